//! Compares layouts and exchanges for given documents, from lengths alone: no GPU, no tensors.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use burn_cp_examples::plan::{PlanArgs, SimulateArgs, run_plan, simulate};
use clap::{Args, Parser, Subcommand};

/// Show what attention over documents of given lengths costs with each layout and exchange.
#[derive(Debug, Parser)]
#[command(
    name = "plan",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    plan: Plan,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// One world, rank by rank; the same as without a command
    Plan(Plan),
    /// Many worlds, 8 to 1,024 ranks unless told otherwise
    Simulate(SimulateArgs),
}

#[derive(Debug, Args)]
struct Plan {
    /// Ranks that share the documents
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    #[command(flatten)]
    args: PlanArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let shown = match cli.command {
        None => run_plan(&cli.plan.args, cli.plan.ranks),
        Some(Command::Plan(plan)) => run_plan(&plan.args, plan.ranks),
        Some(Command::Simulate(args)) => simulate(&args),
    };
    match shown {
        // Whoever reads may have seen enough.
        Ok(text) => match io::stdout().write_all(text.as_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
            _ => ExitCode::SUCCESS,
        },
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
