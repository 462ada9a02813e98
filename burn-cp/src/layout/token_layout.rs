//! Which rank owns which tokens, as ranges.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::LayoutError;

/// For every rank the token ranges of a row that it owns, in its local order.
///
/// Every batch row is dealt out by the same ranges. The ranges of all ranks are disjoint and cover
/// `0..seq_len`; every rank owns at least one token. Shares may be uneven, and a rank's ranges need not
/// be ascending: its local token `i` is the `i`-th token of its ranges put one behind the other.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "RawLayout", into = "RawLayout")]
pub struct TokenLayout {
    seq_len: usize,
    ranks: Vec<Vec<Range<usize>>>,
    /// Start of each rank's shard in the rank-major concatenation of all shards; `seq_len` at the end.
    offsets: Vec<usize>,
    /// All ranges, ascending by token.
    owned: Vec<OwnedRange>,
}

/// A run of tokens that one rank owns, consecutive in the row as well as in the rank's local order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OwnedRange {
    /// The owner.
    pub rank: usize,
    /// Local token indices within a row of the owner's shard.
    pub local: Range<usize>,
    /// Global token indices within a row, as many as local ones.
    pub tokens: Range<usize>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLayout {
    seq_len: usize,
    ranks: Vec<Vec<Range<usize>>>,
}

impl TokenLayout {
    /// A layout from the ranges of each rank, in local order.
    ///
    /// Empty ranges are dropped, and ranges that continue each other in local order are joined, so that
    /// equal layouts compare and hash equal.
    ///
    /// # Errors
    ///
    /// No ranks or no tokens; a rank without tokens; ranges that overlap, leave tokens without an owner,
    /// lie past `seq_len` or end before they start.
    pub fn new(seq_len: usize, mut ranks: Vec<Vec<Range<usize>>>) -> Result<Self, LayoutError> {
        if ranks.is_empty() {
            return Err(LayoutError::ZeroRanks);
        }
        if seq_len == 0 {
            return Err(LayoutError::EmptyStream { what: "layout" });
        }
        for (rank, ranges) in ranks.iter_mut().enumerate() {
            canonicalise(rank, ranges, seq_len)?;
        }
        let owned = index(&ranks);
        check_cover(&owned, seq_len)?;
        // Only now: lengths cannot overflow once the ranges are known to be disjoint.
        let mut offsets = vec![0];
        for ranges in &ranks {
            let len: usize = ranges.iter().map(Range::len).sum();
            offsets.push(offsets[offsets.len() - 1] + len);
        }
        Ok(Self {
            seq_len,
            ranks,
            offsets,
            owned,
        })
    }

    /// Rank `r` owns the `r`-th of `world_size` equal parts of a row.
    ///
    /// # Errors
    ///
    /// No ranks, no tokens, or a `seq_len` that `world_size` does not divide.
    pub fn contiguous(seq_len: usize, world_size: usize) -> Result<Self, LayoutError> {
        let len = divide("contiguous", seq_len, world_size, world_size)?;
        let ranks = (0..world_size).map(|rank| vec![part(rank, len)]).collect();
        Self::new(seq_len, ranks)
    }

    /// Rank `r` owns the `r`-th part from the front and the `r`-th from the back, of `2 * world_size`
    /// equal parts of a row.
    ///
    /// Under a causal mask over a whole row every rank then has the same work.
    ///
    /// # Errors
    ///
    /// No ranks, no tokens, or a `seq_len` that `2 * world_size` does not divide.
    pub fn head_tail(seq_len: usize, world_size: usize) -> Result<Self, LayoutError> {
        let num_parts = world_size.checked_mul(2).ok_or(LayoutError::Overflow {
            what: "head-tail",
            got: seq_len,
        })?;
        let len = divide("head-tail", seq_len, world_size, num_parts)?;
        let ranks = (0..world_size)
            .map(|rank| vec![part(rank, len), part(num_parts - 1 - rank, len)])
            .collect();
        Self::new(seq_len, ranks)
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Tokens of a row, padding included.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Tokens of a row that `rank` owns, at least 1.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn local_len(&self, rank: usize) -> usize {
        self.offsets[rank + 1] - self.offsets[rank]
    }

    /// Where the shard of `rank` begins in the rank-major concatenation of all shards of a row.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn offset(&self, rank: usize) -> usize {
        assert!(
            rank < self.world_size(),
            "rank {rank} of {}",
            self.world_size()
        );
        self.offsets[rank]
    }

    /// The token ranges that `rank` owns, in its local order.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn ranges(&self, rank: usize) -> &[Range<usize>] {
        &self.ranks[rank]
    }

    /// The global token index of each local token of `rank`.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn indices(&self, rank: usize) -> Vec<usize> {
        self.ranks[rank].iter().cloned().flatten().collect()
    }

    /// The rank that owns a global token, and the token's local index there.
    ///
    /// `None` past the end of the row.
    pub fn owner(&self, token: usize) -> Option<(usize, usize)> {
        let owned = self.owned_ranges(token..token.checked_add(1)?).next()?;
        Some((owned.rank, owned.local.start))
    }

    /// The owners of the global range `tokens`, in ascending order, cut to the range.
    ///
    /// What lies past the end of the row has no owner and is left out.
    pub fn owned_ranges(&self, tokens: Range<usize>) -> impl Iterator<Item = OwnedRange> {
        let first = (self.owned).partition_point(|owned| owned.tokens.end <= tokens.start);
        self.owned[first..]
            .iter()
            .take_while({
                // An empty range has no owners, wherever it lies.
                let end = if tokens.is_empty() { 0 } else { tokens.end };
                move |owned| owned.tokens.start < end
            })
            .map(move |owned| {
                let start = owned.tokens.start.max(tokens.start);
                let end = owned.tokens.end.min(tokens.end);
                let local = owned.local.start + (start - owned.tokens.start);
                OwnedRange {
                    rank: owned.rank,
                    local: local..local + (end - start),
                    tokens: start..end,
                }
            })
    }

    /// The permutation that restores global order: token `t` of a row stands at index `inverse()[t]` of
    /// the rank-major concatenation of all shards of that row.
    ///
    /// Selecting these indices from the concatenation yields the row.
    pub fn inverse(&self) -> Vec<usize> {
        let mut inverse = vec![0; self.seq_len];
        let concatenated = self.ranks.iter().flatten().cloned().flatten();
        for (index, token) in concatenated.enumerate() {
            inverse[token] = index;
        }
        inverse
    }
}

impl TryFrom<RawLayout> for TokenLayout {
    type Error = LayoutError;

    fn try_from(raw: RawLayout) -> Result<Self, LayoutError> {
        Self::new(raw.seq_len, raw.ranks)
    }
}

impl From<TokenLayout> for RawLayout {
    fn from(layout: TokenLayout) -> Self {
        Self {
            seq_len: layout.seq_len,
            ranks: layout.ranks,
        }
    }
}

fn part(index: usize, len: usize) -> Range<usize> {
    index * len..(index + 1) * len
}

fn divide(
    what: &'static str,
    seq_len: usize,
    world_size: usize,
    divisor: usize,
) -> Result<usize, LayoutError> {
    if world_size == 0 {
        return Err(LayoutError::ZeroRanks);
    }
    if !seq_len.is_multiple_of(divisor) {
        return Err(LayoutError::Divisibility {
            what,
            world_size,
            expected: divisor,
            got: seq_len,
        });
    }
    Ok(seq_len / divisor)
}

fn canonicalise(
    rank: usize,
    ranges: &mut Vec<Range<usize>>,
    seq_len: usize,
) -> Result<(), LayoutError> {
    if let Some(&Range { start, end }) = ranges.iter().find(|range| range.end < range.start) {
        return Err(LayoutError::ReversedRange { rank, start, end });
    }
    ranges.retain(|range| !range.is_empty());
    if let Some(range) = ranges.iter().find(|range| range.end > seq_len) {
        return Err(LayoutError::PastEnd {
            rank,
            expected: seq_len,
            got: range.end,
        });
    }
    ranges.dedup_by(|next, range| {
        let continues = range.end == next.start;
        if continues {
            range.end = next.end;
        }
        continues
    });
    if ranges.is_empty() {
        return Err(LayoutError::EmptyRank { rank });
    }
    Ok(())
}

fn index(ranks: &[Vec<Range<usize>>]) -> Vec<OwnedRange> {
    let mut owned = Vec::with_capacity(ranks.iter().map(Vec::len).sum());
    for (rank, ranges) in ranks.iter().enumerate() {
        let mut local = 0_usize;
        for tokens in ranges {
            // Overlapping input could overflow here before the overlap is reported.
            let end = local.saturating_add(tokens.len());
            owned.push(OwnedRange {
                rank,
                local: local..end,
                tokens: tokens.clone(),
            });
            local = end;
        }
    }
    owned.sort_unstable_by_key(|owned| (owned.tokens.start, owned.rank, owned.tokens.end));
    owned
}

fn check_cover(owned: &[OwnedRange], seq_len: usize) -> Result<(), LayoutError> {
    let mut end = 0;
    for OwnedRange { rank, tokens, .. } in owned {
        if tokens.start < end {
            return Err(LayoutError::Overlap {
                token: tokens.start,
                rank: *rank,
            });
        }
        if tokens.start > end {
            return Err(LayoutError::Gap {
                expected: seq_len,
                got: end..tokens.start,
            });
        }
        end = tokens.end;
    }
    if end < seq_len {
        return Err(LayoutError::Gap {
            expected: seq_len,
            got: end..seq_len,
        });
    }
    Ok(())
}
