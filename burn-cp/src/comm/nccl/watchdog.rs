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
use crate::comm::{CommError, FailureCause, Observer};

/// Ends the communicator when it is dropped.
pub(super) struct Watchdog {
    /// `None` where there is no thread.
    stop: Option<mpsc::Sender<()>>,
    shared: Arc<Shared>,
}

impl Watchdog {
    pub(super) fn start(shared: &Arc<Shared>) -> Self {
        let (stop, stopped) = mpsc::channel();
        let of_thread = shared.clone();
        // Before there is a thread: one that has not begun yet is waited for, too.
        let helper = shared.observer.as_ref().map(Observer::helper);
        let look =
            (shared.deadline / 20).clamp(Duration::from_millis(1), Duration::from_millis(100));
        let watch = move || {
            // Goes last: what the communicator holds of the device is let go before.
            let _helper = helper;
            let shared = of_thread;
            loop {
                if stopped.recv_timeout(look) != Err(RecvTimeoutError::Timeout) {
                    // Its rank does not wait for that: it may have a failure to report, which others wait for.
                    shared.close();
                    break;
                }
                if let Some(reason) = fault(&shared) {
                    report(&shared, &reason);
                    // Kernels that wait for a peer end, and with them the waits of this rank's thread.
                    shared.abort();
                    break;
                }
            }
            // The process must not end under the device's thread.
            shared.wait_for_announced();
            shared.leave_device();
        };
        let thread = thread::Builder::new().name("nccl-watchdog".into());
        let stop = match thread.spawn(watch) {
            Ok(_) => Some(stop),
            Err(error) => {
                tracing::error!(%error, "no watchdog: a rank that hangs will not be noticed by NCCL");
                None
            }
        };
        Self {
            stop,
            shared: shared.clone(),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // The thread notices that nobody can send any more.
        if self.stop.take().is_none() {
            self.shared.close();
        }
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
    // Also where no operation is on its way: the rank's next one may be long in coming.
    if let Err(error) = shared.stream.check() {
        return Some(Fault::Nccl(error));
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
    let oldest = match shared.oldest() {
        Ok(oldest) => oldest,
        Err(error) => return Some(Fault::Nccl(error)),
    };
    let (number, started) = oldest?;
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
