//! Looks after a communicator while its rank does something else.

use std::{
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use cudarc::nccl::sys::ncclResult_t;

use super::{communicator::Shared, error::NcclError};
use crate::comm::{CommError, FailureCause};

/// Stops when it is dropped.
pub(super) struct Watchdog {
    _stop: mpsc::Sender<()>,
}

impl Watchdog {
    pub(super) fn start(shared: &Arc<Shared>) -> Self {
        let (stop, stopped) = mpsc::channel();
        let shared = shared.clone();
        let look =
            (shared.deadline / 20).clamp(Duration::from_millis(1), Duration::from_millis(100));
        let watch = move || {
            while stopped.recv_timeout(look) == Err(RecvTimeoutError::Timeout) {
                if let Some(reason) = fault(&shared) {
                    report(&shared, &reason);
                    // Kernels that wait for a peer end, and with them the waits of this rank's thread.
                    shared.abort();
                    return;
                }
            }
        };
        if let Err(error) = thread::Builder::new()
            .name("nccl-watchdog".into())
            .spawn(watch)
        {
            tracing::error!(%error, "no watchdog: a rank that hangs will not be noticed by NCCL");
        }
        Self { _stop: stop }
    }
}

/// Why a communicator has to be aborted.
enum Fault {
    /// Somebody else has reported a failure.
    World,
    /// NCCL has reported one.
    Nccl(NcclError),
    /// An operation is not done by the deadline.
    Late { number: u64, waited: Duration },
}

fn fault(shared: &Shared) -> Option<Fault> {
    let observer = shared.observer.as_ref();
    if observer.is_some_and(|world| world.failure().is_some()) {
        return Some(Fault::World);
    }
    match shared.error() {
        Ok(ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) => {}
        Ok(code) => {
            return Some(Fault::Nccl(NcclError::Call {
                what: "an operation",
                code,
                detail: String::new(),
            }));
        }
        Err(error) => return Some(Fault::Nccl(error)),
    }
    let first = match shared.drop_ended() {
        Ok(first) => first.or_else(|| *shared.starting()),
        Err(error) => return Some(Fault::Nccl(error)),
    };
    let (number, started) = first?;
    let waited = started.elapsed();
    (waited > shared.deadline).then_some(Fault::Late { number, waited })
}

fn report(shared: &Shared, fault: &Fault) {
    let Some(observer) = &shared.observer else {
        return;
    };
    match fault {
        Fault::World => {}
        Fault::Nccl(NcclError::Aborted) => {}
        Fault::Nccl(error) => {
            let error = CommError::Transport {
                group: observer.group().to_owned(),
                what: "an operation on the device".to_owned(),
                reason: error.to_string(),
            };
            observer.fail("an operation on the device", FailureCause::Comm(error));
        }
        // Becomes the world's failure.
        Fault::Late { number, waited } => {
            let error = observer.diagnose(*number, *waited);
            tracing::error!(%error, "aborting NCCL");
        }
    }
}
