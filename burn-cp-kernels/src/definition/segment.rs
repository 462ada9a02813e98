//! One segment: a run of queries, the run of keys it sees, and the mask between the two.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// How far a query sees around its own key. `None` means without bound on that side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Number of keys before the own one that are visible.
    pub left: Option<usize>,
    /// Number of keys after the own one that are visible; a causal segment shows none of them anyway.
    pub right: Option<usize>,
}

impl Window {
    /// The `left` keys before a query's own one, and without bound after it.
    #[must_use]
    pub fn left(left: usize) -> Self {
        Self {
            left: Some(left),
            right: None,
        }
    }

    /// The `left` keys before a query's own one and the `right` keys after it.
    #[must_use]
    pub fn new(left: usize, right: usize) -> Self {
        Self {
            left: Some(left),
            right: Some(right),
        }
    }
}

/// A run of queries, the run of keys it sees, and the mask between the two.
///
/// With `num_q` queries and `num_k` keys, query `t` (counted within the segment) has the *own key*
/// `num_k - num_q + t`: the last query and the last key belong together. A causal query sees the
/// keys up to its own one; if there are fewer keys than queries, the first queries see none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// Batch row of the query buffer.
    pub q_row: usize,
    /// Query tokens within that row, half-open; may be empty.
    pub q: Range<usize>,
    /// Batch row of the key buffer.
    pub k_row: usize,
    /// Key tokens within that row, half-open; may be empty.
    pub k: Range<usize>,
    /// Position of the first key within its document. Moves no mask; it places the tiles in which
    /// keys are walked, so that a document's rows give the same bits however it was cut.
    pub k_position: usize,
    /// Whether a query sees only the keys up to its own one; otherwise it sees all of them.
    pub causal: bool,
    /// How far a query sees around its own key; `None` means as far as there are keys.
    pub window: Option<Window>,
}

impl Segment {
    /// Number of queries.
    #[must_use]
    pub fn num_q(&self) -> usize {
        self.q.len()
    }

    /// Number of keys.
    #[must_use]
    pub fn num_k(&self) -> usize {
        self.k.len()
    }

    /// Number of keys before and after its own one that a query sees at most; `None` without bound.
    #[must_use]
    pub fn reach(&self) -> (Option<usize>, Option<usize>) {
        let window = self.window.unwrap_or_default();
        match self.causal {
            true => (window.left, Some(0)),
            false => (window.left, window.right),
        }
    }

    /// Number of leading queries that see no key. No later query is blind: its own key is no later
    /// than the last one.
    #[must_use]
    pub fn num_blind_queries(&self) -> usize {
        match (self.num_k(), self.reach().1) {
            (0, _) => self.num_q(),
            (_, None) => 0,
            (keys, Some(right)) => self.num_q().saturating_sub(keys.saturating_add(right)),
        }
    }

    /// Keys that query `t` sees, both counted within the segment. The bounds never decrease with
    /// `t`. Empty if the query sees none.
    #[must_use]
    pub fn visible_keys(&self, t: usize) -> Range<usize> {
        // Number of keys up to and including the own one; negative where there are fewer keys.
        let end = (self.num_k() + t + 1) as isize - self.num_q() as isize;
        let (left, right) = self.reach();
        let far = |reach: usize| isize::try_from(reach).unwrap_or(isize::MAX);
        let start = left.map_or(0, |left| end.saturating_sub(far(left)).saturating_sub(1));
        let keys = self.num_k() as isize;
        let end = right.map_or(keys, |right| end.saturating_add(far(right)).min(keys));
        start.max(0) as usize..end.max(0) as usize
    }
}
