//! Which documents cross a rank's borders.

use std::ops::Range;

use crate::layout::{Document, Documents, TokenLayout};

/// Why there is no context of a rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecurrentError {
    /// A layout whose ranks do not follow each other in the order of the sequence.
    #[error("recurrent context: expected rank {rank} to own tokens {expected:?}, got {got:?}")]
    NotContiguous {
        /// The first such rank.
        rank: usize,
        /// What it would own.
        expected: Range<usize>,
        /// What it owns.
        got: Vec<Range<usize>>,
    },
    /// Documents of other rows than those that are dealt out.
    #[error("recurrent context: expected documents in rows of {expected} tokens, got {got}")]
    Length {
        /// Tokens of a row of the layout.
        expected: usize,
        /// Tokens of a row of the documents.
        got: usize,
    },
}

/// A document that began on earlier ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leading {
    /// Index in its row.
    pub(super) document: usize,
    /// Real tokens on earlier ranks.
    pub(super) num_before: usize,
    /// The earlier ranks that hold some of them, ascending.
    pub(super) ranks: Vec<usize>,
}

/// What one rank of a contiguous layout knows of the documents of a row: those that it holds, and those that began before it
/// or go on behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankContext {
    boundaries: Vec<usize>,
    pub(super) leading: Option<Leading>,
    pub(super) trailing: Option<usize>,
    num_ranks_after: usize,
}

impl RankContext {
    /// The contexts of all ranks in one row. Pure host.
    ///
    /// # Errors
    /// A layout that is not contiguous in the order of ranks, or has rows of another length than the documents.
    ///
    /// # Panics
    /// There is no such row.
    pub fn of_row(
        documents: &Documents,
        row: usize,
        layout: &TokenLayout,
    ) -> Result<Vec<Self>, RecurrentError> {
        if documents.seq_len() != layout.seq_len() {
            return Err(RecurrentError::Length {
                expected: layout.seq_len(),
                got: documents.seq_len(),
            });
        }
        let mut contexts = Vec::with_capacity(layout.world_size());
        for rank in 0..layout.world_size() {
            let expected = layout.offset(rank)..layout.offset(rank) + layout.local_len(rank);
            if layout.ranges(rank) != [expected.clone()] {
                return Err(RecurrentError::NotContiguous {
                    rank,
                    expected,
                    got: layout.ranges(rank).to_vec(),
                });
            }
            contexts.push(Self {
                boundaries: boundaries(documents.row(row), &expected),
                leading: None,
                trailing: None,
                num_ranks_after: 0,
            });
        }
        for (index, document) in documents.row(row).iter().enumerate() {
            cross(&mut contexts, &shares(document, layout), index);
        }
        Ok(contexts)
    }

    /// Where documents begin and end among this rank's tokens, from 0 to their number; runs of tokens that belong to no document
    /// lie between two of them too.
    pub fn boundaries(&self) -> &[usize] {
        &self.boundaries
    }

    /// Tokens on earlier ranks of the document that goes on here; 0 where none does. A convolution reaches back no further.
    pub fn num_tokens_before(&self) -> usize {
        self.leading
            .as_ref()
            .map_or(0, |leading| leading.num_before)
    }

    /// Earlier ranks that hold tokens of the document that goes on here.
    pub fn num_ranks_before(&self) -> usize {
        self.leading
            .as_ref()
            .map_or(0, |leading| leading.ranks.len())
    }

    /// Later ranks that hold tokens of this rank's last document.
    pub fn num_ranks_after(&self) -> usize {
        self.num_ranks_after
    }

    /// Whether no document reaches here from earlier ranks.
    pub fn is_first(&self) -> bool {
        self.leading.is_none()
    }

    /// Whether no document goes on behind this rank.
    pub fn is_last(&self) -> bool {
        self.num_ranks_after == 0
    }
}

/// Borders of extents within `part`, counted from its start.
fn boundaries(documents: &[Document], part: &Range<usize>) -> Vec<usize> {
    let mut found = vec![0];
    let extents = documents
        .iter()
        .filter(|document| !document.extent.is_empty());
    for border in extents.flat_map(|document| [document.extent.start, document.extent.end]) {
        let last = found[found.len() - 1];
        if part.contains(&border) && border - part.start > last {
            found.push(border - part.start);
        }
    }
    found.push(part.len());
    found
}

/// The ranks that hold real tokens of a document, ascending, each with how many.
fn shares(document: &Document, layout: &TokenLayout) -> Vec<(usize, usize)> {
    let mut shares: Vec<(usize, usize)> = Vec::new();
    for run in &document.runs {
        for owned in layout.owned_ranges(run.clone()) {
            match shares.last_mut() {
                Some((rank, len)) if *rank == owned.rank => *len += owned.tokens.len(),
                _ => shares.push((owned.rank, owned.tokens.len())),
            }
        }
    }
    shares
}

/// Notes a document with the ranks that it crosses into.
fn cross(contexts: &mut [RankContext], shares: &[(usize, usize)], document: usize) {
    let mut num_before = 0;
    for (at, (rank, len)) in shares.iter().enumerate() {
        let context = &mut contexts[*rank];
        if at > 0 {
            context.leading = Some(Leading {
                document,
                num_before,
                ranks: shares[..at].iter().map(|(rank, _)| *rank).collect(),
            });
        }
        if at + 1 < shares.len() {
            context.trailing = Some(document);
            context.num_ranks_after = shares.len() - 1 - at;
        }
        num_before += len;
    }
}

/// The tokens of a row at these document positions, as ranges.
pub(super) fn tokens_at(document: &Document, positions: &Range<usize>) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    for run in &document.runs {
        let start = positions.start.clamp(at, at + run.len());
        let end = positions.end.clamp(at, at + run.len());
        if start < end {
            found.push(run.start + (start - at)..run.start + (end - at));
        }
        at += run.len();
    }
    found
}
