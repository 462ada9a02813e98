//! Keys and values pass round the ranks; each computes with what it needs of the shard that has come to it, and merges the results.
//!
//! After ring attention (Liu, Zaharia and Abbeel, 2023, arXiv:2310.01889), over segments of any layout. The next transfer is started
//! before the rank computes. Rows go on only as far as a rank still needs them. In backward keys and values pass round again, and the
//! gradients of a shard's keys go straight to its owner after each step, which adds them up in the order of the steps.

use burn::tensor::{Tensor, TensorMetadata, ops::FloatTensor};
use burn_cp_kernels::{AttentionGradients, AttentionInput, AttentionOutput};

use super::{
    AttentionCall, InnerAttention,
    driver::{Saved, backward_over, forward_over},
    merge::Merger,
    ring_plan::{RingPlan, RingStep},
    rows::{self, KvRows, add_rows, pack_buffer, place, take, to_payload, to_tensor},
    split::Returns,
};
use crate::collectives::{Call, Collective, Payload, Pending};

/// Starts to pass on what a step moves.
fn pass_on<B: InnerAttention>(
    rows: Payload<B>,
    step: &RingStep,
    call: &AttentionCall,
    operation: Call,
) -> Pending<B> {
    let plan = step.exchange.clone();
    let op = Collective::Exchange { dim: 0, plan };
    B::collective_start(rows, &op, call.group(), operation)
}

/// Attention of this rank's queries, and the number of the first operation.
pub(super) fn forward<B: InnerAttention>(
    input: &AttentionInput<FloatTensor<B>>,
    call: &AttentionCall,
) -> (AttentionOutput<FloatTensor<B>>, Option<u64>) {
    let AttentionInput { q, k, v, sinks, .. } = input;
    let RingPlan { own, steps } = call.prepared().ring();
    let kv = KvRows::of::<B>(k, v);
    let rows = KvRows::pack::<B>(k, v);
    let mut first = None;
    let mut start = |rows: Payload<B>, step: &RingStep| {
        let operation = call.forward();
        first.get_or_insert(operation.number);
        pass_on(rows, step, call, operation)
    };
    let rank = call.prepared().rank();
    let travels = |step: Option<&RingStep>| step.is_some_and(|step| step.exchange.moves_rows(rank));
    let mut pending = steps.first().map(|step| start(rows.clone(), step));
    let own_rows = take(&rows, own.pieces.iter().map(|piece| &piece.range));
    let partial = forward_over::<B>(
        q,
        kv.unpack_buffer(own_rows),
        own,
        call,
        travels(steps.first()),
    );
    let mut merger = Merger::<B>::new(partial);
    for (index, step) in steps.iter().enumerate() {
        let Some(arrived) = pending.take().map(Pending::finish) else {
            break;
        };
        let next = steps.get(index + 1);
        pending = next.map(|next| start(arrived.clone(), next));
        if step.keys.len > 0 {
            let keys = kv.unpack_buffer(take(&arrived, &step.take));
            let partial = forward_over::<B>(q, keys, &step.keys, call, travels(next));
            merger = merger.add(partial);
        }
    }
    (merger.finish(sinks.as_ref()), first)
}

/// Gradients of [`forward`], whose first operation had the number `of`.
pub(super) fn backward<B: InnerAttention>(
    saved: &Saved<B>,
    dout: &FloatTensor<B>,
    call: &AttentionCall,
    of: u64,
) -> AttentionGradients<FloatTensor<B>> {
    let AttentionInput { q, k, v, .. } = &saved.input;
    let RingPlan { own, steps } = call.prepared().ring();
    let kv = KvRows::of::<B>(k, v);
    let rows = KvRows::pack::<B>(k, v);
    let start = |rows: Payload<B>, step: &RingStep| {
        pass_on(rows, step, call, call.backward("attention again", of))
    };
    let mut pending = steps.first().map(|step| start(rows.clone(), step));
    let own_ranges: Vec<_> = own.pieces.iter().map(|piece| piece.range.clone()).collect();
    let own_keys = kv.unpack_buffer(take(&rows, &own_ranges));
    let grads = backward_over(saved, own_keys, dout, own, call);
    let dsinks = grads.dsinks;
    let mut dq: Tensor<B, 4> = to_tensor(Payload::Float(grads.dq).widened());
    let own_rows = pack_buffer::<B>(&grads.dk, &grads.dv, own.len).widened();
    let mut total = place(&own_rows, &own_ranges, rows.shape()[0]);
    let mut returning = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let Some(arrived) = pending.take().map(Pending::finish) else {
            break;
        };
        pending = (steps.get(index + 1)).map(|next| start(arrived.clone(), next));
        let mut grads = rows.zeros_like(0, 0);
        if step.keys.len > 0 {
            let keys = kv.unpack_buffer(take(&arrived, &step.take));
            let part = backward_over(saved, keys, dout, &step.keys, call);
            dq = dq + to_tensor(Payload::Float(part.dq).widened());
            grads = pack_buffer::<B>(&part.dk, &part.dv, step.keys.len);
        }
        // What the step before has sent has had this step's time to arrive.
        total = add_returned(total, returning.drain(..));
        if let Some(back) = &step.back {
            let plan = back.plan.clone();
            let op = Collective::Exchange { dim: 0, plan };
            let operation = call.backward("attention", of);
            let sent = B::collective_start(grads, &op, call.group(), operation);
            returning.push((sent, back));
        }
    }
    total = add_returned(total, returning.into_iter());
    let batch = call.prepared().plan().documents().batch_size();
    let (dk, dv) = kv.unpack(total.narrowed(rows.dtype()), batch);
    let dq = to_payload(dq).narrowed(q.dtype());
    AttentionGradients::new(rows::unwrap(to_tensor::<B, 4>(dq)), dk, dv).with_dsinks(dsinks)
}

/// The gradients of this rank's rows with what others have made of them in a step.
fn add_returned<'a, B: InnerAttention>(
    total: Payload<B>,
    returning: impl Iterator<Item = (Pending<B>, &'a Returns)>,
) -> Payload<B> {
    returning.fold(total, |total, (pending, back)| {
        let rows = pending.finish();
        // Of one step, so of one rank at most.
        match back.targets.first() {
            Some(ranges) => add_rows(total, rows, ranges),
            None => total,
        }
    })
}
