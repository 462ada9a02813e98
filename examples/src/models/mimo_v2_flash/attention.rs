//! Attention of a layer: grouped queries over all earlier tokens or over a window with a sink.

use burn::{
    module::{Initializer, Module, Param},
    nn::{Linear, LinearConfig},
    tensor::{Tensor, backend::Backend},
};
use burn_cp::{
    attention::{AttentionOptions, ContextParallelBackend},
    nn::{RotaryConfig, RotaryTables},
    plan::CostShape,
    sharder::{CpStep, StepError},
};

use super::config::{AttentionKind, MimoV2FlashConfig};

/// Causal grouped-query attention whose values are narrower than queries and keys, and of whose heads a part is rotated.
#[derive(Module, Debug)]
pub struct MimoAttention<B: Backend> {
    /// `hidden_size -> num_heads · head_dim`.
    pub q_proj: Linear<B>,
    /// `hidden_size -> num_kv_heads · head_dim`.
    pub k_proj: Linear<B>,
    /// `hidden_size -> num_kv_heads · v_head_dim`.
    pub v_proj: Linear<B>,
    /// `num_heads · v_head_dim -> hidden_size`.
    pub o_proj: Linear<B>,
    /// Sinks `[num_heads]` of a layer with a window (Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    /// 2024): `exp` of each joins its head's sums.
    pub attention_sink_bias: Option<Param<Tensor<B, 1>>>,
    #[module(skip)]
    num_kv_heads: usize,
    #[module(skip)]
    head_dim: usize,
    #[module(skip)]
    v_head_dim: usize,
    #[module(skip)]
    value_scale: f64,
    #[module(skip)]
    window: Option<usize>,
    #[module(skip)]
    rotary: RotaryConfig,
    /// The first dims of a head, which are rotated.
    #[module(skip)]
    rotary_width: usize,
}

impl<B: Backend> MimoAttention<B> {
    /// A layer with lazy zeros; `config` is a valid one.
    pub(super) fn new(config: &MimoV2FlashConfig, kind: AttentionKind, device: &B::Device) -> Self {
        let linear = |d_input, d_output, bias| {
            LinearConfig::new(d_input, d_output)
                .with_bias(bias)
                .with_initializer(Initializer::Zeros)
                .init(device)
        };
        let (hidden, bias) = (config.hidden_size, config.attention_bias);
        let (num_heads, num_kv_heads) = (config.num_attention_heads, config.num_kv_heads(kind));
        let sinks = || Initializer::Zeros.init([num_heads], device);
        let (rotary, rotary_width) = config.rotary(kind);
        Self {
            q_proj: linear(hidden, num_heads * config.head_dim, bias),
            k_proj: linear(hidden, num_kv_heads * config.head_dim, bias),
            v_proj: linear(hidden, num_kv_heads * config.v_head_dim, bias),
            o_proj: linear(num_heads * config.v_head_dim, hidden, false),
            attention_sink_bias: (kind == AttentionKind::Sliding).then(sinks),
            num_kv_heads,
            head_dim: config.head_dim,
            v_head_dim: config.v_head_dim,
            value_scale: config.value_scale(),
            window: config.window(kind),
            rotary,
            rotary_width,
        }
    }
}

impl<B: ContextParallelBackend> MimoAttention<B> {
    /// Whether the step's exchange can serve this layer's heads. Pure host.
    ///
    /// # Errors
    /// It cannot: on every rank alike, before anything travels.
    pub(super) fn check(&self, step: &CpStep<B>) -> Result<(), StepError> {
        let [width, _] = self.o_proj.weight.dims();
        let shape = CostShape {
            num_heads: width / self.v_head_dim,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim,
            bytes_per_element: self.o_proj.weight.dtype().size(),
        };
        step.exchange(&shape, &self.options())?;
        Ok(())
    }

    fn options(&self) -> AttentionOptions {
        match self.window {
            Some(window) => AttentionOptions::causal().with_window(window),
            None => AttentionOptions::causal(),
        }
    }

    /// The rotary tables of the step's positions, which all layers of one kind share. Exchanges nothing.
    pub(super) fn tables(&self, step: &CpStep<B>) -> RotaryTables<B> {
        RotaryTables::new(step.positions(), &self.rotary, self.rotary_width)
    }

    /// `x [batch, local_tokens, hidden_size]` to the same shape. Every rank of the step's group must call it.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 3>,
        step: &CpStep<B>,
        tables: &RotaryTables<B>,
    ) -> Tensor<B, 3> {
        let [batch, tokens, _] = x.dims();
        let heads = |x: Tensor<B, 3>, width: usize| {
            let num_heads = x.dims()[2] / width;
            x.reshape([batch, tokens, num_heads, width]).swap_dims(1, 2)
        };
        let q = heads(self.q_proj.forward(x.clone()), self.head_dim);
        let k = heads(self.k_proj.forward(x.clone()), self.head_dim);
        let v = heads(self.v_proj.forward(x), self.v_head_dim) * self.value_scale;
        let [q, k] = [q, k].map(|x| self.rotate(x, tables));
        let options = self.options();
        let out = match &self.attention_sink_bias {
            Some(sinks) => step.attention_with_sinks(q, k, v, sinks.val(), &options),
            None => step.attention(q, k, v, &options),
        };
        let width = out.dims()[1] * self.v_head_dim;
        self.o_proj
            .forward(out.swap_dims(1, 2).reshape([batch, tokens, width]))
    }

    fn rotate(&self, x: Tensor<B, 4>, tables: &RotaryTables<B>) -> Tensor<B, 4> {
        let rest = self.head_dim - self.rotary_width;
        let rotated = tables.rotate(x.clone().narrow(3, 0, self.rotary_width));
        if rest == 0 {
            return rotated;
        }
        burn_cp::cat(vec![rotated, x.narrow(3, self.rotary_width, rest)], 3)
    }
}
