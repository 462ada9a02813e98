//! How a model is run over a mesh.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::names;
use crate::{
    batch::StreamDeclaration,
    field_path::{ReadFields, read_with_path},
    layout::LayoutPolicy,
    plan::ExchangeStrategy,
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
///
/// Read from any self-describing format (TOML, JSON, ..): a field that is left out has its default, an unknown one is refused,
/// and an error names the field by its path. `layout`, `exchange` and `primary` are written as below and also read by other
/// names in use; case, spaces around a name, and `-` or `_` make no difference. Null, `""` and `"default"` mean the
/// default, as `"auto"` does but for `exchange`, where it leaves the choice to the cost model.
///
/// | field | written | also read |
/// | --- | --- | --- |
/// | `layout` | `{ "contiguous": { "multiple": 1 } }` (default) | `contiguous` |
/// | | `"head-tail"` | `round_robin`, `load_balanced`, `zigzag` |
/// | | `"dual-chunk-swap"` | `thd`, `thd_dual_chunk_swap` |
/// | | `{ "balanced": { "visibility": { "causal": { "window": null } } } }` | `balanced` |
/// | | `"identity"` | |
/// | | `{ "custom": [[{ "start": 0, "end": 8 }], ..] }` | |
/// | `exchange` | `"needed-only"` (default) | `needed`, `halo`, `neighbor`, `neighbour`, `a2a`, `a2av`, `alltoall`, `all_to_all`, `needed_a2a` |
/// | | `"all-gather"` | `allgather` |
/// | | `"left-halo"` | |
/// | | `"ring"` | `ring_attention`, `p2p` |
/// | | `"head-all-to-all"` | `head_a2a`, `ulysses` |
/// | | `"auto"` | |
/// | `primary` | `"sharded"` (default), `"whole"` | |
///
/// The names of an exchange by neighbours or all-to-all mean `needed-only`, which moves just those tokens; `a2a` is not the
/// exchange of heads that goes by that name elsewhere. Kernels are not chosen here: a call
/// takes the fastest routine that serves it.
///
/// ```
/// use burn_cp::{layout::LayoutPolicy, sharder::ContextParallelConfig};
///
/// let read = |text| serde_json::from_str::<ContextParallelConfig>(text);
/// assert_eq!(read(r#"{ "layout": "Round-Robin" }"#).unwrap().layout, LayoutPolicy::HeadTail);
/// let error = read(r#"{ "exchange": "gossip" }"#).unwrap_err().to_string();
/// assert!(error.starts_with("exchange: expected one of needed-only, all-gather, left-halo, ring"), "{error}");
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
// The derived functions become private ones of the type, which the traits below call.
#[serde(remote = "Self", default, deny_unknown_fields)]
pub struct ContextParallelConfig {
    /// Mesh axis over which sequences are sharded.
    pub cp_axis: String,
    /// Mesh axes over which the loss is averaged and gradients are summed.
    pub loss_axes: Vec<String>,
    /// Which rank owns which tokens.
    #[serde(deserialize_with = "names::layout")]
    pub layout: LayoutPolicy,
    /// How keys and values get to the ranks that need them.
    #[serde(deserialize_with = "names::exchange")]
    pub exchange: ExchangeStrategy,
    /// Whether `all-gather`, `needed-only` and `left-halo` compute with a rank's own keys while those of others travel. Off, which is
    /// the default, the forward pass gives the bits of one device; on, it is as accurate, and a rank waits less. Attention with dropout
    /// of its weights never overlaps.
    pub overlap: bool,
    /// Whether `all-gather`, `needed-only` and `left-halo` keep the keys and values of other ranks for the backward pass, at the cost
    /// of their memory in every layer, instead of exchanging them again, which is the default. The bits are the same.
    pub keep_keys: bool,
    /// Multiprocessors of a GPU that forward passes leave free where they compute while keys and values travel: with `overlap` in
    /// `all-gather`, `needed-only` and `left-halo`, and in `ring`. 0 unless set. For the routine `hopper`, whose kernel ends late where a
    /// transfer has some of the multiprocessors that it wants; the others, and backward passes, share them as they are free
    /// ([`burn_cp_kernels::AttentionOptions::sm_margin`]). Ranks may differ.
    pub sm_margin: usize,
    /// When the vision tower is split over the ranks.
    #[serde(deserialize_with = "VisionShardingConfig::deserialize")]
    pub vision: VisionShardingConfig,
    /// Whether the primary stream is cut before the model sees it.
    #[serde(deserialize_with = "names::primary")]
    pub primary: PrimaryStream,
    /// Id that stands in tokens added behind a sequence.
    pub padding_token_id: i64,
    /// Further streams that batches may carry.
    pub streams: Vec<StreamDeclaration>,
}

impl Default for ContextParallelConfig {
    fn default() -> Self {
        Self {
            cp_axis: "cp".to_owned(),
            loss_axes: vec!["dp".to_owned(), "cp".to_owned()],
            layout: names::DEFAULT_LAYOUT,
            exchange: names::DEFAULT_EXCHANGE,
            overlap: false,
            keep_keys: false,
            sm_margin: 0,
            vision: VisionShardingConfig::default(),
            primary: PrimaryStream::default(),
            padding_token_id: 0,
            streams: Vec::new(),
        }
    }
}

impl Serialize for ContextParallelConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> ReadFields<'de> for ContextParallelConfig {
    fn read_fields<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer)
    }
}

impl<'de> Deserialize<'de> for ContextParallelConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_with_path(deserializer)
    }
}
