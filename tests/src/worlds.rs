//! Worlds of ranks in threads.

use std::time::Duration;

use burn::tensor::{Tensor, backend::AutodiffBackend};
use burn_cp::{
    comm::{self, CommError, Groups, ProcessGroup},
    launch::{self, LaunchError, ThreadsOptions},
    mesh::DeviceMesh,
    sharder::{ContextParallel, ContextParallelConfig},
};
use burn_cp_examples::train::Device;

use crate::{DEVICE, enter_rank};

/// Runs `f` on every rank of a mesh and returns the results in rank order; a rank waits for its peers for so long at most.
///
/// # Errors
/// The first failure of the world.
pub fn with_deadline<T: Send>(
    axes: &[(&str, usize)],
    deadline: Duration,
    f: impl Fn(Groups) -> T + Sync,
) -> Result<Vec<T>, LaunchError> {
    let mesh = DeviceMesh::new(axes.iter().copied()).expect("a legal mesh");
    let options = ThreadsOptions {
        deadline,
        ..ThreadsOptions::default()
    };
    launch::threads_with(mesh.world_size(), options, |rank| {
        enter_rank(&rank);
        Ok::<_, CommError>(f(comm::bind(&mesh, &rank)?))
    })
}

/// Runs `f` on every rank of a mesh and returns the results in rank order.
///
/// # Panics
/// The world failed.
pub fn on_groups<T: Send>(axes: &[(&str, usize)], f: impl Fn(Groups) -> T + Sync) -> Vec<T> {
    with_deadline(axes, Duration::from_secs(60), f).unwrap_or_else(|error| panic!("{error}"))
}

/// The deadline of worlds that are to end before it. A device makes kernels for many tests at once.
pub const DEADLINE: Duration = Duration::from_secs(match DEVICE {
    Device::Cpu => 5,
    _ => 60,
});

/// Runs `f` on every rank of one group and returns the results in rank order.
///
/// # Panics
/// The world failed.
pub fn on_ranks<T: Send>(world_size: usize, f: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    on_groups(&[("cp", world_size)], |groups| {
        f(groups.along(&["cp"]).expect("the mesh has the axis"))
    })
}

/// This rank's end of a run on a mesh of one axis, "cp", whatever the configuration's loss axes are.
///
/// # Panics
/// The mesh has no such axis.
pub fn sharder(groups: &Groups, config: ContextParallelConfig) -> ContextParallel {
    let config = ContextParallelConfig {
        loss_axes: vec!["cp".into()],
        ..config
    };
    ContextParallel::new(groups, config).expect("the mesh has the axis")
}

/// `loss.backward()` once every rank of the group has come this far.
///
/// Burn's clean-up after a backward pass waits for every graph of the process; a rank that were already one pass ahead would
/// hold its graph while it waits for the rank that waits for it.
///
/// # Panics
/// A peer failed.
pub fn backward<B: AutodiffBackend, const D: usize>(
    loss: &Tensor<B, D>,
    group: &ProcessGroup,
) -> B::Gradients {
    group.barrier().unwrap_or_else(|error| error.raise());
    loss.backward()
}
