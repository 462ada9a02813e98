//! The program behind its flags.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use burn_cp::launch::{LaunchError, Place, Process};
use clap::Parser;
use serde::Serialize;

use super::{
    Corpus, CorpusError, Dtype, FinetuneConfig, FinetuneConfigError, Freeze, LongDocuments,
    worker::Job,
};
use crate::{
    hf::{DirectoryError, ModelDirectory},
    train::{
        CheckpointError, Checkpointing, Device, Exchange, Launch, Layout, Outcome, ReportError,
        Reporter, catch_interrupts, checkpoints_in, max_rel_diff, max_rel_grad_diff, on_device,
        process_options,
    },
};

/// Train a published Qwen3-VL further on conversations with pictures, its sequences and its vision tower sharded over ranks.
#[derive(Debug, Clone, Parser)]
#[command(name = "finetune-qwen3-vl", version)]
pub struct FinetuneArgs {
    /// Model directory: config.json, *.safetensors, tokenizer.json, chat template, preprocessor configurations
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Conversations, one {"messages": [..]} a line; paths of pictures count from its folder
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// How ranks are started: as threads of this process, or as processes by torchrun, mpirun or srun
    #[arg(long, value_enum, default_value_t)]
    pub launch: Launch,
    /// Number of ranks where they are threads [default: 1]
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Ranks along the data-parallel axis; the mesh is dp x (ranks / dp)
    #[arg(long, default_value_t = 1)]
    pub dp: usize,
    /// Where ranks compute
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: Device,
    /// Which rank owns which tokens
    #[arg(long, value_enum, default_value = "head-tail")]
    pub layout: Layout,
    /// How keys and values travel
    #[arg(long, value_enum, default_value = "needed-only")]
    pub exchange: Exchange,
    /// What is not trained
    #[arg(long, value_enum, default_value = "none")]
    pub freeze: Freeze,
    /// What forward and backward compute in; optimizer and saved weights are f32
    #[arg(long, value_enum, default_value = "auto")]
    pub dtype: Dtype,
    /// What the backward pass computes again
    #[arg(long, value_enum, default_value = "none")]
    pub checkpointing: Checkpointing,
    /// Optimizer steps [default: those of --epochs]
    #[arg(long)]
    pub steps: Option<u64>,
    /// Passes over the data, where --steps is not given
    #[arg(long, default_value_t = 1)]
    pub epochs: u64,
    /// Decides the order of documents
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Most tokens of a packed row
    #[arg(long, default_value_t = 4096)]
    pub tokens: usize,
    /// Rows of one optimizer step, divisible by dp; a rank's rows are accumulated
    #[arg(long, default_value_t = 1)]
    pub rows_per_step: usize,
    /// Highest learning rate
    #[arg(long, default_value_t = 1e-5)]
    pub learning_rate: f64,
    /// Steps over which the learning rate rises; then it falls along a half cosine to a tenth
    #[arg(long, default_value_t = 10)]
    pub warmup_steps: u64,
    /// Weight decay of AdamW
    #[arg(long, default_value_t = 0.01)]
    pub weight_decay: f64,
    /// Largest norm of all gradients together
    #[arg(long, default_value_t = 1.0)]
    pub clip_norm: f64,
    /// Tokens whose logits exist at a time
    #[arg(long, default_value_t = 1024)]
    pub chunk: usize,
    /// What happens to documents longer than a row
    #[arg(long, value_enum, default_value = "drop")]
    pub long_documents: LongDocuments,
    /// Steps between two checkpoints
    #[arg(long, default_value_t = 100)]
    pub checkpoint_every: u64,
    /// Seconds that a rank waits for its peers
    #[arg(long, default_value_t = 600)]
    pub deadline_seconds: u64,
    /// Also train with one rank from the same start, and report how far the two are apart
    #[arg(long)]
    pub compare: bool,
    /// Folder for metrics, summary, curve and checkpoints; what an earlier run left there is replaced
    #[arg(long, value_name = "DIR", default_value = "runs/finetune-qwen3-vl")]
    pub out: PathBuf,
    /// Continue from the newest checkpoint in --out
    #[arg(long, conflicts_with = "compare")]
    pub resume: bool,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum FinetuneError {
    #[error(transparent)]
    Config(#[from] FinetuneConfigError),
    #[error(transparent)]
    Model(#[from] DirectoryError),
    #[error(transparent)]
    Data(#[from] CorpusError),
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
    /// Flags that contradict each other.
    #[error("--ranks {ranks} with --launch env: the number of ranks is that of the processes")]
    RanksOfProcesses {
        /// What `--ranks` says.
        ranks: usize,
    },
    /// Ctrl-C cannot be caught.
    #[error("cannot listen for Ctrl-C: {0}")]
    Interrupt(#[from] ctrlc::Error),
}

/// `summary.json`.
#[derive(Debug, Clone, Serialize)]
struct Summary {
    steps: u64,
    documents: usize,
    dropped_documents: usize,
    final_loss: f64,
    tokens_per_s: f64,
    max_rel_diff: Option<f64>,
    max_rel_grad_diff: Option<f64>,
    vision_frames_per_rank: Vec<u64>,
    parameters_sha256: String,
    interrupted: bool,
    config: FinetuneConfig,
}

impl FinetuneArgs {
    pub(super) fn config(&self, ranks: usize) -> FinetuneConfig {
        FinetuneConfig {
            model: self.model.clone(),
            data: self.data.clone(),
            ranks,
            dp: self.dp,
            device: self.device,
            layout: self.layout,
            exchange: self.exchange,
            freeze: self.freeze,
            dtype: self.dtype,
            checkpointing: self.checkpointing,
            steps: self.steps.unwrap_or(0),
            seed: self.seed,
            tokens: self.tokens,
            rows_per_step: self.rows_per_step,
            learning_rate: self.learning_rate,
            warmup_steps: self.warmup_steps,
            weight_decay: self.weight_decay,
            clip_norm: self.clip_norm,
            chunk: self.chunk,
            long_documents: self.long_documents,
            checkpoint_every: self.checkpoint_every,
            deadline_seconds: self.deadline_seconds,
        }
    }
}

/// Steps of so many passes over all documents.
fn steps_of(corpus: &Corpus, config: &FinetuneConfig, epochs: u64) -> u64 {
    let rows: usize = (0..epochs)
        .map(|epoch| corpus.rows(config.seed, epoch).len())
        .sum();
    rows.div_ceil(config.rows_per_step) as u64
}

/// Runs the program. Whether the run was interrupted.
///
/// Where ranks are processes, every one of them calls it; rank 0 prints and writes.
///
/// # Errors
/// A wrong flag, a directory that is no model, a line that is no conversation, a folder that cannot be written, or a rank that failed.
pub fn run(args: &FinetuneArgs) -> Result<bool, FinetuneError> {
    let place = match (args.launch, args.ranks) {
        (Launch::Threads, _) => None,
        (Launch::Env, Some(ranks)) => return Err(FinetuneError::RanksOfProcesses { ranks }),
        (Launch::Env, None) => Some(Place::from_env().map_err(LaunchError::from)?),
    };
    let threads = args.ranks.unwrap_or(1);
    let mut config = args.config(place.as_ref().map_or(threads, |place| place.world_size));
    config.validate()?;
    let directory = ModelDirectory::open(&args.model)?;
    let needs_media = config.freeze == Freeze::Text;
    let corpus = Corpus::read(
        &args.data,
        &directory,
        config.tokens,
        config.long_documents,
        needs_media,
    )?;
    if args.steps.is_none() {
        config.steps = steps_of(&corpus, &config, args.epochs);
    }
    let speaks = place.as_ref().is_none_or(|place| place.rank == 0);
    let resumed = if args.resume {
        Some(checkpoints_in::<FinetuneConfig>(&args.out).latest(&config)?)
    } else {
        None
    };
    let reporter = if speaks {
        Reporter::new(&args.out, config.steps, resumed.as_ref())?
    } else {
        Reporter::reader(&args.out)
    };
    let done = Arc::new(AtomicBool::new(false));
    catch_interrupts(reporter.interrupt(), done.clone())?;
    if speaks {
        let (num, dropped, tokens) = (corpus.len(), corpus.num_dropped(), config.tokens);
        reporter.print(&format!(
            "{num} documents; {dropped} left out, longer than {tokens} tokens"
        ));
        let dtype = if config.is_bf16() { "bf16" } else { "f32" };
        reporter.print(&format!(
            "{} ranks, dp {}, {:?}, {dtype}, {} steps",
            config.ranks, config.dp, config.device, config.steps
        ));
    }
    let process = place
        .map(|place| {
            Process::join(
                &place,
                process_options(config.device, config.deadline_seconds),
            )
        })
        .transpose()?;
    let job = Job {
        config: &config,
        directory: &directory,
        corpus: &corpus,
        reporter: Some(&reporter),
        resume: args.resume,
        keep_gradients: args.compare,
        process,
    };
    let outcome = on_device(config.device, config.checkpointing, job)?;
    let interrupted = outcome.steps_done < config.steps;
    if speaks {
        reporter.finish();
        done.store(true, Ordering::Relaxed);
        write(args, &config, (&directory, &corpus), &outcome, &reporter)?;
    }
    Ok(interrupted)
}

/// Summary and curve, and the comparison if it was asked for.
fn write(
    args: &FinetuneArgs,
    config: &FinetuneConfig,
    (directory, corpus): (&ModelDirectory, &Corpus),
    outcome: &Outcome,
    reporter: &Reporter<FinetuneConfig>,
) -> Result<(), FinetuneError> {
    let mut summary = Summary {
        steps: outcome.steps_done,
        documents: corpus.len(),
        dropped_documents: corpus.num_dropped(),
        final_loss: outcome.losses.last().copied().unwrap_or(f64::NAN),
        tokens_per_s: outcome.tokens_per_s,
        max_rel_diff: None,
        max_rel_grad_diff: None,
        vision_frames_per_rank: outcome.vision_frames_per_rank.clone(),
        parameters_sha256: outcome.parameters_sha256.clone(),
        interrupted: outcome.steps_done < config.steps,
        config: config.clone(),
    };
    let mut curves = vec![(format!("{} ranks", config.ranks), outcome.losses.clone())];
    if args.compare && !summary.interrupted {
        println!("training with one rank from the same start ...");
        let alone = config.on_one_rank();
        let job = Job {
            config: &alone,
            directory,
            corpus,
            reporter: None,
            resume: false,
            keep_gradients: true,
            process: None,
        };
        let reference = on_device(config.device, config.checkpointing, job)?;
        let grads = |outcome: &Outcome| outcome.first_gradients.clone().unwrap_or_default();
        let loss = max_rel_diff(&outcome.losses, &reference.losses);
        let gradient = max_rel_grad_diff(&grads(outcome), &grads(&reference));
        if !(loss.is_finite() && gradient.is_finite()) {
            return Err(FinetuneError::Incomparable { loss, gradient });
        }
        println!(
            "largest relative difference from one rank: loss {loss:.1e}, gradient {gradient:.1e}"
        );
        summary.max_rel_diff = Some(loss);
        summary.max_rel_grad_diff = Some(gradient);
        curves.push(("one rank".to_owned(), reference.losses));
    }
    reporter.draw("finetune-qwen3-vl: loss per token", &curves)?;
    reporter.write_summary(&summary)?;
    println!(
        "loss {:.5} after step {}",
        summary.final_loss, summary.steps
    );
    println!(
        "vision frames per rank: {:?}",
        summary.vision_frames_per_rank
    );
    if summary.interrupted {
        println!("interrupted; continue with --resume");
    }
    println!("written to {}", args.out.display());
    Ok(())
}
