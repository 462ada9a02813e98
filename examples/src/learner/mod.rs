//! The digit documents of `train-vlm`, trained by burn-train: the program `learner-vlm`.
//!
//! `SupervisedTraining` owns the loop, the metrics, the checkpoints and the display; the strategy of `burn_cp::train` runs each
//! of its steps over several ranks. [`DigitReader`] is the model as burn-train wants it, [`PackLoader`] the packs as a data loader.
//! Warm-up and clipping by the norm of all gradients are `train-vlm`'s own, and not here.

mod loader;
mod model;

use std::{path::PathBuf, sync::Arc, time::Duration};

use burn::{
    data::dataloader::DataLoader,
    lr_scheduler::cosine::{CosineAnnealingLrScheduler, CosineAnnealingLrSchedulerConfig},
    optim::{AdamW, AdamWConfig, adaptor::OptimizerAdaptor},
    record::{FullPrecisionSettings, NamedMpkFileRecorder},
};
use burn_cp::{
    launch::{LaunchError, RankDevice, ThreadsOptions},
    train::{ContextParallelStrategy, ForRank},
};
use burn_train::{
    InferenceStep, Interrupter, Learner, LearningComponentsMarker, SupervisedTraining,
    metric::{AccuracyMetric, LossMetric},
};

use crate::{
    data::Split,
    models::qwen3_vl::ConfigError,
    train::{TrainBackend, TrainConfig, TrainConfigError},
};

pub use loader::{PackLoader, Packs};
pub use model::{DigitReader, Reading};

/// The guide's page, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/burn-train.md")]
struct Guide;

type Optimizer<B> = OptimizerAdaptor<AdamW, DigitReader<B>, B>;
type Components<B> =
    LearningComponentsMarker<B, CosineAnnealingLrScheduler, DigitReader<B>, Optimizer<B>>;

/// A training by burn-train.
#[derive(Debug, Clone)]
pub struct LearnerRun {
    /// Model, packs, ranks and how they share sequences; its steps are those of an epoch.
    pub config: TrainConfig,
    /// Epochs of `config.steps` steps, with validation and a checkpoint behind each.
    pub epochs: usize,
    /// Whether burn-train's own strategy for a single device trains, rather than ranks.
    pub single_device: bool,
    /// Continue behind this epoch's checkpoint.
    pub checkpoint: Option<usize>,
    /// Where metrics, logs and checkpoints go.
    pub out: PathBuf,
}

/// Why a training did not end well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum LearnerError {
    #[error(transparent)]
    Config(#[from] TrainConfigError),
    #[error(transparent)]
    Model(#[from] ConfigError),
    #[error("learning rate: {0}")]
    LearningRate(String),
    #[error("{path}: expected a checkpoint of learner-vlm, found none")]
    NoCheckpoint { path: String },
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

/// Trains, and returns what the trained model, on one rank, says of the held-out packs.
///
/// # Errors
/// A configuration that does not fit together, or the first failure of the ranks.
pub fn learn<B: TrainBackend<Device: RankDevice>>(
    run: &LearnerRun,
    interrupter: &Interrupter,
) -> Result<Reading, LearnerError> {
    let config = &run.config;
    config.validate()?;
    if let Some(epoch) = run.checkpoint {
        // burn-train would panic.
        let path = run.out.join(format!("checkpoint/model-{epoch}.mpk"));
        if !path.exists() {
            let path = path.display().to_string();
            return Err(LearnerError::NoCheckpoint { path });
        }
    }
    let model = DigitReader::<B> {
        model: config.model().init(&B::Device::default(), config.seed)?,
        alignment: config.alignment(),
    };
    let num_steps = run.epochs as u64 * config.steps;
    let schedule = CosineAnnealingLrSchedulerConfig::new(config.learning_rate, num_steps as usize)
        .init()
        .map_err(LearnerError::LearningRate)?;
    #[allow(clippy::cast_possible_truncation)]
    let optimizer: Optimizer<B> = AdamWConfig::new()
        .with_beta_2(config.beta_2 as f32)
        .with_weight_decay(config.weight_decay as f32)
        .init();
    let learner = Learner::new(model, optimizer, schedule);
    let (train, valid) = loaders(run)?;
    let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
    let loss = LossMetric::<B::Inner>::new();
    let accuracy = AccuracyMetric::<B::Inner>::new();
    let training_packs: Arc<dyn DataLoader<B, ForRank<Packs>>> = Arc::new(train);
    let held_out: Arc<dyn DataLoader<B::Inner, ForRank<Packs>>> = Arc::new(valid.clone());
    let mut training = SupervisedTraining::<Components<B>>::new(&run.out, training_packs, held_out)
        .metrics((loss, accuracy))
        .with_file_checkpointer(recorder)
        .with_interrupter(interrupter.clone())
        .num_epochs(run.epochs)
        .summary();
    if let Some(epoch) = run.checkpoint {
        training = training.checkpoint(epoch);
    }
    let trained = if run.single_device {
        training.launch(learner)
    } else {
        let strategy = ContextParallelStrategy::new(config.mesh()?, config.context_parallel());
        let options = ThreadsOptions {
            deadline: Duration::from_secs(config.deadline_seconds),
            ..ThreadsOptions::default()
        };
        strategy.with_options(options).launch(training, learner)?
    };
    let readings = valid
        .items()
        .map(|packs| trained.model.step(ForRank::new(packs)));
    Ok(readings.fold(Reading::default(), Reading::and))
}

/// Training and held-out packs. Every group of ranks takes an item of each step.
fn loaders(run: &LearnerRun) -> Result<(PackLoader, PackLoader), TrainConfigError> {
    let config = &run.config;
    let packs = |split| config.packs(split).map(Arc::new);
    let per_item = config.packs_per_step / config.dp;
    let num_items = config.steps * config.dp as u64;
    let first_epoch = run.checkpoint.unwrap_or(0) as u64;
    let train = PackLoader::new(packs(Split::Train)?, num_items, per_item).from_epoch(first_epoch);
    let valid = PackLoader::new(packs(Split::HeldOut)?, config.heldout_packs, 1).repeated();
    Ok((train, valid))
}
