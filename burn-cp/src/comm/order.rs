//! The order of a program's differentiable collectives.

use std::{
    any::Any,
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

#[cfg(doc)]
use super::ProcessGroup;

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
