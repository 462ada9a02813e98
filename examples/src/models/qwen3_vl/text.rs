//! The decoder.

use burn::{
    module::{Initializer, Module},
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig},
    tensor::{Tensor, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    nn::{ContextParallelAttention, NnError, RotaryTables, rms_norm},
    sharder::CpStep,
};

use super::config::{Activation, TextConfig};

/// The decoder of Qwen3-VL, without its head. Field names are those of published weights.
#[derive(Module, Debug)]
pub struct Qwen3VlText<B: Backend> {
    /// Token embedding `[vocab_size, hidden_size]`.
    pub embed_tokens: Embedding<B>,
    /// Layers.
    pub layers: Vec<DecoderLayer<B>>,
    /// Behind the last layer.
    pub norm: RmsNorm<B>,
}

impl<B: Backend> Qwen3VlText<B> {
    /// A decoder with lazy parameters; `config` is a valid one.
    pub(super) fn new(config: &TextConfig, device: &B::Device) -> Result<Self, NnError> {
        let embed_tokens = EmbeddingConfig::new(config.vocab_size, config.hidden_size)
            .with_initializer(Initializer::Zeros);
        let layers: Result<Vec<_>, _> = (0..config.num_hidden_layers)
            .map(|_| DecoderLayer::new(config, device))
            .collect();
        Ok(Self {
            embed_tokens: embed_tokens.init(device),
            layers: layers?,
            norm: norm(config, device),
        })
    }
}

impl<B: ContextParallelBackend> Qwen3VlText<B> {
    /// Embedded tokens `[batch, local_tokens, hidden_size]` -> the same shape, normed. `deepstack[i]`, features of the
    /// step's media tokens, is added behind layer `i`.
    pub(super) fn forward(
        &self,
        embeddings: Tensor<B, 3>,
        deepstack: Vec<Tensor<B, 2>>,
        step: &CpStep<B>,
    ) -> Tensor<B, 3> {
        let tables = self
            .layers
            .first()
            .and_then(|layer| layer.self_attn.tables(step));
        let mut deepstack = deepstack.into_iter();
        let mut x = embeddings;
        for layer in &self.layers {
            x = layer.forward(x, step, tables.as_ref());
            if let Some(features) = deepstack.next() {
                x = x + step.scatter_media(features);
            }
        }
        rms_norm(&self.norm, x)
    }
}

fn norm<B: Backend>(config: &TextConfig, device: &B::Device) -> RmsNorm<B> {
    RmsNormConfig::new(config.hidden_size)
        .with_epsilon(config.rms_norm_eps)
        .init(device)
}

/// A layer of the decoder, norms first.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    /// Causal grouped-query attention with normed and rotated queries and keys.
    pub self_attn: ContextParallelAttention<B>,
    /// Gated feed-forward layer.
    pub mlp: GatedMlp<B>,
    /// Before attention.
    pub input_layernorm: RmsNorm<B>,
    /// Before the feed-forward layer.
    pub post_attention_layernorm: RmsNorm<B>,
}

impl<B: Backend> DecoderLayer<B> {
    fn new(config: &TextConfig, device: &B::Device) -> Result<Self, NnError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            self_attn: config
                .attention()
                .with_initializer(Initializer::Zeros)
                .init(device)?,
            mlp: GatedMlp::new(hidden, inner, config.hidden_act, device),
            input_layernorm: norm(config, device),
            post_attention_layernorm: norm(config, device),
        })
    }
}

impl<B: ContextParallelBackend> DecoderLayer<B> {
    fn forward(
        &self,
        x: Tensor<B, 3>,
        step: &CpStep<B>,
        tables: Option<&RotaryTables<B>>,
    ) -> Tensor<B, 3> {
        let normed = rms_norm(&self.input_layernorm, x.clone());
        let x = x + self.self_attn.forward_with_tables(normed, step, tables);
        x.clone()
            + self
                .mlp
                .forward(rms_norm(&self.post_attention_layernorm, x))
    }
}

/// Feed-forward layer with a gate (Shazeer, "GLU Variants Improve Transformer", 2020).
#[derive(Module, Debug)]
pub struct GatedMlp<B: Backend> {
    /// `hidden_size -> intermediate_size`, through the activation.
    pub gate_proj: Linear<B>,
    /// `hidden_size -> intermediate_size`.
    pub up_proj: Linear<B>,
    /// `intermediate_size -> hidden_size`.
    pub down_proj: Linear<B>,
    #[module(skip)]
    activation: Activation,
}

impl<B: Backend> GatedMlp<B> {
    /// A layer with lazy zeros.
    pub(in crate::models) fn new(
        hidden: usize,
        inner: usize,
        activation: Activation,
        device: &B::Device,
    ) -> Self {
        let linear = |d_input, d_output| {
            LinearConfig::new(d_input, d_output)
                .with_bias(false)
                .with_initializer(Initializer::Zeros)
                .init(device)
        };
        Self {
            gate_proj: linear(hidden, inner),
            up_proj: linear(hidden, inner),
            down_proj: linear(inner, hidden),
            activation,
        }
    }

    /// `[.., hidden_size]` to the same shape.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        let gate = self.activation.forward(self.gate_proj.forward(x.clone()));
        self.down_proj.forward(gate * self.up_proj.forward(x))
    }
}
