//! One rank's end of a group's device transport.

use std::{
    collections::VecDeque,
    fmt,
    mem::MaybeUninit,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use cudarc::nccl::sys;

use super::{
    cuda::{Event, Stream},
    error::{NcclError, check_libraries},
    queue::{Queue, accepted, call},
    watchdog::Watchdog,
};
use crate::comm::{CommError, Observer};

/// What the ranks of a communicator have in common before it exists. Made by one of them.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct UniqueId(Vec<u8>);

impl UniqueId {
    /// A new one.
    ///
    /// # Errors
    /// NCCL or the driver is not there, or no network interface can be used.
    pub(crate) fn new() -> Result<Self, NcclError> {
        check_libraries()?;
        let id = cudarc::nccl::result::get_uniqueid()
            .map_err(|error| call("making a unique id", error.0, None))?;
        Ok(Self(id.internal.iter().map(|byte| *byte as u8).collect()))
    }

    fn raw(&self) -> sys::ncclUniqueId {
        let mut internal = [0; 128];
        for (to, from) in internal.iter_mut().zip(&self.0) {
            *to = *from as _;
        }
        sys::ncclUniqueId { internal }
    }
}

/// A communicator that the library holds. Freed by an abort.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Raw(pub(super) sys::ncclComm_t);

// SAFETY: NCCL lets other threads than the creating one use a communicator, one at a time, which the mutex around it sees to.
unsafe impl Send for Raw {}

/// An operation that may not have ended yet.
pub(super) struct InFlight {
    pub(super) number: u64,
    pub(super) started: Instant,
    pub(super) end: Arc<Event>,
}

/// What the rank's thread and the watchdog share.
pub(super) struct Shared {
    pub(super) raw: Mutex<Option<Raw>>,
    pub(super) stream: Stream,
    pub(super) in_flight: Mutex<VecDeque<InFlight>>,
    pub(super) observer: Option<Observer>,
    pub(super) deadline: Duration,
}

/// One rank's end of a group's device transport.
pub(crate) struct Communicator {
    shared: Arc<Shared>,
    rank: usize,
    size: usize,
    ordinal: usize,
    _watchdog: Watchdog,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            size,
            ordinal,
            ..
        } = self;
        write!(f, "Communicator({rank} of {size} on device {ordinal})")
    }
}

/// An operation that was started.
#[derive(Debug)]
#[must_use = "work that uses the result has to be ordered behind the operation"]
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    end: Arc<Event>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Ticket {
    /// Makes all work that is submitted to the device from now on wait for the operation, on the device. Its buffers may be let go
    /// afterwards. The host does not wait.
    pub(crate) fn order_before_later_work(self) -> Result<(), NcclError> {
        self.shared.stream.enter()?;
        self.shared.stream.hold_later_work(&self.end)
    }
}

impl Communicator {
    /// Joins `size` ranks that use the same id. Every rank must call it; `ordinal` is the rank's GPU. Waits for the others until
    /// the deadline, or until the world has failed.
    pub(crate) fn new(
        id: &UniqueId,
        [rank, size, ordinal]: [usize; 3],
        observer: Option<Observer>,
        deadline: Duration,
    ) -> Result<Self, NcclError> {
        check_libraries()?;
        let stream = Stream::new(ordinal)?;
        let mut config = non_blocking();
        let mut raw = MaybeUninit::uninit();
        let [c_rank, c_size] = [rank, size].map(|n| i32::try_from(n).unwrap_or(i32::MAX));
        // SAFETY: the out pointer and the configuration outlive the call, which copies what it keeps.
        let code = unsafe {
            sys::ncclCommInitRankConfig(raw.as_mut_ptr(), c_size, id.raw(), c_rank, &raw mut config)
        };
        accepted("joining the communicator", code, None)?;
        // SAFETY: the call was accepted, so it has written the handle.
        let raw = Raw(unsafe { raw.assume_init() });
        Self::finish_making(raw, stream, [rank, size, ordinal], observer, deadline)
    }

    fn finish_making(
        raw: Raw,
        stream: Stream,
        [rank, size, ordinal]: [usize; 3],
        observer: Option<Observer>,
        deadline: Duration,
    ) -> Result<Self, NcclError> {
        let shared = Arc::new(Shared {
            raw: Mutex::new(Some(raw)),
            stream,
            in_flight: Mutex::default(),
            observer,
            deadline,
        });
        if let Err(error) = shared.settle("joining the communicator") {
            shared.abort();
            return Err(error);
        }
        let watchdog = Watchdog::start(&shared);
        Ok(Self {
            shared,
            rank,
            size,
            ordinal,
            _watchdog: watchdog,
        })
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Starts operation `number`: what `enqueue` adds runs after all work that was submitted to the device before. The host does
    /// not wait for it.
    pub(crate) fn start(
        &self,
        number: u64,
        enqueue: impl FnOnce(&Queue<'_>) -> Result<(), NcclError>,
    ) -> Result<Ticket, NcclError> {
        let shared = &self.shared;
        shared.stream.enter()?;
        {
            let raw = shared.lock()?;
            shared.stream.wait_for_submitted_work()?;
            enqueue(&Queue {
                raw: raw.1,
                stream: &shared.stream,
            })?;
        }
        shared.settle("starting an operation")?;
        let end = Arc::new(shared.stream.record()?);
        let mut in_flight = shared
            .in_flight
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        in_flight.push_back(InFlight {
            number,
            started: Instant::now(),
            end: end.clone(),
        });
        Ok(Ticket {
            shared: shared.clone(),
            end,
        })
    }

    /// Ends everything that runs or waits in the communicator.
    #[cfg(test)]
    pub(crate) fn abort(&self) {
        self.shared.abort();
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// A guard of a communicator that has not been aborted.
pub(super) struct Alive<'a>(
    #[allow(dead_code, reason = "held")] MutexGuard<'a, Option<Raw>>,
    Raw,
);

impl Shared {
    fn guard(&self) -> MutexGuard<'_, Option<Raw>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock(&self) -> Result<Alive<'_>, NcclError> {
        let guard = self.guard();
        let raw = guard.ok_or(NcclError::Aborted)?;
        Ok(Alive(guard, raw))
    }

    /// Waits until NCCL has taken what it was given: connections are made when they are first needed. Not for the device.
    fn settle(&self, what: &'static str) -> Result<(), NcclError> {
        let start = Instant::now();
        loop {
            let code = self.error()?;
            match code {
                sys::ncclResult_t::ncclSuccess => return Ok(()),
                sys::ncclResult_t::ncclInProgress => {}
                code => return Err(call(what, code, self.lock().ok().map(|raw| raw.1))),
            }
            let waited = start.elapsed();
            let failed = self
                .observer
                .as_ref()
                .is_some_and(|world| world.failure().is_some());
            if failed || waited > self.deadline {
                return Err(NcclError::Slow { what, waited });
            }
            if waited > Duration::from_micros(200) {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// What NCCL has to say of the communicator.
    pub(super) fn error(&self) -> Result<sys::ncclResult_t, NcclError> {
        let raw = self.lock()?;
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: alive while the lock is held; the out pointer outlives the call.
        let code = unsafe { sys::ncclCommGetAsyncError(raw.1.0, &raw mut state) };
        accepted("asking for errors", code, Some(raw.1))?;
        Ok(state)
    }

    pub(super) fn abort(&self) {
        if let Some(raw) = self.guard().take() {
            // SAFETY: taken out, so that nobody uses it any more. There is nothing to do about an error.
            unsafe { sys::ncclCommAbort(raw.0) };
        }
    }

    /// Ends the communicator: when all that it was given has ended, or at once where that will never be.
    fn close(&self) {
        let start = Instant::now();
        let idle = loop {
            let in_flight = self
                .in_flight
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if in_flight
                .iter()
                .all(|op| op.end.has_happened().unwrap_or(false))
            {
                break true;
            }
            drop(in_flight);
            let failed = self
                .observer
                .as_ref()
                .is_some_and(|world| world.failure().is_some());
            if failed || start.elapsed() > self.deadline || self.guard().is_none() {
                break false;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        if !idle {
            // Destroying would wait for what runs, which may wait for ranks that are gone.
            self.abort();
        } else if let Some(raw) = self.guard().take() {
            // SAFETY: as in `abort`.
            unsafe { sys::ncclCommDestroy(raw.0) };
        }
    }
}

/// A configuration that leaves everything to NCCL, but for calls that return before they are done.
fn non_blocking() -> sys::ncclConfig_t {
    const UNDEFINED: i32 = i32::MIN;
    const MAGIC: u32 = 0xcafe_beef;
    // The version of the headers that the bindings were made from decides what NCCL reads; see NCCL_CONFIG_INITIALIZER.
    const VERSION: u32 = 22_800;
    // SAFETY: a struct of integers and pointers, for which zeros are legal; what NCCL must not read as given is set below.
    let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
    config.size = size_of::<sys::ncclConfig_t>();
    config.magic = MAGIC;
    config.version = VERSION;
    config.blocking = 0;
    config.cgaClusterSize = UNDEFINED;
    config.minCTAs = UNDEFINED;
    config.maxCTAs = UNDEFINED;
    config.splitShare = UNDEFINED;
    config.trafficClass = UNDEFINED;
    config.collnetEnable = UNDEFINED;
    config.CTAPolicy = UNDEFINED;
    config.shrinkShare = UNDEFINED;
    config.nvlsCTAs = UNDEFINED;
    config.nChannelsPerNetPeer = UNDEFINED;
    config.nvlinkCentricSched = UNDEFINED;
    config
}

impl NcclError {
    /// As an error of the group's operation; where the world has failed, that failure, which is its cause.
    pub(crate) fn of(self, observer: Option<&Observer>, what: &str) -> CommError {
        let failed = observer.and_then(Observer::failure);
        failed.unwrap_or_else(|| CommError::Transport {
            group: observer.map_or_else(|| "solo".to_owned(), |world| world.group().to_owned()),
            what: what.to_owned(),
            reason: self.to_string(),
        })
    }
}
