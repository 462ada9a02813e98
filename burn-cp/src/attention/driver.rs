//! Exchange, kernel, and back.
//!
//! K and V travel in one message of rows `[batch · local_tokens, num_kv_heads · (head_dim + v_head_dim)]`, so that a token is
//! one run of memory and ranges of tokens are ranges of rows.

use std::ops::Range;

use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive, backend::Backend, ops::FloatTensor};
use burn_cp_kernels::{AttentionBackwardInput, AttentionGradients, AttentionInput};

use super::{AttentionCall, InnerAttention};
use crate::{
    collectives::{Call, Collective, CollectiveBackend, Payload},
    plan::ExchangeStrategy,
};

/// What the backward pass of an attention operation needs. Keys and values of other ranks are not kept.
#[derive(Debug, Clone)]
pub struct AttentionState<B: Backend> {
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    /// Number of the forward exchange in the group's program order.
    exchange: Option<u64>,
}

/// Attention of this rank's queries, without a backward pass. Every rank of the group must call it.
pub fn attend<B: InnerAttention>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    call: &AttentionCall,
) -> FloatTensor<B> {
    attend_with_state::<B>(q, k, v, call).0
}

/// [`attend`], and the natural log of each query's sum of exponentials, `[batch, num_heads, local_tokens]`; −∞ where a query
/// sees no key.
pub fn attend_with_lse<B: InnerAttention>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    call: &AttentionCall,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (out, state) = attend_with_state::<B>(q, k, v, call);
    (out, state.lse)
}

/// Attention of this rank's queries, and what its backward pass needs. Every rank of the group must call it.
pub fn attend_with_state<B: InnerAttention>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    call: &AttentionCall,
) -> (FloatTensor<B>, AttentionState<B>) {
    check_shapes::<B>(&q, &k, &v, call);
    let exchange = call
        .communicates()
        .then(|| Call::forward(call.group(), "attention"));
    let (k_all, v_all) = keys_and_values::<B>(&k, &v, call, exchange);
    let input = AttentionInput::new(q.clone(), k_all, v_all);
    let output = B::attention_forward(input, call.prepared().segments(), call.kernel());
    let state = AttentionState {
        q,
        k,
        v,
        out: output.out.clone(),
        lse: output.lse,
        exchange: exchange.map(|exchange| exchange.number),
    };
    (output.out, state)
}

/// The gradients of this rank's q, k and v. Every rank of the group must call it.
///
/// Keys and values are exchanged again; dK and dV of other ranks' tokens go back to their owners, who add them up in rank
/// order, in `f32` at least.
pub fn attention_gradients<B: InnerAttention>(
    state: AttentionState<B>,
    dout: FloatTensor<B>,
    call: &AttentionCall,
) -> AttentionGradients<FloatTensor<B>> {
    let AttentionState {
        q,
        k,
        v,
        out,
        lse,
        exchange,
    } = state;
    let again = exchange.map(|number| Call::adjoint(call.group(), "attention again", number));
    let (k_all, v_all) = keys_and_values::<B>(&k, &v, call, again);
    let input = AttentionBackwardInput::new(q, k_all, v_all, out, lse, dout);
    let gradients = B::attention_backward(input, call.prepared().segments(), call.kernel());
    if call.prepared().is_local() {
        return gradients;
    }
    let AttentionGradients { dq, dk, dv, .. } = gradients;
    let adjoint = exchange.map(|number| Call::adjoint(call.group(), "attention", number));
    let rows = pack::<B>(&dk, &dv);
    let rows = send_back::<B>(rows, call, adjoint);
    let (dk, dv) = unpack::<B>(rows, &k.shape().to_vec(), &v.shape().to_vec());
    AttentionGradients::new(dq, dk, dv)
}

/// The keys and values that the segments address: this rank's own, or the buffer that the plan describes.
fn keys_and_values<B: InnerAttention>(
    k: &FloatTensor<B>,
    v: &FloatTensor<B>,
    call: &AttentionCall,
    exchange: Option<Call>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let prepared = call.prepared();
    if prepared.is_local() {
        return (k.clone(), v.clone());
    }
    let rows = Payload::Float(pack::<B>(k, v).into_primitive().tensor());
    let buffer = match (exchange, call.strategy()) {
        (None, _) => take(&rows, &prepared.gathered_locally()),
        (Some(exchange), ExchangeStrategy::AllGather) => {
            let op = Collective::AllGather {
                dim: 0,
                sizes: prepared.sizes().clone(),
            };
            let all = B::collective(rows, &op, call.group(), with_plan(exchange, call));
            take(&all, prepared.gathered())
        }
        (Some(exchange), _) => {
            let op = Collective::Exchange {
                dim: 0,
                plan: prepared.exchange().clone(),
            };
            B::collective(rows, &op, call.group(), with_plan(exchange, call))
        }
    };
    // Layers and devices fail on empty tensors: an empty buffer is one row that no segment names.
    let buffer = if buffer.shape()[0] == 0 {
        buffer.zeros_like(0, 1)
    } else {
        buffer
    };
    let num_tokens = buffer.shape()[0];
    let flat = |shape: Vec<usize>| vec![1, shape[1], num_tokens, shape[3]];
    let (k_shape, v_shape) = (flat(k.shape().to_vec()), flat(v.shape().to_vec()));
    unpack::<B>(into_rows(buffer), &k_shape, &v_shape)
}

/// Brings the gradients of the buffer's rows back to the ranks that own them.
fn send_back<B: InnerAttention>(
    rows: Tensor<B, 2>,
    call: &AttentionCall,
    adjoint: Option<Call>,
) -> Tensor<B, 2> {
    let prepared = call.prepared();
    let len = prepared.exchange().output_len();
    let rows = Payload::Float(rows.into_primitive().tensor());
    let rows = if len == 0 {
        rows.zeros_like(0, 0)
    } else {
        rows
    };
    into_rows(match (adjoint, call.strategy()) {
        (None, _) => place(
            &rows,
            &prepared.gathered_locally(),
            prepared.sizes()[prepared.rank()],
        ),
        (Some(adjoint), ExchangeStrategy::AllGather) => {
            let all = place(&rows, prepared.gathered(), prepared.sizes().iter().sum());
            let op = Collective::ReduceScatter {
                dim: 0,
                sizes: prepared.sizes().clone(),
            };
            B::collective(all, &op, call.group(), with_plan(adjoint, call))
        }
        (Some(adjoint), _) => {
            let op = Collective::ExchangeReverse {
                dim: 0,
                plan: prepared.exchange().clone(),
            };
            B::collective(rows, &op, call.group(), with_plan(adjoint, call))
        }
    })
}

fn with_plan(exchange: Call, call: &AttentionCall) -> Call {
    let tracked = call.is_tracked() && exchange.adjoint_of.is_none();
    Call {
        plan: Some(call.prepared().short_hash()),
        tracked,
        ..exchange
    }
}

fn into_rows<B: Backend>(payload: Payload<B>) -> Tensor<B, 2> {
    match payload {
        Payload::Float(tensor) => Tensor::from_primitive(TensorPrimitive::Float(tensor)),
        _ => unreachable!("keys and values are floats"),
    }
}

/// The rows of `ranges`, in their order.
fn take<B: Backend>(rows: &Payload<B>, ranges: &[Range<usize>]) -> Payload<B> {
    Payload::concat(
        ranges.iter().map(|range| rows.rows(0, range)).collect(),
        0,
        rows,
    )
}

/// The adjoint of [`take`]: rows go back to their ranges, all others are 0. No two ranges overlap.
fn place<B: Backend>(rows: &Payload<B>, ranges: &[Range<usize>], len: usize) -> Payload<B> {
    let mut at = 0;
    let mut pieces: Vec<(&Range<usize>, Range<usize>)> = Vec::with_capacity(ranges.len());
    for range in ranges {
        pieces.push((range, at..at + range.len()));
        at += range.len();
    }
    pieces.sort_by_key(|(range, _)| range.start);
    let (mut parts, mut filled) = (Vec::new(), 0);
    for (range, from) in pieces {
        if range.start > filled {
            parts.push(rows.zeros_like(0, range.start - filled));
        }
        parts.push(rows.rows(0, &from));
        filled = range.end;
    }
    if filled < len {
        parts.push(rows.zeros_like(0, len - filled));
    }
    Payload::concat(parts, 0, rows)
}

fn wrap<B: Backend>(tensor: &FloatTensor<B>) -> Tensor<B, 4> {
    Tensor::from_primitive(TensorPrimitive::Float(tensor.clone()))
}

/// `[batch, num_kv_heads, tokens, ..]` twice -> `[batch · tokens, num_kv_heads · (head_dim + v_head_dim)]`.
fn pack<B: Backend>(k: &FloatTensor<B>, v: &FloatTensor<B>) -> Tensor<B, 2> {
    let rows = Tensor::cat(vec![wrap::<B>(k), wrap::<B>(v)], 3).swap_dims(1, 2);
    let [batch, tokens, heads, width] = rows.dims();
    rows.reshape([batch * tokens, heads * width])
}

/// The inverse of [`pack`], to tensors of the given shapes.
fn unpack<B: Backend>(
    rows: Tensor<B, 2>,
    k_shape: &[usize],
    v_shape: &[usize],
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (batch, heads, tokens) = (k_shape[0], k_shape[1], k_shape[2]);
    let (head_dim, v_head_dim) = (k_shape[3], v_shape[3]);
    let both = rows
        .reshape([batch, tokens, heads, head_dim + v_head_dim])
        .swap_dims(1, 2);
    let k = both.clone().narrow(3, 0, head_dim);
    let v = both.narrow(3, head_dim, v_head_dim);
    (k.into_primitive().tensor(), v.into_primitive().tensor())
}

/// Refuses shapes that do not fit the plan, before anything travels. Every rank has the same plan and model, so all refuse.
fn check_shapes<B: CollectiveBackend>(
    q: &FloatTensor<B>,
    k: &FloatTensor<B>,
    v: &FloatTensor<B>,
    call: &AttentionCall,
) {
    let plan = call.prepared().plan();
    let (batch, tokens) = (
        plan.documents().batch_size(),
        plan.layout().local_len(call.group().rank()),
    );
    let dtypes = [q.dtype(), k.dtype(), v.dtype()];
    assert!(
        dtypes.iter().all(|dtype| *dtype == dtypes[0]),
        "attention: q, k and v must have one dtype, got {dtypes:?}"
    );
    let (q, k, v) = (q.shape().to_vec(), k.shape().to_vec(), v.shape().to_vec());
    for (name, shape) in [("q", &q), ("k", &k), ("v", &v)] {
        assert!(
            shape.len() == 4 && shape[0] == batch && shape[2] == tokens,
            "attention: {name} must be [batch {batch}, heads, local_tokens {tokens}, head_dim], got {shape:?}"
        );
    }
    assert!(
        k[1] == v[1],
        "attention: k and v must have equally many heads, got {} and {}",
        k[1],
        v[1]
    );
    assert!(
        q[3] == k[3],
        "attention: q and k must have one head_dim, got {} and {}",
        q[3],
        k[3]
    );
    assert!(
        k[1] > 0 && q[1] % k[1] == 0,
        "attention: num_heads must be a multiple of num_kv_heads, got {} and {}",
        q[1],
        k[1]
    );
}
