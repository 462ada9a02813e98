//! A small language model of gated linear attention (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient
//! Training", 2024), behind short causal convolutions, over sharded sequences of packed documents.
//!
//! A head keeps a state `S [key_dim, value_dim]` per document: `S_t = diag(α_t) S_{t-1} + k_t v_tᵀ`, and a token reads `q_tᵀ S_t`.
//! Tokens are brought into the order of the sequence once, and back before the head; a layer then needs the few tokens of earlier
//! ranks that its convolutions reach, and the state in which its document enters the rank.

mod chunks;

use burn::module::Param;
use burn::{
    module::Module,
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig},
    tensor::{
        Distribution, Tensor,
        activation::{log_sigmoid, silu},
        backend::Backend,
    },
};
use burn_cp::{
    attention::ContextParallelBackend,
    nn::{SequenceModel, rms_norm},
    recurrent::Recurrence,
    sharder::{CpStep, ModelCapabilities, StepError},
};

pub use chunks::{GatedInputs, gated_attention};

/// Gates are `sigmoid(x)` to the power of one over this, so that states live for long.
const GATE_TEMPERATURE: f64 = 16.0;

/// The sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedLinearConfig {
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Width of hidden states.
    pub hidden_size: usize,
    /// Heads; they divide the hidden size.
    pub num_heads: usize,
    /// Layers.
    pub num_layers: usize,
    /// Taps of the convolutions.
    pub kernel_size: usize,
    /// Tokens that are computed at once, between two states.
    pub chunk_size: usize,
}

impl GatedLinearConfig {
    /// A model with random parameters, which exist when this returns.
    ///
    /// # Panics
    /// Heads that do not divide the hidden size; a size of 0.
    pub fn init<B: Backend>(&self, device: &B::Device) -> GatedLinearModel<B> {
        assert!(
            self.num_heads > 0 && self.hidden_size.is_multiple_of(self.num_heads),
            "{} heads of a hidden size of {}",
            self.num_heads,
            self.hidden_size
        );
        assert!(self.kernel_size > 0 && self.chunk_size > 0, "sizes of 0");
        let layers = (0..self.num_layers).map(|_| GatedLinearLayer::new(self, device));
        GatedLinearModel {
            embedding: EmbeddingConfig::new(self.vocab_size, self.hidden_size).init(device),
            layers: layers.collect(),
            norm: RmsNormConfig::new(self.hidden_size).init(device),
            head: LinearConfig::new(self.hidden_size, self.vocab_size)
                .with_bias(false)
                .init(device),
        }
    }
}

/// Ids of a step in, logits out.
#[derive(Module, Debug)]
pub struct GatedLinearModel<B: Backend> {
    /// `[vocab_size, hidden_size]`.
    pub embedding: Embedding<B>,
    /// Layers.
    pub layers: Vec<GatedLinearLayer<B>>,
    /// Behind the last layer.
    pub norm: RmsNorm<B>,
    /// `hidden_size -> vocab_size`.
    pub head: Linear<B>,
}

impl<B: ContextParallelBackend> SequenceModel<B> for GatedLinearModel<B> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        let recurrence = step.recurrence();
        let embedded = self.embedding.forward(step.ids()?);
        let mut x = recurrence.to_contiguous(embedded, 1);
        for layer in &self.layers {
            x = layer.forward(x, &recurrence);
        }
        let x = recurrence.from_contiguous(x, 1);
        Ok(self.head.forward(rms_norm(&self.norm, x)))
    }

    fn capabilities(&self) -> ModelCapabilities {
        ModelCapabilities::text()
    }
}

/// A causal depthwise convolution over each document.
#[derive(Module, Debug)]
pub struct ShortConvolution<B: Backend> {
    /// `[kernel_size, channels]`; the last tap is the token's own.
    pub weight: Param<Tensor<B, 2>>,
    /// `[channels]`.
    pub bias: Param<Tensor<B, 1>>,
}

impl<B: Backend> ShortConvolution<B> {
    fn new(kernel_size: usize, channels: usize, device: &B::Device) -> Self {
        let bound = 1.0 / (kernel_size as f64).sqrt();
        let distribution = Distribution::Uniform(-bound, bound);
        let weight = Tensor::random([kernel_size, channels], distribution, device);
        Self {
            weight: Param::from_tensor(weight),
            bias: Param::from_tensor(Tensor::zeros([channels], device)),
        }
    }
}

impl<B: ContextParallelBackend> ShortConvolution<B> {
    fn forward(&self, x: Tensor<B, 3>, recurrence: &Recurrence<B>) -> Tensor<B, 3> {
        let bias = Some(self.bias.val());
        silu(recurrence.causal_conv1d(x, self.weight.val(), bias))
    }
}

/// Gated linear attention with a residual connection, norm first.
#[derive(Module, Debug)]
pub struct GatedLinearLayer<B: Backend> {
    /// Ahead of the projections.
    pub norm: RmsNorm<B>,
    /// Queries, `hidden_size -> hidden_size`.
    pub q_proj: Linear<B>,
    /// Keys.
    pub k_proj: Linear<B>,
    /// Values.
    pub v_proj: Linear<B>,
    /// What becomes `α`.
    pub decay_proj: Linear<B>,
    /// Gate of the output.
    pub gate_proj: Linear<B>,
    /// Back into the residual stream.
    pub out_proj: Linear<B>,
    /// Over queries, keys and values side by side.
    pub convolution: ShortConvolution<B>,
    num_heads: usize,
    chunk_size: usize,
}

impl<B: Backend> GatedLinearLayer<B> {
    fn new(config: &GatedLinearConfig, device: &B::Device) -> Self {
        let hidden = config.hidden_size;
        let linear = || {
            LinearConfig::new(hidden, hidden)
                .with_bias(false)
                .init(device)
        };
        Self {
            norm: RmsNormConfig::new(hidden).init(device),
            q_proj: linear(),
            k_proj: linear(),
            v_proj: linear(),
            decay_proj: LinearConfig::new(hidden, hidden).init(device),
            gate_proj: linear(),
            out_proj: linear(),
            convolution: ShortConvolution::new(config.kernel_size, 3 * hidden, device),
            num_heads: config.num_heads,
            chunk_size: config.chunk_size,
        }
    }
}

impl<B: ContextParallelBackend> GatedLinearLayer<B> {
    /// `x [batch, local_tokens, hidden_size]` in the order of the sequence -> the same shape. Every rank of the step's group must
    /// call it.
    pub fn forward(&self, x: Tensor<B, 3>, recurrence: &Recurrence<B>) -> Tensor<B, 3> {
        let [batch, len, hidden] = x.dims();
        let normed = rms_norm(&self.norm, x.clone());
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let qkv = projections.map(|proj| proj.forward(normed.clone()));
        let qkv = self
            .convolution
            .forward(burn_cp::cat(qkv.into(), 2), recurrence);
        let heads = |x: Tensor<B, 3>| {
            x.reshape([batch, len, self.num_heads, hidden / self.num_heads])
                .swap_dims(1, 2)
        };
        let [q, k, v] = [0, 1, 2].map(|at| heads(qkv.clone().narrow(2, at * hidden, hidden)));
        let log_decay = log_sigmoid(self.decay_proj.forward(normed.clone())) / GATE_TEMPERATURE;
        let inputs = GatedInputs {
            q,
            k,
            v,
            log_decay: heads(log_decay),
        };
        let read = gated_attention(inputs, self.chunk_size, recurrence)
            .swap_dims(1, 2)
            .reshape([batch, len, hidden]);
        let gate = silu(self.gate_proj.forward(normed));
        x + self.out_proj.forward(read * gate)
    }
}
