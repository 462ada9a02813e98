//! The ranks that run collectives together.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    CollectiveKind,
    error::{CommError, FailureCause},
    hub::{Attendance, Hub, MeetingKey, odd_one_out},
    signature::Signature,
};

/// The latest differentiable collective of a program, as its autodiff backend left it.
///
/// Autodiff runs adjoints by depth of the graph, not by program order, and the depths of two ranks may differ. Each
/// differentiable collective therefore takes the one before it as a parent. Which one that is, is kept here, type-erased:
/// this room knows no autodiff. Groups bound together share one order, since ranks that wait for each other in two groups
/// in different orders would wait for ever; a training step has an order of its own.
///
/// Collectives of one order belong to one backward pass. Losses that get a pass each need an order each
/// ([`ProcessGroup::with_order`]): a pass consumes the graph of all collectives before it in its order, also of those that
/// its loss does not depend on.
#[derive(Clone, Default)]
pub struct ProgramOrder {
    latest: Arc<Latest>,
}

type Latest = Mutex<Option<Box<dyn Any + Send>>>;

impl ProgramOrder {
    /// An order in which nothing has happened yet.
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut Option<Box<dyn Any + Send>>) -> T) -> T {
        f(&mut self.latest.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// For what the order itself refers to, and must not keep alive.
    pub(crate) fn downgrade(&self) -> WeakProgramOrder {
        WeakProgramOrder(Arc::downgrade(&self.latest))
    }
}

/// An order that may have ended.
#[derive(Debug, Clone)]
pub(crate) struct WeakProgramOrder(Weak<Latest>);

impl WeakProgramOrder {
    pub(crate) fn upgrade(&self) -> Option<ProgramOrder> {
        self.0.upgrade().map(|latest| ProgramOrder { latest })
    }
}

impl fmt::Debug for ProgramOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgramOrder").finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum Transport {
    /// A group of one: nothing travels.
    Solo,
    /// Ranks are threads of this process.
    Threads(Arc<Hub>),
}

#[derive(Debug)]
struct Shared {
    key: Arc<str>,
    ranks: Vec<usize>,
    rank: usize,
    transport: Transport,
    next_number: AtomicU64,
    next_host_number: AtomicU64,
}

/// A group of ranks that run collectives together, as one of them sees it. Cheap to clone; clones share the numbering.
#[derive(Debug, Clone)]
pub struct ProcessGroup {
    shared: Arc<Shared>,
    order: ProgramOrder,
}

impl ProcessGroup {
    /// A group of one rank. Every collective is the identity.
    pub fn solo() -> Self {
        Self::from_parts("solo".into(), vec![0], 0, Transport::Solo)
    }

    pub(crate) fn threads(hub: &Arc<Hub>, key: Arc<str>, ranks: Vec<usize>, rank: usize) -> Self {
        let transport = if ranks.len() == 1 {
            Transport::Solo
        } else {
            Transport::Threads(hub.clone())
        };
        Self::from_parts(key, ranks, rank, transport)
    }

    fn from_parts(key: Arc<str>, ranks: Vec<usize>, rank: usize, transport: Transport) -> Self {
        let shared = Shared {
            key,
            ranks,
            rank,
            transport,
            next_number: AtomicU64::new(0),
            next_host_number: AtomicU64::new(0),
        };
        Self {
            shared: Arc::new(shared),
            order: ProgramOrder::new(),
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

    /// Exchanges one value with every rank of the group; values come back in group order.
    ///
    /// Every rank must call it, with an equal signature and the same `T`.
    pub(crate) fn meet<T: Send + Sync + 'static>(
        &self,
        number: u64,
        signature: Signature,
        value: T,
    ) -> Result<Vec<Arc<T>>, CommError> {
        self.meet_under(false, number, signature, value)
    }

    fn meet_under<T: Send + Sync + 'static>(
        &self,
        host: bool,
        number: u64,
        signature: Signature,
        value: T,
    ) -> Result<Vec<Arc<T>>, CommError> {
        let hub = match &self.shared.transport {
            Transport::Solo => return Ok(vec![Arc::new(value)]),
            Transport::Threads(hub) => hub,
        };
        let key = MeetingKey {
            group: self.shared.key.clone(),
            host,
            number,
        };
        let attendance = Attendance {
            ranks: &self.shared.ranks,
            index: self.shared.rank,
        };
        let wanted = std::any::type_name::<T>();
        let parcels = hub.meet(&key, &attendance, signature.clone(), Arc::new(value))?;
        parcels
            .into_iter()
            .zip(&self.shared.ranks)
            .map(|(parcel, &rank)| {
                parcel.downcast::<T>().map_err(|_| CommError::Mismatch {
                    group: self.shared.key.to_string(),
                    number,
                    rank,
                    expected: format!("{signature} of {wanted}"),
                    got: format!("{signature} of another backend"),
                })
            })
            .collect()
    }

    /// Gathers a small host message from every rank, in group order. No device takes part.
    ///
    /// Every rank must call it with the same `label`. Errors as the module's protocol says.
    pub fn host_all_gather<T: Clone + Send + Sync + 'static>(
        &self,
        label: &'static str,
        value: T,
    ) -> Result<Vec<T>, CommError> {
        let number = self.shared.next_host_number.fetch_add(1, Ordering::Relaxed);
        let values = self.meet_under(true, number, Signature::control(label), value)?;
        Ok(values.iter().map(|value| T::clone(value)).collect())
    }

    /// Checks that every rank holds an equal value, shown as `shown` in the error: [`CommError::Disagreement`] on all ranks.
    ///
    /// Every rank must call it.
    pub fn agree<T: Clone + PartialEq + Send + Sync + 'static>(
        &self,
        what: &'static str,
        value: T,
        shown: impl Fn(&T) -> String,
    ) -> Result<(), CommError> {
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
        if let Transport::Threads(hub) = &self.shared.transport {
            hub.fail(rank, Some(op.to_owned()), cause);
        }
    }

    /// Waits until every rank of the group has arrived. Host only.
    ///
    /// # Errors
    /// As the module's protocol says.
    pub fn barrier(&self) -> Result<(), CommError> {
        let number = self.shared.next_host_number.fetch_add(1, Ordering::Relaxed);
        let signature = Signature {
            kind: CollectiveKind::Barrier,
            ..Signature::control("barrier")
        };
        self.meet_under(true, number, signature, ()).map(|_| ())
    }
}
