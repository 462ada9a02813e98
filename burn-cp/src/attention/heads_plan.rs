//! How ranks trade their tokens for heads, and back. Host data.
//!
//! Between the two trades a rank has a part of the heads of all real tokens, one behind the other in the order of (row, token), as one
//! rank alone would have them.

use std::{ops::Range, sync::Arc};

use burn_cp_kernels::Segments;

use super::{PrepareError, prepared::kernel_segments};
use crate::{
    collectives::{ExchangePlan, Piece},
    layout::TokenLayout,
    plan::{self, AttentionPlan},
};

/// One rank's view of the trade.
#[derive(Debug)]
pub(super) struct HeadsPlan {
    /// Real tokens of the batch.
    pub(super) num_tokens: usize,
    /// Over queries and keys of shape `(1, num_tokens)`.
    pub(super) segments: Segments,
    /// From rows (rank that gets the heads, own token) to this rank's heads of all tokens.
    pub(super) there: Arc<ExchangePlan>,
    /// From this rank's heads of all tokens to rows (rank that had the heads, own real token).
    pub(super) back: Arc<ExchangePlan>,
    /// The own real tokens among the rows of the shard.
    pub(super) own: Vec<Range<usize>>,
}

impl HeadsPlan {
    pub(super) fn new(plan: &AttentionPlan, rank: usize) -> Result<Self, PrepareError> {
        let whole = TokenLayout::contiguous(plan.documents().seq_len(), 1)
            .unwrap_or_else(|_| unreachable!("rows of a layout have a token"));
        let alone = AttentionPlan::new(plan.documents().clone(), whole.into(), plan.mask())?;
        let alone = alone.rank(0);
        let order = order(plan, &alone.pieces);
        let num_tokens = alone.buffer_len;
        let size = plan.world_size();
        let batch = plan.documents().batch_size();
        let lens: Vec<usize> = (0..size)
            .map(|rank| batch * plan.layout().local_len(rank))
            .collect();
        let there: Vec<Vec<Piece>> = (0..size)
            .map(|to| {
                let shifted = order.iter().map(|piece| {
                    let first = to * lens[piece.source];
                    Piece {
                        source: piece.source,
                        range: first + piece.range.start..first + piece.range.end,
                    }
                });
                shifted.collect()
            })
            .collect();
        let inputs: Vec<usize> = lens.iter().map(|len| size * len).collect();
        let owned: Vec<Vec<(Range<usize>, usize)>> =
            (0..size).map(|rank| owned_by(&order, rank)).collect();
        let back: Vec<Vec<Piece>> = owned
            .iter()
            .map(|owned| {
                let rows = owned.iter().map(|(range, at)| *at..at + range.len());
                let from = |source| rows.clone().map(move |range| Piece { source, range });
                (0..size).flat_map(from).collect()
            })
            .collect();
        Ok(Self {
            num_tokens,
            segments: segments(alone, num_tokens)?,
            there: ExchangePlan::new(&inputs, &there, rank)?.into(),
            back: ExchangePlan::new(&vec![num_tokens; size], &back, rank)?.into(),
            own: owned[rank].iter().map(|(range, _)| range.clone()).collect(),
        })
    }
}

/// All real tokens in the order of (row, token), as rows of their owners' shards.
fn order(plan: &AttentionPlan, tokens: &[plan::KvPiece]) -> Vec<Piece> {
    let mut order: Vec<Piece> = Vec::new();
    for piece in tokens {
        for owned in plan.layout().owned_ranges(piece.local.clone()) {
            let first = piece.row * plan.layout().local_len(owned.rank);
            let range = first + owned.local.start..first + owned.local.end;
            match order.last_mut() {
                Some(last) if last.source == owned.rank && last.range.end == range.start => {
                    last.range.end = range.end;
                }
                _ => order.push(Piece {
                    source: owned.rank,
                    range,
                }),
            }
        }
    }
    order
}

/// The rows of a rank in the order of its shard, each run with its place among all tokens.
fn owned_by(order: &[Piece], rank: usize) -> Vec<(Range<usize>, usize)> {
    let mut at = 0;
    let mut owned = Vec::new();
    for piece in order {
        if piece.source == rank {
            owned.push((piece.range.clone(), at));
        }
        at += piece.range.len();
    }
    owned.sort_unstable_by_key(|(range, _)| range.start);
    owned
}

/// The segments of one rank alone, over its real tokens instead of its rows.
fn segments(alone: &plan::RankPlan, num_tokens: usize) -> Result<Segments, PrepareError> {
    // One rank's buffer holds every real token, since each sees itself, in the order of (row, token).
    let place = |row: usize, token: usize| {
        let next =
            (alone.pieces).partition_point(|piece| (piece.row, piece.local.start) <= (row, token));
        let piece = &alone.pieces[next - 1];
        piece.at + (token - piece.local.start)
    };
    let moved: Vec<plan::Segment> = (alone.segments.iter())
        .map(|segment| {
            let start = place(segment.q_row, segment.q.start);
            plan::Segment {
                q_row: 0,
                q: start..start + segment.q.len(),
                ..segment.clone()
            }
        })
        .collect();
    let shape = (1, num_tokens.max(1));
    Ok(kernel_segments(&moved, shape, shape)?)
}
