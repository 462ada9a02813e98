//! Document tables from what users have: lengths, boundaries, ids, masks of one entry per token.

use std::ops::Range;

use super::{Document, Documents, LayoutError};

impl Documents {
    /// One document per row that fills it.
    ///
    /// # Errors
    ///
    /// No rows or no tokens.
    pub fn full(batch_size: usize, seq_len: usize) -> Result<Self, LayoutError> {
        let row = vec![Document::contiguous(0..seq_len)];
        Self::from_runs(vec![row; batch_size], seq_len)
    }

    /// Documents that follow each other without gaps, by their lengths; the rest of the row is padding.
    ///
    /// A length of 0 is legal.
    ///
    /// # Errors
    ///
    /// No rows or no tokens, or documents that run past `seq_len`.
    pub fn from_lengths(lengths: &[Vec<usize>], seq_len: usize) -> Result<Self, LayoutError> {
        let rows = lengths
            .iter()
            .map(|lengths| consecutive(lengths.iter().map(|&length| (length, length))))
            .collect();
        Self::from_runs(rows, seq_len)
    }

    /// Documents that follow each other, each with padding of its own behind its real tokens.
    ///
    /// `padded_lengths` has the shape of `lengths`; an entry counts the real tokens too.
    ///
    /// # Errors
    ///
    /// Tables of different shape, a padded length below the real one, and what
    /// [`from_lengths`](Self::from_lengths) refuses.
    pub fn from_padded_lengths(
        lengths: &[Vec<usize>],
        padded_lengths: &[Vec<usize>],
        seq_len: usize,
    ) -> Result<Self, LayoutError> {
        if lengths.len() != padded_lengths.len() {
            return Err(LayoutError::NumRows {
                what: "padded lengths",
                expected: lengths.len(),
                got: padded_lengths.len(),
            });
        }
        let mut rows = Vec::with_capacity(lengths.len());
        for (row, (lengths, padded_lengths)) in lengths.iter().zip(padded_lengths).enumerate() {
            check_row_len("padded lengths", row, lengths.len(), padded_lengths.len())?;
            let pairs = || lengths.iter().copied().zip(padded_lengths.iter().copied());
            if let Some((document, (expected, got))) = pairs()
                .enumerate()
                .find(|(_, (real, padded))| padded < real)
            {
                return Err(LayoutError::PaddedLength {
                    row,
                    document,
                    expected,
                    got,
                });
            }
            rows.push(consecutive(pairs()));
        }
        Self::from_runs(rows, seq_len)
    }

    /// Documents by their boundaries: each row `[0, end of the first, end of the second, ..]`.
    ///
    /// Tokens behind the last boundary are padding. Equal neighbours are an empty document.
    ///
    /// # Errors
    ///
    /// No rows or no tokens; boundaries that do not start at 0, are negative, decrease or lie past
    /// `seq_len`.
    pub fn from_cu_seqlens(cu_seqlens: &[Vec<i64>], seq_len: usize) -> Result<Self, LayoutError> {
        let mut rows = Vec::with_capacity(cu_seqlens.len());
        for (row, boundaries) in cu_seqlens.iter().enumerate() {
            check_not_negative("cu_seqlens", row, boundaries)?;
            if boundaries.first() != Some(&0) {
                return Err(LayoutError::FirstBoundary {
                    row,
                    got: boundaries.first().copied(),
                });
            }
            let mut documents = Vec::with_capacity(boundaries.len() - 1);
            for (index, pair) in boundaries.windows(2).enumerate() {
                if pair[1] < pair[0] {
                    return Err(LayoutError::DecreasingBoundary {
                        row,
                        index: index + 1,
                        expected: pair[0],
                        got: pair[1],
                    });
                }
                documents.push(Document::contiguous(to_usize(pair[0])..to_usize(pair[1])));
            }
            rows.push(documents);
        }
        Self::from_runs(rows, seq_len)
    }

    /// Documents by an id per token: every run of equal ids is a document, 0 is padding.
    ///
    /// Padding ends a run: an id that comes back, behind padding or behind another id, is a new document.
    ///
    /// # Errors
    ///
    /// No rows or no tokens, rows of different length, negative ids.
    pub fn from_ids(ids: &[Vec<i64>]) -> Result<Self, LayoutError> {
        let seq_len = ids.first().map_or(0, Vec::len);
        let mut rows = Vec::with_capacity(ids.len());
        for (row, ids) in ids.iter().enumerate() {
            check_row_len("document ids", row, seq_len, ids.len())?;
            check_not_negative("document ids", row, ids)?;
            let mut start = 0;
            let mut documents = Vec::new();
            for run in ids.chunk_by(|a, b| a == b) {
                if run[0] != 0 {
                    documents.push(Document::contiguous(start..start + run.len()));
                }
                start += run.len();
            }
            rows.push(documents);
        }
        Self::from_runs(rows, seq_len)
    }

    /// One document per row of the tokens that are `true`; `false` is padding.
    ///
    /// Padding between real tokens does not split the document. A row without real tokens has none.
    ///
    /// # Errors
    ///
    /// No rows or no tokens, rows of different length.
    pub fn from_mask(mask: &[Vec<bool>]) -> Result<Self, LayoutError> {
        let seq_len = mask.first().map_or(0, Vec::len);
        let mut rows = Vec::with_capacity(mask.len());
        for (row, mask) in mask.iter().enumerate() {
            check_row_len("attention mask", row, seq_len, mask.len())?;
            let mut start = 0;
            let mut runs: Vec<Range<usize>> = Vec::new();
            for run in mask.chunk_by(|a, b| a == b) {
                if run[0] {
                    runs.push(start..start + run.len());
                }
                start += run.len();
            }
            let extent = runs.first().zip(runs.last()).map(|(a, b)| a.start..b.end);
            rows.push(
                extent
                    .map(|extent| Document { runs, extent })
                    .into_iter()
                    .collect(),
            );
        }
        Self::from_runs(rows, seq_len)
    }

    /// Documents by an integer mask: 0 is padding; if no value is above 1 the others are real tokens of one
    /// document per row, else they are ids.
    ///
    /// The whole table is read in one way: as [`from_mask`](Self::from_mask) or as
    /// [`from_ids`](Self::from_ids) does. There is no reader for integer masks of four dims, see
    /// [`DenseMask`](super::DenseMask).
    ///
    /// # Errors
    ///
    /// No rows or no tokens, rows of different length, negative values.
    pub fn from_mask_values(values: &[Vec<i64>]) -> Result<Self, LayoutError> {
        let seq_len = values.first().map_or(0, Vec::len);
        for (row, values) in values.iter().enumerate() {
            check_row_len("attention mask", row, seq_len, values.len())?;
            check_not_negative("attention mask", row, values)?;
        }
        if values.iter().flatten().any(|&value| value > 1) {
            return Self::from_ids(values);
        }
        let real = |row: &Vec<i64>| row.iter().map(|&value| value != 0).collect();
        Self::from_mask(&values.iter().map(real).collect::<Vec<Vec<bool>>>())
    }

    /// One document per row of token ids that ends where nothing but `padding_id` follows.
    ///
    /// For streams that come without lengths, ids or mask. Nothing is guessed: a vocabulary whose padding
    /// id is also a token of the text needs one of those.
    ///
    /// # Errors
    ///
    /// No rows or no tokens, rows of different length, and [`LayoutError::PaddingInContent`] if content
    /// follows `padding_id`.
    pub fn from_token_ids(ids: &[Vec<i64>], padding_id: i64) -> Result<Self, LayoutError> {
        let seq_len = ids.first().map_or(0, Vec::len);
        let mut lengths = Vec::with_capacity(ids.len());
        for (row, ids) in ids.iter().enumerate() {
            check_row_len("token ids", row, seq_len, ids.len())?;
            let last = ids.iter().rposition(|&id| id != padding_id);
            let length = last.map_or(0, |last| last + 1);
            if let Some(got) = ids[..length].iter().position(|&id| id == padding_id) {
                return Err(LayoutError::PaddingInContent {
                    row,
                    padding_id,
                    got,
                });
            }
            // A row of padding has no document, rather than an empty one.
            lengths.push(Vec::from_iter((length > 0).then_some(length)));
        }
        Self::from_lengths(&lengths, seq_len)
    }
}

/// Documents one behind the other, from pairs of real and padded length.
fn consecutive(lengths: impl Iterator<Item = (usize, usize)>) -> Vec<Document> {
    let mut start = 0_usize;
    lengths
        .map(|(real, padded)| {
            // A sum that saturates lies past every stream, which the table refuses.
            let end = start.saturating_add(padded);
            let run = start..start.saturating_add(real);
            let document = Document {
                runs: vec![run],
                extent: start..end,
            };
            start = end;
            document
        })
        .collect()
}

pub(super) fn check_row_len(
    what: &'static str,
    row: usize,
    expected: usize,
    got: usize,
) -> Result<(), LayoutError> {
    if expected == got {
        return Ok(());
    }
    Err(LayoutError::RowLen {
        what,
        row,
        expected,
        got,
    })
}

fn check_not_negative(what: &'static str, row: usize, values: &[i64]) -> Result<(), LayoutError> {
    match values.iter().position(|&value| value < 0) {
        None => Ok(()),
        Some(index) => Err(LayoutError::Negative {
            what,
            row,
            index,
            got: values[index],
        }),
    }
}

/// For values known not to be negative; what does not fit lies past every stream anyway.
fn to_usize(value: i64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
