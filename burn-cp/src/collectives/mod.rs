//! Differentiable collectives on tensors.
//!
//! Every rank of a group must call the same collectives in the same order, also a rank that has nothing to say. All of them
//! are linear maps over the ranks' tensors taken together, so the adjoint of each is again one of them (see [`Collective`]);
//! on an autodiff backend the adjoint runs in the backward pass, and adjoints run in the reverse of program order on every
//! rank, however deep each rank's graph is. Sums are in rank order, so that nothing depends on who arrives first (those that NCCL
//! makes of more than two ranks in its own); `f16` and `bf16` are summed in `f32`.
//!
//! Failures end the rank with a typed panic that [`launch`](crate::launch) turns back into
//! [`CommError`](crate::comm::CommError). A tensor whose gradient is tracked on one rank must be tracked on all of them;
//! otherwise some ranks would wait for an adjoint that the others never run, so this is refused in forward.
//!
//! ```
//! use burn::tensor::Tensor;
//! use burn_cp::{collectives, comm, launch, mesh::DeviceMesh};
//!
//! type B = burn::backend::Flex;
//! let mesh = DeviceMesh::new([("cp", 2)])?;
//! let sums = launch::threads(2, |rank| {
//!     let group = comm::bind(&mesh, &rank)?.along(&["cp"])?;
//!     let mine = Tensor::<B, 1>::full([2], rank.rank() as f32 + 1.0, &Default::default());
//!     let all = collectives::all_gather(mine, 0, &group);
//!     Ok::<_, comm::CommError>(all.into_data().to_vec::<f32>().unwrap())
//! })?;
//! assert_eq!(sums[0], [1.0, 1.0, 2.0, 2.0]);
//! assert_eq!(sums[0], sums[1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backend;
mod decomposition;
mod exchange;
mod host_read;
mod linear;
mod messages;
mod payload;
mod pending;
mod threads;
#[cfg(feature = "cubecl")]
mod through_host;
mod wire;

use burn::tensor::{Numeric, Shape, Tensor};

pub use backend::CollectiveBackend;
pub use exchange::{ExchangeError, ExchangePlan, Piece, SentRange};
pub use host_read::num_host_reads;
pub(crate) use host_read::read_to_host;
pub use linear::{Call, Collective};
pub use messages::start_by_messages;
pub use payload::{CollectiveElement, Payload};
pub use pending::Pending;
pub use threads::start_on_threads;
#[cfg(feature = "cubecl")]
pub use through_host::start_through_host;
#[cfg(feature = "cuda")]
pub(crate) use {
    decomposition::{Combine, Decomposition},
    wire::{Later, Wire},
};

use crate::comm::ProcessGroup;

fn run<B, const D: usize, K>(
    tensor: Tensor<B, D, K>,
    op: &Collective,
    group: &ProcessGroup,
    label: &'static str,
) -> Tensor<B, D, K>
where
    B: CollectiveBackend,
    K: CollectiveElement<B>,
{
    let payload = B::collective(
        K::into_payload(tensor),
        op,
        group,
        Call::forward(group, label),
    );
    K::from_payload(payload)
}

fn check_dim<const D: usize>(what: &str, dim: usize) {
    assert!(dim < D, "{what}: dim must be below {D}, got {dim}");
}

/// The sizes of `dim` on every rank, from a host message.
fn sizes_of<const D: usize>(shape: &Shape, dim: usize, group: &ProcessGroup) -> Vec<usize> {
    check_dim::<D>("all_gather", dim);
    if group.size() == 1 {
        return vec![shape[dim]];
    }
    group
        .host_all_gather("all_gather sizes", shape[dim])
        .unwrap_or_else(|error| error.raise())
}

/// Concatenates every rank's tensor along `dim`, in rank order; ranks may differ in the size of `dim`.
///
/// `[.., n_r, ..]` -> `[.., Σ n_r, ..]`. Every rank must call it. Adjoint: [`reduce_scatter`] with the same sizes, so a
/// loss that every rank computes from the result in full has its gradient multiplied by the number of ranks.
/// The sizes travel on the host first; use [`all_gather_sized`] where they are known.
pub fn all_gather<B, const D: usize, K>(
    tensor: Tensor<B, D, K>,
    dim: usize,
    group: &ProcessGroup,
) -> Tensor<B, D, K>
where
    B: CollectiveBackend,
    K: CollectiveElement<B>,
{
    let sizes = sizes_of::<D>(&tensor.shape(), dim, group);
    all_gather_sized(tensor, dim, &sizes, group)
}

/// [`all_gather`] for callers who know the size of `dim` on every rank.
///
/// # Panics
/// `sizes` does not have one entry per rank, or this rank's entry is not the tensor's size.
pub fn all_gather_sized<B, const D: usize, K>(
    tensor: Tensor<B, D, K>,
    dim: usize,
    sizes: &[usize],
    group: &ProcessGroup,
) -> Tensor<B, D, K>
where
    B: CollectiveBackend,
    K: CollectiveElement<B>,
{
    check_dim::<D>("all_gather", dim);
    assert_eq!(
        sizes.len(),
        group.size(),
        "all_gather: one size per rank expected"
    );
    assert_eq!(
        sizes[group.rank()],
        tensor.shape()[dim],
        "all_gather: this rank's size of dim {dim}"
    );
    run(
        tensor,
        &Collective::AllGather {
            dim,
            sizes: sizes.into(),
        },
        group,
        "all_gather",
    )
}

/// Sums every rank's tensor and leaves each rank its part of `dim`: `sizes[r]` rows for rank `r`, in rank order.
///
/// `[.., Σ sizes, ..]` -> `[.., sizes[rank], ..]`. Every rank must call it with the same shape and sizes. Adjoint: [`all_gather`].
///
/// # Panics
/// `sizes` does not have one entry per rank or does not add up to the size of `dim`.
pub fn reduce_scatter<B, const D: usize, K>(
    tensor: Tensor<B, D, K>,
    dim: usize,
    sizes: &[usize],
    group: &ProcessGroup,
) -> Tensor<B, D, K>
where
    B: CollectiveBackend,
    K: CollectiveElement<B> + Numeric<B>,
{
    check_dim::<D>("reduce_scatter", dim);
    assert_eq!(
        sizes.len(),
        group.size(),
        "reduce_scatter: one size per rank expected"
    );
    assert_eq!(
        sizes.iter().sum::<usize>(),
        tensor.shape()[dim],
        "reduce_scatter: sizes must add up to dim {dim}"
    );
    run(
        tensor,
        &Collective::ReduceScatter {
            dim,
            sizes: sizes.into(),
        },
        group,
        "reduce_scatter",
    )
}

/// Sums every rank's tensor, `[..]`, of one shape and dtype on all ranks -> the same. Every rank must call it. Adjoint: itself.
pub fn all_reduce<B, const D: usize, K>(
    tensor: Tensor<B, D, K>,
    group: &ProcessGroup,
) -> Tensor<B, D, K>
where
    B: CollectiveBackend,
    K: CollectiveElement<B> + Numeric<B>,
{
    run(tensor, &Collective::AllReduce, group, "all_reduce")
}

/// Gives every rank the tensor of the group's rank `root`, `[..]` -> the same; the others pass a tensor of its shape and dtype.
///
/// Every rank must call it. Adjoint: the sum over ranks at the root, zeros elsewhere.
///
/// # Panics
/// `root` is not a rank of the group.
pub fn broadcast<B, const D: usize, K>(
    tensor: Tensor<B, D, K>,
    root: usize,
    group: &ProcessGroup,
) -> Tensor<B, D, K>
where
    B: CollectiveBackend,
    K: CollectiveElement<B>,
{
    assert!(
        root < group.size(),
        "broadcast: root must be below {}, got {root}",
        group.size()
    );
    run(tensor, &Collective::Broadcast { root }, group, "broadcast")
}

/// Sends `send_sizes[r]` consecutive rows of `dim` to each rank `r`, in rank order; what is received comes in source order.
///
/// `[.., Σ send_sizes, ..]` -> `[.., Σ received, ..]`; sizes may be 0 and differ freely. The sizes travel on the host first.
/// Every rank must call it. Adjoint: the reverse exchange.
///
/// # Panics
/// `send_sizes` does not have one entry per rank or does not add up to the size of `dim`.
pub fn all_to_all_v<B, const D: usize, K>(
    tensor: Tensor<B, D, K>,
    dim: usize,
    send_sizes: &[usize],
    group: &ProcessGroup,
) -> Tensor<B, D, K>
where
    B: CollectiveBackend,
    K: CollectiveElement<B>,
{
    check_dim::<D>("all_to_all_v", dim);
    assert_eq!(
        send_sizes.len(),
        group.size(),
        "all_to_all_v: one size per rank expected"
    );
    assert_eq!(
        send_sizes.iter().sum::<usize>(),
        tensor.shape()[dim],
        "all_to_all_v: sizes must add up to dim {dim}"
    );
    let matrix = group
        .host_all_gather("all_to_all_v sizes", send_sizes.to_vec())
        .unwrap_or_else(|error| error.raise());
    let plan = ExchangePlan::all_to_all_v(&matrix, group.rank());
    run(
        tensor,
        &Collective::Exchange {
            dim,
            plan: plan.into(),
        },
        group,
        "all_to_all_v",
    )
}

/// Moves planned ranges of `dim` between pairs of ranks: the result is the concatenation of the plan's pieces.
///
/// `[.., plan.input_len(), ..]` -> `[.., plan.output_len(), ..]`. A row may go to several ranks or to none. Every rank must
/// call it, each with its own view of one plan. Adjoint: the reverse exchange, which sums rows that went to several ranks,
/// in rank order.
///
/// # Panics
/// The tensor's size of `dim` is not the plan's input length, or the plan is one for another group size.
pub fn exchange<B, const D: usize, K>(
    tensor: Tensor<B, D, K>,
    dim: usize,
    plan: &std::sync::Arc<ExchangePlan>,
    group: &ProcessGroup,
) -> Tensor<B, D, K>
where
    B: CollectiveBackend,
    K: CollectiveElement<B>,
{
    check_dim::<D>("exchange", dim);
    assert_eq!(
        plan.world_size(),
        group.size(),
        "exchange: the plan's number of ranks"
    );
    assert_eq!(
        plan.input_len(),
        tensor.shape()[dim],
        "exchange: the plan's input length of dim {dim}"
    );
    run(
        tensor,
        &Collective::Exchange {
            dim,
            plan: plan.clone(),
        },
        group,
        "exchange",
    )
}

/// Waits until every rank of the group has arrived. Every rank must call it.
pub fn barrier(group: &ProcessGroup) {
    group.barrier().unwrap_or_else(|error| error.raise());
}
