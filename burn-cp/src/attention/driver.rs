//! What every strategy shares: checks, the choice of the driver, and what is kept for backward.

use burn::tensor::{TensorMetadata, backend::Backend, ops::FloatTensor};
use burn_cp_kernels::{
    AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput, AttentionOutput,
    AttentionProblem,
};

use super::{AttentionCall, InnerAttention, gathered, heads, ring, subset::KeySubset};
use crate::{
    collectives::CollectiveBackend,
    plan::{CostShape, ExchangeStrategy},
};

/// What a driver computed with and what it got. Keys and values of other ranks are kept where the call says so, and those of the heads
/// that `HeadAllToAll` has traded this rank's others for.
#[derive(Debug, Clone)]
pub(super) struct Saved<B: Backend> {
    pub(super) input: AttentionInput<FloatTensor<B>>,
    pub(super) out: FloatTensor<B>,
    pub(super) lse: FloatTensor<B>,
    /// Keys and values that were exchanged: all that the rank computed with or, with overlap, those of others.
    pub(super) exchanged: Option<KeysAndValues<B>>,
}

/// `[1, num_kv_heads, tokens, ..]` each.
pub(super) type KeysAndValues<B> = (FloatTensor<B>, FloatTensor<B>);

/// What the backward pass of an attention operation needs.
#[derive(Debug, Clone)]
pub struct AttentionState<B: Backend> {
    saved: Saved<B>,
    strategy: ExchangeStrategy,
    /// Number of the first forward operation in the group's program order.
    exchange: Option<u64>,
}

/// Attention of this rank's queries, without a backward pass. Every rank of the group must call it.
///
/// # Panics
/// As [`attend_with_state`].
pub fn attend<B: InnerAttention>(
    input: AttentionInput<FloatTensor<B>>,
    call: &AttentionCall,
) -> FloatTensor<B> {
    attend_with_state::<B>(input, call).0
}

/// [`attend`], and the natural log of each query's sum of exponentials without the sink, `[batch, num_heads, local_tokens]`; −∞ where
/// a query sees no key. Every rank of the group must call it.
///
/// # Panics
/// As [`attend_with_state`].
pub fn attend_with_lse<B: InnerAttention>(
    input: AttentionInput<FloatTensor<B>>,
    call: &AttentionCall,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (out, state) = attend_with_state::<B>(input, call);
    let lse = state.saved.lse;
    match (state.strategy, state.exchange) {
        (ExchangeStrategy::HeadAllToAll, Some(_)) => (out, heads::local_lse::<B>(&lse, call)),
        _ => (out, lse),
    }
}

/// Attention of this rank's queries, `[batch, num_heads, local_tokens, v_head_dim]`, and what its backward pass needs. Every rank of
/// the group must call it.
///
/// # Panics
/// Before anything travels, on every rank alike: tensors that do not fit the plan or each other, and with the message of a
/// [`PlanError`](crate::plan::PlanError) where the strategy cannot serve them. A failure between ranks ends this one with a typed
/// panic.
pub fn attend_with_state<B: InnerAttention>(
    input: AttentionInput<FloatTensor<B>>,
    call: &AttentionCall,
) -> (FloatTensor<B>, AttentionState<B>) {
    let shape = check_shapes::<B>(&input, call);
    let strategy = call
        .strategy(&shape)
        .unwrap_or_else(|error| panic!("attention: {error}"));
    check_routine::<B>(&input.q, &shape, call).unwrap_or_else(|error| panic!("attention: {error}"));
    let keep = |output: AttentionOutput<FloatTensor<B>>, exchanged, exchange| {
        let AttentionOutput { out, lse, .. } = output;
        let saved = Saved {
            input: input.clone(),
            out: out.clone(),
            lse,
            exchanged,
        };
        (out, saved, exchange)
    };
    let (out, saved, exchange) = if !call.communicates() {
        let (output, _) = gathered::forward::<B>(input.clone(), call, strategy, None);
        keep(output, None, None)
    } else {
        match strategy {
            ExchangeStrategy::Ring => {
                let (output, first) = ring::forward::<B>(&input, call);
                keep(output, None, first)
            }
            ExchangeStrategy::HeadAllToAll => {
                let (out, saved, first) = heads::forward::<B>(&input, call);
                (out, saved, Some(first))
            }
            _ => {
                let exchange = call.forward();
                let (output, exchanged) = if call.overlaps() {
                    gathered::overlapped_forward::<B>(&input, call, strategy, exchange)
                } else {
                    gathered::forward::<B>(input.clone(), call, strategy, Some(exchange))
                };
                let exchanged = call.keeps_keys().then_some(exchanged);
                keep(output, exchanged, Some(exchange.number))
            }
        }
    };
    let state = AttentionState {
        saved,
        strategy,
        exchange,
    };
    (out, state)
}

/// The gradients of this rank's q, k, v and sinks, of their shapes, from that of the result,
/// `dout [batch, num_heads, local_tokens, v_head_dim]`. Every rank of the group must call it.
///
/// Keys and values are exchanged again where they are not kept; dK and dV of other ranks' tokens go back to their owners, who add them
/// up in a fixed order, in `f32` at least. The gradient of the sinks is this rank's share: the sum over ranks is the whole.
pub fn attention_gradients<B: InnerAttention>(
    state: AttentionState<B>,
    dout: FloatTensor<B>,
    call: &AttentionCall,
) -> AttentionGradients<FloatTensor<B>> {
    let AttentionState {
        saved,
        strategy,
        exchange,
    } = state;
    match (exchange, strategy) {
        (Some(of), ExchangeStrategy::Ring) => ring::backward(&saved, &dout, call, of),
        (Some(of), ExchangeStrategy::HeadAllToAll) => heads::backward(saved, &dout, call, of),
        (Some(of), _) if call.overlaps() => {
            gathered::overlapped_backward(&saved, &dout, call, strategy, of)
        }
        _ => gathered::backward(&saved, dout, call, strategy, exchange),
    }
}

/// The queries over some of their keys, without sinks: a partial result.
pub(super) fn forward_over<B: InnerAttention>(
    q: &FloatTensor<B>,
    (k, v): (FloatTensor<B>, FloatTensor<B>),
    keys: &KeySubset,
    call: &AttentionCall,
    travels: bool,
) -> AttentionOutput<FloatTensor<B>> {
    B::attention_forward(
        AttentionInput::new(q.clone(), k, v),
        &keys.segments,
        &call.kernel_beside(travels),
    )
}

/// The share of some of the keys in the gradients; that of the sinks is the whole each time.
pub(super) fn backward_over<B: InnerAttention>(
    saved: &Saved<B>,
    (k, v): (FloatTensor<B>, FloatTensor<B>),
    dout: &FloatTensor<B>,
    keys: &KeySubset,
    call: &AttentionCall,
) -> AttentionGradients<FloatTensor<B>> {
    let (out, lse) = (saved.out.clone(), saved.lse.clone());
    let input = AttentionBackwardInput::new(saved.input.q.clone(), k, v, out, lse, dout.clone())
        .with_sinks(saved.input.sinks.clone());
    B::attention_backward(input, &keys.segments, call.kernel())
}

/// Refuses what no kernel of the device serves, before anything travels. Ranks have devices of one kind, so all refuse.
fn check_routine<B: InnerAttention>(
    q: &FloatTensor<B>,
    shape: &CostShape,
    call: &AttentionCall,
) -> Result<(), AttentionError> {
    let segments = call.prepared().segments();
    let ((q_batch, q_tokens), (k_batch, k_tokens)) = (segments.q_shape(), segments.k_shape());
    let queries = [q_batch, shape.num_heads, q_tokens, shape.head_dim];
    let [keys, values] =
        [shape.head_dim, shape.v_head_dim].map(|dim| [k_batch, shape.num_kv_heads, k_tokens, dim]);
    let problem = AttentionProblem::new(queries, keys, values, segments)?;
    B::attention_routine(&problem, q.dtype(), &B::float_device(q), call.kernel())?;
    Ok(())
}

/// Refuses shapes that do not fit the plan, before anything travels. Every rank has the same plan and model, so all refuse.
fn check_shapes<B: CollectiveBackend>(
    input: &AttentionInput<FloatTensor<B>>,
    call: &AttentionCall,
) -> CostShape {
    let plan = call.prepared().plan();
    let (batch, tokens) = (
        plan.documents().batch_size(),
        plan.layout().local_len(call.group().rank()),
    );
    let AttentionInput { q, k, v, sinks, .. } = input;
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
    if let Some(sinks) = sinks {
        let shape = sinks.shape().to_vec();
        assert!(
            shape == [q[1]],
            "attention: sinks must be [num_heads {}], got {shape:?}",
            q[1]
        );
    }
    CostShape {
        num_heads: q[1],
        num_kv_heads: k[1],
        head_dim: q[3],
        v_head_dim: v[3],
        bytes_per_element: dtypes[0].size(),
    }
}
