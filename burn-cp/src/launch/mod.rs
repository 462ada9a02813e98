//! How the ranks of a world are started.
//!
//! As threads of one process: [`threads`] returns when all closures have ended; [`threads_detached`] returns at once, for callers
//! that must not wait for a rank that never arrives. As processes that torchrun, srun or mpirun have started: [`process`] runs
//! one closure, and [`from_env`] connects this process with the others and leaves the running to the caller. Either way the
//! error is the **first** failure of the world.

mod device;
mod environment;
mod processes;
mod slurm;
#[cfg(test)]
mod tests;
mod threads;

use std::{
    any::Any,
    error::Error,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    time::Duration,
};

pub use device::{DeviceError, RankDevice};
pub use environment::{EnvironmentError, Place, Rendezvous, Scheme};
pub use processes::{
    Process, ProcessOptions, TensorTransport, from_env, from_env_with, process, process_with,
};
pub use threads::{DetachedWorld, ThreadsOptions, threads, threads_detached, threads_with};

use crate::comm::{
    CommError, ConnectError, FailureCause, MpiError, RankContext, RankFailure, panic_message,
};

/// Why a world did not end well.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A world needs at least one rank.
    #[error("world_size must be at least 1, got 0")]
    EmptyWorld,
    /// The operating system refused a thread.
    #[error("cannot start a thread for rank {rank}: {reason}")]
    Spawn {
        /// The rank whose thread could not be started.
        rank: usize,
        /// What the system said.
        reason: String,
    },
    /// The environment does not say which rank this process is.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The processes could not be connected.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The processes cannot exchange tensors.
    #[error(transparent)]
    Mpi(#[from] MpiError),
    /// The first failure of the world.
    #[error(transparent)]
    Rank(#[from] RankFailure),
    /// A detached world had not ended in time.
    #[error("after {waited:?}, {num_running} ranks were still running")]
    StillRunning {
        /// How long the caller waited.
        waited: Duration,
        /// Ranks that had not ended.
        num_running: usize,
    },
}

/// An error that left a rank's closure as a panic.
struct Raised(Arc<dyn Error + Send + Sync>);

/// Ends this rank's closure with an error, from where none can be returned, such as a step of burn-train's: the launcher reports
/// it as if the closure had returned it.
///
/// Unwinds without the panic hook's message, so outside of a launcher's closure the log alone says why.
pub fn raise(error: impl Into<Box<dyn Error + Send + Sync>>) -> ! {
    match error.into().downcast::<CommError>() {
        Ok(error) => error.raise(),
        Err(error) => {
            tracing::error!(%error, "a rank ends");
            resume_unwind(Box::new(Raised(error.into())))
        }
    }
}

/// Runs a rank's closure: its value, or why there is none. What the rank's groups have on devices is let go with it, whoever keeps a group.
fn outcome<T, E>(
    context: RankContext,
    f: impl FnOnce(RankContext) -> Result<T, E>,
) -> (Option<T>, Option<FailureCause>)
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let of_rank = context.clone();
    let ended = catch_unwind(AssertUnwindSafe(|| f(context)));
    of_rank.leave_devices();
    match ended {
        Ok(Ok(value)) => (Some(value), None),
        Ok(Err(error)) => (None, Some(cause_of_error(error.into()))),
        Err(payload) => (None, Some(cause_of_panic(payload.as_ref()))),
    }
}

fn cause_of_error(error: Box<dyn Error + Send + Sync>) -> FailureCause {
    match error.downcast::<CommError>() {
        Ok(error) => FailureCause::Comm(*error),
        Err(error) => FailureCause::Error(error.into()),
    }
}

fn cause_of_panic(payload: &(dyn Any + Send)) -> FailureCause {
    if let Some(error) = payload.downcast_ref::<CommError>() {
        return FailureCause::Comm(error.clone());
    }
    if let Some(Raised(error)) = payload.downcast_ref() {
        return FailureCause::Error(error.clone());
    }
    FailureCause::Panic(panic_message(payload))
}

/// Waits for threads that take down what a world's ranks have used on devices, but not for one that is stuck.
fn wait_for_helpers(hub: Option<&crate::comm::Hub>) {
    #[cfg(feature = "cuda")]
    crate::comm::wait_for_helpers(hub, std::time::Duration::from_secs(20));
    let _ = hub;
}
