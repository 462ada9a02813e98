//! The configuration of a model, with the field names that `transformers` writes and those of the published `config.json`.
//!
//! Fields that do not change what is computed here (cache, dropout at inference, dtype names) are ignored when they occur.

use burn_cp::nn::RotaryConfig;
use serde::{Deserialize, Serialize};

use super::validate::{validate, validate_with_media};
use crate::models::{
    problems::ConfigError,
    qwen3_vl::{Activation, Initialization, VisionConfig},
};

/// Configuration of the text part of MiMo-V2-Flash (Xiaomi, "MiMo-V2-Flash Technical Report", 2026).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MimoV2FlashConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width inside the dense feed-forward layers.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads, in both kinds of layer.
    pub num_attention_heads: usize,
    /// Key and value heads of layers with full attention.
    pub num_key_value_heads: usize,
    /// Key and value heads of layers with a sliding window; absent: twice as many.
    #[serde(default)]
    pub swa_num_key_value_heads: Option<usize>,
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Width of a head of values.
    pub v_head_dim: usize,
    /// Tokens that a token sees in layers with a sliding window, itself among them.
    #[serde(default = "defaults::sliding_window")]
    pub sliding_window: usize,
    /// One less than `sliding_window`; goes before it.
    #[serde(default)]
    pub sliding_window_size: Option<usize>,
    /// Kind of attention by layer. Absent: as `hybrid_layer_pattern`, or full in the first and every sixth layer.
    #[serde(default)]
    pub layer_types: Option<Vec<AttentionKind>>,
    /// The same as numbers, 1 for a sliding window.
    #[serde(default)]
    pub hybrid_layer_pattern: Option<Vec<u8>>,
    /// Kind of feed-forward layer by layer. Absent: as `moe_layer_freq`, or dense in the first layer only.
    #[serde(default)]
    pub mlp_layer_types: Option<Vec<MlpKind>>,
    /// The same as numbers, 1 for experts.
    #[serde(default)]
    pub moe_layer_freq: Option<Vec<u8>>,
    /// Rotary embedding of both kinds of layer. Absent: from the three fields that follow.
    #[serde(default)]
    pub rope_parameters: Option<RopeByKind>,
    /// Base of the rotary frequencies in layers with full attention.
    #[serde(default)]
    pub rope_theta: Option<f64>,
    /// Base of the rotary frequencies in layers with a sliding window.
    #[serde(default)]
    pub swa_rope_theta: Option<f64>,
    /// Share of a head that is rotated.
    #[serde(default)]
    pub partial_rotary_factor: Option<f64>,
    /// Factor of the values; null: 1.
    #[serde(default = "defaults::attention_value_scale")]
    pub attention_value_scale: Option<f64>,
    /// Whether queries, keys and values have a bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// Number of experts of a layer.
    pub n_routed_experts: usize,
    /// Experts that a token goes to.
    pub num_experts_per_tok: usize,
    /// Width inside an expert.
    pub moe_intermediate_size: usize,
    /// Groups that the experts of a layer are divided into.
    #[serde(default = "defaults::one")]
    pub n_group: usize,
    /// Groups whose experts a token may go to.
    #[serde(default = "defaults::one")]
    pub topk_group: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    #[serde(default = "defaults::norm_topk_prob")]
    pub norm_topk_prob: bool,
    /// Factor of those weights; null: 1.
    #[serde(default)]
    pub routed_scaling_factor: Option<f64>,
    /// How routers score; only `sigmoid` is known.
    #[serde(default)]
    pub scoring_func: Option<String>,
    /// Experts that every token goes to; only none is known.
    #[serde(default)]
    pub n_shared_experts: Option<usize>,
    /// Whether layers with full attention have sinks; only `false` is known.
    #[serde(default)]
    pub add_full_attention_sink_bias: Option<bool>,
    /// Whether layers with a sliding window have sinks; only `true` is known.
    #[serde(default)]
    pub add_swa_attention_sink_bias: Option<bool>,
    /// Epsilon of every RMS norm.
    #[serde(default = "defaults::rms_norm_eps", alias = "layernorm_epsilon")]
    pub rms_norm_eps: f64,
    /// Activation of the gates.
    #[serde(default = "defaults::activation")]
    pub hidden_act: Activation,
    /// Whether logits come from the token embedding instead of a head of their own.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Standard deviation of initial weights.
    #[serde(default = "defaults::initializer_range")]
    pub initializer_range: f64,
    /// How weights are drawn for training from scratch. Not a field of published configurations.
    #[serde(default)]
    pub initialization: Initialization,
}

/// A [`MimoV2FlashConfig`] with the vision tower of Qwen3-VL before it, whose features take the places of placeholder tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MimoV2FlashVlConfig {
    /// The decoder.
    pub text_config: MimoV2FlashConfig,
    /// The vision tower; no deepstack.
    pub vision_config: VisionConfig,
    /// Factor of the auxiliary loss that balances the load of experts.
    pub balance: f64,
}

/// Which tokens a layer's attention sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKind {
    /// All earlier ones of the document.
    #[serde(rename = "full_attention")]
    Full,
    /// The last ones, with a sink.
    #[serde(rename = "sliding_attention")]
    Sliding,
}

/// Which feed-forward layer a layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MlpKind {
    /// One for all tokens.
    Dense,
    /// Experts, of which a router chooses some for each token.
    Sparse,
}

/// Rotary embedding of both kinds of layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeByKind {
    /// Of layers with full attention.
    pub full_attention: RopeOfKind,
    /// Of layers with a sliding window.
    pub sliding_attention: RopeOfKind,
}

/// Rotary embedding of one kind of layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeOfKind {
    /// Base of the frequencies.
    pub rope_theta: f64,
    /// Share of a head that is rotated.
    #[serde(default = "defaults::partial_rotary_factor")]
    pub partial_rotary_factor: f64,
    /// Only `default` is known.
    #[serde(default)]
    pub rope_type: Option<String>,
}

pub(super) mod defaults {
    use super::Activation;

    pub(in crate::models::mimo_v2_flash) fn sliding_window() -> usize {
        129
    }
    pub(in crate::models::mimo_v2_flash) fn one() -> usize {
        1
    }
    pub(in crate::models::mimo_v2_flash) fn norm_topk_prob() -> bool {
        true
    }
    pub(in crate::models::mimo_v2_flash) fn partial_rotary_factor() -> f64 {
        0.334
    }
    #[allow(clippy::unnecessary_wraps, reason = "null is a value of the field")]
    pub(in crate::models::mimo_v2_flash) fn attention_value_scale() -> Option<f64> {
        Some(0.707)
    }
    pub(in crate::models::mimo_v2_flash) fn rms_norm_eps() -> f64 {
        1e-5
    }
    pub(in crate::models::mimo_v2_flash) fn initializer_range() -> f64 {
        0.02
    }
    pub(in crate::models::mimo_v2_flash) fn activation() -> Activation {
        Activation::Silu
    }
}

impl MimoV2FlashConfig {
    /// Checks every field and the fields against each other.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] lists the path of every field that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate(self)
    }

    /// Kind of attention by layer.
    #[must_use]
    pub fn attention_kinds(&self) -> Vec<AttentionKind> {
        if let Some(kinds) = &self.layer_types {
            return kinds.clone();
        }
        let of = |sliding| {
            if sliding {
                AttentionKind::Sliding
            } else {
                AttentionKind::Full
            }
        };
        match &self.hybrid_layer_pattern {
            Some(pattern) => pattern.iter().map(|&sliding| of(sliding == 1)).collect(),
            None => (0..self.num_hidden_layers)
                .map(|layer| of(layer != 0 && !(layer + 1).is_multiple_of(6)))
                .collect(),
        }
    }

    /// Kind of feed-forward layer by layer.
    #[must_use]
    pub fn mlp_kinds(&self) -> Vec<MlpKind> {
        if let Some(kinds) = &self.mlp_layer_types {
            return kinds.clone();
        }
        let of = |sparse| {
            if sparse {
                MlpKind::Sparse
            } else {
                MlpKind::Dense
            }
        };
        match &self.moe_layer_freq {
            Some(pattern) => pattern.iter().map(|&sparse| of(sparse == 1)).collect(),
            None => (0..self.num_hidden_layers)
                .map(|layer| of(layer > 0))
                .collect(),
        }
    }

    /// Key and value heads of a layer.
    #[must_use]
    pub fn num_kv_heads(&self, kind: AttentionKind) -> usize {
        match kind {
            AttentionKind::Full => self.num_key_value_heads,
            AttentionKind::Sliding => self
                .swa_num_key_value_heads
                .unwrap_or(2 * self.num_key_value_heads),
        }
    }

    /// Earlier tokens that a token of a layer sees besides itself; `None`: all of its document.
    #[must_use]
    pub fn window(&self, kind: AttentionKind) -> Option<usize> {
        match kind {
            AttentionKind::Full => None,
            AttentionKind::Sliding => Some(
                self.sliding_window_size
                    .unwrap_or(self.sliding_window.saturating_sub(1)),
            ),
        }
    }

    pub(super) fn rope(&self, kind: AttentionKind) -> RopeOfKind {
        let (full, sliding) = (self.rope_theta, self.swa_rope_theta);
        match (&self.rope_parameters, kind) {
            (Some(rope), AttentionKind::Full) => rope.full_attention.clone(),
            (Some(rope), AttentionKind::Sliding) => rope.sliding_attention.clone(),
            (None, _) => RopeOfKind {
                rope_theta: match kind {
                    AttentionKind::Full => full.unwrap_or(5e6),
                    AttentionKind::Sliding => sliding.unwrap_or(1e4),
                },
                partial_rotary_factor: self
                    .partial_rotary_factor
                    .unwrap_or_else(defaults::partial_rotary_factor),
                rope_type: None,
            },
        }
    }

    /// Frequencies of a layer, and the first dims of a head that are rotated.
    #[must_use]
    pub fn rotary(&self, kind: AttentionKind) -> (RotaryConfig, usize) {
        let rope = self.rope(kind);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let width = (self.head_dim as f64 * rope.partial_rotary_factor) as usize;
        (RotaryConfig::new(rope.rope_theta), width)
    }

    /// Factor of the values.
    #[must_use]
    pub fn value_scale(&self) -> f64 {
        self.attention_value_scale.unwrap_or(1.0)
    }
}

impl MimoV2FlashVlConfig {
    /// Checks every field and the fields against each other.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] lists the path of every field that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate_with_media(self)
    }
}
