//! Ranks as processes with a GPU each, whose tensors travel through NCCL. `BURN_CP_SKIP_MISSING_DEVICES=1` lets a machine with fewer than
//! two GPUs pass, and says so.

use std::{process::Command, time::Duration};

use serde_json::Value;

use crate::{
    contains,
    world::{self, DEADLINE, MARGIN, World, free_port},
};

fn two_gpus() -> bool {
    let listed = Command::new("nvidia-smi").arg("-L").output();
    let found = listed.map_or(0, |listed| {
        String::from_utf8_lossy(&listed.stdout)
            .lines()
            .filter(|line| line.starts_with("GPU"))
            .count()
    });
    if found >= 2 {
        return true;
    }
    let skip = std::env::var("BURN_CP_SKIP_MISSING_DEVICES").is_ok_and(|skip| skip == "1");
    assert!(
        skip,
        "expected 2 GPUs, got {found}; BURN_CP_SKIP_MISSING_DEVICES=1 skips"
    );
    eprintln!("skipped: expected 2 GPUs, got {found}");
    false
}

/// Two processes, rank `r` with the GPU of index `gpus[r]` only.
fn start(scenario: &str, gpus: [usize; 2]) -> World {
    let (port, mut world) = (free_port(), World::new());
    for (rank, gpu) in gpus.into_iter().enumerate() {
        let mut command = world::command(scenario);
        world::torchrun(&mut command, port, (rank, 2));
        world.spawn(command.env("CUDA_VISIBLE_DEVICES", gpu.to_string()));
    }
    world
}

#[test]
fn every_collective_and_its_adjoint_are_those_of_cpu_threads_to_the_bit() {
    if !two_gpus() {
        return;
    }
    for scenario in ["collectives", "broadcast"] {
        for report in start(scenario, [0, 1]).finish() {
            assert!(report["error"].is_null(), "{scenario}: {report}");
        }
    }
}

/// Starting and compiling kernels takes its time.
fn ends_in_time(report: &Value) {
    let elapsed = Duration::from_millis(report["elapsed_ms"].as_u64().unwrap_or(u64::MAX));
    assert!(elapsed < DEADLINE + 3 * MARGIN, "{report}");
}

fn check_killed(scenario: &str) {
    if !two_gpus() {
        return;
    }
    let mut world = start(scenario, [0, 1]);
    world.kill_when_ready(1);
    let reports = world.finish();
    let error = reports[0]["error"].as_str().unwrap_or_default();
    contains(
        error,
        &["rank 1 failed", "its process ended without a word"],
    );
    ends_in_time(&reports[0]);
}

#[test]
fn a_process_that_is_killed_in_an_exchange_ends_the_other() {
    check_killed("endless-exchange");
}

#[test]
fn a_process_that_is_killed_between_collectives_ends_the_other() {
    check_killed("killed-between-collectives");
}

#[test]
fn a_process_that_never_arrives_is_named_at_the_deadline() {
    if !two_gpus() {
        return;
    }
    let reports = start("never-arrives", [0, 1]).finish();
    let error = reports[0]["error"].as_str().unwrap_or_default();
    contains(error, &["ranks [1] had not arrived"]);
    let elapsed = reports[0]["elapsed_ms"].as_u64().unwrap_or_default();
    assert!(elapsed >= DEADLINE.as_millis() as u64, "{}", reports[0]);
    ends_in_time(&reports[0]);
    // It finds out when it comes.
    assert!(reports[1]["error"].is_string(), "{}", reports[1]);
}

#[test]
fn two_processes_with_one_gpu_are_refused() {
    if !two_gpus() {
        return;
    }
    for report in start("endless-exchange", [1, 1]).finish() {
        let error = report["error"].as_str().unwrap_or_default();
        contains(error, &["ranks 0 and 1 are processes with the same GPU"]);
    }
}
