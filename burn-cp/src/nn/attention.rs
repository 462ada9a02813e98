//! Self-attention for models whose sequences are sharded.

use burn::{
    config::Config,
    module::{Initializer, Module},
    nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig},
    tensor::{DType, Tensor, backend::Backend},
};

use super::{
    DropoutSite, NnError, RotaryConfig, RotaryTables, StepDropout, dropout::places::WEIGHTS,
};
use crate::{
    attention::{AttentionOptions, ContextParallelBackend},
    plan::MaskKind,
    sharder::CpStep,
};

/// Configuration of [`ContextParallelAttention`].
#[derive(Config, Debug)]
pub struct ContextParallelAttentionConfig {
    /// Width of the hidden states.
    pub d_model: usize,
    /// Heads of the queries.
    pub num_heads: usize,
    /// Heads of keys and values; divides `num_heads`. Each serves `num_heads / num_kv_heads` query heads.
    pub num_kv_heads: usize,
    /// Width of a head; need not be `d_model / num_heads`.
    pub head_dim: usize,
    /// Whether the projections of queries, keys and values have a bias.
    #[config(default = false)]
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    #[config(default = false)]
    pub output_bias: bool,
    /// Epsilon of an RMS norm over each head of queries and keys, before they are rotated; `None`: no such norm.
    pub qk_norm: Option<f64>,
    /// Whether a token sees no later token of its document.
    #[config(default = true)]
    pub causal: bool,
    /// Earlier tokens that a token sees besides itself; `None` means all. Only with `causal`.
    pub window: Option<usize>,
    /// Rotary position embedding; `None`: positions are not used.
    pub rope: Option<RotaryConfig>,
    /// How the projections are initialised.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / 3.0f64.sqrt(), fan_out_only: false }"
    )]
    pub initializer: Initializer,
}

impl ContextParallelAttentionConfig {
    /// Checks the fields against each other.
    ///
    /// # Errors
    ///
    /// A size of 0, heads that do not divide, a window without `causal`, an epsilon that is not positive, or a rotary
    /// embedding that does not fit `head_dim`: see [`NnError`].
    pub fn validate(&self) -> Result<(), NnError> {
        let sizes = [
            ("d_model", self.d_model),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
        ];
        if let Some((what, got)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(NnError::field(what, "at least 1", got));
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(NnError::HeadGroups {
                num_heads: self.num_heads,
                num_kv_heads: self.num_kv_heads,
            });
        }
        if let (false, Some(window)) = (self.causal, self.window) {
            return Err(NnError::field("window", "none without causal", window));
        }
        if let Some(epsilon) = self
            .qk_norm
            .filter(|epsilon| epsilon.is_nan() || *epsilon <= 0.0)
        {
            return Err(NnError::field("qk_norm", "a positive number", epsilon));
        }
        self.rope
            .map_or(Ok(()), |rope| rope.validate(self.head_dim))
    }

    /// Makes the layer; its parameters are lazy, as all of Burn's.
    ///
    /// # Errors
    ///
    /// As [`Self::validate`].
    pub fn init<B: Backend>(
        &self,
        device: &B::Device,
    ) -> Result<ContextParallelAttention<B>, NnError> {
        self.validate()?;
        let linear = |d_input, d_output, bias| {
            LinearConfig::new(d_input, d_output)
                .with_bias(bias)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
        let norm = |epsilon| {
            RmsNormConfig::new(self.head_dim)
                .with_epsilon(epsilon)
                .init(device)
        };
        let (q, kv) = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        );
        Ok(ContextParallelAttention {
            q_proj: linear(self.d_model, q, self.qkv_bias),
            k_proj: linear(self.d_model, kv, self.qkv_bias),
            v_proj: linear(self.d_model, kv, self.qkv_bias),
            o_proj: linear(q, self.d_model, self.output_bias),
            q_norm: self.qk_norm.map(norm),
            k_norm: self.qk_norm.map(norm),
            head_dim: self.head_dim,
            mask: None,
            causal: self.causal,
            window: self.window,
            rope: self.rope,
            dropout: 0.0,
            layer: 0,
        })
    }
}

/// Grouped-query self-attention over the tokens of a [`CpStep`]: a token attends within its document, also to the tokens
/// that other ranks hold.
///
/// Everything but the attention itself is per token, so it needs no exchange. Every rank of the step's group must run it.
#[derive(Module, Debug)]
pub struct ContextParallelAttention<B: Backend> {
    /// `d_model -> num_heads · head_dim`.
    pub q_proj: Linear<B>,
    /// `d_model -> num_kv_heads · head_dim`.
    pub k_proj: Linear<B>,
    /// `d_model -> num_kv_heads · head_dim`.
    pub v_proj: Linear<B>,
    /// `num_heads · head_dim -> d_model`.
    pub o_proj: Linear<B>,
    /// Norm of each query head.
    pub q_norm: Option<RmsNorm<B>>,
    /// Norm of each key head.
    pub k_norm: Option<RmsNorm<B>>,
    /// Instead of `causal` and `window`.
    #[module(skip)]
    pub(super) mask: Option<MaskKind>,
    #[module(skip)]
    pub(super) head_dim: usize,
    #[module(skip)]
    pub(super) causal: bool,
    #[module(skip)]
    pub(super) window: Option<usize>,
    #[module(skip)]
    pub(super) rope: Option<RotaryConfig>,
    #[module(skip)]
    pub(super) dropout: f64,
    #[module(skip)]
    pub(super) layer: u64,
}

impl<B: Backend> ContextParallelAttention<B> {
    /// The same layer with a mask, whatever it had: for masks that ask the batch, such as causal with bidirectional spans. A
    /// mask that the step cannot be planned with makes [`forward`](Self::forward) panic.
    #[must_use]
    pub fn with_mask(self, mask: MaskKind) -> Self {
        Self {
            mask: Some(mask),
            ..self
        }
    }

    /// The same layer, in which every token sees its whole document, whatever mask it had.
    #[must_use]
    pub fn full(self) -> Self {
        Self {
            mask: None,
            causal: false,
            window: None,
            ..self
        }
    }

    /// The same layer, which drops weights with probability `p` in training, drawn from the batch's seed and `layer`: the
    /// layers of a model need different ones.
    ///
    /// # Errors
    /// `p` is not at least 0 and less than 1.
    pub fn with_dropout(self, p: f64, layer: u64) -> Result<Self, NnError> {
        if !(0.0..1.0).contains(&p) {
            return Err(NnError::field("dropout", "at least 0 and less than 1", p));
        }
        Ok(Self {
            dropout: p,
            layer,
            ..self
        })
    }

    /// The same layer, whose dropout is that of layer `layer` of a model; 0 in a new one.
    #[must_use]
    pub fn in_layer(self, layer: u64) -> Self {
        Self { layer, ..self }
    }
}

impl<B: ContextParallelBackend> ContextParallelAttention<B> {
    /// `x [batch, local_tokens, d_model]` -> the same shape. Positions are those of the step. Every rank of the step's group must call it.
    ///
    /// Models with several layers make the tables once and call [`Self::forward_with_tables`].
    ///
    /// # Panics
    ///
    /// If `x` is not this rank's shard, an exchange fails, or there is dropout in training and the batch has no seed for it.
    pub fn forward(&self, x: Tensor<B, 3>, step: &CpStep<B>) -> Tensor<B, 3> {
        let tables = self.tables(step);
        self.forward_with_tables(x, step, tables.as_ref())
    }

    /// The rotary tables of the step's positions; `None` for a layer without rotary embedding. Exchanges nothing.
    pub fn tables(&self, step: &CpStep<B>) -> Option<RotaryTables<B>> {
        self.rope
            .map(|rope| RotaryTables::new(step.positions(), &rope, self.head_dim))
    }

    /// [`Self::forward`] with queries and keys rotated by `tables`, or not at all. Every rank of the step's group must call it.
    ///
    /// # Panics
    ///
    /// As [`Self::forward`].
    pub fn forward_with_tables(
        &self,
        x: Tensor<B, 3>,
        step: &CpStep<B>,
        tables: Option<&RotaryTables<B>>,
    ) -> Tensor<B, 3> {
        let [batch, tokens, _] = x.dims();
        let q = self.heads(self.q_proj.forward(x.clone()), self.q_norm.as_ref(), tables);
        let k = self.heads(self.k_proj.forward(x.clone()), self.k_norm.as_ref(), tables);
        let v = self.heads(self.v_proj.forward(x), None, None);
        let dropout = StepDropout::new(step, self.dropout > 0.0)
            .unwrap_or_else(|error| panic!("attention: {error}"));
        let options = AttentionOptions {
            dropout: dropout.of_attention(self.dropout, DropoutSite::new(self.layer, WEIGHTS)),
            ..self.options()
        };
        let out = step.attention(q, k, v, &options);
        let width = out.dims()[1] * self.head_dim;
        self.o_proj
            .forward(out.swap_dims(1, 2).reshape([batch, tokens, width]))
    }

    fn options(&self) -> AttentionOptions {
        match (self.mask, self.causal, self.window) {
            (Some(mask), ..) => AttentionOptions {
                mask,
                ..AttentionOptions::causal()
            },
            (None, true, Some(window)) => AttentionOptions::causal().with_window(window),
            (None, true, None) => AttentionOptions::causal(),
            (None, false, _) => AttentionOptions::full(),
        }
    }

    /// `[batch, tokens, heads · head_dim]` -> `[batch, heads, tokens, head_dim]`, normed and rotated.
    fn heads(
        &self,
        x: Tensor<B, 3>,
        norm: Option<&RmsNorm<B>>,
        tables: Option<&RotaryTables<B>>,
    ) -> Tensor<B, 4> {
        let [batch, tokens, width] = x.dims();
        let x = x.reshape([batch, tokens, width / self.head_dim, self.head_dim]);
        let x = match norm {
            Some(norm) => rms_norm(norm, x),
            None => x,
        }
        .swap_dims(1, 2);
        match tables {
            Some(tables) => tables.rotate(x),
            None => x,
        }
    }
}

/// Applies `norm` over the last dim of `x`, with the mean square in f32, or in f64 if `x` is f64; same shape and dtype.
///
/// `RmsNorm::forward` takes the mean in f32 whatever the dtype, which leaves f64 models with the accuracy of f32.
pub fn rms_norm<B: Backend, const D: usize>(norm: &RmsNorm<B>, x: Tensor<B, D>) -> Tensor<B, D> {
    let dtype = x.dtype();
    let wide = x.cast(if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    });
    let mean_square = (wide.clone() * wide.clone()).mean_dim(D - 1);
    let normed = wide / (mean_square + norm.epsilon).sqrt();
    scaled(normed.cast(dtype), norm.gamma.val())
}

/// `x` times `gamma` along the last dim.
///
/// The gradient of `gamma` sums over all tokens, dim by dim: over 8,192 tokens in one dim Burn took 1.1 to 1.8 ms on an H200
/// (`benches/results`). Tokens stand in two dims where their number has divisors, so that there are many sums to be made at once.
fn scaled<B: Backend, const D: usize>(x: Tensor<B, D>, gamma: Tensor<B, 1>) -> Tensor<B, D> {
    let dims = x.dims();
    let width = dims[D - 1];
    let rows: usize = dims[..D - 1].iter().product();
    let Some(split) = (1..=rows.isqrt()).rev().find(|n| rows.is_multiple_of(*n)) else {
        return x * gamma.unsqueeze();
    };
    (x.reshape([split, rows / split, width]) * gamma.unsqueeze()).reshape(dims)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn config() -> ContextParallelAttentionConfig {
        ContextParallelAttentionConfig::new(64, 4, 2, 16)
    }

    #[test]
    fn contradicting_fields_are_refused_by_name() {
        let what = |config: ContextParallelAttentionConfig| match config
            .init::<Flex>(&Default::default())
        {
            Err(NnError::Field { what, .. }) => what,
            Err(NnError::HeadGroups { .. }) => "groups",
            Err(NnError::Sections { .. }) => "sections",
            Err(NnError::Unconvertible { .. }) => "unconvertible",
            Ok(_) => "none",
        };
        let rope = RotaryConfig::new(1e4);
        assert_eq!(
            what(config().with_rope(Some(rope)).with_qk_norm(Some(1e-6))),
            "none"
        );
        assert_eq!(
            what(ContextParallelAttentionConfig::new(0, 4, 2, 16)),
            "d_model"
        );
        assert_eq!(
            what(ContextParallelAttentionConfig::new(64, 4, 0, 16)),
            "num_kv_heads"
        );
        assert_eq!(
            what(ContextParallelAttentionConfig::new(64, 4, 3, 16)),
            "groups"
        );
        let odd = ContextParallelAttentionConfig::new(64, 4, 2, 15);
        assert_eq!(what(odd.clone()), "none");
        assert_eq!(what(odd.with_rope(Some(rope))), "head_dim");
        assert_eq!(
            what(config().with_rope(Some(rope.with_sections([4, 4, 4])))),
            "sections"
        );
        assert_eq!(
            what(config().with_causal(false).with_window(Some(3))),
            "window"
        );
        assert_eq!(what(config().with_qk_norm(Some(0.0))), "qk_norm");
    }

    #[test]
    fn projections_have_the_widths_of_their_heads() {
        let layer = config()
            .with_qk_norm(Some(1e-6))
            .init::<Flex>(&Default::default())
            .unwrap();
        assert_eq!(layer.q_proj.weight.dims(), [64, 64]);
        assert_eq!(layer.k_proj.weight.dims(), [64, 32]);
        assert_eq!(layer.o_proj.weight.dims(), [64, 64]);
        assert_eq!(layer.q_norm.unwrap().gamma.dims(), [16]);
    }

    #[test]
    fn rms_norm_has_unit_mean_square() {
        let device = Default::default();
        let norm = RmsNormConfig::new(4)
            .with_epsilon(1e-12)
            .init::<Flex>(&device);
        let out = rms_norm(
            &norm,
            Tensor::<Flex, 2>::from_data([[3.0, -4.0, 0.0, 0.0]], &device),
        );
        let got: Vec<f64> = out.into_data().iter().collect();
        for (got, want) in got.into_iter().zip([1.2, -1.6, 0.0, 0.0]) {
            assert!((got - want).abs() < 1e-6);
        }
    }
}
