//! Which backend computes attention by which routine, and the autodiff op. The only room that
//! touches Burn's backend types and autodiff internals.

mod autodiff;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cubecl")]
mod fusion;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;

use burn::tensor::{
    DType,
    backend::Backend,
    ops::{Device, FloatTensor},
};
#[cfg(feature = "cubecl")]
pub use cube::AttentionRuntime;

use crate::{
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, RoutineChoice, Segments,
    },
    routines::{check_merge, composed},
};

/// A backend without autodiff that computes attention over segments, forward and backward.
///
/// Tensors are the backend's float primitives; shapes, dtypes and values as said at
/// [`AttentionInput`], [`AttentionOutput`], [`AttentionBackwardInput`] and [`AttentionGradients`]. Callers with
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
        input: AttentionInput<FloatTensor<Self>>,
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

    /// Two results of [`Self::attention_forward`] over disjoint sets of keys, without sinks, made the result over both; `out` has this
    /// dtype, computed in f32 (f64 if `lse` is). The results' own `out` may differ in dtype.
    ///
    /// With `lse = ln(exp(lse_a) + exp(lse_b))`, the output is `out_a · exp(lse_a - lse) + out_b · exp(lse_b - lse)`: the online
    /// softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867) over sets instead of single keys.
    ///
    /// # Panics
    ///
    /// With the message of an [`AttentionError`](crate::AttentionError) if the shapes differ.
    fn merge_attention(
        first: AttentionOutput<FloatTensor<Self>>,
        second: AttentionOutput<FloatTensor<Self>>,
        dtype: DType,
    ) -> AttentionOutput<FloatTensor<Self>> {
        check_merge::<Self>(&first, &second).unwrap_or_else(|error| panic!("{error}"));
        composed::merge::<Self>(first, second, dtype)
    }

    /// Which routine a call with tensors of this dtype takes on a device.
    ///
    /// # Errors
    ///
    /// A dtype or a size of vectors that no routine serves, or not the forced one; a forced routine
    /// that the device cannot run. Such a call panics with the same message.
    fn attention_routine(
        problem: &AttentionProblem,
        dtype: DType,
        device: &Device<Self>,
        options: &AttentionOptions,
    ) -> Result<RoutineChoice, AttentionError>;
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
        input: AttentionInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> FloatTensor<Self>;

    /// As [`AttentionBackend::attention_routine`].
    ///
    /// # Errors
    ///
    /// As there.
    fn varlen_attention_routine(
        problem: &AttentionProblem,
        dtype: DType,
        device: &Device<Self>,
        options: &AttentionOptions,
    ) -> Result<RoutineChoice, AttentionError>;
}

impl<B: AttentionBackend> VarlenAttentionBackend for B {
    fn varlen_attention(
        input: AttentionInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> FloatTensor<Self> {
        B::attention_forward(input, segments, options).out
    }

    fn varlen_attention_routine(
        problem: &AttentionProblem,
        dtype: DType,
        device: &Device<Self>,
        options: &AttentionOptions,
    ) -> Result<RoutineChoice, AttentionError> {
        B::attention_routine(problem, dtype, device, options)
    }
}
