//! A rank's own keys and those of others apart, so that one is computed with while the other travels. Host data.

use std::{ops::Range, sync::Arc};

use super::{PrepareError, PreparedAttention, prepared::all_pieces, subset::KeySubset};
use crate::collectives::{ExchangePlan, Piece};

/// A rank's attention in two parts.
#[derive(Debug)]
pub(super) struct Split {
    /// Over its own keys.
    pub(super) own: KeySubset,
    /// Over those of others.
    pub(super) remote: KeySubset,
    /// Brings the keys of others.
    pub(super) exchange: Arc<ExchangePlan>,
    /// Brings their gradients back to who owns them, by rank of who computed them.
    pub(super) back: Returns,
    /// The rows of `remote` in the concatenation of all shards.
    pub(super) gathered: Vec<Range<usize>>,
}

impl Split {
    pub(super) fn new(prepared: &PreparedAttention) -> Result<Self, PrepareError> {
        let (plan, rank, sizes) = (prepared.plan(), prepared.rank(), prepared.sizes());
        let remote = KeySubset::new(plan, rank, |source| source != rank)?;
        let mut pieces = all_pieces(plan);
        for (rank, pieces) in pieces.iter_mut().enumerate() {
            pieces.retain(|piece| piece.source != rank);
        }
        let gathered = remote.pieces.iter().map(|piece| {
            let offset: usize = sizes[..piece.source].iter().sum();
            offset + piece.range.start..offset + piece.range.end
        });
        Ok(Self {
            own: KeySubset::new(plan, rank, |source| source == rank)?,
            gathered: gathered.collect(),
            exchange: ExchangePlan::new(sizes, &pieces, rank)?.into(),
            back: Returns::new(&pieces, rank)?,
            remote,
        })
    }
}

/// The way back of rows that ranks have taken: each owner gets what others make of its rows, one behind the other.
#[derive(Debug)]
pub(super) struct Returns {
    pub(super) plan: Arc<ExchangePlan>,
    /// The owner's rows that the arriving rows belong to, by the rank that they come from, in the order of ranks.
    pub(super) targets: Vec<Vec<Range<usize>>>,
}

impl Returns {
    /// `pieces[r]` is what rank `r` has taken, in order.
    pub(super) fn new(pieces: &[Vec<Piece>], rank: usize) -> Result<Self, PrepareError> {
        let mut back = vec![Vec::new(); pieces.len()];
        let mut targets = vec![Vec::new(); pieces.len()];
        let mut lens = Vec::with_capacity(pieces.len());
        for (taker, list) in pieces.iter().enumerate() {
            let mut at = 0;
            for piece in list {
                let range = at..at + piece.range.len();
                at = range.end;
                back[piece.source].push(Piece {
                    source: taker,
                    range,
                });
                if piece.source == rank {
                    targets[taker].push(piece.range.clone());
                }
            }
            lens.push(at);
        }
        targets.retain(|ranges| !ranges.is_empty());
        Ok(Self {
            plan: ExchangePlan::new(&lens, &back, rank)?.into(),
            targets,
        })
    }
}
