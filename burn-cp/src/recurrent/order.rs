//! From any layout to the order of the sequence, and back.

use std::ops::Range;

use crate::{
    collectives::{ExchangePlan, Piece},
    layout::TokenLayout,
};

/// A layout's tokens brought into the order of the sequence: rank `r` holds as many as before, and they come right behind those
/// of rank `r - 1`. Pure host, derived from the layout alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceOrder {
    contiguous: TokenLayout,
    is_identity: bool,
    lens: Vec<usize>,
    /// Per rank what it takes of the ranks' shards of the layout.
    to: Vec<Vec<Piece>>,
    /// Per rank what it takes of the ranks' contiguous shards.
    from: Vec<Vec<Piece>>,
}

impl SequenceOrder {
    /// The order of the tokens of a layout.
    pub fn new(layout: &TokenLayout) -> Self {
        let ranks = 0..layout.world_size();
        let lens: Vec<usize> = ranks.clone().map(|rank| layout.local_len(rank)).collect();
        let parts = ranks.map(|rank| {
            let part = layout.offset(rank)..layout.offset(rank) + layout.local_len(rank);
            std::iter::once(part).collect()
        });
        let contiguous = TokenLayout::new(layout.seq_len(), parts.collect())
            .expect("the shares of a layout cover its rows, and none is empty");
        let take = |from: &TokenLayout, ranges: &[Range<usize>]| -> Vec<Piece> {
            let owned = ranges
                .iter()
                .flat_map(|range| from.owned_ranges(range.clone()));
            owned
                .map(|owned| Piece {
                    source: owned.rank,
                    range: owned.local,
                })
                .collect()
        };
        let of_all = |from: &TokenLayout, to: &TokenLayout| {
            (0..to.world_size())
                .map(|rank| take(from, to.ranges(rank)))
                .collect()
        };
        Self {
            is_identity: contiguous == *layout,
            to: of_all(layout, &contiguous),
            from: of_all(&contiguous, layout),
            lens,
            contiguous,
        }
    }

    /// The layout in which the tokens stand in order.
    pub fn contiguous(&self) -> &TokenLayout {
        &self.contiguous
    }

    /// Whether they do already, so that nothing has to move.
    pub fn is_identity(&self) -> bool {
        self.is_identity
    }

    /// The exchange into the order of the sequence, as `rank` sees it.
    ///
    /// # Panics
    /// There is no such rank.
    pub fn to_contiguous(&self, rank: usize) -> ExchangePlan {
        self.plan(&self.to, rank)
    }

    /// The exchange back.
    ///
    /// # Panics
    /// There is no such rank.
    pub fn from_contiguous(&self, rank: usize) -> ExchangePlan {
        self.plan(&self.from, rank)
    }

    fn plan(&self, pieces: &[Vec<Piece>], rank: usize) -> ExchangePlan {
        ExchangePlan::new(&self.lens, pieces, rank)
            .expect("a rank of the layout, and pieces that their owners hold")
    }
}
