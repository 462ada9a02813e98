//! The plan of all ranks.

use std::sync::{Arc, OnceLock};

use super::derive::rank_plan;
use super::hash::hash;
use super::table::Table;
use super::types::{KvPiece, RankPlan, TokenSpan};
use super::{MaskKind, PlanError, mask};
use crate::layout::{Documents, TokenLayout};

/// Who computes what, and which tokens move between whom, for one mask.
///
/// Made on the host from documents and layout alone. Every rank makes the plan of all ranks, and all make
/// the same one; [`hash`](Self::hash) lets them check that they started from the same input.
///
/// ```
/// use std::sync::Arc;
/// use burn_cp::layout::{Documents, TokenLayout};
/// use burn_cp::plan::{AttentionPlan, MaskKind};
///
/// // Two documents of six and two tokens on two ranks of four tokens.
/// let documents = Arc::new(Documents::from_lengths(&[vec![6, 2]], 8)?);
/// let layout = Arc::new(TokenLayout::contiguous(8, 2)?);
/// let plan = AttentionPlan::new(documents, layout, MaskKind::CAUSAL)?;
///
/// // The second rank ends the first document, for which it needs all of the first rank.
/// let rank = plan.rank(1);
/// assert_eq!((rank.segments[0].q.clone(), rank.segments[0].k.clone()), (0..2, 0..6));
/// assert_eq!((rank.segments[1].q.clone(), rank.segments[1].k.clone()), (2..4, 6..8));
/// assert_eq!(plan.num_transferred(0, 1), 4);
/// assert_eq!(plan.num_transferred(1, 0), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct AttentionPlan {
    documents: Arc<Documents>,
    layout: Arc<TokenLayout>,
    mask: MaskKind,
    ranks: Vec<RankPlan>,
    /// By destination.
    transfers: Vec<Transfers>,
    hash: OnceLock<[u8; 32]>,
}

/// What one rank gets, its own tokens included.
#[derive(Debug, Clone)]
struct Transfers {
    /// By source, and within a source in the order of the pieces.
    spans: Vec<TokenSpan>,
    /// First span of each source; the number of spans at the end.
    first: Vec<usize>,
    /// Tokens from each source.
    num_tokens: Vec<usize>,
}

impl AttentionPlan {
    /// Plans attention over `documents`, dealt out by `layout`.
    ///
    /// # Errors
    ///
    /// Rows of another length than the layout's (pad the documents with [`Documents::padded_to`] first);
    /// a mask of things that cannot be combined ([`PlanError::Pair`]) or that needs what did not come with
    /// the documents ([`PlanError::Unmarked`]); numbers past 64 bits.
    pub fn new(
        documents: Arc<Documents>,
        layout: Arc<TokenLayout>,
        mask: MaskKind,
    ) -> Result<Self, PlanError> {
        if documents.seq_len() != layout.seq_len() {
            return Err(PlanError::SeqLen {
                expected: layout.seq_len(),
                got: documents.seq_len(),
            });
        }
        // Whatever is indexed below lies within this.
        if (documents.batch_size().checked_mul(documents.seq_len())).is_none() {
            return Err(PlanError::Overflow {
                what: "number of tokens",
            });
        }
        mask::check(mask, &documents)?;
        let table = Table::new(&documents, &layout);
        let mut ranks = (0..layout.world_size())
            .map(|rank| rank_plan(&documents, &table, mask, rank))
            .collect::<Result<Vec<_>, _>>()?;
        let transfers = transfers(&mut ranks);
        Ok(Self {
            documents,
            layout,
            mask,
            ranks,
            transfers,
            hash: OnceLock::new(),
        })
    }

    /// The documents, padded to the length of the layout.
    pub fn documents(&self) -> &Arc<Documents> {
        &self.documents
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<TokenLayout> {
        &self.layout
    }

    /// The mask.
    pub fn mask(&self) -> MaskKind {
        self.mask
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// The plan of one rank.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn rank(&self, rank: usize) -> &RankPlan {
        &self.ranks[rank]
    }

    /// The plans of all ranks, by rank.
    pub fn ranks(&self) -> &[RankPlan] {
        &self.ranks
    }

    /// The tokens of the shard of `source` that `destination` needs, in the order in which the pieces of
    /// `destination` use them. A rank's own tokens are listed too, as `transfers(rank, rank)`.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn transfers(&self, source: usize, destination: usize) -> &[TokenSpan] {
        let transfers = self.to(source, destination);
        &transfers.spans[transfers.first[source]..transfers.first[source + 1]]
    }

    /// Number of tokens in [`transfers`](Self::transfers).
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn num_transferred(&self, source: usize, destination: usize) -> usize {
        self.to(source, destination).num_tokens[source]
    }

    fn to(&self, source: usize, destination: usize) -> &Transfers {
        let world_size = self.world_size();
        assert!(
            source < world_size && destination < world_size,
            "ranks {source} and {destination} of {world_size}"
        );
        &self.transfers[destination]
    }

    /// Whether any rank needs a token of another. If not, no rank has to communicate.
    ///
    /// The answer is the same on every rank.
    pub fn moves_tokens(&self) -> bool {
        self.ranks.iter().any(|rank| rank.kv_tokens_received > 0)
    }

    /// SHA-256 of documents (with their spans, prefixes and masks), layout and mask: equal on all ranks and platforms that plan the same.
    ///
    /// Computed at the first call and kept.
    pub fn hash(&self) -> [u8; 32] {
        *(self.hash).get_or_init(|| hash(&self.documents, &self.layout, self.mask))
    }

    /// [`hash`](Self::hash) as 64 hexadecimal digits, for messages.
    pub fn hash_hex(&self) -> String {
        self.hash()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// Lists for each pair of ranks what moves, and notes at the sources how much they send.
fn transfers(ranks: &mut [RankPlan]) -> Vec<Transfers> {
    let world_size = ranks.len();
    let transfers: Vec<Transfers> = (ranks.iter())
        .map(|rank| Transfers::new(&rank.pieces, world_size))
        .collect();
    for (source, rank) in ranks.iter_mut().enumerate() {
        let others = (transfers.iter().enumerate()).filter(|(to, _)| *to != source);
        rank.kv_tokens_sent = others.map(|(_, to)| to.num_tokens[source]).sum();
    }
    transfers
}

impl Transfers {
    /// Sorts pieces by source, in time that grows with their number.
    fn new(pieces: &[KvPiece], world_size: usize) -> Self {
        let mut first = vec![0; world_size + 1];
        let mut num_tokens = vec![0; world_size];
        for piece in pieces {
            first[piece.source + 1] += 1;
            num_tokens[piece.source] += piece.local.len();
        }
        for source in 0..world_size {
            first[source + 1] += first[source];
        }
        let mut next = first.clone();
        let nothing = TokenSpan {
            row: 0,
            local: 0..0,
        };
        let mut spans = vec![nothing; pieces.len()];
        for piece in pieces {
            spans[next[piece.source]] = TokenSpan {
                row: piece.row,
                local: piece.local.clone(),
            };
            next[piece.source] += 1;
        }
        Self {
            spans,
            first,
            num_tokens,
        }
    }
}
