//! A group as seen by what looks after its operations from elsewhere.

use std::sync::{Arc, PoisonError};

use super::{
    CommError, FailureCause, ProcessGroup, Signature, World,
    hub::{Attendance, MeetingKey},
};

/// A group as another thread or a transport that does not meet sees it: what it is called, and the control plane's records of it.
#[derive(Debug, Clone)]
pub(crate) struct Observer {
    world: Arc<World>,
    key: Arc<str>,
    ranks: Arc<[usize]>,
    rank: usize,
}

impl Observer {
    /// Name of the group.
    pub(crate) fn group(&self) -> &str {
        &self.key
    }

    /// How long a rank waits for its peers.
    pub(crate) fn deadline(&self) -> std::time::Duration {
        self.world.deadline()
    }

    fn operation(&self, number: u64) -> MeetingKey {
        MeetingKey {
            group: self.key.clone(),
            host: false,
            number,
        }
    }

    /// Notes, without waiting, that this rank starts tensor operation `number`. Where it is not what the others call, the world fails
    /// as soon as all have noted theirs.
    pub(crate) fn record(&self, number: u64, signature: Signature) {
        let key = self.operation(number);
        self.world
            .record(self.ranks[self.rank], &key, signature, self.ranks.len());
    }

    /// Why tensor operation `number`, which every rank [records](Self::record), has not ended after `waited`: who differs from
    /// the others, or who is missing and where it was last seen. It becomes the world's failure if there is none yet.
    pub(crate) fn diagnose(&self, number: u64, waited: std::time::Duration) -> CommError {
        let attendance = Attendance {
            ranks: &self.ranks,
            index: self.rank,
        };
        self.world
            .diagnose(&attendance, &self.operation(number), waited)
    }

    /// The first failure of the world, as far as this rank has heard of it.
    pub(crate) fn failure(&self) -> Option<CommError> {
        self.world
            .failure()
            .map(|failure| failure.as_peer_failure())
    }

    /// Number of the world's ranks in this process.
    #[cfg(feature = "cuda")]
    pub(crate) fn num_ranks_here(&self) -> usize {
        match &*self.world {
            World::Threads(hub) => hub.world_size(),
            World::Processes(_) => 1,
        }
    }

    /// A device of this process for this rank alone; `None` where another rank has it.
    #[cfg(feature = "cuda")]
    pub(crate) fn claim(&self, device: usize) -> Option<super::claims::Claim> {
        super::claims::Claim::of(device, &self.world)
    }

    /// A thread that works for this rank's world.
    #[cfg(feature = "cuda")]
    pub(crate) fn helper(&self) -> super::Helper {
        super::Helper::of(&self.world)
    }

    /// What to wait for besides when the world has ended: `drain` returns when the thread of a device of this process has done what it was
    /// given.
    #[cfg(feature = "cuda")]
    pub(crate) fn drain_at_end(&self, device: usize, drain: fn(usize)) {
        super::helpers::drain_at_end(&self.world, device, drain);
    }

    /// Makes this rank's failure the world's first, if there is none yet.
    pub(crate) fn fail(&self, op: &str, cause: FailureCause) {
        self.world
            .fail(self.ranks[self.rank], Some(op.to_owned()), cause);
    }
}

impl ProcessGroup {
    /// For what looks after this group's operations from elsewhere; `None` for a group of one.
    pub(crate) fn observer(&self) -> Option<Observer> {
        Some(Observer {
            world: self.shared.world.clone()?,
            key: self.shared.key.clone(),
            ranks: self.shared.ranks.clone(),
            rank: self.shared.rank,
        })
    }

    /// What moves this group's tensors from device to device, made at the first call. Every rank must call it between the same
    /// operations if `make` talks to the others.
    pub(crate) fn device_transport<T: Send + Sync + 'static>(
        &self,
        make: impl FnOnce() -> Result<T, CommError>,
    ) -> Result<Arc<T>, CommError> {
        let slot = &self.shared.device_transport;
        let mut slot = slot.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = slot.clone().and_then(|made| made.downcast().ok()) {
            return Ok(made);
        }
        let made = Arc::new(make()?);
        *slot = Some(made.clone());
        Ok(made)
    }
}
