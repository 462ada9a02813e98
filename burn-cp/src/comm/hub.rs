//! Where ranks meet: the table of a world. Ranks that are threads use it directly, for tensors and for host messages; ranks that
//! are processes have it in rank 0's process and use it over TCP ([`tcp`](super::tcp)), for host messages only.

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    error::{CommError, FailureCause, RankFailure},
    records::Records,
    signature::Signature,
};

/// What a rank leaves for the others. Peers clone the handle; tensors are reference counted, so no bytes are copied here.
pub(crate) type Parcel = Arc<dyn Any + Send + Sync>;

/// Identifies a meeting: the group's key, whether it is a host message, and the operation's number within the group.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct MeetingKey {
    #[serde(with = "group_name")]
    pub(crate) group: Arc<str>,
    pub(crate) host: bool,
    pub(crate) number: u64,
}

impl MeetingKey {
    pub(super) fn describe(&self, signature: &Signature) -> String {
        format!("{signature} #{} of group {}", self.number, self.group)
    }
}

pub(super) struct Meeting {
    pub(super) ranks: Vec<usize>,
    pub(super) parcels: Vec<Option<(Signature, Parcel)>>,
    /// Ranks that have taken the parcels, or will not.
    pub(super) num_taken: usize,
}

impl Meeting {
    pub(super) fn missing(&self) -> Vec<usize> {
        self.ranks
            .iter()
            .zip(&self.parcels)
            .filter(|(_, parcel)| parcel.is_none())
            .map(|(&rank, _)| rank)
            .collect()
    }
}

/// Where a rank waits, and for what.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    pub(super) key: MeetingKey,
    pub(super) op: String,
}

/// What a rank was last seen to call.
#[derive(Debug, Clone)]
pub(super) enum LastOp {
    /// In these words.
    Said(String),
    /// This, which is put into words when somebody asks: it is noted at every operation.
    Recorded(MeetingKey, Arc<Signature>),
}

impl fmt::Display for LastOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Said(op) => f.write_str(op),
            Self::Recorded(key, signature) => f.write_str(&key.describe(signature)),
        }
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) failure: Option<RankFailure>,
    pub(super) meetings: HashMap<MeetingKey, Meeting>,
    pub(super) last_op: Vec<Option<LastOp>>,
    pub(super) waiting: Vec<Option<Waiting>>,
    pub(super) ended: Vec<bool>,
    pub(super) records: Records,
}

impl State {
    /// What a rank was last seen to call.
    pub(super) fn last_op(&self, rank: usize) -> Option<String> {
        self.last_op.get(rank)?.as_ref().map(LastOp::to_string)
    }

    /// The operation in which a rank waits for ranks that have not come; `None` if it can go on.
    fn blocked(&self, rank: usize) -> Option<&Waiting> {
        let waiting = self.waiting[rank].as_ref()?;
        self.meetings
            .get(&waiting.key)
            .is_some_and(|meeting| !meeting.missing().is_empty())
            .then_some(waiting)
    }

    /// Whom a wait in `op` for `missing` comes down to, and the operation that waits for that rank: missing ranks may
    /// themselves wait for others.
    pub(super) fn culprit(&self, op: &str, missing: &[usize]) -> (usize, String) {
        let (mut missing, mut op) = (missing.to_vec(), op.to_owned());
        let mut seen = Vec::new();
        // Follows the waiting ranks first: the innermost wait is the one that holds up the others.
        while let Some((rank, waiting)) = missing
            .iter()
            .filter(|rank| !seen.contains(*rank))
            .find_map(|&rank| Some((rank, self.blocked(rank)?)))
        {
            seen.push(rank);
            op.clone_from(&waiting.op);
            missing = self
                .meetings
                .get(&waiting.key)
                .map(Meeting::missing)
                .unwrap_or_default();
        }
        let free = missing.iter().find(|&&rank| self.blocked(rank).is_none());
        (free.copied().unwrap_or(missing[0]), op)
    }

    /// The error of a group whose ranks all wait for each other, in different operations.
    pub(super) fn crossed(
        &self,
        group: &Arc<str>,
        ranks: &[usize],
    ) -> Option<(usize, String, CommError)> {
        let waiting: Vec<&Waiting> = ranks.iter().map_while(|&rank| self.blocked(rank)).collect();
        if waiting.len() < ranks.len() || waiting.iter().any(|waiting| waiting.key.group != *group)
        {
            return None;
        }
        let keys: Vec<&MeetingKey> = waiting.iter().map(|waiting| &waiting.key).collect();
        let (odd, expected) = odd_one_out(&keys)?;
        let error = CommError::Mismatch {
            group: group.to_string(),
            number: keys[expected].number,
            rank: ranks[odd],
            expected: waiting[expected].op.clone(),
            got: waiting[odd].op.clone(),
        };
        Some((ranks[odd], waiting[odd].op.clone(), error))
    }
}

/// The shared table of one world.
pub(crate) struct Hub {
    world_size: usize,
    pub(super) deadline: Duration,
    state: Mutex<State>,
    pub(super) changed: Condvar,
    /// Rings when the world has failed or a rank has ended, but not at every meeting.
    settled: Condvar,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("world_size", &self.world_size)
            .finish_non_exhaustive()
    }
}

/// Who meets: the caller, its index in the group, and the group's global ranks.
pub(crate) struct Attendance<'a> {
    pub(crate) ranks: &'a [usize],
    pub(crate) index: usize,
}

impl Hub {
    pub(crate) fn new(world_size: usize, deadline: Duration) -> Arc<Self> {
        let state = State {
            last_op: vec![None; world_size],
            waiting: vec![None; world_size],
            ended: vec![false; world_size],
            ..State::default()
        };
        Arc::new(Self {
            world_size,
            deadline,
            state: Mutex::new(state),
            changed: Condvar::new(),
            settled: Condvar::new(),
        })
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    // The table holds plain values, valid after any panic of a holder.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the first failure of the world and wakes everybody.
    pub(crate) fn fail(&self, rank: usize, op: Option<String>, cause: FailureCause) {
        self.note(&mut self.lock(), rank, op, cause);
    }

    pub(super) fn note(
        &self,
        state: &mut State,
        rank: usize,
        op: Option<String>,
        cause: FailureCause,
    ) {
        self.changed.notify_all();
        self.settled.notify_all();
        if state.failure.is_none() {
            let op = op.unwrap_or_else(|| match state.last_op(rank) {
                Some(last) => format!("its own code, after {last}"),
                None => "its own code, before any collective".to_owned(),
            });
            state.failure = Some(RankFailure { rank, op, cause });
        }
    }

    pub(crate) fn failure(&self) -> Option<RankFailure> {
        self.lock().failure.clone()
    }

    /// Marks that a rank's program has ended, so that nobody waits for it.
    pub(crate) fn end(&self, rank: usize) {
        let mut state = self.lock();
        state.ended[rank] = true;
        self.check_end(&mut state, rank);
        drop(state);
        self.changed.notify_all();
        self.settled.notify_all();
    }

    /// How long a rank waits for its peers.
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Waits until the world has failed or `done` holds of which ranks have ended, at most for `timeout`: the failure, and
    /// whether `done` holds.
    pub(crate) fn wait_settled(
        &self,
        timeout: Duration,
        done: impl Fn(&[bool]) -> bool,
    ) -> (Option<RankFailure>, bool) {
        let state = self
            .settled
            .wait_timeout_while(self.lock(), timeout, |state| {
                state.failure.is_none() && !done(&state.ended)
            })
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        (state.failure.clone(), done(&state.ended))
    }

    /// Waits until `done` holds of which ranks have ended, at most for `timeout`. Whether it does.
    pub(crate) fn wait_ended(&self, timeout: Duration, done: impl Fn(&[bool]) -> bool) -> bool {
        let state = self
            .settled
            .wait_timeout_while(self.lock(), timeout, |state| !done(&state.ended))
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        done(&state.ended)
    }
}

/// Indices of the first value that differs from the most frequent one, and of that one; the lowest index wins ties.
pub(crate) fn odd_one_out<T: PartialEq>(values: &[T]) -> Option<(usize, usize)> {
    if values.windows(2).all(|pair| pair[0] == pair[1]) {
        return None;
    }
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

/// A shared name travels as text.
mod group_name {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(name: &Arc<str>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(name)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<str>, D::Error> {
        String::deserialize(from).map(Into::into)
    }
}
