//! Trains a stock Burn text classifier over several ranks; see `--help`.

use std::process::ExitCode;

use burn_cp_examples::classifier::{ClassifierOutcome, ClassifierRun, max_rel_diff, train};
use clap::Parser;

/// Train a text classifier that was written with Burn alone, over several ranks: it learns to tell licence, prose and source
/// code apart.
#[derive(Parser)]
struct Args {
    /// Threads that share each row of passages.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Optimizer steps.
    #[arg(long, default_value_t = 60)]
    steps: u64,
    /// Tokens of a step's row.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(200..))]
    tokens: u64,
    /// Probability of dropout.
    #[arg(long, default_value_t = 0.1)]
    dropout: f64,
    /// Decides passages, weights and dropout.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Train on one rank too, and fail unless losses and gradients agree.
    #[arg(long)]
    compare: bool,
}

/// What f32 sums in another order may differ by over a short training.
const LARGEST_LOSS_DIFF: f64 = 1e-3;
const LARGEST_GRAD_DIFF: f64 = 1e-5;

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let of_ranks = |ranks| -> Result<ClassifierOutcome, Box<dyn std::error::Error>> {
        Ok(train(&ClassifierRun {
            ranks,
            steps: args.steps,
            tokens: args.tokens.try_into()?,
            dropout: args.dropout,
            seed: args.seed,
        })?)
    };
    let outcome = of_ranks(args.ranks)?;
    for (step, loss) in outcome.losses.iter().enumerate() {
        if step % 10 == 0 || step + 1 == outcome.losses.len() {
            println!("step {step:>4}  loss {loss:.4}");
        }
    }
    let accuracy = 100.0 * outcome.accuracy;
    println!("{} ranks; {accuracy:.1} % of held-out passages", args.ranks);
    if args.compare {
        let one = of_ranks(1)?;
        let loss = max_rel_diff(&outcome.losses, &one.losses);
        let grad = max_rel_diff(
            &outcome.first_gradients.concat(),
            &one.first_gradients.concat(),
        );
        println!("against one rank: loss within {loss:.1e}, first gradients within {grad:.1e}");
        if loss > LARGEST_LOSS_DIFF || grad > LARGEST_GRAD_DIFF {
            return Err("the ranks did not train what one rank trains".into());
        }
    }
    Ok(())
}
