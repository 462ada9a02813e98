//! Trains a small Qwen3-VL over several ranks by burn-train; see `--help`.

use std::{path::PathBuf, process::ExitCode};

use burn::backend::{Autodiff, Flex};
use burn_cp_examples::{
    learner::{LearnerRun, Reading, learn},
    train::{ModelSize, TrainConfig},
};
use burn_train::Interrupter;
use clap::Parser;

/// Train a small Qwen3-VL to read handwritten digits, in burn-train's loop, over several ranks.
///
/// Built with the feature `tui`, burn-train shows its dashboard. Ctrl-C ends the training behind the step that runs.
#[derive(Parser)]
struct Args {
    /// Threads
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Ranks along the data-parallel axis; the others share each sequence
    #[arg(long, default_value_t = 1)]
    dp: usize,
    /// Epochs, each with a validation and a checkpoint behind it
    #[arg(long, default_value_t = 4)]
    epochs: usize,
    /// Optimizer steps of an epoch
    #[arg(long, default_value_t = 75)]
    steps: u64,
    /// Tokens of a pack
    #[arg(long, default_value_t = 512)]
    tokens: usize,
    /// Which model
    #[arg(long, value_enum, default_value = "small")]
    size: ModelSize,
    /// Folder for metrics, logs and checkpoints
    #[arg(long, value_name = "DIR", default_value = "runs/learner-vlm")]
    out: PathBuf,
    /// Continue behind this epoch's checkpoint in --out
    #[arg(long, value_name = "EPOCH")]
    checkpoint: Option<usize>,
    /// Train by burn-train's own strategy for one device too, and fail unless both end with the same held-out loss
    #[arg(long, conflicts_with = "checkpoint")]
    compare: bool,
}

/// What f32 sums in another order may differ by over a short training.
const LARGEST_DIFF: f64 = 1e-3;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    if args.compare && args.dp > 1 {
        return Err("--compare: one device takes one item a step, so --dp must be 1".into());
    }
    let config = TrainConfig {
        ranks: args.ranks,
        dp: args.dp,
        steps: args.steps,
        tokens: args.tokens,
        size: args.size,
        ..TrainConfig::default()
    };
    let mut run = LearnerRun {
        config,
        epochs: args.epochs,
        single_device: false,
        checkpoint: args.checkpoint,
        out: args.out.clone(),
    };
    let interrupter = Interrupter::new();
    let heard = interrupter.clone();
    ctrlc::set_handler(move || heard.stop(Some("Ctrl-C")))?;
    let sharded = learn::<Autodiff<Flex>>(&run, &interrupter)?;
    report(&format!("{} ranks", args.ranks), sharded);
    if args.compare && !interrupter.should_stop() {
        run.single_device = true;
        run.out = args.out.join("single-device");
        let one = learn::<Autodiff<Flex>>(&run, &interrupter)?;
        report("one device", one);
        let diff = (sharded.loss - one.loss).abs() / one.loss;
        println!("held-out losses differ by {diff:.1e}");
        if diff.is_nan() || diff > LARGEST_DIFF {
            return Err("the ranks did not train what one device trains".into());
        }
    }
    Ok(())
}

fn report(who: &str, reading: Reading) {
    let percent = 100.0 * reading.score.accuracy();
    println!(
        "{who}: held-out loss {:.4}, {percent:.1} % of digits",
        reading.loss
    );
}
