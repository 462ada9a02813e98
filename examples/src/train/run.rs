//! `train-vlm` behind its flags.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use burn_cp::launch::LaunchError;
use clap::Parser;

use super::{
    CheckpointError, Checkpointing, ConfigFileError, Device, Exchange, Layout, ModelSize, Outcome,
    ReportError, Reporter, Summary, TrainConfig, TrainConfigError, Vision, load_config,
    max_rel_diff, max_rel_grad_diff, report::checkpoints_in, train_on_device,
};

/// Train a small Qwen3-VL to read handwritten digits, its sequences and its vision tower sharded over ranks.
#[derive(Debug, Clone, Parser)]
#[command(name = "train-vlm", version)]
pub struct TrainArgs {
    /// Number of ranks, threads of this process [default: 2]
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Ranks along the data-parallel axis; the mesh is dp x (ranks / dp) [default: 1]
    #[arg(long)]
    pub dp: Option<usize>,
    /// Where ranks compute [default: cpu]
    #[arg(long, value_enum)]
    pub device: Option<Device>,
    /// Which rank owns which tokens [default: head-tail]
    #[arg(long, value_enum)]
    pub layout: Option<Layout>,
    /// How keys and values travel [default: needed-only]
    #[arg(long, value_enum)]
    pub exchange: Option<Exchange>,
    /// Where the vision tower runs [default: sharded]
    #[arg(long, value_enum)]
    pub vision: Option<Vision>,
    /// Leave the vision tower as it was initialised
    #[arg(long)]
    pub freeze_vision: bool,
    /// What the backward pass computes again [default: none]
    #[arg(long, value_enum)]
    pub checkpointing: Option<Checkpointing>,
    /// Optimizer steps [default: 600]
    #[arg(long)]
    pub steps: Option<u64>,
    /// Decides documents, packs and initial weights [default: 1]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Tokens of a pack [default: 512]
    #[arg(long)]
    pub tokens: Option<usize>,
    /// Packs of one optimizer step, divisible by dp [default: 2]
    #[arg(long)]
    pub packs_per_step: Option<usize>,
    /// Which model [default: small]
    #[arg(long, value_enum)]
    pub size: Option<ModelSize>,
    /// Steps between two checkpoints [default: 75]
    #[arg(long)]
    pub checkpoint_every: Option<u64>,
    /// Also train with one rank from the same start, and report how far the two are apart
    #[arg(long)]
    pub compare: bool,
    /// Configuration file, TOML or JSON; flags go before it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Folder for metrics, summary, curve and checkpoints; what an earlier run left there is replaced
    #[arg(long, value_name = "DIR", default_value = "runs/train-vlm")]
    pub out: PathBuf,
    /// Continue from the newest checkpoint in --out
    #[arg(long, conflicts_with = "compare")]
    pub resume: bool,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum RunError {
    #[error(transparent)]
    ConfigFile(#[from] ConfigFileError),
    #[error(transparent)]
    Config(#[from] TrainConfigError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The comparison has no result.
    #[error(
        "the run cannot be compared with one rank: losses differ by {loss}, gradients by {gradient}"
    )]
    Incomparable {
        /// Largest relative difference of the loss.
        loss: f64,
        /// Largest relative difference of a gradient.
        gradient: f64,
    },
    /// Ctrl-C cannot be caught.
    #[error("cannot listen for Ctrl-C: {0}")]
    Interrupt(#[from] ctrlc::Error),
}

impl TrainArgs {
    /// The run that file and flags describe, checked.
    ///
    /// # Errors
    /// A file that cannot be used, or a field out of range.
    pub fn resolve(&self) -> Result<TrainConfig, RunError> {
        let mut config = match &self.config {
            Some(path) => load_config(path)?,
            None => TrainConfig::default(),
        };
        macro_rules! flags {
            ($($field:ident),*) => { $(if let Some(value) = self.$field { config.$field = value; })* };
        }
        flags!(
            ranks,
            dp,
            device,
            layout,
            exchange,
            vision,
            checkpointing,
            steps,
            seed,
            tokens,
            packs_per_step,
            size
        );
        flags!(checkpoint_every);
        config.freeze_vision |= self.freeze_vision;
        config.validate()?;
        Ok(config)
    }
}

/// Runs the program: trains, compares if asked to, writes everything. Whether the run was interrupted.
///
/// # Errors
/// A wrong flag or file, a folder that cannot be written, a checkpoint that cannot be used, or a rank that failed.
pub fn run(args: &TrainArgs) -> Result<bool, RunError> {
    let config = args.resolve()?;
    let resumed = if args.resume {
        Some(checkpoints_in(&args.out).latest(&config)?)
    } else {
        None
    };
    let reporter = Reporter::new(&args.out, config.steps, resumed.as_ref())?;
    let (interrupt, done) = (reporter.interrupt(), Arc::new(AtomicBool::new(false)));
    let written = done.clone();
    ctrlc::set_handler(move || {
        // A second Ctrl-C does not wait for the step to end; what is written is whole either way. Behind the run itself
        // nothing is left to save.
        if interrupt.swap(true, Ordering::Relaxed) || written.load(Ordering::Relaxed) {
            std::process::exit(130);
        }
    })?;
    let mesh = config.mesh()?;
    reporter.print(&format!(
        "{mesh} in threads, {:?}, {:?} layout, {:?} exchange",
        config.device, config.layout, config.exchange
    ));
    reporter.start();
    let outcome = train_on_device(&config, Some(&reporter), args.resume, args.compare)?;
    let interrupted = outcome.steps_done < config.steps;
    let final_loss = outcome.losses.last().copied().unwrap_or(f64::NAN);
    reporter.row(
        outcome.steps_done,
        final_loss,
        outcome.tokens_per_s,
        outcome.heldout.accuracy(),
    );
    reporter.finish();
    let mut curves = vec![(format!("{mesh}"), outcome.losses.clone())];
    let mut summary = summarize(&config, &outcome, interrupted);
    reporter.draw(&curves)?;
    reporter.write_summary(&summary)?;
    done.store(true, Ordering::Relaxed);
    if args.compare && !interrupted {
        println!("training with one rank from the same start ...");
        let reference = train_on_device(&config.on_one_rank(), None, false, true)?;
        let grads = |outcome: &Outcome| outcome.first_gradients.clone().unwrap_or_default();
        let loss = max_rel_diff(&outcome.losses, &reference.losses);
        let gradient = max_rel_grad_diff(&grads(&outcome), &grads(&reference));
        if !(loss.is_finite() && gradient.is_finite()) {
            return Err(RunError::Incomparable { loss, gradient });
        }
        summary.max_rel_diff = Some(loss);
        summary.max_rel_grad_diff = Some(gradient);
        curves.push(("one rank".to_owned(), reference.losses));
        reporter.draw(&curves)?;
        reporter.write_summary(&summary)?;
    }
    show(&summary, &args.out);
    Ok(interrupted)
}

fn summarize(config: &TrainConfig, outcome: &Outcome, interrupted: bool) -> Summary {
    Summary {
        ranks: config.ranks,
        steps: outcome.steps_done,
        final_loss: outcome.losses.last().copied().unwrap_or(f64::NAN),
        heldout_accuracy: outcome.heldout.accuracy(),
        tokens_per_s: outcome.tokens_per_s,
        max_rel_diff: None,
        max_rel_grad_diff: None,
        vision_frames_per_rank: outcome.vision_frames_per_rank.clone(),
        kv_tokens_received: outcome.kv_tokens_received.clone(),
        parameters_sha256: outcome.parameters_sha256.clone(),
        interrupted,
        config: config.clone(),
    }
}

fn show(summary: &Summary, out: &std::path::Path) {
    println!(
        "vision frames per rank: {:?}",
        summary.vision_frames_per_rank
    );
    println!(
        "K/V tokens received per rank and layer: {:?}",
        summary.kv_tokens_received
    );
    if let (Some(loss), Some(grad)) = (summary.max_rel_diff, summary.max_rel_grad_diff) {
        println!("largest relative difference from one rank: loss {loss:.1e}, gradient {grad:.1e}");
    }
    if summary.interrupted {
        println!(
            "interrupted after step {}; continue with --resume",
            summary.steps
        );
    }
    println!("written to {}", out.display());
}
