//! Collectives among ranks that are threads: each leaves a reference to its tensor and computes its own result from the others'.

use burn::tensor::backend::Backend;

use super::{Call, Collective, Payload};
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
    let work = op.decompose(&payload.shape(), group.rank(), group.size());
    let taken = (work.takes.iter()).map(|piece| parts[piece.source].rows(work.dim, &piece.range));
    work.combine.apply(taken, work.dim, &payload)
}
