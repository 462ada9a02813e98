//! What a run trains: the seam between the training loop and a model.

use std::fmt::Debug;

use burn::{
    backend::{Autodiff, autodiff::checkpoint::strategy::CheckpointStrategy},
    module::AutodiffModule,
    tensor::backend::AutodiffBackend,
};
use burn_cp::{
    attention::{ContextParallelBackend, InnerAttention},
    loss::TokenLoss,
    nn::SequenceModel,
    sharder::{CpStep, StepError},
};

use super::ModelSize;
use crate::{
    data::vocabulary,
    models::{
        mimo_v2_flash::{MimoV2FlashVl, MimoV2FlashVlConfig},
        qwen3_vl::{ConfigError, Qwen3Vl, Qwen3VlConfig, Qwen3VlVision, VisionConfig},
    },
};

/// A backend that the programs can train on: autodiff over a backend that runs context-parallel attention.
pub trait TrainBackend:
    AutodiffBackend<InnerBackend = Self::Inner> + ContextParallelBackend
{
    /// The backend without autodiff, for evaluation.
    type Inner: ContextParallelBackend<Device = Self::Device>;
}

impl<B, C> TrainBackend for Autodiff<B, C>
where
    B: InnerAttention + ContextParallelBackend,
    C: CheckpointStrategy,
    Self: AutodiffBackend<InnerBackend = B> + ContextParallelBackend<Device = B::Device>,
{
    type Inner = B;
}

/// An architecture that learns to read digits: the configuration of its model, by size. A program trains one.
pub trait Architecture: Debug + Clone + PartialEq + Send + Sync + 'static {
    /// The program that trains it.
    const PROGRAM: &'static str;
    /// What the program says of itself.
    const ABOUT: &'static str;
    /// Where the program writes if nothing else is asked for.
    const OUT: &'static str;
    /// Whether positions have the axes time, height and width; else they count tokens.
    const POSITIONS_HAVE_AXES: bool;

    /// Its model.
    type Model<B: TrainBackend>: TrainModel<B>;

    /// The configuration of a size.
    fn of_size(size: ModelSize) -> Self;

    /// Checks every field.
    ///
    /// # Errors
    /// All that is wrong.
    fn validate(&self) -> Result<(), ConfigError>;

    /// The vision tower.
    fn vision(&self) -> &VisionConfig;

    /// A model to train from scratch, which depends on the configuration and `seed` only.
    ///
    /// # Errors
    /// As [`Self::validate`].
    fn init<B: TrainBackend>(
        &self,
        device: &B::Device,
        seed: u64,
    ) -> Result<Self::Model<B>, ConfigError>;
}

/// A model that the training loop can train.
pub trait TrainModel<B: TrainBackend>:
    AutodiffModule<B, InnerModule: SequenceModel<B::Inner>> + SequenceModel<B>
{
    /// The vision tower.
    fn tower(&self) -> &Qwen3VlVision<B>;

    /// Takes the vision tower out of training.
    #[must_use]
    fn freeze_vision(self) -> Self;

    /// What is minimised. Every rank of the step's loss group must call it.
    ///
    /// # Errors
    /// A step that the model cannot be given, or ranks that could not talk to each other.
    fn loss(&self, step: &CpStep<B>) -> Result<TokenLoss<B>, StepError> {
        step.cross_entropy(self.forward(step)?)
    }
}

impl Architecture for Qwen3VlConfig {
    const PROGRAM: &'static str = "train-vlm";
    const ABOUT: &'static str = "Train a small Qwen3-VL to read handwritten digits, its sequences and its vision tower sharded over ranks.";
    const OUT: &'static str = "runs/train-vlm";
    const POSITIONS_HAVE_AXES: bool = true;

    type Model<B: TrainBackend> = Qwen3Vl<B>;

    fn of_size(size: ModelSize) -> Self {
        match size {
            ModelSize::Tiny => Self::tiny(vocabulary::SIZE),
            ModelSize::Small => Self::small(vocabulary::SIZE),
        }
    }

    fn validate(&self) -> Result<(), ConfigError> {
        self.validate()
    }

    fn vision(&self) -> &VisionConfig {
        &self.vision_config
    }

    fn init<B: TrainBackend>(
        &self,
        device: &B::Device,
        seed: u64,
    ) -> Result<Qwen3Vl<B>, ConfigError> {
        self.init(device, seed)
    }
}

impl<B: TrainBackend> TrainModel<B> for Qwen3Vl<B> {
    fn tower(&self) -> &Qwen3VlVision<B> {
        &self.model.visual
    }

    fn freeze_vision(self) -> Self {
        self.freeze_vision()
    }
}

impl Architecture for MimoV2FlashVlConfig {
    const PROGRAM: &'static str = "train-mimo";
    const ABOUT: &'static str = "Train a small MiMo-V2-Flash to read handwritten digits, its sequences and its vision tower sharded over ranks.";
    const OUT: &'static str = "runs/train-mimo";
    const POSITIONS_HAVE_AXES: bool = false;

    type Model<B: TrainBackend> = MimoV2FlashVl<B>;

    fn of_size(size: ModelSize) -> Self {
        match size {
            ModelSize::Tiny => Self::tiny(),
            ModelSize::Small => Self::small(),
        }
    }

    fn validate(&self) -> Result<(), ConfigError> {
        self.validate()
    }

    fn vision(&self) -> &VisionConfig {
        &self.vision_config
    }

    fn init<B: TrainBackend>(
        &self,
        device: &B::Device,
        seed: u64,
    ) -> Result<MimoV2FlashVl<B>, ConfigError> {
        self.init(device, seed)
    }
}

impl<B: TrainBackend> TrainModel<B> for MimoV2FlashVl<B> {
    fn tower(&self) -> &Qwen3VlVision<B> {
        &self.visual
    }

    fn freeze_vision(self) -> Self {
        self.freeze_vision()
    }

    fn loss(&self, step: &CpStep<B>) -> Result<TokenLoss<B>, StepError> {
        self.loss(step)
    }
}
