//! Worlds that come together, and processes that are turned away.

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::{LONG, Outcome, SHORT, free_port, join, place, watch};
use crate::{
    comm::{CommError, ConnectError, Listener, Refusal, bind, tcp::frames},
    launch::{LaunchError, Place, Process},
    mesh::DeviceMesh,
};

/// A world of ranks 0 and 1, each of which runs `f` when `between` has been done.
fn pair_with(between: impl FnOnce(u16)) -> Vec<Outcome<Vec<usize>>> {
    let port = free_port();
    thread::scope(|scope| {
        let run = move |rank| {
            join(&place(rank, 2, port), LONG)?.run(|context| {
                let mesh = DeviceMesh::new([("cp", 2)])?;
                bind(&mesh, &context)?
                    .world()?
                    .host_all_gather("rank", rank)
            })
        };
        let first = scope.spawn(move || run(0));
        between(port);
        let second = scope.spawn(move || run(1));
        [first, second].map(|rank| rank.join().unwrap()).into()
    })
}

/// Connects as soon as somebody listens.
fn knock(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn refusal(result: Result<Process, LaunchError>) -> Refusal {
    match result {
        Err(LaunchError::Connect(ConnectError::Refused { refusal, .. })) => refusal,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("welcomed"),
    }
}

#[test]
fn processes_of_other_worlds_are_refused_and_disturb_nobody() {
    let _watch = watch();
    let outcomes = pair_with(|port| {
        let expected = Refusal::WorldSize {
            expected: 2,
            got: 3,
        };
        assert_eq!(refusal(join(&place(1, 3, port), LONG)), expected);
        let far = refusal(join(&place(5, 2, port), LONG));
        assert_eq!(
            far,
            Refusal::Rank {
                expected: 2,
                got: 5
            }
        );
        let other = Place {
            job: "other".to_owned(),
            ..place(1, 2, port)
        };
        assert!(matches!(refusal(join(&other, LONG)), Refusal::Job { .. }));
    });
    for outcome in outcomes {
        assert_eq!(outcome.unwrap(), [0, 1]);
    }
}

#[test]
fn garbage_on_the_port_disturbs_nobody() {
    let _watch = watch();
    let mut kept = Vec::new();
    let outcomes = pair_with(|port| {
        for garbage in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"",
            b"burn-cp\n\x01\x00\xff\xff\xff\xff",
            b"x",
        ] {
            let mut stream = knock(port);
            let _ = stream.write_all(garbage);
            // Some stay, and say nothing more.
            kept.push(stream);
        }
    });
    for outcome in outcomes {
        assert_eq!(outcome.unwrap(), [0, 1]);
    }
}

#[test]
fn a_second_process_of_a_rank_is_refused() {
    let _watch = watch();
    let port = free_port();
    thread::scope(|scope| {
        let zero =
            scope.spawn(move || join(&place(0, 3, port), LONG)?.run(|_| Ok::<_, CommError>(())));
        let one =
            scope.spawn(move || join(&place(1, 3, port), LONG)?.run(|_| Ok::<_, CommError>(())));
        thread::sleep(Duration::from_millis(300));
        assert_eq!(
            refusal(join(&place(1, 3, port), LONG)),
            Refusal::Taken { rank: 1 }
        );
        let again = join(&place(0, 3, port), LONG).unwrap_err();
        assert!(
            matches!(&again, LaunchError::Connect(ConnectError::Listen { .. })),
            "{again}"
        );
        let two = join(&place(2, 3, port), LONG).unwrap();
        // The world has started.
        assert_eq!(
            refusal(join(&place(2, 3, port), LONG)),
            Refusal::Taken { rank: 2 }
        );
        two.run(|_| Ok::<_, CommError>(())).unwrap();
        zero.join().unwrap().unwrap();
        one.join().unwrap().unwrap();
    });
}

#[test]
fn a_port_in_use_is_named() {
    let _watch = watch();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = join(&place(0, 2, port), SHORT).unwrap_err();
    assert!(
        matches!(&error, LaunchError::Connect(ConnectError::Listen { .. })),
        "{error}"
    );
    assert!(error.to_string().contains(&port.to_string()), "{error}");
    // Something listens there that says nothing, or something else.
    let error = join(&place(1, 2, port), SHORT).unwrap_err();
    assert!(
        matches!(&error, LaunchError::Connect(ConnectError::Foreign { .. })),
        "{error}"
    );
    let server = thread::spawn(move || {
        // The first is the one that was left waiting above.
        for stream in taken.incoming().take(2) {
            let _ = stream.unwrap().write_all(b"220 mail.example.org ESMTP");
        }
    });
    let error = join(&place(1, 2, port), LONG).unwrap_err();
    assert!(error.to_string().contains("220 mail"), "{error}");
    server.join().unwrap();
}

#[test]
fn ranks_that_do_not_come_are_named_at_the_deadline() {
    let _watch = watch();
    let port = free_port();
    let start = Instant::now();
    let ranks =
        [0, 2].map(|rank| thread::spawn(move || join(&place(rank, 4, port), SHORT).unwrap_err()));
    let _ = join(&place(1, 5, port), SHORT).map(|_| ()).unwrap_err();
    let [zero, two] = ranks.map(|rank| rank.join().unwrap().to_string());
    assert!(zero.contains("ranks [1, 3] had not connected"), "{zero}");
    assert!(
        zero.contains("refused: rank 1 (expected a world of 4 ranks, got one of 5)"),
        "{zero}"
    );
    assert!(two.contains("ranks [1, 3] had not come"), "{two}");
    assert!(start.elapsed() < SHORT * 8);
    // Who comes later finds nobody.
    let late = join(&place(3, 4, port), SHORT).unwrap_err();
    assert!(
        matches!(
            &late,
            LaunchError::Connect(ConnectError::Unreachable { .. })
        ),
        "{late}"
    );
}

#[test]
fn a_late_rank_is_waited_for_and_an_early_one_tries_again() {
    let _watch = watch();
    for late in [0, 1] {
        let port = free_port();
        let ranks = [0, 1].map(|rank| {
            thread::spawn(move || {
                if rank == late {
                    thread::sleep(Duration::from_millis(400));
                }
                join(&place(rank, 2, port), LONG)?.run(|_| Ok::<_, CommError>(rank))
            })
        });
        assert_eq!(ranks.map(|rank| rank.join().unwrap().unwrap()), [0, 1]);
    }
}

#[test]
fn more_connections_than_anyone_needs_keep_no_rank_out() {
    let _watch = watch();
    let outcomes = pair_with(|port| {
        let idle: Vec<_> = (0..200).map(|_| knock(port)).collect();
        // Behind the second rank's first attempts.
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(500));
            drop(idle);
        });
    });
    for outcome in outcomes {
        assert_eq!(outcome.unwrap(), [0, 1]);
    }
}

#[test]
fn one_who_says_little_at_a_time_is_let_go_in_time() {
    let _watch = watch();
    let port = free_port();
    let zero = thread::spawn(move || join(&place(0, 2, port), SHORT).map(|_| ()));
    let mut stream = knock(port);
    let start = Instant::now();
    // The opening of a rank, the length of what follows, and then too little.
    let mut opening = frames::opening().to_vec();
    opening.extend(4_000_u32.to_le_bytes());
    stream.write_all(&opening).unwrap();
    while stream.write_all(b"x").is_ok() {
        assert!(start.elapsed() < LONG / 4, "still heard");
        thread::sleep(SHORT / 20);
    }
    assert!(zero.join().unwrap().is_err());
}

/// As what forwards connections does before rank 0 is there.
#[test]
fn a_connection_that_ends_before_anything_was_said_is_tried_again() {
    let _watch = watch();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let one = thread::spawn(move || join(&place(1, 2, port), LONG)?.run(|_| Ok::<_, CommError>(1)));
    for stream in listener.incoming().take(2) {
        drop(stream.unwrap());
    }
    drop(listener);
    let zero = loop {
        match join(&place(0, 2, port), LONG) {
            Err(LaunchError::Connect(ConnectError::Listen { .. })) => {
                thread::sleep(Duration::from_millis(20));
            }
            other => break other.unwrap(),
        }
    };
    assert_eq!(zero.run(|_| Ok::<_, CommError>(0)).unwrap(), 0);
    assert_eq!(one.join().unwrap().unwrap(), 1);
}

#[test]
fn rank_0_listens_where_its_own_name_does_not_resolve() {
    let listener = Listener::bind("no-such-host.invalid", 0).unwrap();
    assert!(TcpStream::connect(("127.0.0.1", listener.port())).is_ok());
}
