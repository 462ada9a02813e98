//! Which backend computes attention by which routine, and the autodiff op. The only room that
//! touches Burn's backend types and autodiff internals.

mod autodiff;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;

use burn::tensor::{backend::Backend, ops::FloatTensor};

use crate::definition::{
    AttentionBackwardInput, AttentionGradients, AttentionOptions, AttentionOutput, Segments,
};

/// A backend without autodiff that computes attention over segments, forward and backward.
///
/// Tensors are the backend's float primitives; shapes, dtypes and values as said at
/// [`AttentionOutput`], [`AttentionBackwardInput`] and [`AttentionGradients`]. Callers with
/// `Tensor`s use [`attention_forward`](crate::attention_forward) and
/// [`attention_backward`](crate::attention_backward).
pub trait AttentionBackend: Backend {
    /// The forward pass.
    ///
    /// # Panics
    ///
    /// With the message of an [`AttentionError`](crate::AttentionError) if the tensors contradict
    /// each other or the segments.
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionOutput<FloatTensor<Self>>;

    /// The backward pass. Uses `lse` and `rowsum(dout · out)`, so it accepts merged `out`, `lse`.
    ///
    /// # Panics
    ///
    /// As [`Self::attention_forward`].
    fn attention_backward(
        input: AttentionBackwardInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionGradients<FloatTensor<Self>>;
}

/// A backend on which [`varlen_attention`](crate::varlen_attention) runs: every
/// [`AttentionBackend`], and `Autodiff` of one with any checkpointing strategy.
pub trait VarlenAttentionBackend: Backend {
    /// Attention of every segment; with autodiff, one tracked op.
    ///
    /// # Panics
    ///
    /// As [`AttentionBackend::attention_forward`].
    fn varlen_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> FloatTensor<Self>;
}

impl<B: AttentionBackend> VarlenAttentionBackend for B {
    fn varlen_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> FloatTensor<Self> {
        B::attention_forward(q, k, v, segments, options).out
    }
}
