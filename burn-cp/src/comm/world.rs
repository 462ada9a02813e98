//! A rank's place in its world, and what connects the ranks of a world.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::{
    DEFAULT_DEADLINE, ProcessGroup,
    error::{CommError, FailureCause, RankFailure},
    hub::{Attendance, Hub, MeetingKey},
    mpi::MpiWire,
    signature::Signature,
    tcp::{Client, Server},
};

/// What connects the ranks of a world, as one of them sees it.
#[derive(Debug)]
pub(crate) enum World {
    /// Ranks are threads of this process.
    Threads(Arc<Hub>),
    /// Each rank is a process.
    Processes(Processes),
}

/// A world of processes: a control plane for host messages, and a wire for tensors.
#[derive(Debug)]
pub(crate) struct Processes {
    pub(crate) control: Control,
    /// `None` where ranks exchange host messages only.
    pub(crate) wire: Option<MpiWire>,
}

/// This process's end of the control plane.
#[derive(Debug)]
pub(crate) enum Control {
    /// Rank 0: the table itself, and the connections of the other ranks.
    Host(Server),
    /// Any other rank: a connection to rank 0.
    Remote(Client),
}

impl World {
    pub(crate) fn world_size(&self) -> usize {
        match self {
            Self::Threads(hub) => hub.world_size(),
            Self::Processes(processes) => match &processes.control {
                Control::Host(server) => server.hub().world_size(),
                Control::Remote(client) => client.world_size(),
            },
        }
    }

    pub(crate) fn deadline(&self) -> Duration {
        match self {
            Self::Threads(hub) => hub.deadline(),
            Self::Processes(processes) => match &processes.control {
                Control::Host(server) => server.hub().deadline(),
                Control::Remote(client) => client.deadline(),
            },
        }
    }

    /// Makes a failure the world's first, if there is none yet.
    pub(crate) fn fail(&self, rank: usize, op: Option<String>, cause: FailureCause) {
        match self {
            Self::Threads(hub) => hub.fail(rank, op, cause),
            Self::Processes(processes) => match &processes.control {
                Control::Host(server) => server.hub().fail(rank, op, cause),
                Control::Remote(client) => client.fail(rank, op, &cause),
            },
        }
    }

    /// The first failure of the world, as far as this process has heard of it.
    pub(crate) fn failure(&self) -> Option<RankFailure> {
        match self {
            Self::Threads(hub) => hub.failure(),
            Self::Processes(processes) => match &processes.control {
                Control::Host(server) => server.hub().failure(),
                Control::Remote(client) => client.failure(),
            },
        }
    }

    /// Notes that this rank starts an operation of a group of so many ranks in which it does not meet the others. One way: does not
    /// wait.
    pub(crate) fn record(
        &self,
        rank: usize,
        key: &MeetingKey,
        signature: Signature,
        num_ranks: usize,
    ) {
        match self {
            Self::Threads(hub) => hub.record(rank, key, signature, num_ranks),
            Self::Processes(processes) => match &processes.control {
                Control::Host(server) => {
                    server.hub().record(rank, key, signature, num_ranks);
                }
                Control::Remote(client) => client.record(key, signature, num_ranks),
            },
        }
    }

    /// Why a recorded operation has not come to an end; becomes the world's failure if there is none yet.
    pub(crate) fn diagnose(
        &self,
        attendance: &Attendance<'_>,
        key: &MeetingKey,
        waited: Duration,
    ) -> CommError {
        match self {
            Self::Threads(hub) => hub.diagnose(attendance, key, waited),
            Self::Processes(processes) => match &processes.control {
                Control::Host(server) => server.hub().diagnose(attendance, key, waited),
                Control::Remote(client) => client.diagnose(attendance, key, waited),
            },
        }
    }
}

impl Processes {
    /// Leaves bytes and waits for those of the other ranks, in the order of `attendance.ranks`.
    pub(crate) fn meet(
        &self,
        key: &MeetingKey,
        attendance: &Attendance<'_>,
        signature: Signature,
        bytes: Vec<u8>,
    ) -> Result<Vec<Arc<Vec<u8>>>, CommError> {
        match &self.control {
            Control::Host(server) => server.hub().meet_bytes(key, attendance, signature, bytes),
            Control::Remote(client) => client.meet(key, attendance, signature, bytes),
        }
    }
}

/// A rank's place in its world, handed to its closure by [`launch`](crate::launch).
#[derive(Debug, Clone)]
pub struct RankContext {
    rank: usize,
    local_rank: usize,
    world: Arc<World>,
    /// Groups that are bound twice share their numbering, so that no number is used twice.
    groups: Arc<Mutex<HashMap<Arc<str>, ProcessGroup>>>,
}

impl RankContext {
    pub(crate) fn new(rank: usize, hub: Arc<Hub>) -> Self {
        Self::of_world(rank, rank, Arc::new(World::Threads(hub)))
    }

    pub(crate) fn of_world(rank: usize, local_rank: usize, world: Arc<World>) -> Self {
        Self {
            rank,
            local_rank,
            world,
            groups: Arc::default(),
        }
    }

    /// This rank, in `0..world_size`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// This rank among those of its host, from 0: which of the host's devices it takes.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world.world_size()
    }

    /// A world of one rank, without threads and without communication.
    pub fn solo() -> Self {
        Self::new(0, Hub::new(1, DEFAULT_DEADLINE))
    }

    /// Whether ranks are threads of this process.
    #[allow(
        dead_code,
        reason = "for the choice of a device, which not every build has"
    )]
    pub(crate) fn are_threads(&self) -> bool {
        matches!(*self.world, World::Threads(_))
    }

    pub(crate) fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// Lets go of what moves tensors between devices, of every group.
    pub(crate) fn leave_devices(&self) {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.values().for_each(ProcessGroup::leave_devices);
    }

    /// The group of this name. A name stands for the same ranks wherever it is used.
    pub(crate) fn group(&self, name: &str, ranks: Vec<usize>) -> ProcessGroup {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let made = groups.entry(name.into()).or_insert_with(|| {
            let index = ranks
                .iter()
                .position(|&rank| rank == self.rank)
                .unwrap_or_default();
            ProcessGroup::of_world(&self.world, name.into(), ranks, index)
        });
        made.clone()
    }
}
