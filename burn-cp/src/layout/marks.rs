//! What documents say to the masks that ask them: bidirectional spans, prefixes, masks of their own.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Document, Documents, LayoutError, MarkError, MaskKind};

/// Spans, prefixes and masks, each by row and document where they are given. All in document positions,
/// which stay the same wherever the document's tokens are moved.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Marks {
    spans: Option<Vec<Vec<Vec<Range<usize>>>>>,
    prefixes: Option<Vec<Vec<usize>>>,
    masks: Option<Vec<Vec<MaskKind>>>,
}

impl Marks {
    /// Those of the rows one behind the other in one row.
    pub(super) fn flattened(&self) -> Self {
        fn one_row<T: Clone>(rows: &[Vec<T>]) -> Vec<Vec<T>> {
            vec![rows.concat()]
        }
        Self {
            spans: self.spans.as_deref().map(one_row),
            prefixes: self.prefixes.as_deref().map(one_row),
            masks: self.masks.as_deref().map(one_row),
        }
    }

    /// Those of some of the rows alone.
    pub(super) fn of_rows(&self, rows: Range<usize>) -> Self {
        fn some<T: Clone>(of: Option<&Vec<T>>, rows: &Range<usize>) -> Option<Vec<T>> {
            of.map(|of| of[rows.clone()].to_vec())
        }
        Self {
            spans: some(self.spans.as_ref(), &rows),
            prefixes: some(self.prefixes.as_ref(), &rows),
            masks: some(self.masks.as_ref(), &rows),
        }
    }

    /// Checks marks that were read from somewhere against their documents.
    pub(super) fn check(&self, documents: &Documents) -> Result<(), LayoutError> {
        if let Some(spans) = &self.spans {
            documents.check_table("spans", spans)?;
            for (row, table) in spans.iter().enumerate() {
                for (document, spans) in table.iter().enumerate() {
                    check_positions((row, document), spans, documents.row(row)[document].len())?;
                }
            }
        }
        if let Some(prefixes) = &self.prefixes {
            documents.check_prefixes(prefixes)?;
        }
        if let Some(masks) = &self.masks {
            documents.check_masks(masks)?;
        }
        Ok(())
    }
}

impl Documents {
    /// The same documents with bidirectional spans, for [`MaskKind::CausalWithSpans`]: of each row the
    /// half-open ranges of its tokens whose members see each other, such as the tokens of an image.
    ///
    /// Ranges are in order and disjoint, and each holds real tokens of exactly one document; padding within
    /// a range is not a member. Spans that touch stay two.
    ///
    /// ```
    /// use burn_cp::layout::Documents;
    ///
    /// // Two documents; tokens 1 to 3 are an image of the first one.
    /// let documents = Documents::from_lengths(&[vec![5, 3]], 8)?.with_spans(&[vec![1..4]])?;
    /// assert_eq!(documents.spans(0, 0), [1..4]);
    /// assert!(documents.clone().with_spans(&[vec![4..6]]).is_err());
    /// # Ok::<(), burn_cp::layout::LayoutError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Another number of rows; [`MarkError`] for ranges that overlap, are out of order, leave the row, hold
    /// no real token or tokens of several documents.
    pub fn with_spans(mut self, spans: &[Vec<Range<usize>>]) -> Result<Self, LayoutError> {
        check_spans(spans, [self.batch_size(), self.seq_len()])?;
        let rows = spans.iter().enumerate();
        let found = rows.map(|(row, spans)| spans_of_row((row, spans), self.row(row)));
        self.marks.spans = Some(found.collect::<Result<_, _>>()?);
        Ok(self)
    }

    /// The same documents with a prefix each, for [`MaskKind::Prefix`]: of each row and document the number
    /// of real tokens at its begin that see each other; 0 for none.
    ///
    /// # Errors
    ///
    /// Another number of rows or documents; [`MarkError::PrefixLen`] for one longer than its document.
    pub fn with_prefixes(mut self, prefixes: Vec<Vec<usize>>) -> Result<Self, LayoutError> {
        self.check_prefixes(&prefixes)?;
        self.marks.prefixes = Some(prefixes);
        Ok(self)
    }

    /// The same documents with a mask each, by row and document, for [`MaskKind::PerDocument`].
    ///
    /// # Errors
    ///
    /// Another number of rows or documents; [`MarkError::Nested`] for a mask that is itself
    /// [`MaskKind::PerDocument`]. What a mask needs of its document is checked when it is planned.
    pub fn with_masks(mut self, masks: Vec<Vec<MaskKind>>) -> Result<Self, LayoutError> {
        self.check_masks(&masks)?;
        self.marks.masks = Some(masks);
        Ok(self)
    }

    /// Whether spans were given, of which there may be none.
    pub fn has_spans(&self) -> bool {
        self.marks.spans.is_some()
    }

    /// Whether prefixes were given.
    pub fn has_prefixes(&self) -> bool {
        self.marks.prefixes.is_some()
    }

    /// Whether masks of documents were given.
    pub fn has_masks(&self) -> bool {
        self.marks.masks.is_some()
    }

    /// Spans of a document in document positions, in order and disjoint; none where none were given.
    ///
    /// # Panics
    ///
    /// Spans were given, and there is no such row or document.
    pub fn spans(&self, row: usize, document: usize) -> &[Range<usize>] {
        let spans = self.marks.spans.as_ref();
        spans.map_or(&[], |spans| &spans[row][document])
    }

    /// Length of a document's prefix; 0 where none were given.
    ///
    /// # Panics
    ///
    /// Prefixes were given, and there is no such row or document.
    pub fn prefix(&self, row: usize, document: usize) -> usize {
        let prefixes = self.marks.prefixes.as_ref();
        prefixes.map_or(0, |prefixes| prefixes[row][document])
    }

    /// A document's own mask, if masks were given.
    ///
    /// # Panics
    ///
    /// Masks were given, and there is no such row or document.
    pub fn mask(&self, row: usize, document: usize) -> Option<MaskKind> {
        let masks = self.marks.masks.as_ref();
        masks.map(|masks| masks[row][document])
    }

    /// These documents with the marks of `before`, which are the same documents with other real tokens at
    /// the same places.
    pub(super) fn remarked(mut self, before: &Self) -> Result<Self, LayoutError> {
        if before.marks.spans.is_some() {
            let tokens = |row: usize| {
                let documents = before.row(row).iter().enumerate();
                documents.flat_map(move |(index, document)| {
                    let spans = before.spans(row, index).iter();
                    spans.map(|span| {
                        token_at(document, span.start)..token_at(document, span.end - 1) + 1
                    })
                })
            };
            let rows: Vec<Vec<_>> = (0..before.batch_size())
                .map(|row| tokens(row).collect())
                .collect();
            self = self.with_spans(&rows)?;
        }
        if before.marks.prefixes.is_some() {
            let shortened = |row: usize, index: usize| match before.prefix(row, index) {
                0 => 0,
                prefix => {
                    let end = token_at(&before.row(row)[index], prefix - 1) + 1;
                    real_before(&self.row(row)[index], end)
                }
            };
            let prefixes = (0..self.batch_size()).map(|row| {
                let documents = 0..self.row(row).len();
                documents.map(|index| shortened(row, index)).collect()
            });
            self.marks.prefixes = Some(prefixes.collect());
        }
        self.marks.masks.clone_from(&before.marks.masks);
        Ok(self)
    }

    fn check_table<T>(&self, what: &'static str, table: &[Vec<T>]) -> Result<(), LayoutError> {
        if table.len() != self.batch_size() {
            return Err(LayoutError::NumRows {
                what,
                expected: self.batch_size(),
                got: table.len(),
            });
        }
        let mut rows = table.iter().enumerate();
        rows.try_for_each(|(row, entries)| {
            super::sources::check_row_len(what, row, self.row(row).len(), entries.len())
        })
    }

    fn check_prefixes(&self, prefixes: &[Vec<usize>]) -> Result<(), LayoutError> {
        self.check_table("prefixes", prefixes)?;
        for (row, prefixes) in prefixes.iter().enumerate() {
            for (document, (&got, table)) in prefixes.iter().zip(self.row(row)).enumerate() {
                let expected = table.len();
                if got > expected {
                    return Err(LayoutError::Mark(MarkError::PrefixLen {
                        row,
                        document,
                        expected,
                        got,
                    }));
                }
            }
        }
        Ok(())
    }

    fn check_masks(&self, masks: &[Vec<MaskKind>]) -> Result<(), LayoutError> {
        self.check_table("masks", masks)?;
        for (row, masks) in masks.iter().enumerate() {
            let mut masks = masks.iter().enumerate();
            if let Some((document, &got)) =
                masks.find(|(_, mask)| matches!(mask, MaskKind::PerDocument { .. }))
            {
                return Err(LayoutError::Mark(MarkError::Nested { row, document, got }));
            }
        }
        Ok(())
    }
}

/// Checks token ranges of the rows of a batch of `[batch, seq]` tokens: in order, disjoint, within their row.
pub(crate) fn check_spans(
    spans: &[Vec<Range<usize>>],
    [batch_size, seq_len]: [usize; 2],
) -> Result<(), LayoutError> {
    if spans.len() != batch_size {
        return Err(LayoutError::NumRows {
            what: "spans",
            expected: batch_size,
            got: spans.len(),
        });
    }
    for (row, spans) in spans.iter().enumerate() {
        let mut end = 0;
        for (span, got) in spans.iter().enumerate() {
            if got.start < end || got.end < got.start || got.end > seq_len {
                return Err(LayoutError::Mark(MarkError::SpanOrder {
                    row,
                    span,
                    expected: end..seq_len,
                    got: got.clone(),
                }));
            }
            end = got.end;
        }
    }
    Ok(())
}

fn check_positions(
    (row, document): (usize, usize),
    spans: &[Range<usize>],
    len: usize,
) -> Result<(), MarkError> {
    let mut end = 0;
    for got in spans {
        if got.start < end || got.end <= got.start || got.end > len {
            return Err(MarkError::SpanPositions {
                row,
                document,
                expected: end..len,
                got: got.clone(),
            });
        }
        end = got.end;
    }
    Ok(())
}

/// For each document of a row its spans in document positions, from token ranges that are in order.
fn spans_of_row(
    (row, spans): (usize, &[Range<usize>]),
    documents: &[Document],
) -> Result<Vec<Vec<Range<usize>>>, MarkError> {
    let mut found = vec![Vec::new(); documents.len()];
    for (span, tokens) in spans.iter().enumerate() {
        let first = documents.partition_point(|document| document.extent.end <= tokens.start);
        let mut hits = (documents.iter().enumerate().skip(first))
            .take_while(|(_, document)| document.extent.start < tokens.end)
            .filter_map(|(index, document)| {
                let positions =
                    real_before(document, tokens.start)..real_before(document, tokens.end);
                (!positions.is_empty()).then_some((index, positions))
            });
        match (hits.next(), hits.next()) {
            (Some((document, positions)), None) => found[document].push(positions),
            (Some((first, _)), Some((second, _))) => {
                return Err(MarkError::SpanCrosses {
                    row,
                    span,
                    got: tokens.clone(),
                    documents: [first, second],
                });
            }
            (None, _) => {
                return Err(MarkError::SpanEmpty {
                    row,
                    span,
                    got: tokens.clone(),
                });
            }
        }
    }
    Ok(found)
}

/// Real tokens of the document before a token of its row.
fn real_before(document: &Document, token: usize) -> usize {
    let before = |run: &Range<usize>| run.end.min(token).saturating_sub(run.start);
    document.runs.iter().map(before).sum()
}

/// The token at a document position that the document has.
fn token_at(document: &Document, position: usize) -> usize {
    let mut left = position;
    for run in &document.runs {
        if left < run.len() {
            return run.start + left;
        }
        left -= run.len();
    }
    document.extent.end
}
