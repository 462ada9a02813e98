//! How much work a piece of a document is, and which keys it needs.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Which tokens of its document a token sees, as far as the balance of work depends on it.
///
/// A layout is made before a mask is known, and several masks may be used in one layout. What is right for the
/// layers with the most work is a good choice; the default suits causal language models.
///
/// In configuration files: `{ causal = {} }`, `{ causal = { window = 4095 } }`, `"full"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Visibility {
    /// The token itself and earlier ones.
    Causal {
        /// How many earlier tokens are visible besides the token itself; all of them if `None`.
        #[serde(default)]
        window: Option<usize>,
    },
    /// All tokens of the document.
    Full,
}

impl Default for Visibility {
    fn default() -> Self {
        Self::Causal { window: None }
    }
}

impl Visibility {
    /// Visible (query, key) pairs of the queries at these positions of a document of `len` tokens.
    pub(super) fn area(self, queries: &Range<usize>, len: usize) -> u64 {
        match self {
            Self::Full => queries.len() as u64 * len as u64,
            Self::Causal { window } => {
                let window = window.unwrap_or(usize::MAX);
                pairs_before(queries.end, window) - pairs_before(queries.start, window)
            }
        }
    }

    /// The first position such that the queries from it to `end` see at most `area` pairs.
    pub(super) fn start_of(self, area: u64, end: usize, len: usize) -> usize {
        match self {
            Self::Full => {
                end - usize::try_from(area / (len as u64).max(1)).map_or(end, |num| num.min(end))
            }
            Self::Causal { window } => {
                let window = window.unwrap_or(usize::MAX);
                let below = pairs_before(end, window).saturating_sub(area);
                let growing = end.min(window.saturating_add(1));
                let triangle = pairs_before(growing, window);
                if below > triangle {
                    return growing
                        + usize::try_from((below - triangle).div_ceil(growing as u64))
                            .unwrap_or(end);
                }
                // The root of x (x + 1) / 2 = below, from a rounded square root.
                let mut start = (2.0 * below as f64).sqrt() as usize;
                while start > 0 && pairs_before(start - 1, window) >= below {
                    start -= 1;
                }
                while pairs_before(start, window) < below {
                    start += 1;
                }
                start
            }
        }
    }

    /// All visible pairs of a document, if they can be counted.
    pub(super) fn checked_area(self, len: usize) -> Option<u64> {
        let most = len as u128 * len as u128;
        // Twice what is counted at most, so that sums of two areas fit.
        u64::try_from(most).is_ok().then(|| self.whole_area(len))
    }

    /// All visible pairs of a document.
    pub(super) fn whole_area(self, len: usize) -> u64 {
        self.area(&(0..len), len)
    }

    /// The keys of other owners that one owner of the positions `low` and, behind them, `high` needs.
    pub(super) fn received(self, low: &Range<usize>, high: &Range<usize>, len: usize) -> usize {
        let window = match self {
            Self::Full => {
                return if low.is_empty() && high.is_empty() {
                    0
                } else {
                    len - low.len() - high.len()
                };
            }
            Self::Causal { window } => window.unwrap_or(usize::MAX),
        };
        // Keys ahead of a run of queries; those within it are the owner's.
        let ahead = |run: &Range<usize>| run.start.saturating_sub(window)..run.start;
        let below = if low.is_empty() { 0..0 } else { ahead(low) };
        let between = if high.is_empty() { 0..0 } else { ahead(high) };
        let overlap = |a: &Range<usize>, b: &Range<usize>| {
            a.end.min(b.end).saturating_sub(a.start.max(b.start))
        };
        below.len() + between.len() - overlap(&below, &between) - overlap(low, &between)
    }
}

/// Pairs of all queries at positions below `end`.
fn pairs_before(end: usize, window: usize) -> u64 {
    let growing = end.min(window.saturating_add(1)) as u64;
    let constant = end as u64 - growing;
    // One of two consecutive numbers is even; halved first, so that what fits into 64 bits does.
    let triangle = if growing.is_multiple_of(2) {
        growing / 2 * (growing + 1)
    } else {
        growing.div_ceil(2) * growing
    };
    triangle + constant * growing
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds() -> impl Iterator<Item = Visibility> {
        let windows = [None, Some(0), Some(1), Some(3), Some(9), Some(usize::MAX)];
        let causal = windows.map(|window| Visibility::Causal { window });
        causal.into_iter().chain([Visibility::Full])
    }

    fn sees(visibility: Visibility, query: usize, key: usize) -> bool {
        match visibility {
            Visibility::Full => true,
            Visibility::Causal { window } => {
                key <= query && query - key <= window.unwrap_or(usize::MAX)
            }
        }
    }

    #[test]
    fn pairs_and_starts_are_those_that_counting_gives() {
        const LEN: usize = 13;
        for visibility in kinds() {
            let pairs = |queries: &Range<usize>| {
                queries
                    .clone()
                    .map(|query| {
                        (0..LEN).filter(|&key| sees(visibility, query, key)).count() as u64
                    })
                    .sum::<u64>()
            };
            for end in 0..=LEN {
                for start in 0..=end {
                    assert_eq!(
                        visibility.area(&(start..end), LEN),
                        pairs(&(start..end)),
                        "{visibility:?}"
                    );
                }
                for area in 0..120 {
                    let first = (0..=end).find(|&start| pairs(&(start..end)) <= area);
                    assert_eq!(
                        Some(visibility.start_of(area, end, LEN)),
                        first,
                        "{visibility:?} {end} {area}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_received_is_what_is_seen_and_not_owned() {
        const LEN: usize = 9;
        for visibility in kinds() {
            for a in 0..=LEN {
                for b in a..=LEN {
                    for c in b..=LEN {
                        for d in c..=LEN {
                            let owned =
                                |token: &usize| (a..b).contains(token) || (c..d).contains(token);
                            let seen = |key: &usize| {
                                (0..LEN)
                                    .filter(owned)
                                    .any(|query| sees(visibility, query, *key))
                            };
                            let expected = (0..LEN).filter(|key| seen(key) && !owned(key)).count();
                            let got = visibility.received(&(a..b), &(c..d), LEN);
                            assert_eq!(got, expected, "{visibility:?} {a}..{b} {c}..{d}");
                        }
                    }
                }
            }
        }
    }
}
