//! Burn's `TransformerEncoder` over the tokens of a step.

use burn::{
    module::{AutodiffModule, Devices, Module, ModuleMapper, ModuleVisitor},
    nn::transformer::{TransformerEncoder, TransformerEncoderLayer},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    NnError,
    multi_head::{attend, check, check_dropout, unconvertible},
};
use crate::{
    attention::{AttentionOptions, ContextParallelBackend},
    sharder::CpStep,
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
/// let encoder = |dropout| {
///     let config = TransformerEncoderConfig::new(16, 32, 2, 1).with_dropout(dropout);
///     ContextParallelEncoder::try_from(config.init::<Flex>(&Default::default()))
/// };
/// assert!(encoder(0.0).is_ok());
/// let error = encoder(0.1).unwrap_err();
/// assert!(matches!(error, NnError::Unconvertible { path, .. } if path == "layers.0.mha.dropout"));
/// ```
#[derive(Debug, Clone)]
pub struct ContextParallelEncoder<B: Backend> {
    encoder: TransformerEncoder<B>,
    options: AttentionOptions,
}

/// Causal attention over documents; see [`ContextParallelEncoder::full`] for the other kind. Nothing is copied or drawn.
impl<B: Backend> TryFrom<TransformerEncoder<B>> for ContextParallelEncoder<B> {
    type Error = NnError;

    /// # Errors
    /// [`NnError::Unconvertible`], with the path of the first field at fault: quiet softmax; dropout above 0, in attention or
    /// elsewhere; a `min_float` that leaves hidden keys a weight; heads that do not make up `d_model`; an activation with
    /// parameters, which Burn neither trains nor saves here, so that ranks could not be told to hold the same.
    fn try_from(encoder: TransformerEncoder<B>) -> Result<Self, NnError> {
        for (i, layer) in encoder.layers.iter().enumerate() {
            check_layer(&format!("layers.{i}."), layer)?;
        }
        Ok(Self {
            encoder,
            options: AttentionOptions::causal(),
        })
    }
}

fn check_layer<B: Backend>(path: &str, layer: &TransformerEncoderLayer<B>) -> Result<(), NnError> {
    check(&format!("{path}mha."), &layer.mha)?;
    check_dropout(path, "dropout", layer.dropout.prob)?;
    check_dropout(path, "pwff.dropout", layer.pwff.dropout.prob)?;
    match layer.pwff.activation.num_params() {
        0 => Ok(()),
        parameters => Err(unconvertible(
            path,
            "pwff.activation",
            "no parameters, since Burn neither trains nor saves those of an encoder's activation",
            parameters,
        )),
    }
}

impl<B: Backend> ContextParallelEncoder<B> {
    /// The same encoder, in which every token sees its whole document.
    #[must_use]
    pub fn full(self) -> Self {
        Self {
            options: AttentionOptions::full(),
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
    /// # Panics
    /// If `x` is not this rank's shard, or an exchange fails.
    pub fn forward(&self, x: Tensor<B, 3>, step: &CpStep<B>) -> Tensor<B, 3> {
        let layers = self.encoder.layers.iter();
        layers.fold(x, |x, layer| self.layer(layer, x, step))
    }

    /// One layer. Burn's names do not follow the order of use: `norm_2` comes first where norms come first.
    fn layer(
        &self,
        layer: &TransformerEncoderLayer<B>,
        x: Tensor<B, 3>,
        step: &CpStep<B>,
    ) -> Tensor<B, 3> {
        let attended = |x| attend(&layer.mha, x, step, &self.options);
        if layer.norm_first {
            let x = x.clone() + attended(layer.norm_2.forward(x));
            x.clone() + layer.pwff.forward(layer.norm_1.forward(x))
        } else {
            let x = layer.norm_1.forward(x.clone() + attended(x));
            layer.norm_2.forward(x.clone() + layer.pwff.forward(x))
        }
    }
}

impl<B: Backend> Module<B> for ContextParallelEncoder<B> {
    type Record = <TransformerEncoder<B> as Module<B>>::Record;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.encoder.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self {
            encoder: self.encoder.fork(device),
            ..self
        }
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self {
            encoder: self.encoder.to_device(device),
            ..self
        }
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.encoder.visit(visitor);
    }

    fn map<P: ModuleMapper<B>>(self, mapper: &mut P) -> Self {
        Self {
            encoder: self.encoder.map(mapper),
            ..self
        }
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self {
            encoder: self.encoder.load_record(record),
            ..self
        }
    }

    fn into_record(self) -> Self::Record {
        self.encoder.into_record()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for ContextParallelEncoder<B> {
    type InnerModule = ContextParallelEncoder<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        ContextParallelEncoder {
            encoder: self.encoder.valid(),
            options: self.options,
        }
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self {
            encoder: TransformerEncoder::from_inner(module.encoder),
            options: module.options,
        }
    }
}
