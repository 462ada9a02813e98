//! Rounds of mixed faults among two ranks, each in a process of its own that must end by the deadline with the right error: prints a line
//! of JSON per round and one for all, and fails if any hung or said something else.
//!
//! `fault-rounds [--rounds N] [--seed N] [--jobs N] [--program NAME]`: so many rounds, drawn from the seed, so many at once. Every fault
//! comes before one comes again. What is run lies beside this program and is called `fault-scenario` unless said otherwise.

use std::{
    collections::VecDeque,
    path::Path,
    process::ExitCode,
    sync::{Mutex, PoisonError},
    thread,
    time::Instant,
};

use burn_cp_tests::faults::{self, Fault};
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::SliceRandom};

/// Prefixes of scenarios, one per exchange strategy and overlap.
const STRATEGIES: [&str; 7] = [
    "",
    "gather-",
    "gather-overlap-",
    "needed-overlap-",
    "halo-",
    "ring-",
    "heads-",
];

struct Options {
    rounds: usize,
    seed: u64,
    jobs: usize,
    program: String,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        rounds: 20,
        seed: 0,
        jobs: 2,
        program: "fault-scenario".to_owned(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments
            .next()
            .ok_or_else(|| format!("{name}: expected a value"))?;
        let number = || {
            let number = value.parse::<u64>();
            number.map_err(|error| format!("{name}: expected a number, got {value:?}: {error}"))
        };
        match &*name {
            "--rounds" => options.rounds = number()? as usize,
            "--seed" => options.seed = number()?,
            "--jobs" => options.jobs = number()?.max(1) as usize,
            "--program" => options.program = value,
            _ => {
                return Err(format!(
                    "expected --rounds, --seed, --jobs or --program, got {name:?}"
                ));
            }
        }
    }
    Ok(options)
}

/// The scenario of each round, by its full name.
fn drawn(rounds: usize, seed: u64) -> VecDeque<(usize, String, Fault)> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut all = faults::two_ranks();
    let mut drawn = VecDeque::new();
    while drawn.len() < rounds {
        all.shuffle(&mut random);
        for fault in all.iter().take(rounds - drawn.len()) {
            let strategy = if fault.under_every_strategy {
                STRATEGIES[random.random_range(0..STRATEGIES.len())]
            } else {
                ""
            };
            drawn.push_back((drawn.len(), format!("{strategy}{}", fault.name), *fault));
        }
    }
    drawn
}

/// What went wrong with a round, if anything did. Prints its line.
fn run(program: &Path, round: usize, name: &str, fault: &Fault) -> Option<String> {
    let start = Instant::now();
    let (report, wrong) = match faults::run(program, name) {
        Ok(report) => {
            let wrong = report.judge(&fault.expected).err();
            (Some(report), wrong)
        }
        Err(error) => (None, Some(error)),
    };
    let (said, stderr) = report.map_or((serde_json::Value::Null, String::new()), |report| {
        (report.line, report.stderr)
    });
    let mut line = serde_json::json!({
        "round": round, "scenario": name, "wrong": wrong, "wall_ms": start.elapsed().as_millis() as u64, "said": said,
    });
    if wrong.is_some() {
        let first: String = stderr.chars().take(4000).collect();
        line["stderr"] = first.into();
    }
    println!("{line}");
    wrong.map(|wrong| format!("{name}: {wrong}"))
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let program = faults::program(&options.program, &options.program);
    let start = Instant::now();
    let left = Mutex::new(drawn(options.rounds, options.seed));
    let wrong = Mutex::new(Vec::new());
    let next = || {
        left.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    };
    thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| {
                while let Some((round, name, fault)) = next() {
                    if let Some(what) = run(&program, round, &name, &fault) {
                        wrong
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .push(what);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
    let summary = serde_json::json!({
        "rounds": options.rounds, "seed": options.seed, "num_wrong": wrong.len(), "wrong": wrong,
        "seconds": start.elapsed().as_secs(),
    });
    println!("{summary}");
    if wrong.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
