//! A rank's end of exchanges by copies between GPUs.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    communicator::Shared,
    cuda::Event,
    error::NcclError,
    gpu::{Gpu, Streams},
};
use crate::comm::{Moves, peers::Peers};

/// How long a rank waits for another to report what its device did.
const PEERS_TURN: Duration = Duration::from_secs(1);

/// A rank's end of exchanges by copies.
pub(super) struct Direct {
    pub(super) peers: Arc<Peers<Gpu>>,
    pub(super) rank: usize,
    /// For copies to this rank's device.
    pub(super) streams: Streams,
}

impl Shared {
    /// Copies rows that stay with the rank, beside those of others; where that ends.
    pub(super) fn copy_own(
        &self,
        rank: usize,
        moves: &Moves,
        ready: &Event,
    ) -> Result<Option<Event>, NcclError> {
        let mut pairs = moves.to(rank).zip(moves.from(rank)).peekable();
        if pairs.peek().is_none() {
            return Ok(None);
        }
        self.stream.wait(ready)?;
        for (give, take) in pairs {
            for copy in give.copies(take).into_iter().flatten() {
                self.stream.copy_from(&self.stream, &copy)?;
            }
        }
        self.stream.record().map(Some)
    }

    /// Waits until all copies of exchanges up to `number` have started, whose own rows' copies end at `own`.
    pub(super) fn start_older_exchanges(
        &self,
        number: u64,
        own: Option<&Event>,
    ) -> Result<(), NcclError> {
        if let Some(direct) = &self.direct {
            let start = Instant::now();
            // Without a watchdog nobody else looks for the deadline.
            let failed = || self.has_failed() || start.elapsed() > 2 * self.deadline;
            let started = (direct.peers).wait_until_started(direct.rank, number, failed);
            if let Err(error) = started {
                self.leave_exchange(number, own);
                return Err(self.unless_a_peers(error));
            }
        }
        self.stream.enter()
    }

    /// Later work waits for all copies that a rank's buffers take part in, all of which have started.
    pub(super) fn hold_behind_exchange(
        &self,
        number: u64,
        own: Option<&Event>,
    ) -> Result<(), NcclError> {
        let direct = self.direct.as_ref().ok_or(NcclError::Aborted)?;
        let held = direct
            .peers
            .ends(direct.rank, number)
            .and_then(|(since, ends)| {
                // Behind each of them, whatever another one's device says.
                let own = own.map_or(Ok(()), |own| self.stream.hold_later_work(own));
                ends.iter().fold(own, |held, end| {
                    self.watch(number, since, end);
                    held.and(self.stream.hold_later_work(end))
                })
            });
        held.map_err(|error| {
            self.leave_exchange(number, own);
            self.unless_a_peers(error)
        })
    }

    /// Takes a rank's buffers, which are about to go, out of an exchange that has failed: later work waits for copies that have started.
    pub(super) fn leave_exchange(&self, number: u64, own: Option<&Event>) {
        let Some(direct) = &self.direct else {
            return;
        };
        let ends = direct.peers.withdraw(direct.rank, number);
        if self.stream.enter().is_ok() {
            for end in ends.iter().map(Arc::as_ref).chain(own) {
                // Of a device that has failed, perhaps, which the failure says already.
                let _ = self.stream.hold_later_work(end);
            }
        }
    }

    /// An error of a call that names events and buffers of several devices. What another rank's device makes fail is for that rank to
    /// report, which is waited for a while.
    pub(super) fn unless_a_peers(&self, error: NcclError) -> NcclError {
        let start = Instant::now();
        while self.stream.check().is_ok() && start.elapsed() < PEERS_TURN {
            if self.has_failed() {
                tracing::debug!(%error, "in an exchange that has failed");
                return NcclError::Aborted;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        error
    }
}
