//! Collectives among ranks that are threads: each leaves a reference to its tensor and computes its own result from the others'.

use burn::tensor::backend::Backend;

use super::{Call, Collective, Payload, Pending};
use crate::comm::ProcessGroup;

/// Starts a collective among the threads of one process: leaves a reference to the tensor. No bytes are copied to travel: peers read
/// each other's tensors when they finish.
///
/// Every rank of `group` must call it. A failure ends the rank with a typed panic.
pub fn start_on_threads<B: Backend>(
    payload: Payload<B>,
    op: &Collective,
    group: &ProcessGroup,
    call: Call,
) -> Pending<B> {
    let signature = op.signature(&payload, &call);
    let posted = group
        .post(call.number, signature, payload.clone())
        .unwrap_or_else(|error| error.raise());
    let work = op.decompose(&payload.shape(), group.rank(), group.size());
    Pending::new(move || {
        let parts = posted.wait().unwrap_or_else(|error| error.raise());
        let taken =
            (work.takes.iter()).map(|piece| parts[piece.source].rows(work.dim, &piece.range));
        work.combine.apply(taken, work.dim, &payload)
    })
}
