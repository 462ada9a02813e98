//! Contiguous partition with the smallest largest part.

/// Costs that cannot be partitioned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// Nothing to partition into.
    #[error("partition: expected at least one part, got none")]
    NoParts,
    /// Some part would be empty.
    #[error("partition: expected at least one cost for each of {expected} parts, got {got}")]
    TooFewCosts {
        /// Number of parts.
        expected: usize,
        /// Number of costs.
        got: usize,
    },
    /// An item that costs nothing.
    #[error("partition: expected positive costs, got 0 at index {index}")]
    ZeroCost {
        /// The first such item.
        index: usize,
    },
    /// The costs add up to more than fits 128 bits.
    #[error("partition: the sum of {got} costs does not fit 128 bits")]
    Overflow {
        /// Number of costs.
        got: usize,
    },
}

/// Cuts `costs` into exactly `parts` consecutive, non-empty parts whose largest sum is as small as possible.
///
/// Returns `parts + 1` boundaries, from 0 to `costs.len()`: part `r` is `cuts[r]..cuts[r + 1]`. Where several partitions are
/// optimal it is the one whose boundaries come lexicographically last, so the result depends on the costs alone and every
/// rank derives the same one. Takes `O(n + parts · log n · log max cost)`.
///
/// # Errors
/// No parts, fewer costs than parts, a cost of 0, or a sum that does not fit 128 bits.
pub fn balanced_cuts(costs: &[u128], parts: usize) -> Result<Vec<usize>, PartitionError> {
    let n = costs.len();
    if parts == 0 {
        return Err(PartitionError::NoParts);
    }
    if n < parts {
        return Err(PartitionError::TooFewCosts {
            expected: parts,
            got: n,
        });
    }
    if let Some(index) = costs.iter().position(|&cost| cost == 0) {
        return Err(PartitionError::ZeroCost { index });
    }
    let mut sums = Vec::with_capacity(n + 1);
    sums.push(0);
    for &cost in costs {
        let sum: u128 = sums[sums.len() - 1];
        sums.push(
            sum.checked_add(cost)
                .ok_or(PartitionError::Overflow { got: n })?,
        );
    }
    let largest = costs.iter().copied().max().unwrap_or_default();
    let limit = smallest_limit(&sums, parts, largest);
    let mut cuts = Vec::with_capacity(parts + 1);
    cuts.push(0);
    for part in 1..=parts {
        // The later parts need an item each. Taking as much as the limit allows never hurts them: what is left for them is
        // a suffix of what they would have had otherwise.
        cuts.push(reach(&sums, cuts[part - 1], limit).min(n - (parts - part)));
    }
    Ok(cuts)
}

/// End of the longest part that starts at `start` and does not exceed `limit`.
fn reach(sums: &[u128], start: usize, limit: u128) -> usize {
    let end = sums[start].saturating_add(limit);
    start + sums[start..].partition_point(|&sum| sum <= end) - 1
}

/// Whether the items fit `parts` parts of at most `limit` each, which is at least the largest cost.
fn fits(sums: &[u128], parts: usize, limit: u128) -> bool {
    let n = sums.len() - 1;
    let mut start = 0;
    for _ in 0..parts {
        start = reach(sums, start, limit);
        if start == n {
            return true;
        }
    }
    false
}

/// The smallest limit that `parts` parts can keep. Parts that it leaves unused can always be had by splitting others.
fn smallest_limit(sums: &[u128], parts: usize, largest: u128) -> u128 {
    let total = sums[sums.len() - 1];
    let mean = total.div_ceil(parts as u128);
    let mut low = mean.max(largest);
    // Filled in order, every part but the last comes within one item of its limit, so the mean and one item are enough.
    let mut high = mean.saturating_add(largest).min(total);
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(sums, parts, middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn quadratic(rows: &[u128], alpha: u128) -> Vec<u128> {
        rows.iter().map(|p| p * (p + alpha)).collect()
    }

    fn max_load(costs: &[u128], cuts: &[usize]) -> u128 {
        cuts.windows(2)
            .map(|cut| costs[cut[0]..cut[1]].iter().sum())
            .max()
            .unwrap()
    }

    /// Every list of cuts into `parts` non-empty parts of `start..n`.
    fn all_cuts(start: usize, n: usize, parts: usize) -> Vec<Vec<usize>> {
        if parts == 1 {
            return vec![vec![start, n]];
        }
        let firsts = start + 1..=n - (parts - 1);
        let with = |cut: usize| {
            all_cuts(cut, n, parts - 1)
                .into_iter()
                .map(move |rest| [vec![start], rest].concat())
        };
        firsts.flat_map(with).collect()
    }

    #[test]
    fn the_largest_part_is_as_small_as_possible() {
        let mixed = [4, 16, 8, 24, 4, 24];
        let big_first: Vec<u128> = [vec![1024; 4], vec![112; 400]].concat();
        let table: Vec<(&[u128], usize, u128, u128)> = vec![
            (&mixed, 2, 0, 912),
            (&mixed, 3, 0, 592),
            (&mixed, 4, 0, 576),
            (&mixed, 2, 3456, 180_624),
            (&mixed, 6, 0, 576),
            (&[3; 4], 2, 0, 18),
            (&[3; 6], 3, 0, 18),
            (&[3; 8], 4, 0, 18),
            (&[3, 4, 5], 2, 0, 25),
            (&[1, 1, 2], 2, 0, 4),
            (&[1; 4], 2, 0, 2),
            (&[100, 1, 1, 1, 100, 1, 1, 1], 2, 0, 10_003),
            (&[1000, 1, 1, 1], 4, 0, 1_000_000),
            (&[1, 1, 1, 1000], 2, 0, 1_000_000),
            (&[1, 1, 1, 1000], 4, 0, 1_000_000),
            (&big_first, 8, 0, 1_216_768),
            (&big_first, 8, 3456, 22_378_496),
            (&[16, 1024, 1024, 1024, 16], 3, 0, 1_048_832),
            (&[1024, 4, 1024, 1024, 1024], 4, 0, 1_048_592),
            (&[36, 100, 64, 4, 36], 2, 3456, 481_312),
        ];
        for (rows, parts, alpha, expected) in table {
            let costs = quadratic(rows, alpha);
            let cuts = balanced_cuts(&costs, parts).unwrap();
            assert_eq!(
                max_load(&costs, &cuts),
                expected,
                "{parts} parts, alpha {alpha}, cuts {cuts:?}"
            );
            assert_eq!(
                (cuts.len(), cuts[0], cuts[parts]),
                (parts + 1, 0, rows.len())
            );
            assert!(cuts.windows(2).all(|cut| cut[0] < cut[1]));
        }
    }

    #[test]
    fn equally_good_cuts_come_as_late_as_possible() {
        let costs = quadratic(&[4, 16, 8, 24, 4, 24], 0);
        assert_eq!(balanced_cuts(&costs, 2).unwrap(), [0, 4, 6]);
        assert_eq!(balanced_cuts(&costs, 3).unwrap(), [0, 3, 5, 6]);
        assert_eq!(balanced_cuts(&costs, 1).unwrap(), [0, 6]);
        assert_eq!(balanced_cuts(&[1, 1, 1, 9], 3).unwrap(), [0, 2, 3, 4]);
    }

    #[test]
    fn what_cannot_be_partitioned_is_refused() {
        assert_eq!(balanced_cuts(&[1], 0), Err(PartitionError::NoParts));
        assert_eq!(
            balanced_cuts(&[4, 4], 4),
            Err(PartitionError::TooFewCosts {
                expected: 4,
                got: 2
            })
        );
        assert_eq!(
            balanced_cuts(&[4, 0], 2),
            Err(PartitionError::ZeroCost { index: 1 })
        );
        assert_eq!(
            balanced_cuts(&[u128::MAX, 1], 2),
            Err(PartitionError::Overflow { got: 2 })
        );
        assert_eq!(balanced_cuts(&[u128::MAX - 1, 1], 2), Ok(vec![0, 1, 2]));
    }

    proptest! {
        #[test]
        fn agrees_with_trying_every_partition(
            costs in prop::collection::vec(prop_oneof![1_u128..6, 1_u128..1000], 1..9),
            part in any::<prop::sample::Index>(),
        ) {
            let parts = part.index(costs.len()) + 1;
            let all = all_cuts(0, costs.len(), parts);
            let best = all.iter().map(|cuts| max_load(&costs, cuts)).min().unwrap();
            let expected = all.into_iter().filter(|cuts| max_load(&costs, cuts) == best).max().unwrap();
            prop_assert_eq!(balanced_cuts(&costs, parts).unwrap(), expected);
        }
    }
}
