//! The MiMo-V2-Flash architecture (Xiaomi, "MiMo-V2-Flash Technical Report", 2026), from the fields of its configuration.
//!
//! Holds the decoder (layers with full attention and with a sliding window and sinks, values narrower than keys, experts) as it
//! is published, and the same behind the vision tower of Qwen3-VL, to train on documents with pictures. Modules and fields carry
//! the names of published weights, up to the habits of Burn that [`qwen3_vl`](super::qwen3_vl) names. The multi-token prediction
//! layers of the published model are not here, nor are its fp8 weights. Positions have one axis: multi-axis ones are refused.

mod attention;
mod balance;
mod config;
mod experts;
mod layer;
mod media;
mod presets;
mod validate;

use burn::{
    module::{Initializer, Module},
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm},
    tensor::{Tensor, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    loss::TokenLoss,
    nn::{SequenceModel, rms_norm},
    sharder::{CpStep, ModelCapabilities, StepError},
};

use layer::Shared;

pub use crate::models::problems::{ConfigError, ConfigProblem};
pub use attention::MimoAttention;
pub use balance::Routing;
pub use config::{
    AttentionKind, MimoV2FlashConfig, MimoV2FlashVlConfig, MlpKind, RopeByKind, RopeOfKind,
};
pub use experts::{Experts, Router};
pub use layer::{FeedForward, MimoLayer};
pub use media::MimoV2FlashVl;

/// The text part of MiMo-V2-Flash with its head: ids of a step in, logits out.
#[derive(Module, Debug)]
pub struct MimoV2Flash<B: Backend> {
    /// The decoder.
    pub model: MimoV2FlashModel<B>,
    /// `hidden_size -> vocab_size`; `None` if the token embedding is used instead.
    pub lm_head: Option<Linear<B>>,
}

/// The decoder of a [`MimoV2Flash`].
#[derive(Module, Debug)]
pub struct MimoV2FlashModel<B: Backend> {
    /// Token embedding `[vocab_size, hidden_size]`.
    pub embed_tokens: Embedding<B>,
    /// Layers.
    pub layers: Vec<MimoLayer<B>>,
    /// Behind the last layer.
    pub norm: RmsNorm<B>,
    num_chosen: usize,
}

impl MimoV2FlashConfig {
    /// A model whose parameters are lazy zeros, to load weights into.
    ///
    /// # Errors
    ///
    /// As [`Self::validate`].
    pub fn build<B: Backend>(&self, device: &B::Device) -> Result<MimoV2Flash<B>, ConfigError> {
        self.validate()?;
        let (vocab_size, hidden) = (self.vocab_size, self.hidden_size);
        let kinds = self.attention_kinds().into_iter().zip(self.mlp_kinds());
        let head = || {
            LinearConfig::new(hidden, vocab_size)
                .with_bias(false)
                .with_initializer(Initializer::Zeros)
                .init(device)
        };
        Ok(MimoV2Flash {
            model: MimoV2FlashModel {
                embed_tokens: EmbeddingConfig::new(vocab_size, hidden)
                    .with_initializer(Initializer::Zeros)
                    .init(device),
                layers: kinds
                    .map(|kinds| MimoLayer::new(self, kinds, device))
                    .collect(),
                norm: layer::norm(self, device),
                num_chosen: self.num_experts_per_tok,
            },
            lm_head: (!self.tie_word_embeddings).then(head),
        })
    }
}

impl<B: Backend> MimoV2Flash<B> {
    /// Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`.
    pub fn logits(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        match &self.lm_head {
            Some(head) => head.forward(hidden),
            None => {
                let embedding = self.model.embed_tokens.weight.val();
                hidden.matmul(embedding.transpose().unsqueeze())
            }
        }
    }
}

impl<B: ContextParallelBackend> MimoV2FlashModel<B> {
    /// Hidden states `[batch, local_tokens, hidden_size]` behind the last norm, and what the routers have said. Every rank of
    /// the step's group must call it.
    ///
    /// # Errors
    ///
    /// A step without ids, and as [`Self::check`].
    pub fn forward(&self, step: &CpStep<B>) -> Result<(Tensor<B, 3>, Routing<B>), StepError> {
        self.forward_embedded(self.embed_tokens.forward(step.ids()?), step)
    }

    /// Whether the model can be given a step. Pure host, and the same on every rank.
    ///
    /// # Errors
    ///
    /// Positions on several axes, or an exchange that cannot serve the heads of either kind of layer.
    pub fn check(&self, step: &CpStep<B>) -> Result<(), StepError> {
        let num_axes = step.positions().dims()[0];
        if num_axes != 1 {
            return Err(StepError::Invalid {
                what: "axes of the positions".into(),
                expected: "1".into(),
                got: num_axes.to_string(),
            });
        }
        for has_sinks in [false, true] {
            let of_kind =
                |layer: &&MimoLayer<B>| layer.self_attn.attention_sink_bias.is_some() == has_sinks;
            if let Some(layer) = self.layers.iter().find(of_kind) {
                layer.self_attn.check(step)?;
            }
        }
        Ok(())
    }

    /// [`Self::forward`] of embedded tokens `[batch, local_tokens, hidden_size]`.
    ///
    /// # Errors
    ///
    /// As [`Self::check`].
    pub fn forward_embedded(
        &self,
        embeddings: Tensor<B, 3>,
        step: &CpStep<B>,
    ) -> Result<(Tensor<B, 3>, Routing<B>), StepError> {
        self.check(step)?;
        let mut shared = Shared {
            real: experts::RealTokens::of(step),
            full: None,
            sliding: None,
        };
        let mut x = embeddings;
        let mut routings = Vec::new();
        for layer in &self.layers {
            let (out, routing) = layer.forward(x, step, &mut shared);
            x = out;
            routings.extend(routing);
        }
        let routing = Routing {
            layers: routings,
            num_chosen: self.num_chosen,
        };
        Ok((rms_norm(&self.norm, x), routing))
    }
}

impl<B: ContextParallelBackend> MimoV2Flash<B> {
    /// Mean cross entropy over the labels of all ranks, plus `balance` times the loss that keeps experts equally busy. Every rank
    /// of the step's loss group must call it.
    ///
    /// # Errors
    ///
    /// As [`MimoV2FlashModel::forward`] and [`CpStep::cross_entropy`].
    pub fn loss(&self, step: &CpStep<B>, balance: f64) -> Result<TokenLoss<B>, StepError> {
        let (hidden, routing) = self.model.forward(step)?;
        let loss = step.cross_entropy(self.logits(hidden))?;
        routing.join(loss, balance, step)
    }
}

impl<B: ContextParallelBackend> SequenceModel<B> for MimoV2Flash<B> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        Ok(self.logits(self.model.forward(step)?.0))
    }

    fn capabilities(&self) -> ModelCapabilities {
        ModelCapabilities::text()
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
