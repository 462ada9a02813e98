//! Models for the programs of this crate, written against `burn_cp::nn::SequenceModel`.
//!
//! A model here computes on one rank's shard and says nothing about ranks: attention and media go through the step.

pub mod gated_linear_attention;
mod init;
pub mod mimo_v2_flash;
mod problems;
pub mod qwen3_vl;

use burn::tensor::Tensor;
use burn_cp::{attention::ContextParallelBackend, sharder::CpStep};

/// Embedded tokens `[batch, local_tokens, hidden_size]` with the features of the step's media `[media tokens, hidden_size]` in
/// place of their placeholders.
fn place_media<B: ContextParallelBackend>(
    x: Tensor<B, 3>,
    features: Tensor<B, 2>,
    step: &CpStep<B>,
) -> Tensor<B, 3> {
    let mask = step.media_mask().unsqueeze_dim::<3>(2).expand(x.dims());
    // Filled, not multiplied: the embedding of the placeholder id gets no gradient from these tokens.
    x.mask_fill(mask, 0.0) + step.scatter_media(features)
}
