//! What a run is: flags and configuration file, one set of names.

use std::{fs, marker::PhantomData, path::Path};

use burn::tensor::backend::Backend;
use burn_cp::{
    batch::SequenceBatch,
    layout::LayoutError,
    mesh::DeviceMesh,
    sharder::ContextParallelConfig,
    vision::{VisionDelivery, VisionShardingConfig},
};
use serde::{Deserialize, Serialize};

use super::{
    Architecture, Checkpointing, Delivery, Device, Exchange, FieldError, Layout, ModelSize, Vision,
    fields, to_batch, to_batch_in_order,
};
use crate::{
    data::{DataConfig, DataError, Pack, PackSource, PatchShape, Split, vocabulary},
    models::qwen3_vl::Qwen3VlConfig,
};

/// A training run of an architecture. Every field may stand in a configuration file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, bound = "")]
pub struct TrainConfig<A: Architecture = Qwen3VlConfig> {
    /// What is trained; no field of a file.
    #[serde(skip)]
    pub architecture: PhantomData<A>,
    /// Number of ranks: threads of one process, or processes, whose number then counts.
    pub ranks: usize,
    /// Ranks along the data-parallel axis; the others share each sequence.
    pub dp: usize,
    /// Where ranks compute.
    pub device: Device,
    /// Which rank owns which tokens.
    pub layout: Layout,
    /// How keys and values travel.
    pub exchange: Exchange,
    /// Where the vision tower runs.
    pub vision: Vision,
    /// Who is given the vision tower's features.
    pub vision_delivery: Delivery,
    /// Whether the vision tower is left as it was initialised.
    pub freeze_vision: bool,
    /// What backward computes again.
    pub checkpointing: Checkpointing,
    /// Optimizer steps.
    pub steps: u64,
    /// Decides documents, packs and initial weights.
    pub seed: u64,
    /// Tokens of a pack.
    pub tokens: usize,
    /// Packs of one optimizer step; divisible by `dp`.
    pub packs_per_step: usize,
    /// Which model.
    pub size: ModelSize,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// Steps over which the learning rate rises.
    pub warmup_steps: u64,
    /// Weight decay of AdamW.
    pub weight_decay: f64,
    /// Second moment's decay of AdamW.
    pub beta_2: f64,
    /// Largest norm of all gradients together.
    pub clip_norm: f64,
    /// Packs of held-out images that accuracy is measured on.
    pub heldout_packs: u64,
    /// Steps between two measurements of held-out accuracy and two rows of the table.
    pub eval_every: u64,
    /// Steps between two checkpoints.
    pub checkpoint_every: u64,
    /// Seconds that a rank waits for its peers.
    pub deadline_seconds: u64,
    /// What documents look like. The tiny size has no ramp.
    pub data: DataConfig,
}

impl<A: Architecture> Default for TrainConfig<A> {
    fn default() -> Self {
        Self {
            architecture: PhantomData,
            ranks: 2,
            dp: 1,
            device: Device::Cpu,
            layout: Layout::HeadTail,
            exchange: Exchange::NeededOnly,
            vision: Vision::Sharded,
            vision_delivery: Delivery::Gathered,
            freeze_vision: false,
            checkpointing: Checkpointing::None,
            steps: 600,
            seed: 1,
            tokens: 512,
            packs_per_step: 2,
            size: ModelSize::Small,
            learning_rate: 1.5e-3,
            warmup_steps: 30,
            weight_decay: 0.05,
            beta_2: 0.95,
            clip_norm: 1.0,
            heldout_packs: 8,
            eval_every: 75,
            checkpoint_every: 75,
            deadline_seconds: 600,
            data: DataConfig::default(),
        }
    }
}

/// A run that cannot be started. The field's name is that of the flag and of the configuration file.
#[derive(Debug, thiserror::Error)]
pub enum TrainConfigError {
    /// A field has a value out of range.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// Ranks and mesh do not fit.
    #[error("ranks and dp: {0}")]
    Mesh(#[from] burn_cp::mesh::MeshError),
    /// The documents do not fit, or the digits cannot be read.
    #[error("data: {0}")]
    Data(#[from] DataError),
    /// The model does not fit together.
    #[error(transparent)]
    Model(#[from] crate::models::qwen3_vl::ConfigError),
}

impl<A: Architecture> TrainConfig<A> {
    /// The mesh, `dp × cp`.
    ///
    /// # Errors
    /// `ranks` is 0 or not a multiple of `dp`.
    pub fn mesh(&self) -> Result<DeviceMesh, TrainConfigError> {
        fields::mesh(self.ranks, self.dp)
    }

    /// The model's configuration.
    pub fn model(&self) -> A {
        A::of_size(self.size)
    }

    /// [`to_batch`] with the positions that the architecture reads, placed as the layout wants it.
    ///
    /// # Errors
    /// As there.
    pub fn batch<B: Backend>(
        &self,
        packs: &[Pack],
        shape: &PatchShape,
        device: &B::Device,
    ) -> Result<SequenceBatch<B>, LayoutError> {
        let batch = if A::POSITIONS_HAVE_AXES {
            to_batch
        } else {
            to_batch_in_order
        };
        batch(packs, shape, vocabulary::SIZE, self.alignment(), device)
    }

    /// How sequences are sharded.
    pub fn context_parallel(&self) -> ContextParallelConfig {
        ContextParallelConfig {
            layout: self.layout.policy(),
            exchange: self.exchange.strategy(),
            vision: match self.vision {
                Vision::Replicated => VisionShardingConfig::replicated(),
                Vision::Sharded => VisionShardingConfig::always(),
            }
            .with_delivery(match self.vision_delivery {
                Delivery::Gathered => VisionDelivery::Gathered,
                Delivery::ToConsumers => VisionDelivery::ToConsumers,
            }),
            padding_token_id: vocabulary::PAD,
            ..ContextParallelConfig::default()
        }
    }

    /// What every document is padded to a multiple of, where the layout takes one stream of documents.
    pub fn alignment(&self) -> Option<usize> {
        self.layout.alignment(self.ranks / self.dp.max(1))
    }

    /// The packs of one split.
    ///
    /// # Errors
    /// Documents that do not fit into a pack.
    pub fn packs(&self, split: Split) -> Result<PackSource, TrainConfigError> {
        let model = self.model();
        let vision = model.vision();
        let shape = PatchShape {
            patch_size: vision.patch_size,
            merge_size: vision.spatial_merge_size,
            temporal_patch_size: vision.temporal_patch_size,
            channels: vision.in_channels,
        };
        let mut data = self.data.clone();
        if self.size == ModelSize::Tiny {
            // Comparisons of a few steps want long documents from the first one.
            data.ramp_packs = 0;
        }
        Ok(PackSource::new(self.seed, self.tokens, split, data, shape)?)
    }

    /// The same run on one rank: what `--compare` trains beside it.
    #[must_use]
    pub fn on_one_rank(&self) -> Self {
        Self {
            ranks: 1,
            dp: 1,
            layout: Layout::Contiguous,
            vision: Vision::Replicated,
            vision_delivery: Delivery::Gathered,
            ..self.clone()
        }
    }

    /// Checks every field before anything is started or written.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate(&self) -> Result<(), TrainConfigError> {
        self.mesh()?;
        fields::device(self.device)?;
        fields::per_step("packs_per_step", self.packs_per_step, self.dp)?;
        fields::at_least_one(&[
            ("steps", self.steps),
            ("heldout_packs", self.heldout_packs),
            ("eval_every", self.eval_every),
            ("checkpoint_every", self.checkpoint_every),
            ("deadline_seconds", self.deadline_seconds),
        ])?;
        let positive = [
            ("learning_rate", self.learning_rate),
            ("clip_norm", self.clip_norm),
        ];
        fields::optimizer(&positive, self.weight_decay)?;
        if !(0.0..1.0).contains(&self.beta_2) {
            let expected = "a number from 0 to below 1";
            return Err(FieldError::new("beta_2", expected, self.beta_2).into());
        }
        self.model().validate()?;
        self.packs(Split::Train)?;
        Ok(())
    }
}

/// A configuration file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    /// It cannot be read.
    #[error("{path}: {reason}")]
    Read {
        /// The file.
        path: String,
        /// The system's reason.
        reason: String,
    },
    /// Its name ends neither in `.toml` nor in `.json`.
    #[error("{path}: expected a file name that ends in .toml or .json")]
    Kind {
        /// The file.
        path: String,
    },
    /// A field is unknown or wrong, or the file is not well-formed.
    #[error("{path}: at {field}: {reason}")]
    Field {
        /// The file.
        path: String,
        /// Path of the field within the file.
        field: String,
        /// What is wrong.
        reason: String,
    },
}

/// Reads a configuration file, TOML or JSON by its name.
///
/// # Errors
/// It cannot be read, is of another kind, or has an unknown or wrong field, which is named with its path.
pub fn load_config<A: Architecture>(path: &Path) -> Result<TrainConfig<A>, ConfigFileError> {
    let shown = path.display().to_string();
    let text = fs::read_to_string(path).map_err(|error| ConfigFileError::Read {
        path: shown.clone(),
        reason: error.to_string(),
    })?;
    let wrong = |field: String, reason: String| ConfigFileError::Field {
        path: shown.clone(),
        field,
        reason,
    };
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => {
            let parsed = toml::Deserializer::parse(&text)
                .map_err(|error| wrong("the file's syntax".into(), error.to_string()))?;
            serde_path_to_error::deserialize(parsed).map_err(|error| {
                wrong(error.path().to_string(), error.inner().message().to_owned())
            })
        }
        Some("json") => {
            let mut parsed = serde_json::Deserializer::from_str(&text);
            let config = serde_path_to_error::deserialize(&mut parsed)
                .map_err(|error| wrong(error.path().to_string(), error.inner().to_string()))?;
            parsed
                .end()
                .map_err(|error| wrong("the file's end".into(), error.to_string()))?;
            Ok(config)
        }
        _ => Err(ConfigFileError::Kind { path: shown }),
    }
}
