//! Which keys a query sees.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Which tokens of its own document a token attends to.
///
/// Positions are document positions: they number the real tokens of a document and skip padding inside
/// it. No mask lets a token see another document or padding.
///
/// In configuration files: `{ causal = {} }`, `{ causal = { window = 4095 } }`, `"full"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum MaskKind {
    /// The token itself and earlier ones.
    Causal {
        /// How many earlier tokens are visible besides the token itself; all of them if `None`.
        #[serde(default)]
        window: Option<usize>,
    },
    /// All tokens of the document.
    Full,
}

impl MaskKind {
    /// Causal without a window.
    pub const CAUSAL: Self = Self::Causal { window: None };

    /// Whether later tokens are hidden.
    pub fn is_causal(self) -> bool {
        matches!(self, Self::Causal { .. })
    }

    /// The window, where there is one.
    pub fn window(self) -> Option<usize> {
        match self {
            Self::Causal { window } => window,
            Self::Full => None,
        }
    }

    /// The shortest run of positions that holds every key of the queries at the positions `queries` of a
    /// document of `len` real tokens.
    pub(super) fn keys(self, queries: &Range<usize>, len: usize) -> Range<usize> {
        match self {
            Self::Full => 0..len,
            Self::Causal { window: None } => 0..queries.end,
            Self::Causal {
                window: Some(window),
            } => queries.start.saturating_sub(window)..queries.end,
        }
    }

    /// How many (query, key) pairs are visible to those queries. In closed form: nothing is counted.
    pub(super) fn area(self, queries: &Range<usize>, len: usize) -> u128 {
        let wide = |value: usize| value as u128;
        let (start, num) = (wide(queries.start), wide(queries.len()));
        match self {
            Self::Full => num * wide(len),
            Self::Causal { window } => {
                // Queries at positions below the window see everything before them, later ones
                // `window` keys; each sees itself.
                let window = window.map_or(u128::MAX, wide);
                let growing = num.min(window.saturating_sub(start));
                let constant = num - growing;
                let earlier = if constant == 0 { 0 } else { constant * window };
                growing * start + growing * growing.saturating_sub(1) / 2 + earlier + num
            }
        }
    }
}

impl Default for MaskKind {
    fn default() -> Self {
        Self::CAUSAL
    }
}
