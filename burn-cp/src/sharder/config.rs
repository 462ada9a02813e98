//! How a model is run over a mesh.

use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    batch::StreamDeclaration, layout::LayoutPolicy, plan::ExchangeStrategy,
    vision::VisionShardingConfig,
};

/// Whether the primary stream is cut before the model sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrimaryStream {
    /// Each rank's model is given its own tokens.
    #[default]
    Sharded,
    /// Each rank's model is given all tokens (padded), and cuts its hidden states with
    /// [`CpStep::shard_tokens`](super::CpStep::shard_tokens) when it has embedded them.
    Whole,
}

/// How sequences are sharded and exchanged. The same on every rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ContextParallelConfig {
    /// Mesh axis over which sequences are sharded.
    pub cp_axis: String,
    /// Mesh axes over which the loss is averaged and gradients are summed.
    pub loss_axes: Vec<String>,
    /// Which rank owns which tokens.
    pub layout: LayoutPolicy,
    /// How keys and values get to the ranks that need them.
    pub exchange: ExchangeStrategy,
    /// When the vision tower is split over the ranks.
    #[serde(deserialize_with = "vision")]
    pub vision: VisionShardingConfig,
    /// Whether the primary stream is cut before the model sees it.
    pub primary: PrimaryStream,
    /// Id that stands in tokens added behind a sequence.
    pub padding_token_id: i64,
    /// Further streams that batches may carry.
    pub streams: Vec<StreamDeclaration>,
}

/// Reads the field `vision`, so that errors within it name the whole path.
fn vision<'de, D: Deserializer<'de>>(deserializer: D) -> Result<VisionShardingConfig, D::Error> {
    VisionShardingConfig::deserialize_at("vision", deserializer)
}

impl Default for ContextParallelConfig {
    fn default() -> Self {
        Self {
            cp_axis: "cp".to_owned(),
            loss_axes: vec!["dp".to_owned(), "cp".to_owned()],
            layout: LayoutPolicy::Contiguous { multiple: 1 },
            exchange: ExchangeStrategy::NeededOnly,
            vision: VisionShardingConfig::default(),
            primary: PrimaryStream::default(),
            padding_token_id: 0,
            streams: Vec::new(),
        }
    }
}
