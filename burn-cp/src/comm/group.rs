//! The ranks that run collectives together.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::{Serialize, de::DeserializeOwned};

use super::{
    CollectiveKind, ProgramOrder,
    error::{CommError, FailureCause},
    hub::{Attendance, Hub, MeetingKey, odd_one_out},
    mpi::Transfer,
    posted::Posted,
    signature::Signature,
    world::{Processes, World},
};

/// How the tensors of a group travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// A group of one: nothing travels.
    Solo,
    /// Ranks are threads of this process, and read each other's tensors.
    Threads,
    /// Ranks are processes, and send each other bytes.
    Processes,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) key: Arc<str>,
    pub(super) ranks: Arc<[usize]>,
    pub(super) rank: usize,
    /// `None` for a group of one.
    pub(super) world: Option<Arc<World>>,
    next_number: AtomicU64,
    next_host_number: AtomicU64,
    #[allow(
        dead_code,
        reason = "for transports between devices, which not every build has"
    )]
    pub(super) device_transport: Slot,
}

impl Shared {
    pub(super) fn attendance(&self) -> Attendance<'_> {
        Attendance {
            ranks: &self.ranks,
            index: self.rank,
        }
    }

    pub(super) fn mismatch(
        &self,
        key: &MeetingKey,
        rank: usize,
        expected: String,
        got: String,
    ) -> CommError {
        CommError::Mismatch {
            group: self.key.to_string(),
            number: key.number,
            rank,
            expected,
            got,
        }
    }

    pub(super) fn hub(&self) -> Option<&Hub> {
        match self.world.as_deref() {
            Some(World::Threads(hub)) => Some(hub),
            _ => None,
        }
    }
}

/// Something that only a backend knows.
#[derive(Default)]
pub(super) struct Slot(pub(super) Mutex<Option<Arc<dyn Any + Send + Sync>>>);

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

/// A group of ranks that run collectives together, as one of them sees it. Cheap to clone; clones share the numbering.
#[derive(Debug, Clone)]
pub struct ProcessGroup {
    pub(super) shared: Arc<Shared>,
    order: ProgramOrder,
}

impl ProcessGroup {
    /// A group of one rank. Every collective is the identity.
    pub fn solo() -> Self {
        Self::from_parts("solo".into(), vec![0], 0, None)
    }

    pub(crate) fn of_world(
        world: &Arc<World>,
        key: Arc<str>,
        ranks: Vec<usize>,
        rank: usize,
    ) -> Self {
        let world = (ranks.len() > 1).then(|| world.clone());
        Self::from_parts(key, ranks, rank, world)
    }

    fn from_parts(
        key: Arc<str>,
        ranks: Vec<usize>,
        rank: usize,
        world: Option<Arc<World>>,
    ) -> Self {
        let shared = Shared {
            key,
            ranks: ranks.into(),
            rank,
            world,
            next_number: AtomicU64::new(0),
            next_host_number: AtomicU64::new(0),
            device_transport: Slot::default(),
        };
        Self {
            shared: Arc::new(shared),
            order: ProgramOrder::new(),
        }
    }

    /// Lets go of what moves tensors between devices.
    pub(super) fn leave_devices(&self) {
        let mut slot =
            (self.shared.device_transport.0.lock()).unwrap_or_else(PoisonError::into_inner);
        let left = slot.take();
        drop(slot);
        drop(left);
    }

    /// How the tensors of this group travel.
    pub fn transport(&self) -> Transport {
        match self.shared.world.as_deref() {
            None => Transport::Solo,
            Some(World::Threads(_)) => Transport::Threads,
            Some(World::Processes(_)) => Transport::Processes,
        }
    }

    /// This rank's index in the group, in `0..size`.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.shared.ranks.len()
    }

    /// The global ranks of the group, in group order.
    pub fn global_ranks(&self) -> &[usize] {
        &self.shared.ranks
    }

    /// Name of the group, for messages.
    pub fn name(&self) -> &str {
        &self.shared.key
    }

    /// The order in which this handle's differentiable collectives are chained.
    pub fn order(&self) -> &ProgramOrder {
        &self.order
    }

    /// The same group, whose differentiable collectives are chained in another order.
    #[must_use]
    pub fn with_order(&self, order: ProgramOrder) -> Self {
        Self {
            shared: self.shared.clone(),
            order,
        }
    }

    /// Draws the number of the next tensor operation. Every rank draws in the same program order.
    pub(crate) fn next_number(&self) -> u64 {
        self.shared.next_number.fetch_add(1, Ordering::Relaxed)
    }

    fn key(&self, host: bool, number: u64) -> MeetingKey {
        MeetingKey {
            group: self.shared.key.clone(),
            host,
            number,
        }
    }

    fn attendance(&self) -> Attendance<'_> {
        self.shared.attendance()
    }

    /// Leaves a reference for every rank of the group, and takes theirs later. For ranks that share memory.
    ///
    /// Every rank must call it, with an equal signature and the same `T`.
    pub(crate) fn post<T: Send + Sync + 'static>(
        &self,
        number: u64,
        signature: Signature,
        value: T,
    ) -> Result<Posted<T>, CommError> {
        self.post_in_memory(self.key(false, number), signature, value)
    }

    fn post_in_memory<T: Send + Sync + 'static>(
        &self,
        key: MeetingKey,
        signature: Signature,
        value: T,
    ) -> Result<Posted<T>, CommError> {
        let own = match self.shared.world.as_deref() {
            None => Some(Arc::new(value)),
            Some(World::Threads(hub)) => {
                hub.post(&key, &self.attendance(), signature.clone(), Arc::new(value))?;
                None
            }
            Some(World::Processes(_)) => {
                return Err(CommError::Transport {
                    group: self.shared.key.to_string(),
                    what: signature.to_string(),
                    reason: "its ranks are processes, which share no memory".to_owned(),
                });
            }
        };
        Ok(Posted::new(self.shared.clone(), key, signature, own))
    }

    fn meet_in_memory<T: Send + Sync + 'static>(
        &self,
        key: &MeetingKey,
        signature: Signature,
        value: T,
    ) -> Result<Vec<Arc<T>>, CommError> {
        self.post_in_memory(key.clone(), signature, value)?.wait()
    }

    /// Exchanges a host message with every rank of the group; messages come back in group order.
    fn meet_on_host<T>(&self, signature: Signature, value: T) -> Result<Vec<T>, CommError>
    where
        T: Clone + Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        let number = self.shared.next_host_number.fetch_add(1, Ordering::Relaxed);
        let key = self.key(true, number);
        if let Some(World::Processes(processes)) = self.shared.world.as_deref() {
            return self.meet_as_bytes(processes, &key, signature, &value);
        }
        let values = self.meet_in_memory(&key, signature, value)?;
        Ok(values.iter().map(|value| T::clone(value)).collect())
    }

    fn meet_as_bytes<T: Serialize + DeserializeOwned>(
        &self,
        processes: &Processes,
        key: &MeetingKey,
        signature: Signature,
        value: &T,
    ) -> Result<Vec<T>, CommError> {
        let unsent = |error: postcard::Error| CommError::Transport {
            group: self.shared.key.to_string(),
            what: format!("{signature} of {}", std::any::type_name::<T>()),
            reason: error.to_string(),
        };
        let bytes = postcard::to_stdvec(value).map_err(unsent)?;
        let parcels = processes.meet(key, &self.attendance(), signature.clone(), bytes)?;
        let decode = |(parcel, &rank): (&Arc<Vec<u8>>, &usize)| {
            postcard::from_bytes(parcel).map_err(|error| {
                let wanted = format!("{signature} of {}", std::any::type_name::<T>());
                let got = format!("{signature} of something else ({error})");
                let error = self.shared.mismatch(key, rank, wanted, got);
                self.fail(rank, &signature.label, FailureCause::Comm(error.clone()));
                error
            })
        };
        parcels
            .iter()
            .zip(&*self.shared.ranks)
            .map(decode)
            .collect()
    }

    /// Compares an operation's signature with every rank of the group, and waits until all have arrived at it. For ranks that
    /// are processes, before they send each other anything.
    pub(crate) fn rendezvous(&self, number: u64, signature: Signature) -> Result<(), CommError> {
        let key = self.key(false, number);
        match self.shared.world.as_deref() {
            Some(World::Processes(processes)) => processes
                .meet(&key, &self.attendance(), signature, Vec::new())
                .map(|_| ()),
            _ => self.meet_in_memory(&key, signature, ()).map(|_| ()),
        }
    }

    /// Starts to send bytes to ranks of the group and to receive as many as expected from others, as `(rank of the group, ..)`. For
    /// ranks that are processes, which have compared what they do before.
    pub(crate) fn transfer(
        &self,
        number: u64,
        op: &str,
        sends: Vec<(usize, Arc<Vec<u8>>)>,
        receives: &[(usize, usize)],
    ) -> Result<Transfer, CommError> {
        let world = match &self.shared.world {
            Some(world) if !(sends.is_empty() && receives.is_empty()) => world,
            _ => return Ok(Transfer::nothing()),
        };
        let ranks = &self.shared.ranks;
        let sends = sends.into_iter().map(|(to, bytes)| (ranks[to], bytes));
        let receives = receives.iter().map(|&(from, len)| (ranks[from], len));
        let op = format!("{op} #{number} of group {}", self.shared.key);
        let me = (ranks[self.shared.rank], number);
        let World::Processes(Processes {
            wire: Some(wire), ..
        }) = &**world
        else {
            return Err(CommError::Transport {
                group: self.shared.key.to_string(),
                what: op,
                reason: "its world was launched for host messages only".to_owned(),
            });
        };
        wire.transfer(world, me, op, sends.collect(), receives.collect())
    }

    /// Gathers a small host message from every rank, in group order. No device takes part; between processes the message
    /// travels as the bytes of its `Serialize`.
    ///
    /// Every rank must call it with the same `label`.
    ///
    /// # Errors
    /// As the module's protocol says.
    pub fn host_all_gather<T>(&self, label: &'static str, value: T) -> Result<Vec<T>, CommError>
    where
        T: Clone + Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        self.meet_on_host(Signature::control(label), value)
    }

    /// Checks that every rank holds an equal value, shown as `shown` in the error: [`CommError::Disagreement`] on all ranks.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// That, and as the module's protocol says.
    pub fn agree<T>(
        &self,
        what: &'static str,
        value: T,
        shown: impl Fn(&T) -> String,
    ) -> Result<(), CommError>
    where
        T: Clone + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        let values = self.host_all_gather(what, value)?;
        let Some((odd, expected)) = odd_one_out(&values) else {
            return Ok(());
        };
        let rank = self.shared.ranks[odd];
        let error = CommError::Disagreement {
            group: self.shared.key.to_string(),
            what: what.to_owned(),
            rank,
            expected: shown(&values[expected]),
            got: shown(&values[odd]),
        };
        self.fail(rank, what, FailureCause::Comm(error.clone()));
        Err(error)
    }

    /// Tells every rank whether all of them succeeded: the value where all did, the first failing rank's error where one did not.
    ///
    /// Every rank must call it. `op` names what was tried, for the error.
    ///
    /// # Errors
    /// [`CommError::PeerFailed`] with the first failing rank's message, and as the module's protocol says.
    pub fn consensus<T, E: fmt::Display>(
        &self,
        op: &'static str,
        outcome: Result<T, E>,
    ) -> Result<T, CommError> {
        let message = outcome.as_ref().err().map(ToString::to_string);
        let messages = self.host_all_gather(op, message)?;
        let failed = messages
            .iter()
            .enumerate()
            .find_map(|(i, message)| Some((i, message.clone()?)));
        match (outcome, failed) {
            (Ok(value), None) => Ok(value),
            (_, Some((index, cause))) => {
                let rank = self.shared.ranks[index];
                self.fail(rank, op, FailureCause::Reported(cause.clone()));
                Err(CommError::PeerFailed {
                    rank,
                    op: op.to_owned(),
                    cause,
                })
            }
            (Err(error), None) => {
                unreachable!("this rank's own error must be among the gathered ones: {error}")
            }
        }
    }

    /// Makes a rank's failure the world's first, if there is none yet.
    pub(crate) fn fail(&self, rank: usize, op: &str, cause: FailureCause) {
        if let Some(world) = &self.shared.world {
            world.fail(rank, Some(op.to_owned()), cause);
        }
    }

    /// Waits until every rank of the group has arrived. Host only.
    ///
    /// # Errors
    /// As the module's protocol says.
    pub fn barrier(&self) -> Result<(), CommError> {
        let signature = Signature {
            kind: CollectiveKind::Barrier,
            ..Signature::control("barrier")
        };
        self.meet_on_host(signature, ()).map(|_| ())
    }
}
