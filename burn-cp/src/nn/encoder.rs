//! Burn's `TransformerEncoder` over the tokens of a step.

use burn::{
    nn::transformer::{TransformerEncoder, TransformerEncoderLayer},
    tensor::{Tensor, backend::Backend},
};

use super::{
    DropoutSite, NnError, StepDropout,
    delegate::delegate_module,
    dropout::places::{ATTENDED, WEIGHTS},
    feed_forward::{check_feed_forward, feed_forward},
    multi_head::{attend, check, check_dropout},
};
use crate::{
    attention::{AttentionOptions, ContextParallelBackend},
    sharder::{CpStep, StepError},
};

/// A `TransformerEncoder` of Burn whose attention runs over the documents of a [`CpStep`], also to tokens of other ranks.
///
/// It is a module like the encoder that it was made from: the same parameters under the same paths and ids, and the same
/// record, so either loads what was saved of the other.
///
/// ```
/// use burn::{backend::Flex, nn::transformer::TransformerEncoderConfig};
/// use burn_cp::nn::{ContextParallelEncoder, NnError};
///
/// let encoder = |quiet| {
///     let config = TransformerEncoderConfig::new(16, 32, 2, 1).with_quiet_softmax(quiet);
///     ContextParallelEncoder::try_from(config.init::<Flex>(&Default::default()))
/// };
/// assert!(encoder(false).is_ok());
/// let error = encoder(true).unwrap_err();
/// assert!(matches!(error, NnError::Unconvertible { path, .. } if path == "layers.0.mha.quiet_softmax"));
/// ```
///
/// Dropout keeps its probability. In training it is drawn from the seed of the batch
/// ([`with_dropout_seed`](crate::batch::SequenceBatch::with_dropout_seed)) and is the same on any number of ranks; for the weights of
/// attention it follows the softmax, which in Burn it precedes.
#[derive(Debug, Clone)]
pub struct ContextParallelEncoder<B: Backend> {
    encoder: TransformerEncoder<B>,
    options: AttentionOptions,
    first_layer: u64,
}

/// Causal attention over documents; see [`ContextParallelEncoder::full`] for the other kind. Nothing is copied or drawn.
impl<B: Backend> TryFrom<TransformerEncoder<B>> for ContextParallelEncoder<B> {
    type Error = NnError;

    /// # Errors
    /// [`NnError::Unconvertible`], with the path of the first field at fault: quiet softmax; dropout of everything, in attention
    /// or elsewhere; a `min_float` that leaves hidden keys a weight; heads that do not make up `d_model`; an activation with
    /// parameters, which Burn neither trains nor saves here, so that ranks could not be told to hold the same.
    fn try_from(encoder: TransformerEncoder<B>) -> Result<Self, NnError> {
        for (i, layer) in encoder.layers.iter().enumerate() {
            check_layer(&format!("layers.{i}."), layer)?;
        }
        Ok(Self {
            encoder,
            options: AttentionOptions::causal(),
            first_layer: 0,
        })
    }
}

fn check_layer<B: Backend>(path: &str, layer: &TransformerEncoderLayer<B>) -> Result<(), NnError> {
    check(&format!("{path}mha."), &layer.mha)?;
    check_dropout(path, "dropout", layer.dropout.prob)?;
    check_feed_forward(path, &layer.pwff)
}

delegate_module!(ContextParallelEncoder, encoder: TransformerEncoder, options, first_layer);

impl<B: Backend> ContextParallelEncoder<B> {
    /// The same encoder, in which every token sees its whole document.
    #[must_use]
    pub fn full(self) -> Self {
        Self {
            options: AttentionOptions::full(),
            ..self
        }
    }

    /// The same encoder, whose dropout is that of the layers from `layer` on: for models with more layers than those of this
    /// encoder, each of which needs masks of its own. 0 in a new one.
    #[must_use]
    pub fn with_first_layer(self, layer: u64) -> Self {
        Self {
            first_layer: layer,
            ..self
        }
    }

    /// The encoder that it was made from, with today's parameters.
    pub fn inner(&self) -> &TransformerEncoder<B> {
        &self.encoder
    }

    /// Gives the encoder back.
    pub fn into_inner(self) -> TransformerEncoder<B> {
        self.encoder
    }
}

impl<B: ContextParallelBackend> ContextParallelEncoder<B> {
    /// `x [batch, local_tokens, d_model]` -> the same shape. Every rank of the step's group must call it.
    ///
    /// A real token has the value that Burn's encoder gives it under a mask that hides other documents, padding and, unless
    /// this one is [`full`](Self::full), later tokens. Padding sees no token.
    ///
    /// # Errors
    /// There is dropout, the backend has autodiff, and the batch has no seed for it: [`StepError::Missing`], on every rank, before
    /// anything is exchanged.
    ///
    /// # Panics
    /// If `x` is not this rank's shard, or an exchange fails.
    pub fn forward(&self, x: Tensor<B, 3>, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        let drops = |layer: &TransformerEncoderLayer<B>| {
            layer.mha.dropout.prob + layer.dropout.prob + layer.pwff.dropout.prob > 0.0
        };
        let dropout = StepDropout::new(step, self.encoder.layers.iter().any(drops))?;
        let layers = (self.first_layer..).zip(&self.encoder.layers);
        Ok(layers.fold(x, |x, (number, layer)| {
            self.layer((number, layer), x, step, &dropout)
        }))
    }

    /// One layer. Burn's names do not follow the order of use: `norm_2` comes first where norms come first.
    fn layer(
        &self,
        (number, layer): (u64, &TransformerEncoderLayer<B>),
        x: Tensor<B, 3>,
        step: &CpStep<B>,
        dropout: &StepDropout,
    ) -> Tensor<B, 3> {
        let p = layer.dropout.prob;
        let site = |place| DropoutSite::new(number, place);
        let options = AttentionOptions {
            dropout: dropout.of_attention(layer.mha.dropout.prob, site(WEIGHTS)),
            ..self.options
        };
        let attended = |x| dropout.apply(attend(&layer.mha, x, step, &options), p, site(ATTENDED));
        let fed = |x| feed_forward(&layer.pwff, x, dropout, (number, p));
        if layer.norm_first {
            let x = x.clone() + attended(layer.norm_2.forward(x));
            x.clone() + fed(layer.norm_1.forward(x))
        } else {
            let x = layer.norm_1.forward(x.clone() + attended(x));
            layer.norm_2.forward(x.clone() + fed(x))
        }
    }
}
