//! One rank's end of a group's device transport.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use cudarc::nccl::sys;

use super::{
    cuda::{Event, Stream},
    direct::Direct,
    error::{NcclError, check_libraries},
    gpu::peers_of,
    join::{UniqueId, connected},
    operation::Announced,
    queue::accepted,
    watchdog::Watchdog,
};
use crate::comm::{CommError, Observer, claims::Claim};

/// Operations that may be on their way at once: fewer than the device queues, so that starting one never waits for a peer.
const MOST_IN_FLIGHT: usize = 256;

/// How long an abort waits for a call of the library to return.
const PATIENCE: Duration = Duration::from_secs(1);

/// Makes the device's thread run what it was given so far.
pub(crate) type Flush = Box<dyn Fn() + Send + Sync>;

/// A communicator that the library holds. Freed by an abort.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Raw(pub(super) sys::ncclComm_t);

// SAFETY: NCCL lets other threads than the creating one use a communicator, one at a time, which the mutex around it sees to.
unsafe impl Send for Raw {}
// SAFETY: as above; the one use without the mutex is an abort, which NCCL lets another thread make while a call does not return.
unsafe impl Sync for Raw {}

/// An operation that may not have ended yet.
pub(super) struct InFlight {
    pub(super) number: u64,
    pub(super) started: Instant,
    pub(super) end: Arc<Event>,
}

/// What the rank's thread, the device's thread and the watchdog share.
pub(super) struct Shared {
    /// `None` once it was aborted or destroyed. Locked during the library's calls.
    raw: Mutex<Option<Raw>>,
    /// The same, for an abort of a call that does not return.
    handle: Raw,
    aborted: AtomicBool,
    pub(super) stream: Arc<Stream>,
    /// Where the ranks' GPUs reach each other's memory.
    pub(super) direct: Option<Direct>,
    flush: Flush,
    pub(super) in_flight: Mutex<VecDeque<InFlight>>,
    /// The operation that is being started.
    pub(super) starting: Mutex<Option<(u64, Instant)>>,
    /// Tasks for the device's thread that use the communicator and have not run yet.
    pub(super) num_announced: AtomicUsize,
    /// Operations that were started and that later work has not been ordered behind.
    pub(super) num_open: AtomicUsize,
    /// What went wrong first where no rank waits for it.
    pub(super) error: Mutex<Option<NcclError>>,
    pub(super) observer: Option<Observer>,
    pub(super) deadline: Duration,
    claim: Mutex<Option<Claim>>,
}

/// A rank's place among those that join.
#[derive(Debug)]
pub(crate) struct Place {
    /// Rank of the group.
    pub(crate) rank: usize,
    /// Number of ranks.
    pub(crate) size: usize,
    /// The rank's GPU.
    pub(crate) ordinal: usize,
    /// Held until all that was started on it has ended.
    pub(crate) claim: Option<Claim>,
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

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Communicator {
    /// Joins ranks that use the same id, and connects them for all that a [`Queue`] can do, so that later calls wait for nobody. With
    /// `direct` they are threads of this process whose GPUs reach each other's memory. `flush` is for the device's thread, which may let
    /// tasks wait for more. Every rank must call it. Waits for the others
    /// until the deadline, or until the world has failed.
    pub(crate) fn new(
        id: &UniqueId,
        place: Place,
        direct: bool,
        flush: Flush,
        observer: Option<Observer>,
        deadline: Duration,
    ) -> Result<Self, NcclError> {
        check_libraries()?;
        let Place {
            rank,
            size,
            ordinal,
            claim,
        } = place;
        let stream = Arc::new(Stream::new(ordinal)?);
        let direct = direct.then(|| {
            let streams = (0..size).map(|_| Stream::new(ordinal));
            Ok(Direct {
                peers: peers_of(id.bytes(), size),
                rank,
                streams: streams.collect::<Result<_, NcclError>>()?,
            })
        });
        let direct = direct.transpose()?;
        let handle = connected(id, [rank, size], &stream, observer.as_ref(), deadline)?;
        let shared = Arc::new(Shared {
            raw: Mutex::new(Some(handle)),
            handle,
            aborted: AtomicBool::new(false),
            stream,
            direct,
            flush,
            in_flight: Mutex::default(),
            starting: Mutex::default(),
            num_announced: AtomicUsize::new(0),
            num_open: AtomicUsize::new(0),
            error: Mutex::default(),
            observer,
            deadline,
            claim: Mutex::new(claim),
        });
        let watchdog = Watchdog::start(&shared);
        Ok(Self {
            shared,
            rank,
            size,
            ordinal,
            _watchdog: watchdog,
        })
    }

    /// Whether the ranks' GPUs reach each other's memory, so that exchanges can be copies.
    pub(crate) fn is_direct(&self) -> bool {
        self.shared.direct.is_some()
    }

    /// Lets a rank's GPU and others reach each other's memory; whether they can.
    pub(crate) fn open(ordinal: usize, others: &[usize]) -> Result<bool, NcclError> {
        Stream::new(ordinal)?.open_to(others)
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// For a task of the device's thread.
    pub(crate) fn announce(&self) -> Announced {
        Announced::new(&self.shared)
    }

    /// Refuses if an earlier operation has failed, or all were aborted.
    pub(crate) fn check(&self) -> Result<(), NcclError> {
        let error = (self.shared.error.lock()).unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &*error {
            return Err(error.clone());
        }
        if self.shared.aborted.load(Ordering::Acquire) {
            return Err(NcclError::Aborted);
        }
        Ok(())
    }

    /// Ends everything that runs or waits in the communicator.
    #[cfg(test)]
    pub(crate) fn abort(&self) {
        self.shared.abort();
    }
}

/// A guard of a communicator that has not been aborted.
pub(super) struct Alive<'a>(MutexGuard<'a, Option<Raw>>, pub(super) Raw);

impl Shared {
    pub(super) fn in_flight(&self) -> MutexGuard<'_, VecDeque<InFlight>> {
        self.in_flight
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn starting(&self) -> MutexGuard<'_, Option<(u64, Instant)>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_failed(&self) -> bool {
        let observer = self.observer.as_ref();
        observer.is_some_and(|world| world.failure().is_some())
            || self.aborted.load(Ordering::Acquire)
    }

    /// Refuses where an operation before has failed, whose place the next one would take on other ranks.
    pub(super) fn go_on(&self) -> Result<(), NcclError> {
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        if error.is_some() || self.has_failed() {
            return Err(NcclError::Aborted);
        }
        Ok(())
    }

    pub(super) fn lock(&self) -> Result<Alive<'_>, NcclError> {
        let guard = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        let raw = guard.filter(|_| !self.aborted.load(Ordering::Acquire));
        Ok(Alive(guard, raw.ok_or(NcclError::Aborted)?))
    }

    /// Waits until few enough operations are on their way.
    pub(super) fn make_room(&self) -> Result<(), NcclError> {
        let start = Instant::now();
        loop {
            // The watchdog forgets those that have ended; asking about each here would take as long as starting it.
            if self.in_flight().len() < MOST_IN_FLIGHT {
                return Ok(());
            }
            self.drop_ended()?;
            let waited = start.elapsed();
            if self.has_failed() || waited > self.deadline {
                let what = "the operations before it";
                return Err(NcclError::Slow { what, waited });
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Looks after an operation until it has ended.
    pub(super) fn watch(&self, number: u64, started: Instant, end: &Arc<Event>) {
        self.in_flight().push_back(InFlight {
            number,
            started,
            end: end.clone(),
        });
    }

    /// The oldest operation that was started and has not ended.
    pub(super) fn oldest(&self) -> Result<Option<(u64, Instant)>, NcclError> {
        let started = match self.drop_ended()? {
            None => *self.starting(),
            first => first,
        };
        let posted = match &self.direct {
            Some(direct) => direct.peers.oldest(direct.rank),
            None => None,
        };
        Ok(started
            .into_iter()
            .chain(posted)
            .min_by_key(|(_, since)| *since))
    }

    /// Forgets operations that have ended; the first that has not.
    fn drop_ended(&self) -> Result<Option<(u64, Instant)>, NcclError> {
        let mut in_flight = self.in_flight();
        while let Some(first) = in_flight.front() {
            let ended = match first.end.has_happened() {
                // Of another rank's device, which that rank has to report.
                Err(_) if self.stream.check().is_ok() => false,
                ended => ended?,
            };
            if !ended {
                return Ok(Some((first.number, first.started)));
            }
            in_flight.pop_front();
        }
        Ok(None)
    }

    /// What NCCL has to say of the communicator; nothing while it is being used.
    pub(super) fn error(&self) -> Result<sys::ncclResult_t, NcclError> {
        let raw = match self.raw.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(sys::ncclResult_t::ncclSuccess),
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            Ok(guard) => guard,
        };
        let handle = raw.ok_or(NcclError::Aborted)?;
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: alive while the lock is held; the out pointer outlives the call.
        let code = unsafe { sys::ncclCommGetAsyncError(handle.0, &raw mut state) };
        accepted("asking for errors", code, Some(handle))?;
        Ok(state)
    }

    pub(super) fn abort(&self) {
        let start = Instant::now();
        let mut guard = loop {
            match self.raw.try_lock() {
                Ok(guard) => break Some(guard),
                Err(TryLockError::Poisoned(guard)) => break Some(guard.into_inner()),
                // A call waits, perhaps for a peer that is gone: NCCL lets another thread end it.
                Err(TryLockError::WouldBlock) if start.elapsed() > PATIENCE => break None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let gone = guard.as_mut().is_some_and(|guard| guard.take().is_none());
        if !gone && !self.aborted.swap(true, Ordering::AcqRel) {
            // SAFETY: once, and not after it was destroyed, which takes it out of the lock. There is nothing to do about an error.
            unsafe { sys::ncclCommAbort(self.handle.0) };
        }
    }

    /// Other ranks may have the GPU: nothing of this one's is started any more.
    pub(super) fn leave_device(&self) {
        (self.claim.lock())
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// Waits, a while, until the device's thread has run all tasks that use the communicator.
    pub(super) fn wait_for_announced(&self) {
        let start = Instant::now();
        while self.has_announced() && start.elapsed() < self.deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether tasks of the device's thread use the communicator that have not run yet, which it is told to do.
    fn has_announced(&self) -> bool {
        let announced = self.num_announced.load(Ordering::Acquire) > 0;
        if announced {
            (self.flush)();
        }
        announced
    }

    /// Ends the communicator, which nobody starts operations of any more: when all that it was given has ended, or at once where that will never be.
    pub(super) fn close(&self) {
        let start = Instant::now();
        let idle = loop {
            if self.has_failed() {
                break false;
            }
            if start.elapsed() > self.deadline {
                // Others have not come to an operation whose result this rank has let go.
                if let (Some(observer), Ok(Some((number, since)))) = (&self.observer, self.oldest())
                {
                    let error = observer.diagnose(number, since.elapsed());
                    tracing::error!(%error, "aborting NCCL");
                }
                break false;
            }
            let announced = self.has_announced();
            match self.drop_ended() {
                Ok(None) if !announced => break true,
                Ok(_) => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => break false,
            }
        };
        if !idle {
            // Destroying would wait for what runs, which may wait for ranks that are gone.
            return self.abort();
        }
        let raw = self.lock().ok().and_then(|mut alive| alive.0.take());
        if let Some(raw) = raw {
            // SAFETY: taken out, so that nobody uses it any more.
            unsafe { sys::ncclCommDestroy(raw.0) };
        }
    }
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
