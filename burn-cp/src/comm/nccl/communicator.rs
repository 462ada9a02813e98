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

/// Elements that NCCL adds up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F64,
    I32,
    I64,
    U32,
    U64,
    U8,
    I8,
}

impl Element {
    fn raw(self) -> sys::ncclDataType_t {
        match self {
            Self::F32 => sys::ncclDataType_t::ncclFloat32,
            Self::F64 => sys::ncclDataType_t::ncclFloat64,
            Self::I32 => sys::ncclDataType_t::ncclInt32,
            Self::I64 => sys::ncclDataType_t::ncclInt64,
            Self::U32 => sys::ncclDataType_t::ncclUint32,
            Self::U64 => sys::ncclDataType_t::ncclUint64,
            Self::U8 => sys::ncclDataType_t::ncclUint8,
            Self::I8 => sys::ncclDataType_t::ncclInt8,
        }
    }
}

/// A communicator that the library holds. Freed by an abort.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Raw(sys::ncclComm_t);

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

/// What an operation enqueues with; addresses are of the device, and valid until the operation has ended.
pub(crate) struct Queue<'a> {
    raw: Raw,
    stream: &'a Stream,
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

impl Queue<'_> {
    /// Several sends and receives that make progress together.
    pub(crate) fn grouped(
        &self,
        run: impl FnOnce() -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        // SAFETY: every start has its end, also where `run` fails.
        let opened = unsafe { sys::ncclGroupStart() };
        accepted("opening a group of operations", opened, None)?;
        let done = run();
        // SAFETY: as above.
        let closed = unsafe { sys::ncclGroupEnd() };
        let ended = accepted("closing a group of operations", closed, Some(self.raw));
        done.and(ended)
    }

    pub(crate) fn send(&self, to: usize, address: u64, num_bytes: usize) -> Result<(), NcclError> {
        // SAFETY: the caller keeps the buffer until the operation has ended.
        let code = unsafe {
            sys::ncclSend(
                address as _,
                num_bytes,
                sys::ncclDataType_t::ncclUint8,
                to as i32,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("sending", code, Some(self.raw))
    }

    pub(crate) fn receive(
        &self,
        from: usize,
        address: u64,
        num_bytes: usize,
    ) -> Result<(), NcclError> {
        // SAFETY: as for `send`; nobody else has the buffer.
        let code = unsafe {
            sys::ncclRecv(
                address as _,
                num_bytes,
                sys::ncclDataType_t::ncclUint8,
                from as i32,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("receiving", code, Some(self.raw))
    }

    /// Equal parts of all ranks, one behind the other.
    pub(crate) fn all_gather(&self, from: u64, to: u64, num_bytes: usize) -> Result<(), NcclError> {
        // SAFETY: as for `send` and `receive`.
        let code = unsafe {
            sys::ncclAllGather(
                from as _,
                to as _,
                num_bytes,
                sys::ncclDataType_t::ncclUint8,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("gathering", code, Some(self.raw))
    }

    /// Sums on every rank.
    pub(crate) fn all_reduce(
        &self,
        from: u64,
        to: u64,
        len: usize,
        element: Element,
    ) -> Result<(), NcclError> {
        let sum = sys::ncclRedOp_t::ncclSum;
        // SAFETY: as for `send` and `receive`.
        let code = unsafe {
            sys::ncclAllReduce(
                from as _,
                to as _,
                len,
                element.raw(),
                sum,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("adding up", code, Some(self.raw))
    }

    /// The root's buffer on every rank.
    pub(crate) fn broadcast(
        &self,
        from: u64,
        to: u64,
        num_bytes: usize,
        root: usize,
    ) -> Result<(), NcclError> {
        // SAFETY: as for `send` and `receive`.
        let code = unsafe {
            sys::ncclBroadcast(
                from as _,
                to as _,
                num_bytes,
                sys::ncclDataType_t::ncclUint8,
                root as i32,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("broadcasting", code, Some(self.raw))
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

fn accepted(
    what: &'static str,
    code: sys::ncclResult_t,
    comm: Option<Raw>,
) -> Result<(), NcclError> {
    match code {
        sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress => Ok(()),
        code => Err(call(what, code, comm)),
    }
}

fn call(what: &'static str, code: sys::ncclResult_t, comm: Option<Raw>) -> NcclError {
    let comm = comm.map_or(std::ptr::null_mut(), |comm| comm.0);
    // SAFETY: the library returns a string of its own or null.
    let detail = unsafe {
        let text = sys::ncclGetLastError(comm);
        if text.is_null() {
            String::new()
        } else {
            std::ffi::CStr::from_ptr(text)
                .to_string_lossy()
                .into_owned()
        }
    };
    let detail = if detail.is_empty() {
        detail
    } else {
        format!(" ({})", detail.trim())
    };
    NcclError::Call { what, code, detail }
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
