//! Burn's `TransformerDecoder` over the tokens of a step.

use burn::{
    nn::transformer::{TransformerDecoder, TransformerDecoderLayer},
    tensor::{Tensor, backend::Backend},
};
use burn_cp_kernels::varlen_attention;

use super::{
    DropoutSite, Memory, NnError, StepDropout,
    delegate::delegate_module,
    dropout::places::{ATTENDED, CROSS_ATTENDED, CROSS_WEIGHTS, WEIGHTS},
    feed_forward::{check_feed_forward, feed_forward},
    memory::LocalMemory,
    multi_head::{attend, check, check_dropout, heads, joined},
};
use crate::{
    attention::{AttentionOptions, ContextParallelBackend},
    sharder::{CpStep, StepError},
};

/// A `TransformerDecoder` of Burn whose self-attention runs over the documents of a [`CpStep`], also to tokens of other ranks,
/// and whose cross-attention runs over a memory that every rank holds whole ([`Memory`]).
///
/// It is a module like the decoder that it was made from: the same parameters under the same paths and ids, and the same
/// record, so either loads what was saved of the other. Dropout is that of
/// [`ContextParallelEncoder`](super::ContextParallelEncoder).
#[derive(Debug, Clone)]
pub struct ContextParallelDecoder<B: Backend> {
    decoder: TransformerDecoder<B>,
    options: AttentionOptions,
    first_layer: u64,
}

/// Causal self-attention over documents. Nothing is copied or drawn.
impl<B: Backend> TryFrom<TransformerDecoder<B>> for ContextParallelDecoder<B> {
    type Error = NnError;

    /// # Errors
    /// [`NnError::Unconvertible`], with the path of the first field at fault: as for an encoder, in self-attention or
    /// cross-attention.
    fn try_from(decoder: TransformerDecoder<B>) -> Result<Self, NnError> {
        for (i, layer) in decoder.layers.iter().enumerate() {
            let path = format!("layers.{i}.");
            check(&format!("{path}self_attn."), &layer.self_attn)?;
            check(&format!("{path}cross_attn."), &layer.cross_attn)?;
            check_dropout(&path, "dropout", layer.dropout.prob)?;
            check_feed_forward(&path, &layer.pwff)?;
        }
        Ok(Self {
            decoder,
            options: AttentionOptions::causal(),
            first_layer: 0,
        })
    }
}

delegate_module!(ContextParallelDecoder, decoder: TransformerDecoder, options, first_layer);

impl<B: Backend> ContextParallelDecoder<B> {
    /// The same decoder, in which every token sees its whole document.
    #[must_use]
    pub fn full(self) -> Self {
        Self {
            options: AttentionOptions::full(),
            ..self
        }
    }

    /// As [`ContextParallelEncoder::with_first_layer`](super::ContextParallelEncoder::with_first_layer).
    #[must_use]
    pub fn with_first_layer(self, layer: u64) -> Self {
        Self {
            first_layer: layer,
            ..self
        }
    }

    /// The decoder that it was made from, with today's parameters.
    pub fn inner(&self) -> &TransformerDecoder<B> {
        &self.decoder
    }

    /// Gives the decoder back.
    pub fn into_inner(self) -> TransformerDecoder<B> {
        self.decoder
    }
}

impl<B: ContextParallelBackend> ContextParallelDecoder<B> {
    /// `x [batch, local_tokens, d_model]` -> the same shape. Every rank of the step's group must call it, with the same memory.
    ///
    /// A real token has the value that Burn's decoder gives it under masks that hide other documents, padding, later tokens
    /// (unless this one is [`full`](Self::full)), and of the memory all but its document's. Padding sees no token.
    ///
    /// # Errors
    /// The same on every rank, before anything is exchanged: dropout without a seed, as for an encoder; a memory that does not fit
    /// the step's documents, see [`Memory`].
    ///
    /// # Panics
    /// If `x` is not this rank's shard, or an exchange fails.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        memory: &Memory<B>,
        step: &CpStep<B>,
    ) -> Result<Tensor<B, 3>, StepError> {
        let drops = |layer: &TransformerDecoderLayer<B>| {
            let attention = layer.self_attn.dropout.prob + layer.cross_attn.dropout.prob;
            attention + layer.dropout.prob + layer.pwff.dropout.prob > 0.0
        };
        let dropout = StepDropout::new(step, self.decoder.layers.iter().any(drops))?;
        let memory = memory.for_step(step)?;
        let layers = (self.first_layer..).zip(&self.decoder.layers);
        Ok(layers.fold(x, |x, (number, layer)| {
            let layer = Layer {
                burns: layer,
                number,
                dropout: &dropout,
                step,
            };
            layer.forward(x, &memory, &self.options)
        }))
    }
}

struct Layer<'a, B: Backend> {
    burns: &'a TransformerDecoderLayer<B>,
    number: u64,
    dropout: &'a StepDropout,
    step: &'a CpStep<B>,
}

impl<B: ContextParallelBackend> Layer<'_, B> {
    /// Burn's names do not follow the order of use: `norm_3` comes first where norms come first.
    fn forward(
        &self,
        x: Tensor<B, 3>,
        memory: &LocalMemory<B>,
        options: &AttentionOptions,
    ) -> Tensor<B, 3> {
        let layer = self.burns;
        let p = layer.dropout.prob;
        let fed = |x| feed_forward(&layer.pwff, x, self.dropout, (self.number, p));
        if layer.norm_first {
            let x = x.clone() + self.itself(layer.norm_3.forward(x), options);
            let x = x.clone() + self.across(layer.norm_1.forward(x), memory);
            x.clone() + fed(layer.norm_2.forward(x))
        } else {
            let x = layer.norm_1.forward(x.clone() + self.itself(x, options));
            let x = layer.norm_2.forward(x.clone() + self.across(x, memory));
            layer.norm_3.forward(x.clone() + fed(x))
        }
    }

    fn itself(&self, x: Tensor<B, 3>, options: &AttentionOptions) -> Tensor<B, 3> {
        let layer = self.burns;
        let options = AttentionOptions {
            dropout: self
                .dropout
                .of_attention(layer.self_attn.dropout.prob, self.site(WEIGHTS)),
            ..*options
        };
        let out = attend(&layer.self_attn, x, self.step, &options);
        self.dropout
            .apply(out, layer.dropout.prob, self.site(ATTENDED))
    }

    /// Queries of this rank's tokens over their documents' memory: no exchange, since every rank holds it.
    fn across(&self, x: Tensor<B, 3>, memory: &LocalMemory<B>) -> Tensor<B, 3> {
        let layer = &self.burns.cross_attn;
        let states = || memory.states.clone();
        let q = heads(layer, layer.query.forward(x));
        let k = heads(layer, layer.key.forward(states()));
        let v = heads(layer, layer.value.forward(states()));
        let mut options = burn_cp_kernels::AttentionOptions::new();
        options.dropout = self
            .dropout
            .of_attention(layer.dropout.prob, self.site(CROSS_WEIGHTS));
        let out = varlen_attention(q, k, v, &memory.segments, &options);
        let site = self.site(CROSS_ATTENDED);
        self.dropout
            .apply(joined(layer, out), self.burns.dropout.prob, site)
    }

    fn site(&self, place: u8) -> DropoutSite {
        DropoutSite::new(self.number, place)
    }
}
