//! How a fault among ranks is expected to end, and whether a run of `fault-scenario` ended so. Each runs in a process of its own, which
//! is killed if it hangs.

use std::{
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use burn_cp_examples::train::Device;
use serde_json::Value;

use crate::{DEVICE, head_dim};

const ON_CPU: bool = matches!(DEVICE, Device::Cpu);

const fn seconds(on_cpu: u64, on_device: u64) -> Duration {
    Duration::from_secs(if ON_CPU { on_cpu } else { on_device })
}

/// How long a rank of a scenario waits for its peers. On devices kernels are compiled meanwhile.
pub const DEADLINE: Duration = seconds(5, 10);
/// How long a scenario waits for ranks that may never end, from its start.
pub const PATIENCE: Duration = seconds(7, 90);
/// What training and cleaning up may take beyond the deadline on a busy machine.
const MARGIN: Duration = seconds(6, 15);
/// When a scenario counts as hung.
const HUNG: Duration = seconds(30, 120);

/// Whether ranks take a step that goes right before the one that does not.
pub const WARM_UP: bool = !ON_CPU;

/// Size of the scenarios' heads; half of it is the other shape.
pub const HEAD_DIM: usize = if ON_CPU { 8 } else { head_dim(32) };
/// How messages show a row of a key and a value of one head of [`HEAD_DIM`], and of half of it.
pub const ROWS: [&str; 2] = if ON_CPU {
    ["[*, 16]", "[*, 8]"]
} else {
    ["[*, 64]", "[*, 32]"]
};

/// Whether ranks of such a world may exchange without meeting, as NCCL does between ranks with a GPU each. What they call is compared
/// all the same, but nobody waits for that: a rank that others wait for in vain may be named in a later operation.
pub const fn may_not_meet(world_size: usize) -> bool {
    matches!(DEVICE, Device::Cuda) && world_size == 2
}

/// When the ranks are expected to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    /// As soon as the fault is known.
    AtOnce,
    /// When the ranks that wait have waited long enough.
    AtDeadline,
    /// One or the other.
    ByDeadline,
}

/// Stands for either rank: where a device breaks, that of a rank which exchanges with it does too.
pub const ANY_RANK: u64 = u64::MAX;

/// How a scenario is expected to end.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    /// The rank that is named, or [`ANY_RANK`].
    pub rank: u64,
    /// Parts of the operation's name.
    pub op: &'static [&'static str],
    /// Parts of the cause.
    pub cause: &'static [&'static str],
    /// When.
    pub ends: Ends,
    /// Other ranks that may still be held up when the launcher has reported the fault.
    pub held_up: &'static [usize],
    /// Whether the fault itself is a panic, which Rust reports on stderr.
    pub panics: bool,
}

/// What a scenario said.
#[derive(Debug)]
pub struct Report {
    /// Its line; null if it had nothing to say.
    pub line: Value,
    /// What else was printed.
    pub stderr: String,
}

/// The program of a name: beside this one where both were packed for another host, else where it was built.
pub fn program(name: &str, built: &str) -> PathBuf {
    let packed = std::env::current_exe().map(|test| test.with_file_name(name));
    match packed {
        Ok(packed) if packed.exists() => packed,
        _ => built.into(),
    }
}

/// Runs a scenario.
///
/// # Errors
/// It hung, failed or had nothing to say; in words, with what it printed.
pub fn run(program: &Path, name: &str) -> Result<Report, String> {
    let mut child = Command::new(program)
        .arg(name)
        .env_remove("RUST_BACKTRACE")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{} cannot be started: {error}", program.display()))?;
    let outputs = (read(child.stdout.take()), read(child.stderr.take()));
    let ended = wait(&mut child);
    let text = |output: JoinHandle<String>| output.join().unwrap_or_default();
    let (stdout, stderr) = (text(outputs.0), text(outputs.1));
    if let Err(error) = ended {
        return Err(format!("{error}; it said {stdout:?} and {stderr:?}"));
    }
    let line = serde_json::from_str(stdout.trim())
        .map_err(|error| format!("{error} in {stdout:?}; stderr: {stderr}"))?;
    Ok(Report { line, stderr })
}

fn read(output: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut output) = output {
            // What came before an error is what there is.
            let _ = output.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child) -> Result<(), String> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("it ended with {status}")),
            Ok(None) if start.elapsed() > HUNG => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("it hung for {HUNG:?}"));
            }
            Ok(None) => thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(format!("it cannot be waited for: {error}")),
        }
    }
}

impl Report {
    /// How the end differs from what was expected, if it does.
    ///
    /// # Errors
    /// What differs.
    pub fn judge(&self, expected: &Expected) -> Result<(), String> {
        let line = &self.line;
        let named = line["rank"].as_u64();
        if named.is_none() || expected.rank != ANY_RANK && named != Some(expected.rank) {
            return Err(format!("rank {} is to be named", expected.rank));
        }
        for (field, parts) in [("op", expected.op), ("cause", expected.cause)] {
            let text = line[field].as_str().unwrap_or_default();
            if let Some(part) = parts.iter().find(|part| !text.contains(**part)) {
                return Err(format!("{field} should name {part:?}"));
            }
        }
        self.judge_times(expected)?;
        // The error is reported once, by whoever launched the ranks: no rank prints a panic of its own unless it is the fault. On
        // devices other threads may.
        let panics = self.stderr.matches("panicked at").count();
        let wanted = usize::from(expected.panics);
        if panics < wanted || ON_CPU && panics > wanted {
            return Err(format!("{panics} panics: {}", self.stderr));
        }
        Ok(())
    }

    fn judge_times(&self, expected: &Expected) -> Result<(), String> {
        let line = &self.line;
        let deadline = DEADLINE.as_millis() as u64;
        let latest = match expected.ends {
            Ends::AtOnce => deadline,
            _ => deadline + MARGIN.as_millis() as u64,
        };
        let ended = line["ended_ms"].as_array().ok_or("no times of ranks")?;
        for (rank, ended) in ended.iter().enumerate() {
            let sleeps = expected.ends == Ends::AtDeadline && rank as u64 == expected.rank;
            match ended.as_u64() {
                Some(ended) if ended >= latest => {
                    return Err(format!("rank {rank} ended after {latest} ms"));
                }
                None if !sleeps && !expected.held_up.contains(&rank) => {
                    return Err(format!("rank {rank} had not ended"));
                }
                _ => {}
            }
        }
        if expected.ends == Ends::AtDeadline && line["elapsed_ms"].as_u64() < Some(deadline) {
            return Err("it gave up before the deadline".to_owned());
        }
        Ok(())
    }
}

mod two_ranks;

pub use two_ranks::{Fault, two_ranks};
