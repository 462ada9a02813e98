//! The layers of the decoder.

use burn::{
    module::Module,
    nn::{RmsNorm, RmsNormConfig},
    tensor::{Tensor, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    nn::{RotaryTables, rms_norm},
    sharder::CpStep,
};

use super::{
    attention::MimoAttention,
    config::{AttentionKind, MimoV2FlashConfig, MlpKind},
    experts::{Experts, LayerRouting, RealTokens},
};
use crate::models::qwen3_vl::GatedMlp;

pub(super) fn norm<B: Backend>(config: &MimoV2FlashConfig, device: &B::Device) -> RmsNorm<B> {
    RmsNormConfig::new(config.hidden_size)
        .with_epsilon(config.rms_norm_eps)
        .init(device)
}

/// The feed-forward layer of a layer.
#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one a layer; the parameters themselves are elsewhere"
)]
pub enum FeedForward<B: Backend> {
    /// One for all tokens.
    Dense(GatedMlp<B>),
    /// Some of its experts for each token.
    Sparse(Experts<B>),
}

/// A layer of the decoder, norms first.
#[derive(Module, Debug)]
pub struct MimoLayer<B: Backend> {
    /// Attention.
    pub self_attn: MimoAttention<B>,
    /// Feed-forward layer.
    pub mlp: FeedForward<B>,
    /// Before attention.
    pub input_layernorm: RmsNorm<B>,
    /// Before the feed-forward layer.
    pub post_attention_layernorm: RmsNorm<B>,
}

/// What all layers of one forward pass share.
pub(super) struct Shared<B: Backend> {
    pub(super) real: RealTokens<B>,
    pub(super) full: Option<RotaryTables<B>>,
    pub(super) sliding: Option<RotaryTables<B>>,
}

impl<B: Backend> MimoLayer<B> {
    /// A layer with lazy parameters; `config` is a valid one.
    pub(super) fn new(
        config: &MimoV2FlashConfig,
        (attention, mlp): (AttentionKind, MlpKind),
        device: &B::Device,
    ) -> Self {
        Self {
            self_attn: MimoAttention::new(config, attention, device),
            mlp: match mlp {
                MlpKind::Dense => FeedForward::Dense(GatedMlp::new(
                    config.hidden_size,
                    config.intermediate_size,
                    config.hidden_act,
                    device,
                )),
                MlpKind::Sparse => FeedForward::Sparse(Experts::new(config, device)),
            },
            input_layernorm: norm(config, device),
            post_attention_layernorm: norm(config, device),
        }
    }
}

impl<B: ContextParallelBackend> MimoLayer<B> {
    /// `x [batch, local_tokens, hidden_size]` to the same shape, and what the layer's router has said.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 3>,
        step: &CpStep<B>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, Option<LayerRouting<B>>) {
        let tables = if self.self_attn.attention_sink_bias.is_some() {
            &mut shared.sliding
        } else {
            &mut shared.full
        };
        let tables = tables.get_or_insert_with(|| self.self_attn.tables(step));
        let normed = rms_norm(&self.input_layernorm, x.clone());
        let x = x + self.self_attn.forward(normed, step, tables);
        let normed = rms_norm(&self.post_attention_layernorm, x.clone());
        let (out, routing) = match &self.mlp {
            FeedForward::Dense(mlp) => (mlp.forward(normed), None),
            FeedForward::Sparse(experts) => {
                let (out, routing) = experts.forward(normed, &shared.real);
                (out, Some(routing))
            }
        };
        (x + out, routing)
    }
}
