//! What a run is.

use std::path::PathBuf;

use burn_cp::{mesh::DeviceMesh, sharder::ContextParallelConfig, vision::VisionShardingConfig};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::train::{Checkpointing, Device, Exchange, FieldError, Layout, RunConfig, fields};

/// What stays as it was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Freeze {
    /// Nothing.
    None,
    /// The vision tower.
    Vision,
    /// Decoder, embedding and head.
    Text,
}

/// What forward and backward compute in. Optimizer, loss and the weights that are saved are f32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// bf16 on an NVIDIA GPU, else f32.
    Auto,
    /// Single precision.
    F32,
    /// Half of it, with f32's range.
    Bf16,
}

/// What happens to a document that is longer than a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LongDocuments {
    /// It is left out, and counted.
    Drop,
    /// It is an error.
    Refuse,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FinetuneConfig {
    /// Model directory.
    pub model: PathBuf,
    /// Conversations, one a line.
    pub data: PathBuf,
    /// Number of ranks.
    pub ranks: usize,
    /// Ranks along the data-parallel axis; the others share each sequence.
    pub dp: usize,
    /// Where ranks compute.
    pub device: Device,
    /// Which rank owns which tokens.
    pub layout: Layout,
    /// How keys and values travel.
    pub exchange: Exchange,
    /// What is not trained.
    pub freeze: Freeze,
    /// What forward and backward compute in.
    pub dtype: Dtype,
    /// What backward computes again.
    pub checkpointing: Checkpointing,
    /// Optimizer steps.
    pub steps: u64,
    /// Decides the order of documents.
    pub seed: u64,
    /// Most tokens of a row.
    pub tokens: usize,
    /// Rows of one optimizer step; gradients of the rows of a rank are accumulated. Divisible by `dp`.
    pub rows_per_step: usize,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// Steps over which it rises.
    pub warmup_steps: u64,
    /// Weight decay of AdamW.
    pub weight_decay: f64,
    /// Largest norm of all gradients together.
    pub clip_norm: f64,
    /// Tokens whose logits exist at a time.
    pub chunk: usize,
    /// What happens to documents longer than a row.
    pub long_documents: LongDocuments,
    /// Steps between two checkpoints.
    pub checkpoint_every: u64,
    /// Seconds that a rank waits for its peers.
    pub deadline_seconds: u64,
}

impl RunConfig for FinetuneConfig {
    const PROGRAM: &'static str = "finetune-qwen3-vl";

    fn num_ranks(&self) -> usize {
        self.ranks
    }

    fn deciding(&self) -> Self {
        Self {
            checkpoint_every: 1,
            deadline_seconds: 1,
            ..self.clone()
        }
    }
}

/// A run that cannot be started. The field's name is that of the flag.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FinetuneConfigError {
    /// A field has a value out of range.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// Ranks and mesh do not fit.
    #[error("ranks and dp: {0}")]
    Mesh(#[from] burn_cp::mesh::MeshError),
}

impl FinetuneConfig {
    /// The mesh, `dp × cp`.
    ///
    /// # Errors
    /// `ranks` is 0 or not a multiple of `dp`.
    pub fn mesh(&self) -> Result<DeviceMesh, FinetuneConfigError> {
        fields::mesh(self.ranks, self.dp)
    }

    /// How sequences are sharded.
    pub fn context_parallel(&self, padding_token_id: i64) -> ContextParallelConfig {
        ContextParallelConfig {
            layout: self.layout.policy(),
            exchange: self.exchange.strategy(),
            vision: VisionShardingConfig::always(),
            padding_token_id,
            ..ContextParallelConfig::default()
        }
    }

    /// What every document is padded to a multiple of, where the layout takes one stream of documents.
    pub fn alignment(&self) -> Option<usize> {
        self.layout.alignment(self.ranks / self.dp.max(1))
    }

    /// The same run on one rank.
    #[must_use]
    pub fn on_one_rank(&self) -> Self {
        Self {
            ranks: 1,
            dp: 1,
            layout: Layout::Contiguous,
            ..self.clone()
        }
    }

    /// Whether forward and backward compute in bf16.
    pub fn is_bf16(&self) -> bool {
        match self.dtype {
            Dtype::Auto => self.device == Device::Cuda,
            Dtype::F32 => false,
            Dtype::Bf16 => true,
        }
    }

    /// Checks every field before anything is read.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate(&self) -> Result<(), FinetuneConfigError> {
        self.mesh()?;
        fields::device(self.device)?;
        if self.dtype == Dtype::Bf16 && self.device != Device::Cuda {
            let device = format!("{:?}", self.device).to_lowercase();
            let expected = format!("f32 on the device {device}");
            return Err(FieldError::new("dtype", expected, "bf16").into());
        }
        fields::per_step("rows_per_step", self.rows_per_step, self.dp)?;
        fields::at_least_one(&[
            ("tokens", self.tokens as u64),
            ("chunk", self.chunk as u64),
            ("checkpoint_every", self.checkpoint_every),
            ("deadline_seconds", self.deadline_seconds),
        ])?;
        let positive = [
            ("learning_rate", self.learning_rate),
            ("clip_norm", self.clip_norm),
        ];
        Ok(fields::optimizer(&positive, self.weight_decay)?)
    }
}
