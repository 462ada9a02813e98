//! What ranks say of operations in which they do not meet: read when one of them does not end.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use super::{
    error::{CommError, FailureCause},
    hub::{Attendance, Hub, LastOp, MeetingKey, State, odd_one_out},
    signature::Signature,
};

/// How many operations of a group are remembered per rank: more than any transport has on their way.
const KEPT: usize = 512;

/// The latest operations of one rank in one group, by number.
type Calls = VecDeque<(u64, Arc<Signature>)>;

/// The latest operations of every rank, by group.
#[derive(Default)]
pub(super) struct Records {
    groups: HashMap<Arc<str>, HashMap<usize, Calls>>,
}

/// What the records say of an operation that does not end.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    /// `rank` called something else than most ranks, in operation `number`.
    Mismatch {
        number: u64,
        rank: usize,
        expected: Box<Signature>,
        got: Box<Signature>,
    },
    /// These ranks have not started it; where all have, those that were asked about.
    Missing(Vec<usize>),
}

impl Records {
    pub(super) fn note(
        &mut self,
        group: &Arc<str>,
        rank: usize,
        number: u64,
        signature: Arc<Signature>,
    ) {
        let ranks = self.groups.entry(group.clone()).or_default();
        let latest = ranks.entry(rank).or_default();
        if latest.len() == KEPT {
            latest.pop_front();
        }
        latest.push_back((number, signature));
    }

    /// Who differs in operation `number`, once `num_ranks` have called it.
    fn odd_call(&self, group: &str, num_ranks: usize, number: u64) -> Option<Verdict> {
        let all = self.groups.get(group)?;
        // The latest is at the end.
        let call = |(rank, calls): (&usize, &'_ Calls)| {
            let place = (calls.iter().rev()).position(|(at, _)| *at == number)?;
            Some((*rank, calls.len() - 1 - place))
        };
        let mut who: Vec<(usize, usize)> = all.iter().filter_map(call).collect();
        if who.len() < num_ranks {
            return None;
        }
        who.sort_unstable();
        let called: Vec<&Signature> = (who.iter())
            .map(|(rank, place)| &*all[rank][*place].1)
            .collect();
        let (odd, expected) = odd_one_out(&called)?;
        Some(Verdict::Mismatch {
            number,
            rank: who[odd].0,
            expected: called[expected].clone().into(),
            got: called[odd].clone().into(),
        })
    }

    /// A rank that has ended although another of its group has called an operation that it had not come to, and the first of these.
    fn left_behind(&self, group: &str, ended: &[bool]) -> Option<(usize, u64, &Signature)> {
        let all = self.groups.get(group)?;
        let last = |calls: &Calls| calls.iter().map(|(number, _)| *number).max();
        let mut gone: Vec<usize> = all.keys().copied().filter(|rank| ended[*rank]).collect();
        gone.sort_unstable();
        gone.into_iter().find_map(|rank| {
            let end = last(&all[&rank])?;
            let others = all.values().flatten().filter(|(number, _)| *number > end);
            let (number, signature) = others.min_by_key(|(number, _)| *number)?;
            Some((rank, *number, &**signature))
        })
    }

    /// Groups in which a rank has called something.
    fn groups_of(&self, rank: usize) -> Vec<Arc<str>> {
        let of_rank = |(_, ranks): &(&Arc<str>, &HashMap<usize, Calls>)| ranks.contains_key(&rank);
        (self.groups.iter().filter(of_rank))
            .map(|(group, _)| group.clone())
            .collect()
    }

    /// Compares what `ranks` have called up to operation `number`.
    pub(super) fn judge(&self, group: &str, ranks: &[usize], number: u64) -> Verdict {
        let none = VecDeque::new();
        let of = |rank: &usize| {
            self.groups
                .get(group)
                .and_then(|all| all.get(rank))
                .unwrap_or(&none)
        };
        let mut numbers: Vec<u64> = (ranks.iter().flat_map(|rank| of(rank).iter()))
            .map(|(at, _)| *at)
            .filter(|at| *at <= number)
            .collect();
        numbers.sort_unstable();
        numbers.dedup();
        for at in numbers {
            let (who, called): (Vec<usize>, Vec<&Signature>) = ranks
                .iter()
                .filter_map(|rank| {
                    let found = of(rank).iter().find(|(number, _)| *number == at)?;
                    Some((*rank, &*found.1))
                })
                .unzip();
            if let Some((odd, expected)) = odd_one_out(&called) {
                return Verdict::Mismatch {
                    number: at,
                    rank: who[odd],
                    expected: called[expected].clone().into(),
                    got: called[odd].clone().into(),
                };
            }
        }
        let behind = |rank: &&usize| of(rank).back().is_none_or(|(at, _)| *at < number);
        let missing: Vec<usize> = ranks.iter().filter(behind).copied().collect();
        Verdict::Missing(if missing.is_empty() {
            ranks.to_vec()
        } else {
            missing
        })
    }
}

impl Hub {
    /// Notes that a rank starts an operation in which it does not meet the others here, of a group of so many ranks. The last of them
    /// finds out whether one calls something else, which fails the world: the operation might end all the same, with anything for
    /// a result. So does an operation that a rank did not come to before it [ended](Self::end): perhaps nobody waits for its result.
    pub(crate) fn record(
        &self,
        rank: usize,
        key: &MeetingKey,
        signature: Signature,
        num_ranks: usize,
    ) {
        let mut state = self.lock();
        let signature = Arc::new(signature);
        state.last_op[rank] = Some(LastOp::Recorded(key.clone(), signature.clone()));
        state.records.note(&key.group, rank, key.number, signature);
        let verdict = state.records.odd_call(&key.group, num_ranks, key.number);
        if let Some((odd, its_op, error)) = verdict.and_then(|verdict| mismatch(key, verdict).ok())
        {
            let cause = FailureCause::Comm(error);
            self.note(&mut state, odd, Some(its_op), cause);
        }
        if state.ended.contains(&true) {
            self.check_left_behind(&mut state, &key.group);
        }
    }

    /// Looks for operations that a rank which has ended did not come to.
    pub(super) fn check_end(&self, state: &mut State, rank: usize) {
        for group in state.records.groups_of(rank) {
            self.check_left_behind(state, &group);
        }
    }

    fn check_left_behind(&self, state: &mut State, group: &Arc<str>) {
        let left = state.records.left_behind(group, &state.ended);
        if let Some((rank, number, signature)) = left {
            let group = group.clone();
            let key = MeetingKey {
                group,
                host: false,
                number,
            };
            let op = key.describe(signature);
            let cause = FailureCause::Comm(CommError::PeerLeft {
                op: op.clone(),
                rank,
            });
            self.note(state, rank, Some(op), cause);
        }
    }

    /// Why operation `number`, which every rank records, has not come to an end after `waited`: the world's failure if there is
    /// one, else what the records say, which becomes the world's failure.
    pub(crate) fn diagnose(
        &self,
        attendance: &Attendance<'_>,
        key: &MeetingKey,
        waited: Duration,
    ) -> CommError {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return failure.as_peer_failure();
        }
        let (ranks, me) = (attendance.ranks, attendance.ranks[attendance.index]);
        let op = state.last_op(me).unwrap_or_default();
        let verdict = state.records.judge(&key.group, ranks, key.number);
        let (culprit, its_op, error) = match mismatch(key, verdict) {
            Ok(mismatch) => mismatch,
            Err(missing) => {
                let culprit = missing.first().copied().unwrap_or(me);
                let last_seen = state.last_op(culprit);
                let gone = state.ended[culprit];
                let error = if gone {
                    CommError::PeerLeft {
                        op: op.clone(),
                        rank: culprit,
                    }
                } else {
                    CommError::Timeout {
                        op: op.clone(),
                        missing,
                        waited,
                        last_seen,
                    }
                };
                (culprit, op, error)
            }
        };
        let cause = FailureCause::Comm(error.clone());
        self.note(&mut state, culprit, Some(its_op), cause);
        error
    }
}

/// The rank that differs, its operation and the error; or the ranks that are missing.
fn mismatch(key: &MeetingKey, verdict: Verdict) -> Result<(usize, String, CommError), Vec<usize>> {
    match verdict {
        Verdict::Missing(missing) => Err(missing),
        Verdict::Mismatch {
            number,
            rank,
            expected,
            got,
        } => {
            let error = CommError::Mismatch {
                group: key.group.to_string(),
                number,
                rank,
                expected: expected.to_string(),
                got: got.to_string(),
            };
            let at = MeetingKey {
                number,
                ..key.clone()
            };
            Ok((rank, at.describe(&got), error))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::CollectiveKind;

    fn signature(kind: CollectiveKind) -> Signature {
        Signature {
            kind,
            ..Signature::control("test")
        }
    }

    fn records(calls: &[&[CollectiveKind]]) -> (Records, Vec<usize>) {
        let mut records = Records::default();
        let group: Arc<str> = "cp".into();
        for (rank, kinds) in calls.iter().enumerate() {
            for (number, kind) in (0..).zip(*kinds) {
                records.note(&group, rank, number, signature(*kind).into());
            }
        }
        (records, (0..calls.len()).collect())
    }

    use CollectiveKind::{AllGather, AllReduce};

    #[test]
    fn the_first_difference_is_the_one_that_is_named() {
        let (records, ranks) = records(&[
            &[AllGather, AllReduce, AllReduce],
            &[AllGather, AllReduce, AllGather],
            &[AllGather, AllGather, AllGather],
        ]);
        let expected = Verdict::Mismatch {
            number: 1,
            rank: 2,
            expected: signature(AllReduce).into(),
            got: signature(AllGather).into(),
        };
        assert_eq!(records.judge("cp", &ranks, 2), expected);
    }

    #[test]
    fn ranks_that_are_behind_are_missing_and_others_groups_do_not_count() {
        let (records, ranks) = records(&[&[AllGather, AllReduce], &[AllGather], &[]]);
        assert_eq!(records.judge("cp", &ranks, 1), Verdict::Missing(vec![1, 2]));
        assert_eq!(records.judge("cp", &ranks, 0), Verdict::Missing(vec![2]));
        assert_eq!(
            records.judge("dp", &ranks, 0),
            Verdict::Missing(vec![0, 1, 2])
        );
    }

    #[test]
    fn an_operation_that_a_rank_did_not_come_to_before_it_ended_fails_the_world() {
        for ends_first in [true, false] {
            let hub = Hub::new(3, Duration::from_secs(60));
            let record = |rank: usize, group: &str, number| {
                let group = group.into();
                let key = MeetingKey {
                    group,
                    host: false,
                    number,
                };
                hub.record(rank, &key, signature(AllGather), 2);
            };
            // All that rank 1 has called comes to an end without it, in whichever order.
            (1..3).for_each(|number| record(1, "cp", number));
            record(0, "cp", 1);
            record(2, "dp", 7);
            if ends_first {
                hub.end(1);
            }
            record(0, "cp", 2);
            record(2, "dp", 8);
            assert!(hub.failure().is_none());
            if ends_first {
                record(0, "cp", 3);
            } else {
                record(0, "cp", 3);
                assert!(hub.failure().is_none());
                hub.end(1);
            }
            let failure = hub.failure().expect("a failure");
            assert_eq!(failure.rank, 1);
            let FailureCause::Comm(CommError::PeerLeft { op, rank: 1 }) = &failure.cause else {
                panic!("{failure:?}");
            };
            assert!(op.contains("#3") && op.contains("cp"), "{op}");
        }
    }
}
