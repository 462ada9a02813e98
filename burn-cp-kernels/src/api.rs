//! The functions on `Tensor`. They only unwrap and wrap; the work is the backend's.

use burn::tensor::{Tensor, TensorPrimitive, backend::Backend};

use crate::{
    backends::{AttentionBackend, VarlenAttentionBackend},
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionOptions,
        AttentionOutput, AttentionProblem, Segments,
    },
    routines::check_inputs,
};

/// Attention of every segment, differentiable when `B` is an autodiff backend (one op in the
/// graph, never recomputed).
///
/// `q [q_batch, num_heads, q_tokens, head_dim]`, `k [k_batch, num_kv_heads, k_tokens, head_dim]`,
/// `v [k_batch, num_kv_heads, k_tokens, v_head_dim]`, all of one float dtype, give
/// `[q_batch, num_heads, q_tokens, v_head_dim]` in that dtype. f16 and bf16 are computed in f32.
/// Rows that see no key, and rows that no segment names, are 0 and pass no gradient.
///
/// A value that is not finite reaches only rows of segments that see it, or see keys near it in the
/// same segment: masked pairs inside a tile are weighted with 0, not left out.
///
/// # Panics
///
/// With the message of the [`AttentionError`] that [`check`] returns.
pub fn varlen_attention<B: VarlenAttentionBackend>(
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Tensor<B, 4> {
    wrap(B::varlen_attention(
        unwrap(q),
        unwrap(k),
        unwrap(v),
        segments,
        options,
    ))
}

/// The forward pass alone, with `lse`, on a backend without autodiff. Shapes as
/// [`varlen_attention`]; see [`AttentionOutput`].
///
/// # Panics
///
/// With the message of the [`AttentionError`] that [`check`] returns.
pub fn attention_forward<B: AttentionBackend>(
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    segments: &Segments,
    options: &AttentionOptions,
) -> AttentionOutput<Tensor<B, 4>, Tensor<B, 3>> {
    let output = B::attention_forward(unwrap(q), unwrap(k), unwrap(v), segments, options);
    AttentionOutput::new(wrap(output.out), wrap(output.lse))
}

/// The backward pass alone, on a backend without autodiff. `out` and `lse` may be merged from
/// several forward calls; see [`AttentionBackwardInput`] and [`AttentionGradients`].
///
/// # Panics
///
/// With the message of the [`AttentionError`] that [`check`] returns, also for `out`, `lse` and
/// `dout` of a wrong shape, dtype or device.
pub fn attention_backward<B: AttentionBackend>(
    input: AttentionBackwardInput<Tensor<B, 4>, Tensor<B, 3>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> AttentionGradients<Tensor<B, 4>> {
    let input = AttentionBackwardInput::new(
        unwrap(input.q),
        unwrap(input.k),
        unwrap(input.v),
        unwrap(input.out),
        unwrap(input.lse),
        unwrap(input.dout),
    );
    let grads = B::attention_backward(input, segments, options);
    AttentionGradients::new(wrap(grads.dq), wrap(grads.dk), wrap(grads.dv))
}

/// Checks shapes, dtypes and devices of a call before it is made, and returns its sizes.
///
/// # Errors
///
/// See [`AttentionError`].
pub fn check<B: Backend>(
    q: &Tensor<B, 4>,
    k: &Tensor<B, 4>,
    v: &Tensor<B, 4>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    check_inputs::<B>(
        &unwrap(q.clone()),
        &unwrap(k.clone()),
        &unwrap(v.clone()),
        segments,
        options,
    )
}

fn unwrap<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> B::FloatTensorPrimitive {
    tensor.into_primitive().tensor()
}

fn wrap<B: Backend, const D: usize>(primitive: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}
