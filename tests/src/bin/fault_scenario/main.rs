//! Runs one fault among ranks that train, and prints what the launcher said: one line of JSON with the rank, operation and
//! cause of the first failure, how long it took, and when each rank ended (`null` for one that had not).
//!
//! `fault-scenario NAME`; the names are those of [`scenario`]. Each runs in a process of its own because a backward pass that
//! is stuck holds up autodiff's clean-up in the whole process.

mod model;
mod scenarios;

use std::{
    process::ExitCode,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use burn_cp::{
    comm::RankContext,
    launch::{self, LaunchError, ThreadsOptions},
};

use scenarios::{Scenario, run_rank, scenario};

/// How long a rank waits for its peers.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long the launcher waits for ranks that may never end.
const PATIENCE: Duration = Duration::from_secs(7);

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    let Some(scenario) = scenario(&name) else {
        eprintln!("no scenario {name:?}");
        return ExitCode::FAILURE;
    };
    let ended = Arc::new(Mutex::new(vec![None; scenario.world_size()]));
    let start = Instant::now();
    let result = launch(scenario, start, &ended);
    let elapsed = start.elapsed().as_millis();
    let (rank, op, cause) = match result {
        Ok(()) => (None, String::new(), "every rank succeeded".to_owned()),
        Err(LaunchError::Rank(failure)) => {
            (Some(failure.rank), failure.op, failure.cause.to_string())
        }
        Err(other) => (None, String::new(), other.to_string()),
    };
    let ended = ended
        .lock()
        .expect("no rank panics while it notes its end")
        .clone();
    let line = serde_json::json!({
        "rank": rank, "op": op, "cause": cause, "elapsed_ms": elapsed as u64, "ended_ms": ended,
    });
    println!("{line}");
    // Ranks that still sleep end with the process.
    ExitCode::SUCCESS
}

type Ended = Arc<Mutex<Vec<Option<u64>>>>;

/// Notes when a rank ends, however it does.
struct Note {
    rank: usize,
    start: Instant,
    ended: Ended,
}

impl Drop for Note {
    fn drop(&mut self) {
        let elapsed = self.start.elapsed().as_millis() as u64;
        if let Ok(mut ended) = self.ended.lock() {
            ended[self.rank] = Some(elapsed);
        }
    }
}

fn launch(scenario: Scenario, start: Instant, ended: &Ended) -> Result<(), LaunchError> {
    let options = ThreadsOptions {
        deadline: DEADLINE,
        ..ThreadsOptions::default()
    };
    let (world_size, detached, ended) = (scenario.world_size(), scenario.detached, ended.clone());
    let setting = scenarios::Setting::new(scenario);
    let rank = move |context: RankContext| {
        let _note = Note {
            rank: context.rank(),
            start,
            ended: ended.clone(),
        };
        run_rank(&context, &setting)
    };
    if detached {
        launch::threads_detached(world_size, options, rank)?
            .wait(PATIENCE)
            .map(|_| ())
    } else {
        launch::threads_with(world_size, options, rank).map(|_| ())
    }
}
