//! The decoder behind a vision tower.

use burn::{
    module::Module,
    tensor::{Tensor, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    loss::{NumLabels, TokenLoss},
    nn::SequenceModel,
    sharder::{CpStep, ModelCapabilities, StepError},
};

use super::{ConfigError, MimoV2Flash, MimoV2FlashVlConfig, Routing};
use crate::models::{
    init::{Filler, Scales},
    place_media,
    qwen3_vl::Qwen3VlVision,
};

/// A [`MimoV2Flash`] that is given pictures too: ids and media of a step in, logits out.
#[derive(Module, Debug)]
pub struct MimoV2FlashVl<B: Backend> {
    /// The vision tower.
    pub visual: Qwen3VlVision<B>,
    /// The decoder with its head.
    pub language_model: MimoV2Flash<B>,
    balance: f64,
}

impl MimoV2FlashVlConfig {
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
    ) -> Result<MimoV2FlashVl<B>, ConfigError> {
        self.validate()?;
        let (text, vision) = (&self.text_config, &self.vision_config);
        let model = MimoV2FlashVl {
            visual: Qwen3VlVision::new(vision, device),
            language_model: text.build(device)?,
            balance: self.balance,
        };
        let scales = Scales {
            initialization: text.initialization,
            text: (text.initializer_range, text.num_hidden_layers),
            vision: (vision.initializer_range, vision.depth),
        };
        Ok(model.map(&mut Filler::new(scales, seed)))
    }
}

impl<B: Backend> MimoV2FlashVl<B> {
    /// Takes the vision tower out of training: none of its parameters requires a gradient.
    #[must_use]
    pub fn freeze_vision(mut self) -> Self {
        self.visual = self.visual.no_grad();
        self
    }
}

impl<B: ContextParallelBackend> MimoV2FlashVl<B> {
    fn hidden(&self, step: &CpStep<B>) -> Result<(Tensor<B, 3>, Routing<B>), StepError> {
        let model = &self.language_model.model;
        // Before the tower's collectives.
        model.check(step)?;
        let mut x = model.embed_tokens.forward(step.ids()?);
        // Every rank encodes where the batch has media, whichever rank's tokens take them.
        if let Some(features) = step.encode_media(&self.visual)? {
            x = place_media(x, features.embeddings, step);
        }
        model.forward_embedded(x, step)
    }

    /// As [`MimoV2Flash::loss`], with the factor of the configuration.
    ///
    /// # Errors
    ///
    /// As there, and media that the tower cannot encode.
    pub fn loss(&self, step: &CpStep<B>) -> Result<TokenLoss<B>, StepError> {
        let (hidden, routing) = self.hidden(step)?;
        let loss = step.cross_entropy(self.language_model.logits(hidden))?;
        routing.join(loss, self.balance, step)
    }

    /// [`Self::loss`] of one of several microbatches whose gradients are summed: cross entropy over the labels of all of them, and
    /// the loss that balances experts over this one's tokens with a further factor `share`. Shares that sum to 1 make it their mean.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn loss_over(
        &self,
        step: &CpStep<B>,
        num_labels: NumLabels,
        share: f64,
    ) -> Result<TokenLoss<B>, StepError> {
        let (hidden, routing) = self.hidden(step)?;
        let loss = step.cross_entropy_over(self.language_model.logits(hidden), num_labels)?;
        routing.join(loss, share * self.balance, step)
    }
}

impl<B: ContextParallelBackend> SequenceModel<B> for MimoV2FlashVl<B> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        Ok(self.language_model.logits(self.hidden(step)?.0))
    }

    fn capabilities(&self) -> ModelCapabilities {
        ModelCapabilities::text()
            .with_media()
            .with_vision_sharding()
            .with_local_media()
    }
}
