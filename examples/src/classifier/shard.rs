//! The stock classifier over several ranks: all that it takes, as README shows it.

use std::error::Error;

use burn::tensor::Tensor;
use burn_cp::{attention::ContextParallelBackend, nn::ContextParallelEncoder, sharder::CpStep};

use super::stock::TextClassifier;

/// Logits `[batch, local_tokens, num_classes]`; a text's class is what its first token says. Every rank must call it.
///
/// # Errors
/// An encoder that ranks cannot run alike, a step without ids, or dropout without a seed.
// README begins.
pub fn classify<B: ContextParallelBackend>(
    model: &TextClassifier<B>,
    step: &CpStep<B>,
) -> Result<Tensor<B, 3>, Box<dyn Error + Send + Sync>> {
    let encoder = ContextParallelEncoder::try_from(model.encoder.clone())?.full(); // else causal
    let positions = step.embedding_positions();
    let x = model.tokens.forward(step.ids()?) + model.positions.forward(positions);
    Ok(model.output.forward(encoder.forward(x, step)?))
}
// README ends.
