//! The dense Qwen3-VL architecture (Bai et al., "Qwen3-VL Technical Report", 2025), from the fields of its configuration.
//!
//! Holds the vision tower, the decoder that takes its features at several depths (deepstack: Meng et al., "DeepStack",
//! 2024), and their assembly. Modules and fields carry the names of published weights, up to two habits of Burn: matrices
//! of linear layers are `[inputs, outputs]`, and the vectors of norms are called `gamma` and `beta`.
//! It does not tokenise, resize images or generate.

mod config;
mod geometry;
mod positions;
mod text;
mod validate;
mod vision;

use burn::{
    module::{Initializer, Module},
    nn::{Linear, LinearConfig},
    tensor::{Tensor, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    nn::SequenceModel,
    sharder::{CpStep, ModelCapabilities, StepError},
};

use super::{
    init::{Filler, Scales},
    place_media,
};

pub use crate::models::problems::{ConfigError, ConfigProblem};
pub(in crate::models) use config::vision_for_digits;
pub use config::{
    Activation, Initialization, Qwen3VlConfig, RopeParameters, TextConfig, VisionConfig,
};
pub use positions::{PositionError, mrope_positions};
pub use text::{DecoderLayer, GatedMlp, Qwen3VlText};
pub(in crate::models) use validate::check_vision;
pub use vision::{PatchEmbed, PatchMerger, Qwen3VlVision, VisionAttention, VisionBlock, VisionMlp};

/// A Qwen3-VL model with its head: ids and media of a step in, logits out.
#[derive(Module, Debug)]
pub struct Qwen3Vl<B: Backend> {
    /// Tower and decoder.
    pub model: Qwen3VlModel<B>,
    /// `hidden_size -> vocab_size`; `None` if the token embedding is used instead.
    pub lm_head: Option<Linear<B>>,
}

/// Tower and decoder of a [`Qwen3Vl`].
#[derive(Module, Debug)]
pub struct Qwen3VlModel<B: Backend> {
    /// The vision tower.
    pub visual: Qwen3VlVision<B>,
    /// The decoder.
    pub language_model: Qwen3VlText<B>,
}

impl Qwen3VlConfig {
    /// A model whose parameters are lazy zeros, to load weights into.
    ///
    /// # Errors
    ///
    /// As [`Self::validate`].
    pub fn build<B: Backend>(&self, device: &B::Device) -> Result<Qwen3Vl<B>, ConfigError> {
        self.validate()?;
        let text = &self.text_config;
        let language_model = Qwen3VlText::new(text, device).map_err(|error| {
            let problem = ConfigProblem {
                path: "text_config",
                expected: error.to_string(),
                got: format!("{text:?}"),
            };
            ConfigError {
                problems: vec![problem],
            }
        })?;
        let lm_head = (!self.is_tied()).then(|| {
            LinearConfig::new(text.hidden_size, text.vocab_size)
                .with_bias(false)
                .with_initializer(Initializer::Zeros)
                .init(device)
        });
        let visual = Qwen3VlVision::new(&self.vision_config, device);
        Ok(Qwen3Vl {
            model: Qwen3VlModel {
                visual,
                language_model,
            },
            lm_head,
        })
    }

    /// A model to train from scratch. Every parameter exists when this returns, and depends only on the configuration and
    /// `seed`, not on other threads or on the backend's generator.
    ///
    /// # Errors
    ///
    /// As [`Self::validate`].
    pub fn init<B: Backend>(
        &self,
        device: &B::Device,
        seed: u64,
    ) -> Result<Qwen3Vl<B>, ConfigError> {
        let (text, vision) = (&self.text_config, &self.vision_config);
        let scales = Scales {
            initialization: self.initialization,
            text: (text.initializer_range, text.num_hidden_layers),
            vision: (vision.initializer_range, vision.depth),
        };
        Ok(self.build(device)?.map(&mut Filler::new(scales, seed)))
    }
}

impl<B: Backend> Qwen3Vl<B> {
    /// Takes the vision tower out of training: none of its parameters requires a gradient.
    #[must_use]
    pub fn freeze_vision(mut self) -> Self {
        self.model.visual = self.model.visual.no_grad();
        self
    }
}

impl<B: Backend> Qwen3Vl<B> {
    /// The last matrix, `[hidden_size, vocab_size]`.
    pub fn head(&self) -> Tensor<B, 2> {
        match &self.lm_head {
            Some(head) => head.weight.val(),
            None => {
                let embedding = self.model.language_model.embed_tokens.weight.val();
                embedding.transpose()
            }
        }
    }

    /// Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`.
    pub fn logits(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        hidden.matmul(self.head().unsqueeze())
    }
}

impl<B: ContextParallelBackend> Qwen3VlModel<B> {
    /// Hidden states `[batch, local_tokens, hidden_size]` behind the last norm. Every rank of the step's group must call it.
    ///
    /// # Errors
    ///
    /// A step without ids, or one whose media the tower cannot encode.
    pub fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        let mut x = self.language_model.embed_tokens.forward(step.ids()?);
        let mut deepstack = Vec::new();
        if let Some(features) = step.encode_media(&self.visual)? {
            x = place_media(x, features.embeddings, step);
            deepstack = features.deepstack;
        }
        Ok(self.language_model.forward(x, deepstack, step))
    }
}

impl<B: ContextParallelBackend> SequenceModel<B> for Qwen3Vl<B> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        Ok(self.logits(self.model.forward(step)?))
    }

    fn capabilities(&self) -> ModelCapabilities {
        ModelCapabilities::text()
            .with_media()
            .with_vision_sharding()
            .with_local_media()
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
