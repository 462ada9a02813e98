//! What the launcher makes of the ways in which ranks end.

use std::{
    convert::Infallible,
    io,
    panic::panic_any,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use burn_cp::{
    comm::{CommError, FailureCause, RankContext, RankFailure},
    launch::{LaunchError, ThreadsOptions, threads, threads_detached, threads_with},
};

fn failure<T>(result: Result<T, LaunchError>) -> RankFailure {
    match result {
        Err(LaunchError::Rank(failure)) => failure,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("no error"),
    }
}

#[test]
fn results_come_back_in_rank_order_whoever_ends_first() {
    let results = threads(5, |rank: RankContext| {
        thread::sleep(Duration::from_millis(10 * (5 - rank.rank() as u64)));
        Ok::<_, Infallible>((rank.rank(), rank.world_size()))
    });
    assert_eq!(results.unwrap(), [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]);
}

#[test]
fn a_world_of_no_ranks_is_refused() {
    let empty = |_: RankContext| Ok::<_, Infallible>(());
    assert!(matches!(threads(0, empty), Err(LaunchError::EmptyWorld)));
    assert!(matches!(
        threads_detached(0, ThreadsOptions::default(), empty),
        Err(LaunchError::EmptyWorld)
    ));
}

#[test]
fn a_panics_message_is_kept_whatever_its_type() {
    let message = |panic: fn()| {
        let failure = failure(threads(2, |rank: RankContext| {
            if rank.rank() == 1 {
                panic();
            }
            Ok::<_, Infallible>(())
        }));
        assert_eq!(failure.rank, 1);
        assert_eq!(failure.op, "its own code, before any collective");
        match failure.cause {
            FailureCause::Panic(message) => message,
            other => panic!("another cause: {other}"),
        }
    };
    assert_eq!(message(|| panic!("a literal")), "a literal");
    assert_eq!(
        message(|| panic!("{}", "made".to_owned() + " up")),
        "made up"
    );
    assert_eq!(
        message(|| panic_any(3.5_f64)),
        "a value that is not a message"
    );
}

#[test]
fn a_typed_payload_becomes_the_error_that_it_is() {
    let failure = failure(threads(1, |_| -> Result<(), Infallible> {
        CommError::PeerLeft {
            op: "something".to_owned(),
            rank: 0,
        }
        .raise()
    }));
    assert!(matches!(
        failure.cause,
        FailureCause::Comm(CommError::PeerLeft { .. })
    ));
}

#[test]
fn an_errors_sources_are_part_of_the_message() {
    #[derive(Debug)]
    struct Outer(io::Error);
    impl std::fmt::Display for Outer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("cannot read")
        }
    }
    impl std::error::Error for Outer {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }
    let error = failure(threads(1, |_| {
        Err::<(), _>(Outer(io::Error::other("disk full")))
    }));
    assert_eq!(
        error.to_string(),
        "rank 0 failed in its own code, before any collective: cannot read: disk full"
    );
}

#[test]
fn the_first_failure_wins() {
    let failure = failure(threads(3, |rank: RankContext| {
        thread::sleep(Duration::from_millis(150 * ((rank.rank() + 1) % 3) as u64));
        Err::<(), _>(io::Error::other(format!("from {}", rank.rank())))
    }));
    assert_eq!(
        (failure.rank, failure.cause.to_string()),
        (2, "from 2".to_owned())
    );
}

#[test]
fn a_detached_world_that_has_not_ended_says_how_many_ranks_run() {
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(Some(released));
    let world = threads_detached(3, ThreadsOptions::default(), move |rank: RankContext| {
        if rank.rank() == 1
            && let Some(released) = released.lock().unwrap().take()
        {
            let _ = released.recv();
        }
        Ok::<_, Infallible>(())
    });
    let start = Instant::now();
    match world.unwrap().wait(Duration::from_millis(500)) {
        Err(LaunchError::StillRunning {
            num_running,
            waited,
        }) => {
            assert_eq!(num_running, 1);
            assert!(
                waited >= Duration::from_millis(500) && start.elapsed() < Duration::from_secs(5)
            );
        }
        other => panic!("not still running: {other:?}"),
    }
    drop(release);
}

#[test]
fn a_detached_world_returns_its_results_in_rank_order() {
    let world = threads_detached(3, ThreadsOptions::default(), |rank: RankContext| {
        thread::sleep(Duration::from_millis(10 * (3 - rank.rank() as u64)));
        Ok::<_, Infallible>(rank.rank())
    });
    assert_eq!(
        world.unwrap().wait(Duration::from_secs(10)).unwrap(),
        [0, 1, 2]
    );
}

#[test]
fn an_error_names_the_last_operation_between_ranks() {
    let mesh = burn_cp::mesh::DeviceMesh::new([("cp", 2)]).unwrap();
    let options = ThreadsOptions {
        deadline: Duration::from_secs(5),
        ..ThreadsOptions::default()
    };
    let failure = failure(threads_with(
        2,
        options,
        |rank| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            let group = burn_cp::comm::bind(&mesh, &rank)?.world()?;
            group.host_all_gather("sizes", rank.rank())?;
            if rank.rank() == 0 {
                return Err("no luck".into());
            }
            Ok(group.barrier()?)
        },
    ));
    assert_eq!(failure.rank, 0);
    assert_eq!(
        failure.op,
        "its own code, after control[sizes] #0 of group cp[0, 1]"
    );
}

#[test]
fn a_known_failure_ends_the_wait_for_ranks_that_never_end() {
    let start = Instant::now();
    let world = threads_detached(2, ThreadsOptions::default(), |rank: RankContext| {
        if rank.rank() == 1 {
            thread::sleep(Duration::from_secs(60));
        }
        Err::<(), _>("rank 0 gives up")
    });
    let error = world.unwrap().wait(Duration::from_secs(50)).unwrap_err();
    assert!(error.to_string().contains("rank 0 gives up"), "{error}");
    assert!(
        start.elapsed() < Duration::from_secs(20),
        "took {:?}",
        start.elapsed()
    );
}
