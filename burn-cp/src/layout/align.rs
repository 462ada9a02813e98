//! Room behind documents, so that their lengths divide, and where their tokens go.

use super::{Document, Documents, LayoutError, Placement};

/// Documents whose extents have been rounded up, and where the tokens they came from now stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AlignedDocuments {
    /// The documents at their new places. Rows may be longer or shorter than before.
    pub documents: Documents,
    /// Where each token before stands now. Padding that no document counts as its own is dropped; slots without a token are
    /// new padding.
    pub placement: Placement,
}

impl AlignedDocuments {
    /// The same in one row, the rows one behind the other.
    #[must_use]
    pub fn flattened(self) -> Self {
        Self {
            documents: self.documents.flattened(),
            placement: self.placement.flattened(),
        }
    }
}

/// Packs documents of these lengths into one row, each rounded up to a multiple of `multiple` tokens.
///
/// Real tokens come first in each extent, its padding behind them; an empty document stays empty. This is
/// what [`LayoutPolicy::DualChunkSwap`](super::LayoutPolicy::DualChunkSwap) over `world_size` ranks needs,
/// with a `multiple` of `2 * world_size`. Tokens before are counted through all documents, without
/// padding.
///
/// With `seq_len` the row has that many tokens. What is left behind the last document then becomes padding
/// of that document, and is dealt out together with it.
///
/// ```
/// use burn_cp::layout::{LayoutPolicy, align_documents};
///
/// let packed = align_documents(&[3, 5], 2 * 2, None)?;
/// let ids = packed.placement.place(&[11, 12, 13, 21, 22, 23, 24, 25], 0)?;
/// assert_eq!(ids, [11, 12, 13, 0, 21, 22, 23, 24, 25, 0, 0, 0]);
/// let layout = LayoutPolicy::DualChunkSwap.layout(&packed.documents, 2)?;
/// assert_eq!(layout.indices(0), [0, 3, 4, 5, 10, 11]);
/// # Ok::<(), burn_cp::layout::LayoutError>(())
/// ```
///
/// # Errors
///
/// No tokens at all, a `multiple` of 0, a `seq_len` that `multiple` does not divide or that the documents
/// exceed, lengths that overflow.
pub fn align_documents(
    lengths: &[usize],
    multiple: usize,
    seq_len: Option<usize>,
) -> Result<AlignedDocuments, LayoutError> {
    let total = lengths
        .iter()
        .try_fold(0_usize, |total, &length| total.checked_add(length))
        .ok_or(LayoutError::Overflow {
            what: "aligned",
            got: usize::MAX,
        })?;
    let mut aligned = Documents::from_lengths(&[lengths.to_vec()], total)?.aligned(multiple)?;
    let Some(seq_len) = seq_len else {
        return Ok(aligned);
    };
    if !seq_len.is_multiple_of(multiple) {
        return Err(LayoutError::Alignment {
            expected: multiple,
            got: seq_len,
        });
    }
    let mut row = aligned.documents.row(0).to_vec();
    if let Some(last) = row.last_mut() {
        // A row that is too short must be reported, not cut.
        last.extent.end = last.extent.end.max(seq_len);
    }
    aligned.documents = Documents::from_runs(vec![row], seq_len)?;
    aligned.placement = aligned.placement.padded_to(seq_len)?;
    Ok(aligned)
}

impl Documents {
    /// The same documents one behind the other, the extent of each rounded up to a multiple of
    /// `multiple` tokens by padding at its end.
    ///
    /// Padding of a document stays with it, padding between and behind documents is dropped. Rows are as
    /// long as the longest needs, at least `multiple` tokens, and always a multiple of it: also the rows put
    /// one behind the other ([`flattened`](Self::flattened)) are aligned.
    ///
    /// # Errors
    ///
    /// A `multiple` of 0, or lengths that overflow.
    pub fn aligned(&self, multiple: usize) -> Result<AlignedDocuments, LayoutError> {
        if multiple == 0 {
            return Err(LayoutError::Alignment {
                expected: 1,
                got: multiple,
            });
        }
        let overflow = LayoutError::Overflow {
            what: "aligned",
            got: self.seq_len(),
        };
        let mut rows = Vec::with_capacity(self.batch_size());
        let mut targets = Vec::with_capacity(self.batch_size());
        let mut seq_len = multiple;
        for documents in self.rows() {
            let mut end = 0_usize;
            let mut row = Vec::with_capacity(documents.len());
            let mut row_targets = vec![None; self.seq_len()];
            for Document { runs, extent } in documents {
                let new_end = (extent.len())
                    .checked_next_multiple_of(multiple)
                    .and_then(|len| end.checked_add(len))
                    .ok_or(overflow.clone())?;
                let moved = |token: usize| end + (token - extent.start);
                for token in extent.clone() {
                    row_targets[token] = Some(moved(token));
                }
                row.push(Document {
                    runs: (runs.iter())
                        .map(|run| moved(run.start)..moved(run.end))
                        .collect(),
                    extent: end..new_end,
                });
                end = new_end;
            }
            seq_len = seq_len.max(end);
            rows.push(row);
            targets.push(row_targets);
        }
        let mut documents = Self::from_runs(rows, seq_len)?;
        // Document positions are the same wherever the tokens stand.
        documents.marks.clone_from(&self.marks);
        Ok(AlignedDocuments {
            documents,
            placement: Placement::from_rows(&targets, seq_len)?,
        })
    }
}
