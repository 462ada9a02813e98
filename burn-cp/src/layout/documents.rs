//! The canonical document table. How it is read from lengths, boundaries, ids and masks is in
//! `sources`, `dense_mask` and `thd`.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{LayoutError, marks::Marks};

/// One document: a set of tokens of one batch row that attend to each other and to nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Document {
    /// Real tokens, as ordered, disjoint, half-open runs of token indices of the row.
    ///
    /// Nearly always one run. More when padding lies inside the document, which does not split it: the
    /// tokens between the runs are never keys. None when the document is empty.
    pub runs: Vec<Range<usize>>,
    /// Half-open range of all its tokens, its own padding included.
    pub extent: Range<usize>,
}

impl Document {
    /// A document of one run without padding of its own.
    pub fn contiguous(tokens: Range<usize>) -> Self {
        Self {
            runs: vec![tokens.clone()],
            extent: tokens,
        }
    }

    /// Number of real tokens. Document positions number them `0..len`.
    pub fn len(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// Whether the document has no real token.
    pub fn is_empty(&self) -> bool {
        self.runs.iter().all(Range::is_empty)
    }
}

/// The documents of a batch: for each of `batch_size` rows of `seq_len` tokens its documents in order.
///
/// Tokens outside every run are padding: they are never keys, and no document counts them. A document
/// without tokens is legal and owns none; a row without documents is all padding.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Documents {
    seq_len: usize,
    rows: Vec<Vec<Document>>,
    pub(super) marks: Marks,
}

/// A table as it was read.
#[derive(Deserialize)]
struct Unchecked {
    seq_len: usize,
    rows: Vec<Vec<Document>>,
    #[serde(default)]
    marks: Marks,
}

impl TryFrom<Unchecked> for Documents {
    type Error = LayoutError;

    fn try_from(read: Unchecked) -> Result<Self, LayoutError> {
        let documents = Self::from_runs(read.rows, read.seq_len)?;
        read.marks.check(&documents)?;
        Ok(Self {
            marks: read.marks,
            ..documents
        })
    }
}

impl Documents {
    /// The general form: the documents of each row as runs and extents.
    ///
    /// Empty runs are dropped and touching runs of one document are joined, so that equal documents have
    /// equal tables.
    ///
    /// # Errors
    ///
    /// No rows or no tokens; documents that overlap, are out of order or run past `seq_len`; runs that
    /// overlap, are out of order or leave the extent of their document.
    pub fn from_runs(mut rows: Vec<Vec<Document>>, seq_len: usize) -> Result<Self, LayoutError> {
        if rows.is_empty() {
            return Err(LayoutError::EmptyBatch { what: "documents" });
        }
        if seq_len == 0 {
            return Err(LayoutError::EmptyStream { what: "documents" });
        }
        for (row, documents) in rows.iter_mut().enumerate() {
            let mut end = 0;
            for (index, document) in documents.iter_mut().enumerate() {
                check_extent(document, (row, index), end, seq_len)?;
                end = document.extent.end;
                canonicalise(document, (row, index))?;
            }
        }
        Ok(Self {
            seq_len,
            rows,
            marks: Marks::default(),
        })
    }

    /// Number of rows.
    pub fn batch_size(&self) -> usize {
        self.rows.len()
    }

    /// Tokens of each row, padding included.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The documents of one row, in order.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[Document] {
        &self.rows[row]
    }

    /// The documents of each row.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[Document]> {
        self.rows.iter().map(Vec::as_slice)
    }

    /// Number of documents of all rows, empty ones included.
    pub fn num_documents(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// Number of tokens of all rows that belong to a document.
    pub fn num_real_tokens(&self) -> usize {
        self.rows.iter().flatten().map(Document::len).sum()
    }

    /// For each of the `seq_len` tokens of a row whether it is padding.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn padding_mask(&self, row: usize) -> Vec<bool> {
        let mut padding = vec![true; self.seq_len];
        for run in self.rows[row].iter().flat_map(|document| &document.runs) {
            padding[run.clone()].fill(false);
        }
        padding
    }

    /// Positions of the `seq_len` tokens of a row, for position embeddings.
    ///
    /// They restart at 0 where the extent of a document begins, count every token of the extent (also
    /// padding between the runs, unlike the document positions that masks use), and continue through
    /// the padding that follows. Padding ahead of the first document counts from 0. A document with an
    /// empty extent restarts nothing.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn positions(&self, row: usize) -> Vec<usize> {
        let starts = (self.rows[row].iter())
            .filter(|document| !document.extent.is_empty())
            .map(|document| document.extent.start)
            .chain([self.seq_len]);
        let mut positions = Vec::with_capacity(self.seq_len);
        for start in starts {
            // What has been counted so far ends where the next document begins.
            let begin = positions.len();
            debug_assert!(begin <= start);
            positions.extend(0..start - begin);
        }
        positions
    }

    /// The documents of some of the rows alone.
    pub(crate) fn of_rows(&self, rows: Range<usize>) -> Self {
        Self {
            seq_len: self.seq_len,
            rows: self.rows[rows.clone()].to_vec(),
            marks: self.marks.of_rows(rows),
        }
    }

    /// The same documents in one row, the rows one behind the other: token `t` of row `r` becomes token
    /// `r * seq_len + t`.
    ///
    /// Positions of padding ahead of a row's first document change, since they continue the row before.
    #[must_use]
    pub fn flattened(&self) -> Self {
        let moved = |(row, document): (usize, &Document)| {
            let moved = |range: &Range<usize>| {
                range.start + row * self.seq_len..range.end + row * self.seq_len
            };
            Document {
                runs: document.runs.iter().map(moved).collect(),
                extent: moved(&document.extent),
            }
        };
        let documents = (self.rows.iter().enumerate())
            .flat_map(|(row, documents)| documents.iter().map(move |document| (row, document)))
            .map(moved)
            .collect();
        Self {
            seq_len: self.seq_len * self.rows.len(),
            rows: vec![documents],
            marks: self.marks.flattened(),
        }
    }

    /// The same documents without the tokens that a mask `[batch, seq]` of one `bool` per token marks as padding. Their
    /// extents stay. Spans and prefixes lose those tokens too.
    ///
    /// # Errors
    ///
    /// A mask of another size; [`LayoutError::Homeless`] if a token is neither padding nor part of a document; a span of
    /// which nothing is left.
    pub fn without_padding(&self, padding: &[Vec<bool>]) -> Result<Self, LayoutError> {
        if padding.len() != self.rows.len() {
            return Err(LayoutError::NumRows {
                what: "padding mask",
                expected: self.rows.len(),
                got: padding.len(),
            });
        }
        let mut rows = self.rows.clone();
        for (row, (documents, padding)) in rows.iter_mut().zip(padding).enumerate() {
            super::sources::check_row_len("padding mask", row, self.seq_len, padding.len())?;
            let outside = self.padding_mask(row);
            if let Some(token) = (0..self.seq_len).find(|&token| outside[token] && !padding[token])
            {
                return Err(LayoutError::Homeless { row, token });
            }
            for document in documents {
                let tokens = document.runs.iter().cloned().flatten();
                document.runs = tokens
                    .filter(|&token| !padding[token])
                    .map(|token| token..token + 1)
                    .collect();
            }
        }
        Self::from_runs(rows, self.seq_len)?.remarked(self)
    }

    /// The same documents in rows of `seq_len` tokens; the new tokens at the end of each row are padding.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Shorter`] if the rows are longer already.
    pub fn padded_to(&self, seq_len: usize) -> Result<Self, LayoutError> {
        if seq_len < self.seq_len {
            return Err(LayoutError::Shorter {
                expected: self.seq_len,
                got: seq_len,
            });
        }
        Ok(Self {
            seq_len,
            ..self.clone()
        })
    }
}

fn check_extent(
    document: &Document,
    (row, index): (usize, usize),
    previous_end: usize,
    seq_len: usize,
) -> Result<(), LayoutError> {
    let Range { start, end } = document.extent;
    if start < previous_end {
        return Err(LayoutError::DocumentOrder {
            row,
            document: index,
            expected: previous_end,
            got: start,
        });
    }
    // A reversed extent ends before it starts, which the run check could miss if there are no runs.
    if end < start {
        return Err(LayoutError::DocumentRuns {
            row,
            document: index,
            expected: start..seq_len,
            got: start..end,
        });
    }
    if end > seq_len {
        return Err(LayoutError::PastStream {
            row,
            document: index,
            expected: seq_len,
            got: end,
        });
    }
    Ok(())
}

fn canonicalise(document: &mut Document, (row, index): (usize, usize)) -> Result<(), LayoutError> {
    let mut end = document.extent.start;
    for run in &document.runs {
        if run.start < end || run.end < run.start || run.end > document.extent.end {
            return Err(LayoutError::DocumentRuns {
                row,
                document: index,
                expected: end..document.extent.end,
                got: run.clone(),
            });
        }
        end = run.end;
    }
    document.runs.retain(|run| !run.is_empty());
    document.runs.dedup_by(|next, run| {
        let touching = run.end == next.start;
        if touching {
            run.end = next.end;
        }
        touching
    });
    Ok(())
}
