//! Runs one fault among ranks that train, and prints what the launcher said: one line of JSON with the rank, operation and
//! cause of the first failure, how long it took, and when each rank ended (`null` for one that had not).
//!
//! `fault-scenario NAME [processes]`; the names are those of [`scenario`], behind prefixes: an exchange strategy, then `two-` for a world
//! of two ranks or `mesh-` for two groups of two. Times count from the end of the step that devices begin with. Each runs in a process of its own because a backward pass that
//! is stuck holds up autodiff's clean-up in the whole process. Ranks are threads, or, with `processes`, this process is one of
//! them, which mpirun has started; it then prints what the world's failure is, without times, and fails if there is one.

#[cfg(feature = "cuda")]
mod illegal_address;
mod model;
mod scenarios;
mod step;

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use burn::tensor::backend::Backend;

use burn_cp::{
    comm::RankContext,
    launch::{self, LaunchError, ProcessOptions, ThreadsOptions},
};

use burn_cp_tests::faults::{DEADLINE, PATIENCE, WARM_UP};
use scenarios::{Scenario, scenario};
use step::{Setting, run_rank};

/// When the step began in which something goes wrong.
struct Clock(Mutex<Instant>);

impl Clock {
    fn restart(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn elapsed_ms(&self) -> u64 {
        let start = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        start.elapsed().as_millis() as u64
    }
}

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    let Some(scenario) = scenario(&name) else {
        eprintln!("no scenario {name:?}");
        return ExitCode::FAILURE;
    };
    if std::env::args().nth(2).as_deref() == Some("processes") {
        return as_process(scenario);
    }
    let ended = Arc::new(Mutex::new(vec![None; scenario.world_size()]));
    let clock = Arc::new(Clock(Mutex::new(Instant::now())));
    let result = launch(scenario, &clock, &ended);
    let elapsed = clock.elapsed_ms();
    let (rank, op, cause) = described(result);
    let ended = ended
        .lock()
        .expect("no rank panics while it notes its end")
        .clone();
    let line = serde_json::json!({
        "rank": rank, "op": op, "cause": cause, "elapsed_ms": elapsed, "ended_ms": ended,
    });
    println!("{line}");
    // Ranks that still sleep end with the process.
    ExitCode::SUCCESS
}

/// Rank, operation and cause of a world's failure.
fn described(result: Result<(), LaunchError>) -> (Option<usize>, String, String) {
    match result {
        Ok(()) => (None, String::new(), "every rank succeeded".to_owned()),
        Err(LaunchError::Rank(failure)) => {
            (Some(failure.rank), failure.op, failure.cause.to_string())
        }
        Err(other) => (None, String::new(), other.to_string()),
    }
}

fn as_process(scenario: Scenario) -> ExitCode {
    let options = ProcessOptions {
        deadline: DEADLINE,
        ..ProcessOptions::default()
    };
    let start = Instant::now();
    // The same weights in every process.
    model::B::seed(&Default::default(), 7);
    let setting = Setting::new(scenario);
    let result = launch::process_with(options, |context| run_rank(&context, &setting, || {}));
    let failed = result.is_err();
    let (rank, op, cause) = described(result.map(|_| ()));
    let elapsed = start.elapsed().as_millis() as u64;
    let line = serde_json::json!({ "rank": rank, "op": op, "cause": cause, "elapsed_ms": elapsed });
    println!("{line}");
    if !failed {
        return ExitCode::SUCCESS;
    }
    // mpirun ends all ranks when the first one fails; the others have something to say, too.
    thread::sleep(Duration::from_millis(500));
    ExitCode::FAILURE
}

type Ended = Arc<Mutex<Vec<Option<u64>>>>;

/// Notes when a rank ends, however it does.
struct Note {
    rank: usize,
    clock: Arc<Clock>,
    ended: Ended,
}

impl Drop for Note {
    fn drop(&mut self) {
        let elapsed = self.clock.elapsed_ms();
        if let Ok(mut ended) = self.ended.lock() {
            ended[self.rank] = Some(elapsed);
        }
    }
}

fn launch(scenario: Scenario, clock: &Arc<Clock>, ended: &Ended) -> Result<(), LaunchError> {
    let options = ThreadsOptions {
        deadline: DEADLINE,
        ..ThreadsOptions::default()
    };
    let (world_size, detached, ended) = (scenario.world_size(), scenario.detached, ended.clone());
    let setting = Setting::new(scenario);
    let clock = clock.clone();
    let rank = move |context: RankContext| {
        let _note = Note {
            rank: context.rank(),
            clock: clock.clone(),
            ended: ended.clone(),
        };
        run_rank(&context, &setting, || {
            if WARM_UP {
                clock.restart();
            }
        })
    };
    if detached {
        launch::threads_detached(world_size, options, rank)?
            .wait(PATIENCE)
            .map(|_| ())
    } else {
        launch::threads_with(world_size, options, rank).map(|_| ())
    }
}
