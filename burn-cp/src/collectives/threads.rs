//! Collectives among ranks that are threads: each leaves a reference to its tensor and computes its own result from the others'.

use std::sync::Arc;

use burn::tensor::backend::Backend;

use super::{Call, Collective, ExchangePlan, Payload};
use crate::comm::ProcessGroup;

/// Runs a collective among the threads of one process. No bytes are copied to travel: peers read each other's tensors.
///
/// Every rank of `group` must call it. A failure ends the rank with a typed panic.
pub fn run_on_threads<B: Backend>(
    payload: Payload<B>,
    op: &Collective,
    group: &ProcessGroup,
    call: Call,
) -> Payload<B> {
    let signature = op.signature(&payload, &call);
    let parts = group
        .meet(call.number, signature, payload.clone())
        .unwrap_or_else(|error| error.raise());
    match op {
        Collective::AllGather { dim, .. } => Payload::concat(
            parts.iter().map(|part| Payload::clone(part)).collect(),
            *dim,
            &payload,
        ),
        Collective::ReduceScatter { dim, sizes } => {
            let start: usize = sizes[..group.rank()].iter().sum();
            let range = start..start + sizes[group.rank()];
            sum(parts.iter().map(|part| part.rows(*dim, &range)), payload)
        }
        Collective::AllReduce => sum(parts.iter().map(|part| Payload::clone(part)), payload),
        Collective::Exchange { dim, plan } => {
            let pieces = plan
                .pieces()
                .iter()
                .map(|piece| parts[piece.source].rows(*dim, &piece.range));
            Payload::concat(pieces.collect(), *dim, &payload)
        }
        Collective::ExchangeReverse { dim, plan } => sum_back(&parts, *dim, plan, &payload),
        Collective::Broadcast { root } => Payload::clone(&parts[*root]),
        Collective::Reduce { root } if *root == group.rank() => {
            sum(parts.iter().map(|part| Payload::clone(part)), payload)
        }
        Collective::Reduce { .. } => payload.zeros_like(0, payload.shape()[0]),
    }
}

fn sum<B: Backend>(parts: impl Iterator<Item = Payload<B>>, own: Payload<B>) -> Payload<B> {
    // A group has at least one rank, so there is always a sum.
    Payload::sum(parts).unwrap_or(own)
}

/// Adds up, for each row that this rank gave away, what its takers hold of it now; in the order of their ranks.
fn sum_back<B: Backend>(
    parts: &[Arc<Payload<B>>],
    dim: usize,
    plan: &ExchangePlan,
    like: &Payload<B>,
) -> Payload<B> {
    let dtype = like.dtype();
    let mut total = like.zeros_like(dim, plan.input_len()).widened();
    for sent in plan.sends() {
        let rows = sent.at..sent.at + sent.range.len();
        let taken = parts[sent.destination].rows(dim, &rows).widened();
        let so_far = total.rows(dim, &sent.range);
        total = if sent.range == (0..plan.input_len()) {
            so_far.add(taken)
        } else {
            total.with_rows(dim, &sent.range, so_far.add(taken))
        };
    }
    total.narrowed(dtype)
}
