//! Ranks as processes: worlds that come together or do not, and what the others hear of a rank that is killed, late or different.
//!
//! No world may hang: every process is killed when it has run for too long, and none outlives its test.

#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod world;

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use world::{DEADLINE, MARGIN, World, free_port};

/// The error of each process, in the order in which they were started.
fn errors(world: World) -> Vec<String> {
    let reports = world.finish();
    let error = |report: serde_json::Value| {
        let error = report["error"].as_str().map(ToOwned::to_owned);
        error.unwrap_or_else(|| panic!("no failure: {report}"))
    };
    reports.into_iter().map(error).collect()
}

pub(crate) fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} expected in: {text}");
    }
}

#[test]
fn processes_exchange_messages() {
    for world_size in [1, 2, 5] {
        for report in World::start("messages", world_size).finish() {
            assert!(report["error"].is_null(), "{report}");
        }
    }
}

#[test]
fn a_process_of_another_world_is_refused() {
    let port = free_port();
    let errors = errors(World::of("messages", port, &[(0, 2), (1, 3)]));
    contains(
        &errors[1],
        &[
            "refuses rank 1",
            "expected a world of 2 ranks, got one of 3",
        ],
    );
    contains(&errors[0], &["ranks [1] had not connected", "got one of 3"]);
}

#[test]
fn a_second_process_of_one_rank_is_refused() {
    let port = free_port();
    let all = errors(World::of("messages", port, &[(0, 3), (1, 3), (1, 3)]));
    let refused = all
        .iter()
        .filter(|error| error.contains("refuses rank 1: another process is rank 1 already"));
    assert_eq!(refused.count(), 1, "{all:?}");
    contains(&all[0], &["ranks [2] had not connected"]);
    let all = errors(World::of("messages", free_port(), &[(0, 2), (0, 2)]));
    let refused = all
        .iter()
        .filter(|error| error.contains("rank 0 cannot listen"));
    assert_eq!(refused.count(), 1, "{all:?}");
}

#[test]
fn a_rank_out_of_range_is_refused_before_it_connects() {
    let errors = errors(World::of("messages", free_port(), &[(2, 2)]));
    contains(
        &errors[0],
        &["RANK: expected a rank below WORLD_SIZE = 2", "\"2\""],
    );
}

#[test]
fn a_late_rank_is_named_at_the_deadline() {
    let reports = World::start("late", 3).finish();
    let error = |rank: usize| reports[rank]["error"].as_str().unwrap_or_default();
    contains(error(0), &["ranks [2] had not connected to rank 0"]);
    contains(error(1), &["ranks [2] had not come"]);
    // It finds nobody any more.
    contains(error(2), &["rank 0 could not be reached"]);
    for report in &reports[..2] {
        let elapsed = Duration::from_millis(report["elapsed_ms"].as_u64().unwrap());
        // Rank 1 may have come a moment after rank 0.
        let early = Duration::from_millis(500);
        assert!(
            elapsed + early >= DEADLINE && elapsed < DEADLINE + MARGIN,
            "{report}"
        );
    }
}

#[test]
fn a_port_in_use_is_an_error_at_once() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let errors = errors(World::of("messages", port, &[(0, 2)]));
    contains(
        &errors[0],
        &[
            "rank 0 cannot listen at 127.0.0.1",
            &port.to_string(),
            "in use",
        ],
    );
}

#[test]
fn garbage_on_the_port_disturbs_nobody() {
    let port = free_port();
    let mut world = World::of("messages", port, &[(0, 2)]);
    let mut kept = Vec::new();
    for garbage in [
        &b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n"[..],
        b"",
        &[0xff; 4096],
    ] {
        let mut stream = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
            world.check_time();
        };
        let _ = stream.write_all(garbage);
        kept.push(stream);
    }
    world.add("messages", port, (1, 2));
    for report in world.finish() {
        assert!(report["error"].is_null(), "{report}");
    }
}

#[test]
fn a_killed_process_ends_the_others_at_once() {
    for (scenario, killed) in [
        ("killed-1", 1),
        ("killed-0", 0),
        ("killed-while-others-compute", 1),
    ] {
        let mut world = World::start(scenario, 4);
        world.kill_when_ready(killed);
        let rank = format!("rank {killed} failed");
        for (other, report) in world.finish().into_iter().enumerate() {
            if other == killed {
                assert!(report.is_null(), "{report}");
                continue;
            }
            let error = report["error"].as_str().unwrap_or_default();
            contains(error, &[&rank, "its process ended without a word"]);
            let elapsed = Duration::from_millis(report["elapsed_ms"].as_u64().unwrap());
            assert!(elapsed < DEADLINE, "{scenario}: {report}");
        }
    }
}

#[test]
fn a_rank_with_another_plan_is_named_on_every_rank() {
    for error in errors(World::start("other-layout", 3)) {
        contains(
            &error,
            &["rank 1 failed", "disagree on the plan of the step: rank 1"],
        );
    }
}

#[test]
fn a_half_set_environment_names_what_is_missing() {
    let command = |variables: &[(&str, &str)]| {
        let mut world = World::new();
        world.spawn(world::command("messages").envs(variables.iter().copied()));
        errors(world).remove(0)
    };
    let error = command(&[
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
    ]);
    contains(&error, &["torchrun", "LOCAL_RANK, MASTER_PORT are missing"]);
    contains(
        &command(&[]),
        &["describes no rank", "torchrun, mpirun or srun"],
    );
    let error = command(&[("SLURM_JOB_ID", "1")]);
    contains(
        &error,
        &[
            "Slurm",
            "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID are missing",
            "srun",
        ],
    );
}

#[cfg(not(feature = "mpi"))]
#[test]
fn tensors_without_mpi_are_refused_before_anything_starts() {
    let mut world = World::new();
    for rank in 0..2 {
        let mut command = world::command("collectives");
        world::torchrun(&mut command, 1, (rank, 2));
        world.spawn(command.arg("mpi"));
    }
    for report in world.finish() {
        contains(
            report["error"].as_str().unwrap_or_default(),
            &["feature `mpi`", "libopenmpi-dev"],
        );
        assert!(report["elapsed_ms"].as_u64() < Some(2000), "{report}");
    }
}
