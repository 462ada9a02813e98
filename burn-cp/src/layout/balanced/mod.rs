//! A layout in which every rank has the same attention work, receives few keys and values, and holds at most half more tokens
//! than the mean.
//!
//! The three pull apart. Contiguous shares move little and leave work uneven; a head and a tail of every document even it out and
//! move nearly everything; whole documents move nothing, but one that is more than a rank's work must be cut. So documents are
//! dealt out from the longest to the shortest, each whole to the emptiest rank with room for its work and its tokens (longest
//! processing time first; Graham, 1969), and only what fits nowhere is cut. Of a document that is cut, every rank takes a piece of
//! the end of what is left. Such a piece needs all keys ahead of it, most of which others own; where that is more than a rank may
//! receive, it also takes a piece of the beginning, where tokens cost little work and are keys of all others: head and tail,
//! but as little head as will do.
//!
//! How much a rank may receive is searched for, from the [lower bound](bound) up, together with how pieces share a rank with whole
//! documents ([`search`]). The search is bounded by counting, and computes with integers and basic `f64` operations in a fixed
//! order, so that every rank on every machine finds the same layout.
//!
//! What is cut, is cut at multiples of a power of two of the document's positions, where kernels have their tiles.

mod bound;
mod cut;
mod deal;
mod search;
mod visibility;

use std::ops::Range;

pub use visibility::Visibility;

use self::deal::{Piece, Problem};
use super::{Document, Documents, LayoutError, TokenLayout, policy};

const WHAT: &str = "balanced";

/// The largest granule: what a kernel's tile is at most.
const MAX_GRANULE: usize = 128;

/// What no rank may exceed.
#[derive(Debug, Clone)]
struct Limits {
    /// Visible pairs.
    area: u64,
    /// Visible pairs of a rank that was given a piece, since cuts at granules are not exact.
    area_with_cuts: u64,
    /// Tokens.
    tokens: usize,
}

impl Limits {
    /// Work that leaves a reserve, in 64ths of all.
    fn usable(&self, reserve: u64) -> u64 {
        self.area - self.area / 64 * reserve
    }
}

/// Deals out one stream.
pub(super) fn layout(
    documents: &Documents,
    world_size: usize,
    visibility: Visibility,
) -> Result<TokenLayout, LayoutError> {
    let row = one_row(documents)?;
    let seq_len = documents.seq_len();
    if world_size == 1 {
        return TokenLayout::contiguous(seq_len, 1);
    }
    let lengths = lengths(row);
    let problem = problem(&lengths, seq_len, world_size, visibility)?;
    let ranks = match search::search(&problem, seq_len) {
        Some(pieces) => ranges(row, &pieces, seq_len, world_size),
        // What no cut can balance; a handful of tokens, say.
        None => (0..world_size)
            .map(|rank| std::iter::once(share(seq_len, rank, world_size)).collect())
            .collect(),
    };
    policy::custom(ranks, seq_len, world_size)
}

/// A number of K/V tokens that some rank receives in every layout of these documents, over `world_size` ranks, in which the mean
/// work of a rank is at least 0.95 of the most and no rank holds more than 1.5 times the mean number of tokens.
///
/// A lower bound, with which the layout of [`LayoutPolicy::Balanced`](super::LayoutPolicy::Balanced) can be compared: what cannot
/// be avoided by any balanced layout. Layouts that are not balanced may receive less. Where a document is so long against the
/// others that no layout is balanced, the bound says nothing (0).
///
/// # Errors
///
/// No ranks, several rows, or numbers past 64 bits.
pub fn least_kv_received(
    documents: &Documents,
    world_size: usize,
    visibility: Visibility,
) -> Result<usize, LayoutError> {
    if world_size == 0 {
        return Err(LayoutError::ZeroRanks);
    }
    let lengths = lengths(one_row(documents)?);
    let problem = problem(&lengths, documents.seq_len(), world_size, visibility)?;
    Ok(problem.least_received(documents.seq_len()))
}

fn one_row(documents: &Documents) -> Result<&[Document], LayoutError> {
    match documents.batch_size() {
        1 => Ok(documents.row(0)),
        got => Err(LayoutError::NotFlattened {
            what: WHAT,
            expected: 1,
            got,
        }),
    }
}

/// Length and index of each document with tokens, the longest first.
fn lengths(row: &[Document]) -> Vec<(usize, usize)> {
    let mut lengths: Vec<_> = (row.iter().enumerate())
        .map(|(index, document)| (document.len(), index))
        .filter(|&(len, _)| len > 0)
        .collect();
    lengths.sort_unstable_by_key(|&(len, index)| (std::cmp::Reverse(len), index));
    lengths
}

fn problem(
    lengths: &[(usize, usize)],
    seq_len: usize,
    world_size: usize,
    visibility: Visibility,
) -> Result<Problem<'_>, LayoutError> {
    // A few times the work is counted, too.
    let total = (lengths.iter())
        .try_fold(0, |sum: u64, &(len, _)| {
            sum.checked_add(visibility.checked_area(len)?)
        })
        .filter(|&total| total <= u64::MAX / 8)
        .ok_or(LayoutError::Overflow {
            what: WHAT,
            got: seq_len,
        })?;
    let granule = (seq_len / world_size / 256).clamp(1, MAX_GRANULE);
    Ok(Problem {
        documents: lengths,
        world_size,
        visibility,
        granule: 1 << granule.ilog2(),
        total,
        steps: std::cell::Cell::new(0),
    })
}

fn share(seq_len: usize, rank: usize, world_size: usize) -> Range<usize> {
    let start = |rank: usize| (seq_len as u128 * rank as u128 / world_size as u128) as usize;
    start(rank)..start(rank + 1)
}

/// The token ranges of each rank, ascending. Tokens of no document go to the rank of the token before them, or to those with few.
fn ranges(
    row: &[Document],
    pieces: &[Piece],
    seq_len: usize,
    world_size: usize,
) -> Vec<Vec<Range<usize>>> {
    let mut ranks = vec![Vec::new(); world_size];
    let mut num_tokens = vec![0; world_size];
    let mut gaps: Vec<(Range<usize>, usize)> = Vec::new();
    let (mut end, mut before) = (0, 0);
    for piece in by_token(row, pieces) {
        for tokens in tokens_at(&row[piece.document], &piece.positions) {
            if end < tokens.start {
                gaps.push((end..tokens.start, before));
            }
            end = tokens.end;
            before = piece.rank;
            num_tokens[before] += tokens.len();
            ranks[before].push(tokens);
        }
    }
    if end < seq_len {
        gaps.push((end..seq_len, before));
    }
    if !gaps.is_empty() {
        deal_padding(
            gaps,
            seq_len.div_ceil(world_size),
            &mut ranks,
            &mut num_tokens,
        );
    }
    ranks
}

/// Pieces by document and position.
fn by_token<'a>(row: &[Document], pieces: &'a [Piece]) -> Vec<&'a Piece> {
    // Sorted by counting: there may be tens of thousands.
    let mut next = vec![0; row.len() + 1];
    for piece in pieces {
        next[piece.document + 1] += 1;
    }
    for document in 1..next.len() {
        next[document] += next[document - 1];
    }
    let first = next.clone();
    let mut sorted: Vec<Option<&Piece>> = vec![None; pieces.len()];
    for piece in pieces {
        let at = &mut next[piece.document];
        sorted[*at] = Some(piece);
        *at += 1;
    }
    let mut sorted: Vec<&Piece> = sorted.into_iter().flatten().collect();
    for (document, range) in first.windows(2).enumerate() {
        debug_assert_eq!(range[1], next[document]);
        sorted[range[0]..range[1]].sort_unstable_by_key(|piece| piece.positions.start);
    }
    sorted
}

/// The tokens of a document at these document positions.
fn tokens_at(document: &Document, positions: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = *positions;
    let mut position = 0;
    document.runs.iter().filter_map(move |run| {
        let first = position;
        position += run.len();
        let (from, to) = (start.max(first), end.min(position));
        (from < to).then(|| run.start + (from - first)..run.start + (to - first))
    })
}

fn deal_padding(
    gaps: Vec<(Range<usize>, usize)>,
    mean: usize,
    ranks: &mut [Vec<Range<usize>>],
    num_tokens: &mut [usize],
) {
    for (mut gap, before) in gaps {
        while !gap.is_empty() {
            let rank = if num_tokens[before] + gap.len() <= mean {
                before
            } else {
                // Some rank has less than the mean, since not all tokens have been dealt out.
                (0..num_tokens.len())
                    .min_by_key(|&rank| (num_tokens[rank], rank))
                    .unwrap_or(0)
            };
            let num = gap.len().min(mean.saturating_sub(num_tokens[rank]).max(1));
            num_tokens[rank] += num;
            ranks[rank].push(gap.start..gap.start + num);
            gap.start += num;
        }
    }
    for ranges in ranks {
        ranges.sort_unstable_by_key(|range| range.start);
    }
}
