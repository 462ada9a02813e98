//! Operations: how they are started by the device's thread, and what is held until later work has been ordered behind them.

use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Instant,
};

use super::{communicator::Shared, cuda::Event, error::NcclError, gpu::Gpu, queue::Queue};
use crate::comm::{FailureCause, Moves};

/// An operation that was started.
#[derive(Debug)]
#[must_use = "work that uses the result has to be ordered behind the operation"]
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    number: u64,
    started: Started,
}

#[derive(Debug)]
enum Started {
    /// On NCCL's stream; where it ends.
    Nccl(Arc<Event>),
    /// As copies, some of which may wait for others to post, and where those of the rank's own rows end.
    Exchange { own: Option<Event> },
}

impl Ticket {
    fn new(shared: &Arc<Shared>, number: u64, started: Started) -> Self {
        shared.num_open.fetch_add(1, Ordering::AcqRel);
        Self {
            shared: shared.clone(),
            number,
            started,
        }
    }

    /// Makes all work that is submitted to the device from now on wait for the operation, on the device. Its buffers may be let go
    /// afterwards. The host does not wait for the device; where copies go between ranks, it waits until those have started theirs.
    pub(crate) fn order_before_later_work(self) -> Result<(), NcclError> {
        let shared = &self.shared;
        match &self.started {
            Started::Nccl(end) => {
                let started = shared.start_older_exchanges(self.number, None);
                // Also in a world that has failed: an operation that was aborted ends.
                shared.stream.enter()?;
                shared.stream.hold_later_work(end).and(started)
            }
            Started::Exchange { own } => {
                shared.start_older_exchanges(self.number, own.as_ref())?;
                shared.hold_behind_exchange(self.number, own.as_ref())
            }
        }
    }
}

/// Permission to use a communicator from the device's thread: it is not taken down before this is dropped.
#[derive(Debug)]
pub(crate) struct Announced {
    shared: Arc<Shared>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.shared.num_open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Announced {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        shared.num_announced.fetch_add(1, Ordering::AcqRel);
        Self {
            shared: shared.clone(),
        }
    }

    /// Starts operation `number`: what `enqueue` adds runs after all work that was submitted to the device before. Kernels that are submitted
    /// later wait until a `large` one can begin. The host does not wait for it.
    pub(crate) fn start(
        &self,
        number: u64,
        large: bool,
        enqueue: impl FnOnce(&Queue<'_>) -> Result<(), NcclError>,
    ) -> Result<Ticket, NcclError> {
        let shared = &self.shared;
        shared.stream.enter()?;
        shared.make_room()?;
        shared.go_on()?;
        let alone = large && shared.num_open.load(Ordering::Acquire) == 0;
        let end = {
            let _starting = Starting::new(shared, number);
            shared.stream.wait(&shared.stream.submitted_work()?)?;
            if alone {
                // Kernels may hold all multiprocessors until they end: later ones are to begin behind this point, where the operation
                // already is. Behind another that nothing waits for yet it is not, and they would wait for that one.
                let begun = shared.stream.record()?;
                shared.stream.hold_later_work(&begun)?;
            }
            {
                // Not for longer: an abort takes who holds it for one whose call waits for a peer.
                let raw = shared.lock()?;
                enqueue(&Queue {
                    raw: raw.1,
                    stream: &shared.stream,
                })?;
            }
            Arc::new(shared.stream.record()?)
        };
        shared.watch(number, Instant::now(), &end);
        Ok(Ticket::new(shared, number, Started::Nccl(end)))
    }

    /// Starts operation `number`, which moves runs of bytes between ranks: if it is `large`, which every rank must say alike, from buffer to
    /// buffer where the ranks' GPUs [reach each other's memory](Communicator::is_direct), else by NCCL. It starts after all work that was
    /// submitted to the device before, on every rank. The host does not wait for it.
    pub(crate) fn exchange(
        &self,
        number: u64,
        moves: Moves,
        large: bool,
    ) -> Result<Ticket, NcclError> {
        let shared = &self.shared;
        let Some(direct) = shared.direct.as_ref().filter(|_| large) else {
            return self.start(number, large, |queue| queue.exchange(&moves));
        };
        shared.stream.enter()?;
        shared.make_room()?;
        shared.go_on()?;
        let ready = shared.stream.submitted_work()?;
        let own = shared.copy_own(direct.rank, &moves, &ready)?;
        let gpu = Gpu {
            ready,
            streams: direct.streams.clone(),
        };
        let posted = direct.peers.post((direct.rank, number), moves, gpu);
        // Copies to others were started in their devices' contexts.
        if let Err(error) = shared.stream.enter().and(posted) {
            shared.leave_exchange(number, own.as_ref());
            return Err(shared.unless_a_peers(error));
        }
        Ok(Ticket::new(shared, number, Started::Exchange { own }))
    }

    /// Another one.
    pub(crate) fn again(&self) -> Self {
        Self::new(&self.shared)
    }

    /// Reports what went wrong where no rank waits for it: the rank's next operation does not start, and the world has failed.
    pub(crate) fn fail(&self, what: &str, error: NcclError) {
        self.shared
            .error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_with(|| error.clone());
        if let Some(observer) = &self.shared.observer {
            let error = error.of(Some(observer), what);
            observer.fail(what, FailureCause::Comm(error));
        }
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.shared.num_announced.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Marks an operation as being started.
struct Starting<'a>(&'a Shared);

impl<'a> Starting<'a> {
    fn new(shared: &'a Shared, number: u64) -> Self {
        *shared.starting() = Some((number, Instant::now()));
        Self(shared)
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        *self.0.starting() = None;
    }
}
