//! What a backend must do to take part in collectives.

use burn::tensor::{DType, backend::Backend, ops::FloatTensor};

use super::{Call, Collective, Payload, Pending, start_by_messages, start_on_threads};
use crate::comm::{ProcessGroup, Transport};

/// A backend whose tensors can be exchanged between ranks.
///
/// Implemented for Flex and NdArray (features `flex`, `ndarray`), CubeCL backends plain and fused (features `wgpu`, `cuda`), and for
/// `Autodiff` over any such backend. The provided
/// method serves every backend whose tensors can be read by other threads, and be brought to the host and back.
pub trait CollectiveBackend: Backend {
    /// Starts a collective, and returns before its result is there. Every rank of `group` must call it with the same `op`, up to
    /// what may differ between ranks. Several of one group may be under way; ranks start them in the same order, and may finish them in
    /// any. Finish them before an operation of another group starts: a copy between GPUs that has not begun holds up what the device is
    /// given after it, also what another group's ranks wait for.
    ///
    /// Not differentiable on its own: an autodiff backend runs [`Self::collective`] at once.
    fn collective_start(
        payload: Payload<Self>,
        op: &Collective,
        group: &ProcessGroup,
        call: Call,
    ) -> Pending<Self> {
        match group.transport() {
            Transport::Processes => start_by_messages(payload, op, group, call),
            Transport::Solo | Transport::Threads => start_on_threads(payload, op, group, call),
        }
    }

    /// Runs a collective: starts and finishes it. Every rank of `group` must call it with the same `op`, up to what may differ
    /// between ranks.
    ///
    /// On an autodiff backend a tracked float payload is differentiable, and chained in the group's program order.
    fn collective(
        payload: Payload<Self>,
        op: &Collective,
        group: &ProcessGroup,
        call: Call,
    ) -> Payload<Self> {
        Self::collective_start(payload, op, group, call).finish()
    }

    /// Whether `op` takes rows of any dim of tensors of a shape and dtype from where they are, so that nothing is won by putting them
    /// together first. The same answer on every rank of `group`, each of which must call it.
    fn moves_any_rows(
        _tensor: (&[usize], DType),
        _device: &Self::Device,
        _op: &Collective,
        group: &ProcessGroup,
    ) -> bool {
        group.transport() != Transport::Processes
    }

    /// Identity of a tracked tensor's node in the graph of autodiff, within the process; `None` on backends without autodiff, and
    /// for untracked tensors.
    ///
    /// Two ranks whose parameters have the same identity would wait for each other's backward pass.
    fn leaf_id(_tensor: &FloatTensor<Self>) -> Option<u64> {
        None
    }
}
