//! Models and layers that run on a rank's part of a sequence.

mod attention;
mod audit;
mod decoder;
mod delegate;
mod dropout;
mod encoder;
mod error;
mod feed_forward;
mod memory;
mod multi_head;
mod parameters;
mod rotary;
mod sharded;

use burn::tensor::Tensor;

pub use attention::*;
pub use audit::{AttentionAudit, AuditError, UnconvertedAttention};
pub use decoder::ContextParallelDecoder;
pub use dropout::{DropoutSite, StepDropout};
pub use encoder::ContextParallelEncoder;
pub use error::NnError;
pub use memory::Memory;
pub use parameters::{ParameterError, check_parameters};
pub use rotary::*;
pub use sharded::SequenceSharded;

use crate::{
    attention::ContextParallelBackend,
    sharder::{CpStep, ModelCapabilities, StepError},
};

/// A model that predicts the next token of sequences that are sharded over ranks.
///
/// It sees this rank's tokens only: attention goes through [`CpStep::attention`], everything else is per token.
pub trait SequenceModel<B: ContextParallelBackend> {
    /// Logits of this rank's tokens, `[batch, local_tokens, vocab]`. Every rank of the step's group must call it.
    ///
    /// # Errors
    /// The step lacks what the model needs, or the vision tower failed on any rank.
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError>;

    /// What it can be given besides the tokens of one document per row. What it does not declare is refused by
    /// [`SequenceSharded`] on every rank, before anything moves. Must be the same on every rank.
    ///
    /// Nothing checks a model that is run without `SequenceSharded`. By default [`ModelCapabilities::text`]: packed documents, as the contract above implies, and no media.
    fn capabilities(&self) -> ModelCapabilities {
        ModelCapabilities::text()
    }
}
