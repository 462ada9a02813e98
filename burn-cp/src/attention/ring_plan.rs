//! How keys and values pass round the ranks. Host data.
//!
//! In step `j` a rank receives, from the rank before it, rows of the shard of the rank `j` places before it: those that it or a rank
//! behind it on their way still needs. Steps in which no rank receives anything are none.

use std::{ops::Range, sync::Arc};

use super::{
    PrepareError, PreparedAttention, prepared::all_pieces, split::Returns, subset::KeySubset,
};
use crate::collectives::{ExchangePlan, Piece};

/// One rank's view of a ring.
#[derive(Debug)]
pub(super) struct RingPlan {
    /// The rank's own keys, which it starts with.
    pub(super) own: KeySubset,
    pub(super) steps: Vec<RingStep>,
}

/// One step.
#[derive(Debug)]
pub(super) struct RingStep {
    /// From the rows that each rank holds after the step before, which are its own shard at first.
    pub(super) exchange: Arc<ExchangePlan>,
    /// The keys that the rank computes with in this step; there may be none.
    pub(super) keys: KeySubset,
    /// Where they are in the rows that arrive.
    pub(super) take: Vec<Range<usize>>,
    /// Brings the gradients of those keys to who owns them. `None` where no rank has any in this step.
    pub(super) back: Option<Returns>,
}

/// Rows of a shard: ascending ranges, none of which touches the next.
type Rows = Vec<Range<usize>>;

impl RingPlan {
    pub(super) fn new(prepared: &PreparedAttention) -> Result<Self, PrepareError> {
        let (plan, rank) = (prepared.plan(), prepared.rank());
        let size = plan.world_size();
        let pieces = all_pieces(plan);
        let mut held: Vec<Rows> = (prepared.sizes().iter())
            .map(|&len| std::iter::once(0..len).collect())
            .collect();
        let mut steps = Vec::new();
        for step in 1..size {
            let shard_of = |rank: usize| (rank + size - step) % size;
            // By receiver: what it or a rank behind it still needs of the shard that comes to it.
            let arriving: Vec<Rows> = (0..size)
                .map(|to| {
                    needed_from(
                        &pieces,
                        shard_of(to),
                        (0..size - step).map(|on| (to + on) % size),
                    )
                })
                .collect();
            if arriving.iter().all(Vec::is_empty) {
                break;
            }
            let from = |to: usize| (to + size - 1) % size;
            let moved: Vec<Vec<Piece>> = (0..size)
                .map(|to| {
                    let rows = arriving[to].iter().map(|range| Piece {
                        source: from(to),
                        range: place_in(&held[from(to)], range),
                    });
                    rows.collect()
                })
                .collect();
            let lens: Vec<usize> = held.iter().map(num_rows).collect();
            let source = shard_of(rank);
            let keys = KeySubset::new(plan, rank, |of| of == source)?;
            let take = keys
                .pieces
                .iter()
                .map(|piece| place_in(&arriving[rank], &piece.range));
            let mut taken = pieces.clone();
            for (rank, list) in taken.iter_mut().enumerate() {
                list.retain(|piece| piece.source == shard_of(rank));
            }
            let any = taken.iter().any(|list| !list.is_empty());
            steps.push(RingStep {
                exchange: ExchangePlan::new(&lens, &moved, rank)?.into(),
                take: take.collect(),
                back: any.then(|| Returns::new(&taken, rank)).transpose()?,
                keys,
            });
            held = arriving;
        }
        Ok(Self {
            own: KeySubset::new(plan, rank, |of| of == rank)?,
            steps,
        })
    }
}

/// The rows of a shard that any of some ranks needs.
fn needed_from(pieces: &[Vec<Piece>], source: usize, ranks: impl Iterator<Item = usize>) -> Rows {
    let needed = ranks.flat_map(|rank| &pieces[rank]);
    let mut ranges: Rows = needed
        .filter(|piece| piece.source == source && !piece.range.is_empty())
        .map(|piece| piece.range.clone())
        .collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let mut rows = Rows::new();
    for range in ranges {
        match rows.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => rows.push(range),
        }
    }
    rows
}

fn num_rows(rows: &Rows) -> usize {
    rows.iter().map(Range::len).sum()
}

/// Where rows of a shard stand among some of its rows, one behind the other, of which they are a part.
fn place_in(rows: &Rows, range: &Range<usize>) -> Range<usize> {
    let run = rows.partition_point(|run| run.end <= range.start);
    let before: usize = rows[..run].iter().map(Range::len).sum();
    let start = before + (range.start - rows[run].start);
    start..start + range.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        layout::{Documents, TokenLayout},
        plan::{AttentionPlan, MaskKind},
    };

    /// Rows that each rank receives in each step, and with how many of them it computes.
    fn steps(lengths: &[usize], seq_len: usize, world_size: usize) -> Vec<[Vec<usize>; 2]> {
        let documents = Documents::from_lengths(&[lengths.to_vec()], seq_len).unwrap();
        let layout = TokenLayout::contiguous(seq_len, world_size).unwrap();
        let plan = AttentionPlan::new(documents.into(), layout.into(), MaskKind::CAUSAL).unwrap();
        let plan = Arc::new(plan);
        let rings: Vec<PreparedAttention> = (0..world_size)
            .map(|rank| PreparedAttention::new(plan.clone(), rank).unwrap())
            .collect();
        let num_steps = rings[0].ring().steps.len();
        (0..num_steps)
            .map(|step| {
                let of = |of: fn(&RingStep) -> usize| {
                    let ranks = rings.iter().map(|ring| of(&ring.ring().steps[step]));
                    ranks.collect()
                };
                [
                    of(|step| step.exchange.output_len()),
                    of(|step| step.keys.len),
                ]
            })
            .collect()
    }

    #[test]
    fn rows_go_on_as_far_as_a_rank_needs_them_and_no_further() {
        // One document over four ranks: nothing comes to the first one, and the last one's shard stays where it is.
        assert_eq!(
            steps(&[16], 16, 4),
            [
                [vec![0, 4, 4, 4], vec![0, 4, 4, 4]],
                [vec![0, 0, 4, 4], vec![0, 0, 4, 4]],
                [vec![0, 0, 0, 4], vec![0, 0, 0, 4]],
            ]
        );
        // The second document begins on the first rank, ends on the third, and passes the second one.
        assert_eq!(
            steps(&[2, 9, 3], 16, 4),
            [
                [vec![0, 2, 4, 1], vec![0, 2, 4, 1]],
                [vec![0, 0, 2, 0], vec![0, 0, 2, 0]],
            ]
        );
        assert!(steps(&[4, 4, 4, 4], 16, 4).is_empty());
    }
}
