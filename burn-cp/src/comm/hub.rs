//! Where ranks that are threads of one process meet: tensor transport and host control plane in one shared table.

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{
    error::{CommError, FailureCause, RankFailure},
    signature::Signature,
};

/// What a rank leaves for the others. Peers clone the handle; tensors are reference counted, so no bytes are copied here.
pub(crate) type Parcel = Arc<dyn Any + Send + Sync>;

/// Identifies a meeting: the group's key, whether it is a host message, and the operation's number within the group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct MeetingKey {
    pub(crate) group: Arc<str>,
    pub(crate) host: bool,
    pub(crate) number: u64,
}

struct Meeting {
    parcels: Vec<Option<(Signature, Parcel)>>,
    num_taken: usize,
}

#[derive(Default)]
struct State {
    failure: Option<RankFailure>,
    meetings: HashMap<MeetingKey, Meeting>,
    last_op: Vec<Option<String>>,
    ended: Vec<bool>,
}

/// The shared table of one world.
pub(crate) struct Hub {
    world_size: usize,
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("world_size", &self.world_size).finish_non_exhaustive()
    }
}

/// Who meets: the caller, its index in the group, and the group's global ranks.
pub(crate) struct Attendance<'a> {
    pub(crate) ranks: &'a [usize],
    pub(crate) index: usize,
}

impl Hub {
    pub(crate) fn new(world_size: usize, deadline: Duration) -> Arc<Self> {
        let state = State { last_op: vec![None; world_size], ended: vec![false; world_size], ..State::default() };
        Arc::new(Self { world_size, deadline, state: Mutex::new(state), changed: Condvar::new() })
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    // The table holds plain values, valid after any panic of a holder.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the first failure of the world and wakes everybody.
    pub(crate) fn fail(&self, rank: usize, op: Option<String>, cause: FailureCause) {
        let mut state = self.lock();
        Self::record(&mut state, rank, op, cause);
        drop(state);
        self.changed.notify_all();
    }

    fn record(state: &mut State, rank: usize, op: Option<String>, cause: FailureCause) {
        if state.failure.is_none() {
            let op = op.unwrap_or_else(|| match state.last_op.get(rank) {
                Some(Some(last)) => format!("its own code, after {last}"),
                _ => "its own code, before any collective".to_owned(),
            });
            state.failure = Some(RankFailure { rank, op, cause });
        }
    }

    pub(crate) fn failure(&self) -> Option<RankFailure> {
        self.lock().failure.clone()
    }

    /// Marks that a rank's program has ended, so that nobody waits for it.
    pub(crate) fn end(&self, rank: usize) {
        self.lock().ended[rank] = true;
        self.changed.notify_all();
    }

    /// Leaves a parcel and waits for those of the other ranks; returned in the order of `attendance.ranks`.
    pub(crate) fn meet(
        &self,
        key: &MeetingKey,
        attendance: &Attendance<'_>,
        signature: Signature,
        parcel: Parcel,
    ) -> Result<Vec<Parcel>, CommError> {
        let op = format!("{signature} #{} of group {}", key.number, key.group);
        let rank = attendance.ranks[attendance.index];
        let start = Instant::now();
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.as_peer_failure());
        }
        state.last_op[rank] = Some(op.clone());
        let num_ranks = attendance.ranks.len();
        let meeting = state
            .meetings
            .entry(key.clone())
            .or_insert_with(|| Meeting { parcels: (0..num_ranks).map(|_| None).collect(), num_taken: 0 });
        meeting.parcels[attendance.index] = Some((signature, parcel));
        if meeting.parcels.iter().all(Option::is_some) {
            self.changed.notify_all();
        }
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.as_peer_failure());
            }
            let missing = Self::missing(&state, key, attendance.ranks);
            if missing.is_empty() {
                break;
            }
            if let Some(&gone) = missing.iter().find(|&&rank| state.ended[rank]) {
                let error = CommError::PeerLeft { op: op.clone(), rank: gone };
                Self::record(&mut state, gone, Some(op), FailureCause::Comm(error.clone()));
                self.changed.notify_all();
                return Err(error);
            }
            let waited = start.elapsed();
            if waited >= self.deadline {
                let last_seen = state.last_op[missing[0]].clone();
                let error = CommError::Timeout { op: op.clone(), missing: missing.clone(), waited, last_seen };
                Self::record(&mut state, missing[0], Some(op), FailureCause::Comm(error.clone()));
                self.changed.notify_all();
                return Err(error);
            }
            state = self
                .changed
                .wait_timeout(state, self.deadline - waited)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        self.collect(state, key, attendance, op)
    }

    fn missing(state: &State, key: &MeetingKey, ranks: &[usize]) -> Vec<usize> {
        let Some(meeting) = state.meetings.get(key) else { return Vec::new() };
        ranks.iter().zip(&meeting.parcels).filter(|(_, parcel)| parcel.is_none()).map(|(&rank, _)| rank).collect()
    }

    fn collect(
        &self,
        mut state: MutexGuard<'_, State>,
        key: &MeetingKey,
        attendance: &Attendance<'_>,
        op: String,
    ) -> Result<Vec<Parcel>, CommError> {
        let Some(meeting) = state.meetings.get_mut(key) else {
            // Only a rank that meets twice under one number could get here.
            unreachable!("the meeting {op} was closed before all its ranks had taken part");
        };
        let present: Vec<_> = meeting.parcels.iter().flatten().cloned().collect();
        meeting.num_taken += 1;
        if meeting.num_taken == attendance.ranks.len() {
            state.meetings.remove(key);
        }
        let (signatures, parcels): (Vec<_>, Vec<_>) = present.into_iter().unzip();
        if let Some((odd, expected)) = odd_one_out(&signatures) {
            let error = CommError::Mismatch {
                group: key.group.to_string(),
                number: key.number,
                rank: attendance.ranks[odd],
                expected: signatures[expected].to_string(),
                got: signatures[odd].to_string(),
            };
            Self::record(&mut state, attendance.ranks[odd], Some(op), FailureCause::Comm(error.clone()));
            drop(state);
            self.changed.notify_all();
            return Err(error);
        }
        Ok(parcels)
    }
}

/// Indices of the first value that differs from the most frequent one, and of that one; the lowest index wins ties.
pub(crate) fn odd_one_out<T: PartialEq>(values: &[T]) -> Option<(usize, usize)> {
    let votes = |value: &T| values.iter().filter(|other| *other == value).count();
    let mut expected = 0;
    for (i, value) in values.iter().enumerate().skip(1) {
        if votes(value) > votes(&values[expected]) {
            expected = i;
        }
    }
    let odd = values.iter().position(|value| *value != values[expected])?;
    Some((odd, expected))
}

/// A rank's place in its world, handed to its closure by [`launch`](crate::launch).
#[derive(Debug, Clone)]
pub struct RankContext {
    pub(crate) rank: usize,
    pub(crate) hub: Arc<Hub>,
}

impl RankContext {
    /// This rank, in `0..world_size`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.hub.world_size()
    }

    /// A world of one rank, without threads and without communication.
    pub fn solo() -> Self {
        Self { rank: 0, hub: Hub::new(1, super::DEFAULT_DEADLINE) }
    }
}
