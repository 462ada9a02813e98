//! The configuration of a model, with the field names of a published `config.json`.
//!
//! Fields that do not change what is computed here (cache, dropout at inference, dtype names) are ignored when they occur.

use burn::tensor::{Tensor, activation, backend::Backend};
use burn_cp::nn::{ContextParallelAttentionConfig, RotaryConfig};
use serde::{Deserialize, Serialize};

use super::{ConfigError, validate::validate};
use crate::data::vocabulary;

/// Configuration of a dense Qwen3-VL model (Bai et al., "Qwen3-VL Technical Report", 2025).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen3VlConfig {
    /// The decoder.
    pub text_config: TextConfig,
    /// The vision tower.
    pub vision_config: VisionConfig,
    /// Id of the placeholder of an image's tokens.
    #[serde(default = "defaults::image_token_id")]
    pub image_token_id: i64,
    /// Id of the placeholder of a video's tokens.
    #[serde(default = "defaults::video_token_id")]
    pub video_token_id: i64,
    /// Id that stands before the placeholders of an image or of a video's frame.
    #[serde(default = "defaults::vision_start_token_id")]
    pub vision_start_token_id: i64,
    /// Id that stands behind them.
    #[serde(default = "defaults::vision_end_token_id")]
    pub vision_end_token_id: i64,
    /// Whether logits come from the token embedding instead of a head of their own. Absent: what `text_config` says.
    #[serde(default)]
    pub tie_word_embeddings: Option<bool>,
    /// How weights are drawn for training from scratch. Not a field of published configurations.
    #[serde(default)]
    pub initialization: Initialization,
}

/// The decoder's part of a [`Qwen3VlConfig`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; absent: as many as query heads.
    #[serde(default)]
    pub num_key_value_heads: Option<usize>,
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    #[serde(default = "defaults::rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies, where it does not stand in `rope_parameters`.
    #[serde(default)]
    pub rope_theta: Option<f64>,
    /// Rotary embedding, name in older files.
    #[serde(default)]
    pub rope_scaling: Option<RopeParameters>,
    /// Rotary embedding; goes before `rope_scaling`.
    #[serde(default)]
    pub rope_parameters: Option<RopeParameters>,
    /// Whether the four projections of attention have a bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// See [`Qwen3VlConfig::tie_word_embeddings`].
    #[serde(default)]
    pub tie_word_embeddings: Option<bool>,
    /// Activation of the gate.
    #[serde(default = "defaults::text_act")]
    pub hidden_act: Activation,
    /// Standard deviation of initial weights.
    #[serde(default = "defaults::initializer_range")]
    pub initializer_range: f64,
}

/// Rotary embedding of a [`TextConfig`].
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RopeParameters {
    /// Base of the frequencies.
    pub rope_theta: Option<f64>,
    /// Only `default` is known.
    #[serde(alias = "type")]
    pub rope_type: Option<String>,
    /// Planes for time, height and width.
    pub mrope_section: Option<[usize; 3]>,
    /// Only `true` is known.
    pub mrope_interleaved: Option<bool>,
}

/// The vision tower's part of a [`Qwen3VlConfig`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VisionConfig {
    /// Number of blocks.
    pub depth: usize,
    /// Width of the tower's hidden states.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Heads of attention.
    pub num_heads: usize,
    /// Colour channels.
    pub in_channels: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Patches per side of a square that becomes one token.
    pub spatial_merge_size: usize,
    /// Frames that one patch spans.
    pub temporal_patch_size: usize,
    /// Width of the features; the decoder's `hidden_size`.
    pub out_hidden_size: usize,
    /// Learned position embeddings, a square grid of them.
    pub num_position_embeddings: usize,
    /// Blocks whose output is fed to the first decoder layers, rising.
    #[serde(default)]
    pub deepstack_visual_indexes: Vec<usize>,
    /// Activation of the feed-forward layers; the mergers use [`Activation::Gelu`] always.
    #[serde(default = "defaults::vision_act")]
    pub hidden_act: Activation,
    /// Standard deviation of initial weights.
    #[serde(default = "defaults::initializer_range")]
    pub initializer_range: f64,
}

/// Elementwise activation functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · Φ(x)` with the normal distribution function (Hendrycks and Gimpel, 2016).
    Gelu,
    /// GELU with `tanh` in place of the distribution function (same paper).
    #[serde(alias = "gelu_new")]
    GeluPytorchTanh,
}

impl Activation {
    /// Applies the function to every element; same shape.
    pub fn forward<B: Backend, const D: usize>(self, x: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Silu => activation::silu(x),
            Self::Gelu => activation::gelu(x),
            Self::GeluPytorchTanh => {
                // Products, since a power with a float exponent costs far more on CPUs.
                let cube = x.clone() * x.clone() * x.clone();
                let inner = (x.clone() + cube * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
                x * (inner.tanh() + 1.0) * 0.5
            }
        }
    }
}

/// How the weights of a model that was never trained are drawn. Biases are 0 and norms are 1 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Initialization {
    /// Normal with the standard deviation `initializer_range`, as published.
    #[default]
    Published,
    /// Normal with a standard deviation that keeps the size of activations at any width: `1/sqrt(inputs)` for matrices,
    /// times `1/sqrt(2·layers)` for those that write into the residual stream (Radford et al., GPT-2, 2019).
    /// 0.02 is far below that at widths like 64, and training starts slowly.
    FanIn {
        /// Standard deviation of token embeddings.
        embedding_std: f64,
        /// Standard deviation of the vision tower's learned position embeddings.
        position_std: f64,
    },
}

mod defaults {
    use super::Activation;

    pub(super) fn image_token_id() -> i64 {
        151_655
    }
    pub(super) fn video_token_id() -> i64 {
        151_656
    }
    pub(super) fn vision_start_token_id() -> i64 {
        151_652
    }
    pub(super) fn vision_end_token_id() -> i64 {
        151_653
    }
    pub(super) fn rms_norm_eps() -> f64 {
        1e-6
    }
    pub(super) fn initializer_range() -> f64 {
        0.02
    }
    pub(super) fn text_act() -> Activation {
        Activation::Silu
    }
    pub(super) fn vision_act() -> Activation {
        Activation::GeluPytorchTanh
    }
}

impl Qwen3VlConfig {
    /// A model for digits in seconds: two decoder layers of width 32. `vocab_size` ids, placeholders as in
    /// [`vocabulary`](crate::data::vocabulary).
    #[must_use]
    pub fn tiny(vocab_size: usize) -> Self {
        Self::for_digits(
            TextConfig {
                hidden_size: 32,
                intermediate_size: 64,
                num_hidden_layers: 2,
                num_attention_heads: 2,
                num_key_value_heads: Some(1),
                ..text_for_digits(vocab_size)
            },
            VisionConfig {
                hidden_size: 32,
                intermediate_size: 64,
                num_heads: 2,
                ..vision_for_digits()
            },
        )
    }

    /// A model that learns to read digits in minutes on a CPU: two decoder layers of width 64.
    #[must_use]
    pub fn small(vocab_size: usize) -> Self {
        Self::for_digits(text_for_digits(vocab_size), vision_for_digits())
    }

    fn for_digits(text_config: TextConfig, vision_config: VisionConfig) -> Self {
        Self {
            vision_config: VisionConfig {
                out_hidden_size: text_config.hidden_size,
                ..vision_config
            },
            text_config,
            image_token_id: vocabulary::IMAGE,
            video_token_id: vocabulary::VIDEO,
            vision_start_token_id: vocabulary::VISION_START,
            vision_end_token_id: vocabulary::VISION_END,
            tie_word_embeddings: Some(true),
            initialization: Initialization::FanIn {
                embedding_std: 0.1,
                position_std: 0.5,
            },
        }
    }

    /// Checks every field and the fields against each other.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] lists the path of every field that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate(self)
    }

    /// Whether logits come from the token embedding.
    #[must_use]
    pub fn is_tied(&self) -> bool {
        self.tie_word_embeddings
            .or(self.text_config.tie_word_embeddings)
            .unwrap_or(false)
    }
}

fn text_for_digits(vocab_size: usize) -> TextConfig {
    TextConfig {
        vocab_size,
        hidden_size: 64,
        intermediate_size: 160,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: 32,
        rms_norm_eps: defaults::rms_norm_eps(),
        rope_theta: None,
        rope_scaling: None,
        rope_parameters: Some(RopeParameters {
            rope_theta: Some(1e6),
            rope_type: Some("default".into()),
            mrope_section: Some([6, 5, 5]),
            mrope_interleaved: Some(true),
        }),
        attention_bias: false,
        tie_word_embeddings: Some(true),
        hidden_act: Activation::Silu,
        initializer_range: defaults::initializer_range(),
    }
}

/// The tower of [`Qwen3VlConfig::small`].
pub(in crate::models) fn vision_for_digits() -> VisionConfig {
    VisionConfig {
        depth: 2,
        hidden_size: 64,
        intermediate_size: 128,
        num_heads: 4,
        in_channels: 3,
        patch_size: 4,
        spatial_merge_size: 2,
        temporal_patch_size: 2,
        out_hidden_size: 64,
        num_position_embeddings: 16,
        deepstack_visual_indexes: vec![0],
        hidden_act: Activation::GeluPytorchTanh,
        initializer_range: defaults::initializer_range(),
    }
}

impl TextConfig {
    /// Key and value heads.
    #[must_use]
    pub fn num_kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// The rotary section of the file, whichever name it has.
    pub(super) fn rope(&self) -> RopeParameters {
        self.rope_parameters
            .clone()
            .or_else(|| self.rope_scaling.clone())
            .unwrap_or_default()
    }

    /// Frequencies and sections; what is absent is as published (base 500 000, sections 24, 20, 20).
    #[must_use]
    pub fn rotary(&self) -> RotaryConfig {
        let rope = self.rope();
        RotaryConfig::new(rope.rope_theta.or(self.rope_theta).unwrap_or(5e5))
            .with_sections(rope.mrope_section.unwrap_or([24, 20, 20]))
    }

    /// Attention of a decoder layer.
    pub(super) fn attention(&self) -> ContextParallelAttentionConfig {
        ContextParallelAttentionConfig::new(
            self.hidden_size,
            self.num_attention_heads,
            self.num_kv_heads(),
            self.head_dim,
        )
        .with_qkv_bias(self.attention_bias)
        .with_output_bias(self.attention_bias)
        .with_qk_norm(Some(self.rms_norm_eps))
        .with_rope(Some(self.rotary()))
    }
}

impl VisionConfig {
    /// Values of one row of patches: channels x frames x height x width.
    #[must_use]
    pub fn patch_dim(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// Width of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Side of the square of learned position embeddings.
    #[must_use]
    pub fn grid_side(&self) -> usize {
        self.num_position_embeddings.isqrt()
    }
}
