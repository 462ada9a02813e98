//! Worlds of processes, as threads of this one that talk over TCP.

mod joining;

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    comm::{CollectiveKind, CommError, FailureCause, ProcessGroup, RankFailure, Signature, bind},
    launch::{LaunchError, Place, Process, ProcessOptions, Rendezvous, TensorTransport},
    mesh::DeviceMesh,
};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(600);

/// Ends the tests where one of them hangs.
fn watch() -> Arc<()> {
    let watched = Arc::new(());
    let running = Arc::downgrade(&watched);
    thread::spawn(move || {
        thread::sleep(LONG * 6);
        if running.strong_count() > 0 {
            eprintln!("a test hung");
            std::process::abort();
        }
    });
    watched
}

fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().port()
}

fn place(rank: usize, world_size: usize, port: u16) -> Place {
    Place {
        rank,
        world_size,
        local_rank: rank,
        rendezvous: Rendezvous::Address {
            host: "127.0.0.1".to_owned(),
            port,
        },
        job: "test".to_owned(),
    }
}

fn join(place: &Place, deadline: Duration) -> Result<Process, LaunchError> {
    let options = ProcessOptions {
        deadline,
        tensors: TensorTransport::None,
        ..ProcessOptions::default()
    };
    Process::join(place, options)
}

type Outcome<T> = Result<T, LaunchError>;

/// Runs `f` on every rank, each with a connection of its own, and the group of all ranks.
fn world<T: Send>(
    world_size: usize,
    deadline: Duration,
    f: impl Fn(usize, ProcessGroup) -> Result<T, CommError> + Sync,
) -> Vec<Outcome<T>> {
    let port = free_port();
    let mesh = DeviceMesh::new([("cp", world_size)]).unwrap();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let (mesh, f) = (&mesh, &f);
                scope.spawn(move || {
                    join(&place(rank, world_size, port), deadline)?.run(|context| {
                        assert_eq!(context.world_size(), world_size);
                        f(rank, bind(mesh, &context)?.world()?)
                    })
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The failure, the same on every rank.
fn failure<T>(outcomes: Vec<Outcome<T>>) -> RankFailure {
    let mut failures = outcomes.into_iter().map(|outcome| match outcome {
        Err(LaunchError::Rank(failure)) => failure,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("no failure"),
    });
    let first = failures.next().unwrap();
    for other in failures {
        assert_eq!(other.to_string(), first.to_string());
    }
    first
}

#[test]
fn messages_come_back_in_rank_order_on_every_rank() {
    let _watch = watch();
    let outcomes = world(4, LONG, |rank, group| {
        let mut all = Vec::new();
        for round in 0..50 {
            let big = vec![rank as u8; if round == 49 { 1 << 20 } else { rank }];
            all.push(group.host_all_gather("round", (round, rank.to_string(), big))?);
            group.barrier()?;
        }
        group.agree("the number of rounds", all.len(), ToString::to_string)?;
        Ok(all)
    });
    for outcome in outcomes {
        for (round, gathered) in outcome.unwrap().into_iter().enumerate() {
            for (rank, (in_round, name, bytes)) in gathered.into_iter().enumerate() {
                assert_eq!((in_round, name), (round, rank.to_string()));
                assert!(bytes.iter().all(|byte| *byte == rank as u8));
                assert_eq!(bytes.len(), if round == 49 { 1 << 20 } else { rank });
            }
        }
    }
}

#[test]
fn another_message_is_a_mismatch_on_every_rank() {
    let _watch = watch();
    let start = Instant::now();
    let failure = failure(world(3, LONG, |rank, group| match rank {
        1 => group.host_all_gather("sizes", 7_u64).map(|_| ()),
        _ => group.barrier(),
    }));
    assert!(start.elapsed() < LONG / 4);
    assert_eq!(failure.rank, 1);
    assert!(matches!(
        failure.cause,
        FailureCause::Comm(CommError::Mismatch { rank: 1, .. })
    ));
    assert!(failure.op.contains("sizes"), "{}", failure.op);
}

#[test]
fn a_message_of_another_type_is_a_mismatch() {
    let _watch = watch();
    let failure = failure(world(2, LONG, |rank, group| match rank {
        1 => group.host_all_gather("value", 1_u8).map(|_| ()),
        _ => group
            .host_all_gather("value", "text".to_owned())
            .map(|_| ()),
    }));
    assert!(failure.cause.to_string().contains("String"), "{failure}");
}

#[test]
fn a_disagreement_names_the_odd_rank() {
    let _watch = watch();
    let failure = failure(world(3, LONG, |rank, group| {
        group.agree("a value", u8::from(rank == 2), ToString::to_string)
    }));
    assert_eq!(failure.rank, 2);
}

#[test]
fn an_error_a_panic_and_a_rank_that_leaves_end_the_others_at_once() {
    let _watch = watch();
    let start = Instant::now();
    let failed = failure(world(3, LONG, |rank, group| {
        group.barrier()?;
        if rank == 2 {
            return Err(CommError::Timeout {
                op: "its own".to_owned(),
                missing: vec![],
                waited: LONG,
                last_seen: None,
            });
        }
        group.barrier()
    }));
    assert_eq!(failed.rank, 2);
    assert!(
        failed.op.contains("after barrier[barrier] #0"),
        "{}",
        failed.op
    );
    let failed = failure(world(3, LONG, |rank, group| {
        assert!(rank != 0, "the fault");
        group.barrier()
    }));
    assert_eq!(failed.rank, 0);
    assert!(failed.cause.to_string().contains("panicked: the fault"));
    let failed = failure(world(3, LONG, |rank, group| match rank {
        1 => Ok(()),
        _ => group.barrier(),
    }));
    assert_eq!(failed.rank, 1);
    assert!(matches!(
        failed.cause,
        FailureCause::Comm(CommError::PeerLeft { rank: 1, .. })
    ));
    assert!(start.elapsed() < LONG / 4);
}

#[test]
fn a_busy_rank_hears_of_a_failure_without_asking() {
    let _watch = watch();
    let heard = std::sync::Mutex::new(None);
    let outcomes = world(3, LONG, |rank, group| {
        group.barrier()?;
        if rank == 1 {
            return Err(CommError::PeerLeft {
                op: "nothing".to_owned(),
                rank: 1,
            });
        }
        if rank == 2 {
            let start = Instant::now();
            while group.observer().unwrap().failure().is_none() && start.elapsed() < LONG / 2 {
                thread::sleep(Duration::from_millis(5));
            }
            *heard.lock().unwrap() = Some(start.elapsed());
        }
        Ok(())
    });
    assert!(heard.lock().unwrap().unwrap() < LONG / 4);
    assert_eq!(failure(outcomes).rank, 1);
}

#[test]
fn a_rank_that_never_arrives_is_named_at_the_deadline() {
    let _watch = watch();
    let start = Instant::now();
    let failure = failure(world(3, SHORT, |rank, group| {
        group.barrier()?;
        if rank == 1 {
            thread::sleep(SHORT * 2);
        }
        group.barrier()
    }));
    assert!(start.elapsed() >= SHORT && start.elapsed() < LONG / 2);
    assert_eq!(failure.rank, 1);
    assert!(
        failure.to_string().contains("ranks [1] had not arrived"),
        "{failure}"
    );
    assert!(
        failure.to_string().contains("last seen in barrier"),
        "{failure}"
    );
}

#[test]
fn records_tell_who_differs_and_who_is_missing() {
    let _watch = watch();
    let signature = |size: usize| Signature {
        kind: CollectiveKind::AllReduce,
        dtype: "F32".to_owned(),
        shape: vec![Some(size)],
        ..Signature::control("sum")
    };
    for same in [false, true] {
        let failure = failure(world(3, LONG, |rank, group| {
            if !(same && rank == 2) {
                group
                    .observer()
                    .unwrap()
                    .record(0, signature(if rank == 2 { 5 } else { 4 }));
            }
            // Records are one-way; this one comes behind them.
            group.barrier()?;
            match rank {
                // Another call is found out by itself.
                0 if same => Err(group.observer().unwrap().diagnose(0, SHORT)),
                _ => {
                    thread::sleep(Duration::from_millis(50));
                    group.barrier()
                }
            }
        }));
        assert_eq!(failure.rank, 2, "{failure}");
        let want = if same {
            "ranks [2] had not arrived"
        } else {
            "rank 2 calls all_reduce[sum](F32 [5])"
        };
        assert!(failure.to_string().contains(want), "{failure}");
    }
}

#[test]
fn tensors_are_refused_in_a_world_of_host_messages() {
    let _watch = watch();
    let failure = failure(world(2, LONG, |_, group| {
        group
            .transfer(0, "all_reduce", vec![], &[(0, 1)])
            .map(|_| ())
    }));
    assert!(
        failure.to_string().contains("host messages only"),
        "{failure}"
    );
}

/// A process that is dropped closes its connection without a word, as one that is killed.
#[test]
fn a_connection_that_ends_without_a_word_ends_the_world() {
    let _watch = watch();
    for gone in [0, 1] {
        let port = free_port();
        let start = Instant::now();
        let ranks = [0, 1, 2].map(|rank| {
            thread::spawn(move || {
                let process = join(&place(rank, 3, port), LONG)?;
                if rank == gone {
                    thread::sleep(Duration::from_millis(100));
                    drop(process);
                    return Ok(());
                }
                process.run(|context| {
                    let mesh = DeviceMesh::new([("cp", 3)])?;
                    bind(&mesh, &context)?.world()?.barrier()
                })
            })
        });
        let outcomes: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        for (rank, outcome) in outcomes
            .into_iter()
            .enumerate()
            .filter(|(rank, _)| *rank != gone)
        {
            let error = outcome.unwrap_err().to_string();
            assert!(
                error.contains(&format!("rank {gone} failed")),
                "{rank}: {error}"
            );
            assert!(error.contains("ended without a word"), "{rank}: {error}");
        }
        assert!(start.elapsed() < LONG / 4);
    }
}

/// A host that vanishes says nothing, and closes nothing.
#[test]
fn a_rank_that_falls_silent_is_lost_after_a_deadline() {
    let _watch = watch();
    use super::frames::{self, Answer, Hello, MAX_HELLO, OPENING_LEN};
    let port = free_port();
    let zero = thread::spawn(move || {
        join(&place(0, 2, port), SHORT)?.run(|context| {
            let mesh = DeviceMesh::new([("cp", 2)])?;
            let group = bind(&mesh, &context)?.world()?;
            // Not in any operation.
            let start = Instant::now();
            while group.observer().unwrap().failure().is_none() && start.elapsed() < LONG {
                thread::sleep(Duration::from_millis(5));
            }
            Ok::<_, CommError>(())
        })
    });
    let mut stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    let start = Instant::now();
    stream.write_all(&frames::opening()).unwrap();
    std::io::Read::read_exact(&mut stream, &mut [0; OPENING_LEN]).unwrap();
    let hello = Hello {
        rank: 1,
        world_size: 2,
        job: "test".to_owned(),
    };
    frames::write(&mut stream, &hello).unwrap();
    let welcome: Answer = frames::read(&mut stream, MAX_HELLO).unwrap();
    assert!(matches!(welcome, Answer::Welcome { deadline } if deadline == SHORT));
    let error = zero.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("nothing was heard of it"), "{error}");
    assert!(start.elapsed() >= SHORT && start.elapsed() < LONG / 2);
}

#[test]
fn a_world_of_one_connects_to_nobody() {
    let _watch = watch();
    let alone = Place {
        rendezvous: Rendezvous::Alone,
        ..place(0, 1, 1)
    };
    let rank = join(&alone, SHORT).unwrap().run(|context| {
        bind(&DeviceMesh::new([("cp", 1)])?, &context)?
            .world()?
            .barrier()?;
        Ok::<_, CommError>(context.rank())
    });
    assert_eq!(rank.unwrap(), 0);
}
