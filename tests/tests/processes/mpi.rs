//! Ranks that mpirun starts, whose tensors travel through MPI.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::world::{DEADLINE, MARGIN, clean};

/// When a run counts as hung.
const HUNG: Duration = Duration::from_secs(120);

/// mpirun, which ends with the test.
struct Mpirun {
    child: Child,
    start: Instant,
}

impl Mpirun {
    fn start(num_ranks: usize, program: &str, args: &[&str]) -> Self {
        let mut command = Command::new("mpirun");
        clean(&mut command);
        command
            // Containers run as root, have fewer cores than ranks, and do not let processes read each other's memory.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .args([
                "--oversubscribe",
                "--mca",
                "btl_vader_single_copy_mechanism",
                "none",
            ])
            .args(["-n", &num_ranks.to_string(), program])
            .args(args);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("mpirun is installed (Debian: openmpi-bin)");
        Self {
            child,
            start: Instant::now(),
        }
    }

    fn scenario(num_ranks: usize, name: &str) -> Self {
        Self::start(
            num_ranks,
            env!("CARGO_BIN_EXE_process-scenario"),
            &[name, "mpi"],
        )
    }

    fn fault(name: &str) -> Self {
        let num_ranks = if name.starts_with("mesh-") { 4 } else { 3 };
        Self::start(
            num_ranks,
            env!("CARGO_BIN_EXE_fault-scenario"),
            &[name, "processes"],
        )
    }

    /// The lines of all ranks, and whether all succeeded.
    fn finish(mut self) -> (Vec<Value>, bool) {
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            assert!(self.start.elapsed() < HUNG, "mpirun hung");
            thread::sleep(Duration::from_millis(20));
        };
        let mut text = String::new();
        let mut stdout = self.child.stdout.take().expect("piped");
        stdout.read_to_string(&mut text).expect("text");
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        (lines.collect(), status.success())
    }
}

impl Drop for Mpirun {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // mpirun takes its ranks along if it is asked to end.
            let pid = self.child.id().to_string();
            let _ = Command::new("kill").args(["-TERM", &pid]).status();
            let asked = Instant::now();
            while matches!(self.child.try_wait(), Ok(None)) && asked.elapsed() < MARGIN {
                thread::sleep(Duration::from_millis(50));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn succeeds(name: &str) {
    let (lines, succeeded) = Mpirun::scenario(4, name).finish();
    assert!(succeeded && lines.len() == 4, "{lines:?}");
    assert!(
        lines.iter().all(|line| line["error"].is_null()),
        "{lines:?}"
    );
}

#[test]
fn every_collective_and_its_adjoint_are_those_of_threads_to_the_bit() {
    succeeds("collectives");
}

#[test]
fn a_batch_that_one_process_has_read_reaches_all() {
    succeeds("broadcast");
}

#[test]
fn a_training_step_succeeds_without_a_fault() {
    for (name, num_ranks) in [("no-fault", 3), ("mesh-no-fault", 4)] {
        let (lines, succeeded) = Mpirun::fault(name).finish();
        assert!(succeeded && lines.len() == num_ranks, "{name}: {lines:?}");
    }
}

/// Every rank that still spoke names this rank, operation and cause; at least one did.
fn fails(name: &str, rank: u64, op: &[&str], cause: &[&str]) {
    let (lines, succeeded) = Mpirun::fault(name).finish();
    assert!(!succeeded && !lines.is_empty(), "{name}: {lines:?}");
    for line in &lines {
        assert_eq!(line["rank"].as_u64(), Some(rank), "{name}: {line}");
        for (field, parts) in [("op", op), ("cause", cause)] {
            let text = line[field].as_str().expect("text");
            for part in parts {
                assert!(
                    text.contains(part),
                    "{name}: {field} should name {part:?}: {line}"
                );
            }
        }
        let latest = (DEADLINE + MARGIN).as_millis() as u64;
        assert!(line["elapsed_ms"].as_u64() < Some(latest), "{name}: {line}");
    }
}

#[test]
fn a_fault_on_one_process_ends_every_process() {
    fails(
        "panic-in-forward",
        1,
        &["its own code, after"],
        &["panicked: the fault"],
    );
    fails(
        "panic-in-backward",
        1,
        &["adjoint"],
        &["panicked: the fault"],
    );
    fails(
        "error-in-forward",
        1,
        &["its own code"],
        &["the data loader ran dry"],
    );
    fails(
        "leaves-in-forward",
        1,
        &["exchange[attention]"],
        &["rank 1 ended without arriving"],
    );
    fails(
        "error-in-vision-tower",
        1,
        &["vision tower"],
        &["the tower ran dry"],
    );
}

#[test]
fn a_process_with_another_plan_or_operation_is_named() {
    fails(
        "other-documents",
        1,
        &["the plan of the step"],
        &["disagree on the plan of the step: rank 1"],
    );
    fails("other-mask", 1, &["exchange[attention]"], &["plan"]);
    fails(
        "other-collective-in-backward",
        1,
        &["all_reduce"],
        &["rank 1 calls all_reduce", "adjoint of"],
    );
    fails(
        "host-message-in-forward",
        1,
        &["barrier"],
        &["rank 1 calls barrier"],
    );
    fails(
        "other-shape-in-backward",
        1,
        &["all_reduce", "[5]"],
        &["[4]", "[5]"],
    );
    fails(
        "mesh-other-documents",
        3,
        &["the plan of the step"],
        &["rank 3"],
    );
}

#[test]
fn a_process_that_never_arrives_is_named_at_the_deadline() {
    fails(
        "never-arrives-in-backward",
        1,
        &["adjoint of"],
        &["ranks [1] had not arrived", "last seen in"],
    );
}

#[test]
fn a_process_that_does_not_come_ends_the_others_at_the_deadline() {
    let mpirun = Mpirun::scenario(4, "late");
    let start = mpirun.start;
    let (lines, succeeded) = mpirun.finish();
    assert!(
        !succeeded && start.elapsed() < DEADLINE + MARGIN,
        "{lines:?}"
    );
    let text = format!("{lines:?}");
    assert!(text.contains("MPI has not started"), "{text}");
    assert!(text.contains("not all ranks had come"), "{text}");
}

#[test]
fn a_killed_process_ends_the_others() {
    let mut mpirun = Mpirun::scenario(4, "killed-1");
    let mut stdout = BufReader::new(mpirun.child.stdout.take().expect("piped"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("text");
    let pid = line
        .trim()
        .strip_prefix("ready ")
        .unwrap_or_else(|| panic!("{line:?}"));
    let killed = Instant::now();
    Command::new("kill")
        .args(["-KILL", pid])
        .status()
        .expect("kill");
    mpirun.child.stdout = Some(stdout.into_inner());
    let (lines, succeeded) = mpirun.finish();
    assert!(!succeeded && killed.elapsed() < DEADLINE, "{lines:?}");
}
