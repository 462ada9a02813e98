//! What a run is.

use std::path::PathBuf;

use burn_cp::{mesh::DeviceMesh, sharder::ContextParallelConfig, vision::VisionShardingConfig};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::train::{Checkpointing, Device, Exchange, Layout, RunConfig};

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
    #[error("{field}: expected {expected}, got {got}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// Ranks and mesh do not fit.
    #[error("ranks and dp: {0}")]
    Mesh(#[from] burn_cp::mesh::MeshError),
}

pub(super) fn field(
    field: &'static str,
    expected: impl Into<String>,
    got: impl ToString,
) -> FinetuneConfigError {
    FinetuneConfigError::Field {
        field,
        expected: expected.into(),
        got: got.to_string(),
    }
}

impl FinetuneConfig {
    /// The mesh, `dp × cp`.
    ///
    /// # Errors
    /// `ranks` is 0 or not a multiple of `dp`.
    pub fn mesh(&self) -> Result<DeviceMesh, FinetuneConfigError> {
        if self.ranks == 0 {
            return Err(field("ranks", "at least 1", 0));
        }
        if self.dp == 0 || !self.ranks.is_multiple_of(self.dp) {
            let expected = format!("a divisor of ranks = {}", self.ranks);
            return Err(field("dp", expected, self.dp));
        }
        Ok(DeviceMesh::new([
            ("dp", self.dp),
            ("cp", self.ranks / self.dp),
        ])?)
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
        if !Device::built().contains(&self.device) {
            let expected = format!("one of {:?}, or another build", Device::built());
            return Err(field("device", expected, format!("{:?}", self.device)));
        }
        if self.dtype == Dtype::Bf16 && self.device != Device::Cuda {
            let device = format!("{:?}", self.device).to_lowercase();
            return Err(field(
                "dtype",
                format!("f32 on the device {device}"),
                "bf16",
            ));
        }
        if self.rows_per_step == 0 || !self.rows_per_step.is_multiple_of(self.dp) {
            let expected = format!("a multiple of dp = {}", self.dp);
            return Err(field("rows_per_step", expected, self.rows_per_step));
        }
        for (name, value) in [
            ("tokens", self.tokens as u64),
            ("chunk", self.chunk as u64),
            ("checkpoint_every", self.checkpoint_every),
            ("deadline_seconds", self.deadline_seconds),
        ] {
            if value == 0 {
                return Err(field(name, "at least 1", value));
            }
        }
        for (name, value) in [
            ("learning_rate", self.learning_rate),
            ("clip_norm", self.clip_norm),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err(field(name, "a positive number", value));
            }
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return Err(field(
                "weight_decay",
                "a number of at least 0",
                self.weight_decay,
            ));
        }
        Ok(())
    }
}
