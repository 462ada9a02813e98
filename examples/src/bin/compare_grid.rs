//! Runs every combination of ranks, layout, exchange, vision sharding, frozen tower and checkpointing against one rank, and
//! fails if one of them is not equal within the stated tolerances.

use std::{process::ExitCode, time::Instant};

use burn_cp_examples::train::grid;
use clap::{Parser, ValueEnum};

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Subset {
    /// All 192 combinations.
    Full,
    /// As few as meet every pair of values.
    Pairwise,
}

/// Compare ways of running a training with one rank: ranks, layouts, exchange (all-gather, needed-only), vision sharding, frozen tower,
/// checkpointing.
#[derive(Debug, Parser)]
#[command(name = "compare-grid", version)]
struct Args {
    /// Which combinations
    #[arg(long, value_enum, default_value_t = Subset::Full)]
    subset: Subset,
    /// Optimizer steps of each
    #[arg(long, default_value_t = 20)]
    steps: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let cases = match args.subset {
        Subset::Full => grid::full(args.steps),
        Subset::Pairwise => grid::pairwise(args.steps),
    };
    let start = Instant::now();
    let mut num_faults = 0;
    println!("{:<62} {:>8} {:>8}", "case", "loss", "gradient");
    let outcome = grid::run_cases(&cases, |result| {
        let fault = result.fault();
        num_faults += usize::from(fault.is_some());
        let verdict = fault.map_or_else(String::new, |fault| format!("  WRONG: {fault}"));
        println!(
            "{:<62} {:>8.1e} {:>8.1e}{verdict}",
            result.case.name(),
            result.loss,
            result.gradient
        );
    });
    if let Err(error) = outcome {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    println!(
        "{} cases, {num_faults} wrong, {:.0} s",
        cases.len(),
        start.elapsed().as_secs_f64()
    );
    if num_faults == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
