//! Keys and values of a rank's whole buffer, from all ranks or from those that have them: `AllGather`, `NeededOnly`, `LeftHalo`.
//!
//! Without overlap the buffer is put together first and one kernel call computes with it, which gives the bits of one device. With
//! overlap the rank's own keys are computed with while those of others travel, and both parts are merged.

use burn::tensor::{Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};
use burn_cp_kernels::{
    AttentionBackwardInput, AttentionGradients, AttentionInput, AttentionOutput,
};

use super::{
    AttentionCall, InnerAttention,
    driver::{KeysAndValues, Saved, backward_over, forward_over},
    merge::Merger,
    rows::{self, KvRows, pack_buffer, place, rows_of, take},
    travel::Travel,
};
use crate::{
    collectives::{Call, Collective, Payload, Pending},
    plan::ExchangeStrategy,
};

/// Attention of this rank's queries, without overlap. `exchange` is `None` where no rank needs another's keys.
pub(super) fn forward<B: InnerAttention>(
    input: AttentionInput<FloatTensor<B>>,
    call: &AttentionCall,
    strategy: ExchangeStrategy,
    exchange: Option<Call>,
) -> (AttentionOutput<FloatTensor<B>>, KeysAndValues<B>) {
    let AttentionInput { q, k, v, sinks, .. } = input;
    let (k, v) = buffer::<B>(&k, &v, call, strategy, exchange);
    let input = AttentionInput::new(q, k.clone(), v.clone()).with_sinks(sinks);
    let output = B::attention_forward(input, call.prepared().segments(), call.kernel());
    (output, (k, v))
}

/// Gradients of [`forward`], whose first operation had the number `of`.
pub(super) fn backward<B: InnerAttention>(
    saved: &Saved<B>,
    dout: FloatTensor<B>,
    call: &AttentionCall,
    strategy: ExchangeStrategy,
    of: Option<u64>,
) -> AttentionGradients<FloatTensor<B>> {
    let AttentionInput { q, k, v, sinks, .. } = &saved.input;
    let (k_all, v_all) = saved.exchanged.clone().unwrap_or_else(|| {
        let again = of.map(|of| call.backward("attention again", of));
        buffer::<B>(k, v, call, strategy, again)
    });
    let (out, lse) = (saved.out.clone(), saved.lse.clone());
    let input = AttentionBackwardInput::new(q.clone(), k_all, v_all, out, lse, dout)
        .with_sinks(sinks.clone());
    let prepared = call.prepared();
    let gradients = B::attention_backward(input, prepared.segments(), call.kernel());
    if prepared.is_local() {
        return gradients;
    }
    let rows = pack_buffer::<B>(
        &gradients.dk,
        &gradients.dv,
        prepared.exchange().output_len(),
    );
    let rows = match of.map(|of| call.backward("attention", of)) {
        None => place(
            &rows,
            &prepared.gathered_locally(),
            prepared.sizes()[prepared.rank()],
        ),
        Some(adjoint) => {
            let (rows, op) = match strategy {
                ExchangeStrategy::AllGather => {
                    let sizes = prepared.sizes().clone();
                    let all = place(&rows, prepared.gathered(), sizes.iter().sum());
                    (all, Collective::ReduceScatter { dim: 0, sizes })
                }
                _ => {
                    let plan = prepared.exchange().clone();
                    (rows, Collective::ExchangeReverse { dim: 0, plan })
                }
            };
            B::collective(rows, &op, call.group(), adjoint)
        }
    };
    let batch = prepared.plan().documents().batch_size();
    let (dk, dv) = KvRows::of::<B>(k, v).unpack(rows, batch);
    AttentionGradients::new(gradients.dq, dk, dv).with_dsinks(gradients.dsinks)
}

/// The keys and values that the segments address: this rank's own, or the buffer that the plan describes.
fn buffer<B: InnerAttention>(
    k: &FloatTensor<B>,
    v: &FloatTensor<B>,
    call: &AttentionCall,
    strategy: ExchangeStrategy,
    exchange: Option<Call>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let prepared = call.prepared();
    if prepared.is_local() {
        return (k.clone(), v.clone());
    }
    let rows = KvRows::pack::<B>(k, v);
    let buffer = match (exchange, strategy) {
        (None, _) => take(&rows, &prepared.gathered_locally()),
        (Some(exchange), ExchangeStrategy::AllGather) => {
            let all = start_gather(rows, call, exchange).finish();
            take(&all, prepared.gathered())
        }
        (Some(exchange), _) => {
            let plan = prepared.exchange().clone();
            let op = Collective::Exchange { dim: 0, plan };
            B::collective(rows, &op, call.group(), exchange)
        }
    };
    KvRows::of::<B>(k, v).unpack_buffer(buffer)
}

fn start_gather<B: InnerAttention>(
    rows: Payload<B>,
    call: &AttentionCall,
    exchange: Call,
) -> Pending<B> {
    let op = Collective::AllGather {
        dim: 0,
        sizes: call.prepared().sizes().clone(),
    };
    B::collective_start(rows, &op, call.group(), exchange)
}

/// Other ranks' keys and values on their way.
struct Remote<B: Backend> {
    pending: Vec<Pending<B>>,
    travel: Travel,
    gathered: bool,
}

impl<B: InnerAttention> Remote<B> {
    /// `first` is the first operation, and `next` draws the others.
    fn start(
        parts: Vec<Payload<B>>,
        (travel, call, strategy): (Travel, &AttentionCall, ExchangeStrategy),
        first: Call,
        next: impl Fn() -> Call,
    ) -> Self {
        let gathered = strategy == ExchangeStrategy::AllGather;
        let pending = if gathered {
            let rows = parts.into_iter();
            rows.map(|rows| start_gather(rows, call, first)).collect()
        } else {
            let plan = &call.prepared().split().exchange;
            travel.start(parts, (call, plan), first, next)
        };
        Self {
            pending,
            travel,
            gathered,
        }
    }

    fn finish(self, call: &AttentionCall) -> KeysAndValues<B> {
        let parts: Vec<_> = self.pending.into_iter().map(Pending::finish).collect();
        let parts = if self.gathered {
            self.travel.take(&parts, &call.prepared().split().gathered)
        } else {
            parts
        };
        self.travel.unpack_buffer(parts)
    }
}

/// [`forward`] with overlap.
pub(super) fn overlapped_forward<B: InnerAttention>(
    input: &AttentionInput<FloatTensor<B>>,
    call: &AttentionCall,
    strategy: ExchangeStrategy,
    exchange: Call,
) -> (AttentionOutput<FloatTensor<B>>, KeysAndValues<B>) {
    let AttentionInput { q, k, v, sinks, .. } = input;
    let split = call.prepared().split();
    let travel = Travel::of::<B>((k, v), call, strategy, &split.exchange);
    let parts = travel.pack::<B>(k, v);
    let how = (travel, call, strategy);
    let remote = Remote::start(parts.clone(), how, exchange, || call.forward());
    let own = travel.take(&parts, split.own.pieces.iter().map(|piece| &piece.range));
    let moves = split.exchange.moves_rows(call.prepared().rank());
    let travels = strategy == ExchangeStrategy::AllGather || moves;
    let own = forward_over::<B>(q, travel.unpack_buffer(own), &split.own, call, travels);
    let mut merger = Merger::<B>::new(own);
    let remote = remote.finish(call);
    if split.remote.len > 0 {
        let remote = forward_over::<B>(q, remote.clone(), &split.remote, call, false);
        merger = merger.add(remote);
    }
    (merger.finish(sinks.as_ref()), remote)
}

/// [`backward`] with overlap: gradients of others' keys leave as soon as they are there, those of the rank's own are computed
/// meanwhile. They are added up in `f32` at least: the rank's own first, then the others' in rank order.
pub(super) fn overlapped_backward<B: InnerAttention>(
    saved: &Saved<B>,
    dout: &FloatTensor<B>,
    call: &AttentionCall,
    strategy: ExchangeStrategy,
    of: u64,
) -> AttentionGradients<FloatTensor<B>> {
    let AttentionInput { k, v, .. } = &saved.input;
    let prepared = call.prepared();
    let split = prepared.split();
    let remote = saved.exchanged.clone().unwrap_or_else(|| {
        let travel = Travel::of::<B>((k, v), call, strategy, &split.exchange);
        let again = || call.backward("attention again", of);
        let parts = travel.pack::<B>(k, v);
        Remote::start(parts, (travel, call, strategy), again(), again).finish(call)
    });
    let back = Travel::of::<B>((k, v), call, strategy, &split.back.plan);
    let mut dq: Option<Tensor<B, 4>> = None;
    let grads = if split.remote.len > 0 {
        let grads = backward_over(saved, remote, dout, &split.remote, call);
        dq = Some(rows::wrap(&grads.dq));
        back.pack_buffer::<B>(&grads.dk, &grads.dv, split.remote.len)
    } else {
        back.pack_buffer::<B>(k, v, 0)
    };
    let returning = start_return(grads, (back, call, strategy), of);
    let own_ranges: Vec<_> = (split.own.pieces.iter())
        .map(|piece| piece.range.clone())
        .collect();
    let num_rows = prepared.sizes()[prepared.rank()];
    let own = if rows::are_all(&own_ranges, num_rows) && k.shape()[0] == 1 {
        (k.clone(), v.clone())
    } else {
        back.unpack_buffer(back.take(&back.pack::<B>(k, v), &own_ranges))
    };
    let own = backward_over(saved, own, dout, &split.own, call);
    let own_rows = back.pack_buffer::<B>(&own.dk, &own.dv, split.own.len);
    let returned = returning.into_iter().map(Pending::finish);
    let total = own_rows.into_iter().zip(returned).map(|(own, returned)| {
        let mut parts = rows_of(&own, back.dim(), own_ranges.clone());
        if strategy == ExchangeStrategy::AllGather {
            parts.push((0..num_rows, returned));
        } else {
            let targets = split.back.targets.iter().flatten().cloned();
            parts.extend(rows_of(&returned, back.dim(), targets));
        }
        Payload::sum_rows(&parts, back.dim(), num_rows, &own)
    });
    let batch = prepared.plan().documents().batch_size();
    let (dk, dv) = back.unpack(total.collect(), batch);
    // A sum of two is rounded once, whatever it is computed in.
    let dq = match dq {
        Some(dq) => rows::unwrap(rows::wrap::<B, 4>(&own.dq) + dq),
        None => own.dq,
    };
    AttentionGradients::new(dq, dk, dv).with_dsinks(own.dsinks)
}

/// Sends the gradients of others' keys to their owners.
fn start_return<B: InnerAttention>(
    parts: Vec<Payload<B>>,
    (travel, call, strategy): (Travel, &AttentionCall, ExchangeStrategy),
    of: u64,
) -> Vec<Pending<B>> {
    let prepared = call.prepared();
    let split = prepared.split();
    let adjoint = || call.backward("attention", of);
    if strategy == ExchangeStrategy::AllGather {
        let sizes = prepared.sizes().clone();
        let start = |rows: Payload<B>| {
            let all = place(&rows, &split.gathered, sizes.iter().sum());
            let op = Collective::ReduceScatter {
                dim: 0,
                sizes: sizes.clone(),
            };
            B::collective_start(all, &op, call.group(), adjoint())
        };
        return parts.into_iter().map(start).collect();
    }
    travel.start(parts, (call, &split.back.plan), adjoint(), adjoint)
}
