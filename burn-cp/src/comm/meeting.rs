//! How ranks meet: each leaves a parcel, goes on if it likes, and takes the others' when all have arrived.

use std::{
    sync::{Arc, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{
    error::{CommError, FailureCause},
    hub::{Attendance, Hub, LastOp, Meeting, MeetingKey, Parcel, State, Waiting, odd_one_out},
    signature::Signature,
};

impl Hub {
    /// Leaves a parcel and waits for those of the other ranks; returned in the order of `attendance.ranks`.
    pub(crate) fn meet(
        &self,
        key: &MeetingKey,
        attendance: &Attendance<'_>,
        signature: Signature,
        parcel: Parcel,
    ) -> Result<Vec<Parcel>, CommError> {
        let op = key.describe(&signature);
        self.post(key, attendance, signature, parcel)?;
        self.wait(key, attendance, op)
    }

    /// Leaves a parcel without waiting. What follows is [`Self::wait`] or, for a rank that will not take the others' parcels,
    /// [`Self::leave`].
    pub(crate) fn post(
        &self,
        key: &MeetingKey,
        attendance: &Attendance<'_>,
        signature: Signature,
        parcel: Parcel,
    ) -> Result<(), CommError> {
        let op = key.describe(&signature);
        let rank = attendance.ranks[attendance.index];
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.as_peer_failure());
        }
        let ranks = attendance.ranks;
        let meeting = state
            .meetings
            .entry(key.clone())
            .or_insert_with(|| Meeting {
                ranks: ranks.to_vec(),
                parcels: ranks.iter().map(|_| None).collect(),
                num_taken: 0,
            });
        assert!(
            meeting.parcels[attendance.index].is_none(),
            "rank {rank} arrives twice at {op}: its group is used by two threads at once"
        );
        meeting.parcels[attendance.index] = Some((signature, parcel));
        if meeting.missing().is_empty() {
            self.changed.notify_all();
        }
        state.last_op[rank] = Some(LastOp::Said(op));
        Ok(())
    }

    /// Waits for the parcels of the other ranks at a meeting at which this rank has left its own as `op`.
    pub(crate) fn wait(
        &self,
        key: &MeetingKey,
        attendance: &Attendance<'_>,
        op: String,
    ) -> Result<Vec<Parcel>, CommError> {
        let start = Instant::now();
        let rank = attendance.ranks[attendance.index];
        let mut state = self.lock();
        state.last_op[rank] = Some(LastOp::Said(op.clone()));
        state.waiting[rank] = Some(Waiting {
            key: key.clone(),
            op: op.clone(),
        });
        // A meeting that is complete counts, whatever has happened since: so all its ranks see the same outcome.
        while let Some(missing) = state
            .meetings
            .get(key)
            .map(Meeting::missing)
            .filter(|missing| !missing.is_empty())
        {
            if let Some(failure) = &state.failure {
                return Err(failure.as_peer_failure());
            }
            let waited = start.elapsed();
            if let Some((culprit, its_op, error)) = self.give_up(&state, key, &missing, &op, waited)
            {
                let cause = FailureCause::Comm(error.clone());
                self.note(&mut state, culprit, Some(its_op), cause);
                return Err(error);
            }
            state = self
                .changed
                .wait_timeout(state, self.deadline.saturating_sub(waited))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.waiting[rank] = None;
        self.collect(state, key, attendance, op)
    }

    /// Gives up the parcels of a meeting at which this rank has left its own: the others take theirs all the same.
    pub(crate) fn leave(&self, key: &MeetingKey) {
        let mut state = self.lock();
        if let Some(meeting) = state.meetings.get_mut(key) {
            meeting.num_taken += 1;
            if meeting.num_taken == meeting.ranks.len() {
                state.meetings.remove(key);
            }
        }
    }

    /// [`Self::meet`] for ranks that are processes: parcels are bytes.
    pub(crate) fn meet_bytes(
        &self,
        key: &MeetingKey,
        attendance: &Attendance<'_>,
        signature: Signature,
        bytes: Vec<u8>,
    ) -> Result<Vec<Arc<Vec<u8>>>, CommError> {
        let parcels = self.meet(key, attendance, signature, Arc::new(bytes))?;
        let bytes = |parcel: Parcel| {
            parcel
                .downcast()
                .expect("ranks that are processes leave bytes")
        };
        Ok(parcels.into_iter().map(bytes).collect())
    }

    /// Whether waiting on is useless: whose fault it is, in which operation, and the error.
    fn give_up(
        &self,
        state: &State,
        key: &MeetingKey,
        missing: &[usize],
        op: &str,
        waited: Duration,
    ) -> Option<(usize, String, CommError)> {
        if let Some(&gone) = missing.iter().find(|&&rank| state.ended[rank]) {
            return Some((
                gone,
                op.to_owned(),
                CommError::PeerLeft {
                    op: op.to_owned(),
                    rank: gone,
                },
            ));
        }
        let ranks = &state.meetings.get(key)?.ranks;
        if let Some(crossed) = state.crossed(&key.group, ranks) {
            return Some(crossed);
        }
        if waited < self.deadline {
            return None;
        }
        let (culprit, its_op) = state.culprit(op, missing);
        let last_seen = state.last_op(culprit);
        let error = CommError::Timeout {
            op: op.to_owned(),
            missing: missing.to_vec(),
            waited,
            last_seen,
        };
        Some((culprit, its_op, error))
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
            let its_op = key.describe(&signatures[odd]);
            let cause = FailureCause::Comm(error.clone());
            self.note(&mut state, attendance.ranks[odd], Some(its_op), cause);
            return Err(error);
        }
        Ok(parcels)
    }
}
