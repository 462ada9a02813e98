//! The functions on `Tensor`. They only unwrap and wrap; the work is the backend's.

use burn::tensor::{FloatDType, Tensor, TensorPrimitive, backend::Backend};

use crate::{
    backends::{AttentionBackend, VarlenAttentionBackend},
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, RoutineChoice, Segments,
    },
    routines::check_inputs,
};

/// Attention of every segment, differentiable when `B` is an autodiff backend (one op in the
/// graph, never recomputed).
///
/// Head-major, `D = 4`: `q [q_batch, num_heads, q_tokens, head_dim]`,
/// `k [k_batch, num_kv_heads, k_tokens, head_dim]`,
/// `v [k_batch, num_kv_heads, k_tokens, v_head_dim]`, all of one float dtype, give
/// `[q_batch, num_heads, q_tokens, v_head_dim]` in that dtype. Token-major, `D = 3`:
/// `q [q_tokens, num_heads, head_dim]`, `k [k_tokens, num_kv_heads, head_dim]`,
/// `v [k_tokens, num_kv_heads, v_head_dim]`, give `[q_tokens, num_heads, v_head_dim]`; the batch of
/// the segments is then 1. f16 and bf16 are computed in f32. Views are taken as they are where the
/// last dim is contiguous. Rows that see no key, and rows that no segment names, are 0 and pass no
/// gradient.
///
/// A value that is not finite reaches only rows of segments that see it, or see keys near it in the
/// same segment, or in one whose keys overlap with its: masked pairs inside a tile are weighted with 0, not left out.
///
/// # Panics
///
/// With the message of the [`AttentionError`] that [`check`] returns, and for another `D`.
pub fn varlen_attention<B: VarlenAttentionBackend, const D: usize>(
    q: Tensor<B, D>,
    k: Tensor<B, D>,
    v: Tensor<B, D>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Tensor<B, D> {
    attend(AttentionInput::new(q, k, v), segments, options)
}

/// [`varlen_attention`] with attention sinks `[num_heads]`, of any float dtype: `exp(sink)` of its
/// head joins each row's sum of exponentials. Differentiable in the sinks too.
///
/// # Panics
///
/// As [`varlen_attention`].
pub fn varlen_attention_with_sinks<B: VarlenAttentionBackend, const D: usize>(
    input: AttentionInput<Tensor<B, D>, Tensor<B, 1>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Tensor<B, D> {
    attend(input, segments, options)
}

fn attend<B: VarlenAttentionBackend, const D: usize>(
    input: AttentionInput<Tensor<B, D>, Tensor<B, 1>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Tensor<B, D> {
    let AttentionInput { q, k, v, sinks } = input;
    let input = AttentionInput::new(head_major(q), head_major(k), head_major(v));
    let input = primitives(input.with_sinks(sinks));
    let out: Tensor<B, 4> = wrap(B::varlen_attention(input, segments, options));
    match D {
        3 => {
            let [_, heads, tokens, dim] = out.dims();
            out.swap_dims(1, 2)
                .reshape([tokens, heads, dim])
                .reshape([0i32; D])
        }
        _ => out.reshape([0i32; D]),
    }
}

/// `[tokens, heads, dim]` as `[1, heads, tokens, dim]`, a view; four dims as they are.
fn head_major<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 4> {
    match D {
        3 => tensor.unsqueeze::<4>().swap_dims(1, 2),
        4 => tensor.reshape([0i32; 4]),
        _ => panic!("rank of q, k and v: expected 3 (token-major) or 4 (head-major), got {D}"),
    }
}

/// The forward pass alone, with `lse`, on a backend without autodiff. Shapes as
/// [`varlen_attention`], head-major; see [`AttentionOutput`]. No sinks: partial results over
/// disjoint sets of keys are merged without them, and they enter once, after merging.
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
    attention_forward_with_sinks(AttentionInput::new(q, k, v), segments, options)
}

/// [`attention_forward`] with sinks in `out`; `lse` is without them.
///
/// # Panics
///
/// As [`attention_forward`].
pub fn attention_forward_with_sinks<B: AttentionBackend>(
    input: AttentionInput<Tensor<B, 4>, Tensor<B, 1>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> AttentionOutput<Tensor<B, 4>, Tensor<B, 3>> {
    let output = B::attention_forward(primitives(input), segments, options);
    AttentionOutput::new(wrap(output.out), wrap(output.lse))
}

/// Two results of [`attention_forward`] over disjoint sets of keys made the result over both, with `out` in this dtype; see
/// [`AttentionBackend::merge_attention`].
///
/// # Panics
///
/// With the message of an [`AttentionError`] if the shapes differ.
pub fn merge_attention<B: AttentionBackend>(
    first: AttentionOutput<Tensor<B, 4>, Tensor<B, 3>>,
    second: AttentionOutput<Tensor<B, 4>, Tensor<B, 3>>,
    dtype: FloatDType,
) -> AttentionOutput<Tensor<B, 4>, Tensor<B, 3>> {
    let [first, second] =
        [first, second].map(|part| AttentionOutput::new(unwrap(part.out), unwrap(part.lse)));
    let merged = B::merge_attention(first, second, dtype.into());
    AttentionOutput::new(wrap(merged.out), wrap(merged.lse))
}

/// The backward pass alone, on a backend without autodiff. `out` and `lse` may be merged from
/// several forward calls; see [`AttentionBackwardInput`] and [`AttentionGradients`].
///
/// # Panics
///
/// With the message of the [`AttentionError`] that [`check`] returns, also for `out`, `lse` and
/// `dout` of a wrong shape, dtype or device.
pub fn attention_backward<B: AttentionBackend>(
    input: AttentionBackwardInput<Tensor<B, 4>, Tensor<B, 3>, Tensor<B, 1>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> AttentionGradients<Tensor<B, 4>, Tensor<B, 1>> {
    let sinks = input.sinks.map(unwrap);
    let input = AttentionBackwardInput::new(
        unwrap(input.q),
        unwrap(input.k),
        unwrap(input.v),
        unwrap(input.out),
        unwrap(input.lse),
        unwrap(input.dout),
    );
    let grads = B::attention_backward(input.with_sinks(sinks), segments, options);
    AttentionGradients::new(wrap(grads.dq), wrap(grads.dk), wrap(grads.dv))
        .with_dsinks(grads.dsinks.map(wrap))
}

/// Checks a head-major call before it is made, and returns its sizes: shapes, dtypes, devices,
/// options, and whether a routine serves it.
///
/// # Errors
///
/// See [`AttentionError`].
pub fn check<B: VarlenAttentionBackend>(
    q: &Tensor<B, 4>,
    k: &Tensor<B, 4>,
    v: &Tensor<B, 4>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    checked(q, k, v, segments, options).map(|(problem, _)| problem)
}

/// The routine that a head-major call takes, and why. Makes the checks of [`check`].
///
/// # Errors
///
/// See [`AttentionError`].
pub fn describe<B: VarlenAttentionBackend>(
    q: &Tensor<B, 4>,
    k: &Tensor<B, 4>,
    v: &Tensor<B, 4>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<RoutineChoice, AttentionError> {
    checked(q, k, v, segments, options).map(|(_, choice)| choice)
}

fn checked<B: VarlenAttentionBackend>(
    q: &Tensor<B, 4>,
    k: &Tensor<B, 4>,
    v: &Tensor<B, 4>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<(AttentionProblem, RoutineChoice), AttentionError> {
    let input = primitives(AttentionInput::new(q.clone(), k.clone(), v.clone()));
    let problem = check_inputs::<B>(&input, segments, options)?;
    let choice = B::varlen_attention_routine(&problem, q.dtype(), &q.device(), options)?;
    Ok((problem, choice))
}

fn primitives<B: Backend>(
    input: AttentionInput<Tensor<B, 4>, Tensor<B, 1>>,
) -> AttentionInput<B::FloatTensorPrimitive> {
    AttentionInput::new(unwrap(input.q), unwrap(input.k), unwrap(input.v))
        .with_sinks(input.sinks.map(unwrap))
}

fn unwrap<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> B::FloatTensorPrimitive {
    tensor.into_primitive().tensor()
}

fn wrap<B: Backend, const D: usize>(primitive: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}
