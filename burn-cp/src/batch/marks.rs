//! What masks ask of a batch: bidirectional spans, prefixes, masks of documents.

use std::ops::Range;

use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};

use super::{BatchError, Media, SequenceBatch, host_bools};
use crate::layout::{Documents, LayoutError, MaskKind, Placement, check_spans};

/// What the user gave, as it was given.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Marks {
    spans: Option<Vec<Vec<Range<usize>>>>,
    media_spans: bool,
    prefixes: Option<Vec<Vec<usize>>>,
    masks: Option<Vec<Vec<MaskKind>>>,
}

impl Marks {
    /// Those of some rows of a batch with `documents`, whose rows become one: spans stay by row of the batch, the others are
    /// by placed row.
    pub(crate) fn stream_of_rows(
        &self,
        rows: &Range<usize>,
        documents: &Documents,
    ) -> Result<Self, LayoutError> {
        fn some<T: Clone>(
            what: &'static str,
            of: &[Vec<T>],
            rows: &Range<usize>,
            documents: &Documents,
        ) -> Result<Vec<Vec<T>>, LayoutError> {
            let (expected, got) = (documents.batch_size(), of.len());
            if expected != got {
                return Err(LayoutError::NumRows {
                    what,
                    expected,
                    got,
                });
            }
            Ok(of[rows.clone()].to_vec())
        }
        // In one row it could no longer be seen whose entry is missing.
        fn joined<T: Clone>(
            what: &'static str,
            of: &[Vec<T>],
            rows: &Range<usize>,
            documents: &Documents,
        ) -> Result<Vec<Vec<T>>, LayoutError> {
            for (row, (entries, documents)) in of.iter().zip(documents.rows()).enumerate() {
                let (expected, got) = (documents.len(), entries.len());
                if expected != got {
                    return Err(LayoutError::RowLen {
                        what,
                        row,
                        expected,
                        got,
                    });
                }
            }
            Ok(vec![some(what, of, rows, documents)?.concat()])
        }
        let (spans, prefixes, masks) = (&self.spans, &self.prefixes, &self.masks);
        let spans = spans.as_deref();
        let prefixes = prefixes.as_deref();
        let masks = masks.as_deref();
        Ok(Self {
            spans: (spans.map(|of| some("spans", of, rows, documents))).transpose()?,
            media_spans: self.media_spans,
            prefixes: (prefixes.map(|of| joined("prefixes", of, rows, documents))).transpose()?,
            masks: (masks.map(|of| joined("masks", of, rows, documents))).transpose()?,
        })
    }
}

impl<B: Backend> SequenceBatch<B> {
    /// Bidirectional spans, for calls that ask for them
    /// ([`AttentionOptions::causal_with_spans`](crate::attention::AttentionOptions::causal_with_spans)): for each row of the
    /// batch as it comes, the half-open ranges of its tokens whose members see each other. Ranges are in order, disjoint, and
    /// hold tokens of one document each; padding within is no member. Without any, give every row an empty list.
    #[must_use]
    pub fn with_spans(mut self, spans: Vec<Vec<Range<usize>>>) -> Self {
        self.marks.spans = Some(spans);
        self
    }

    /// Makes every image, and every frame of a video, a bidirectional span of its own, beside those of
    /// [`with_spans`](Self::with_spans): the tokens that wait for its features see each other. They must follow each other
    /// in one row. A batch without media then has no such span, which is not an error.
    ///
    /// ```
    /// use burn::tensor::{Tensor, TensorData};
    /// use burn_cp::{
    ///     attention::AttentionOptions,
    ///     batch::{Media, SequenceBatch},
    ///     sharder::{ContextParallel, ContextParallelConfig},
    /// };
    ///
    /// type B = burn::backend::Flex;
    /// let device = Default::default();
    /// // One row of 6 tokens, of which 1 to 4 are an image of 4 x 4 patches, 2 x 2 of them a token.
    /// let image = Media {
    ///     name: "image".into(),
    ///     pixels: Tensor::<B, 2>::zeros([16, 3], &device),
    ///     grids: vec![[1, 4, 4]],
    ///     spatial_merge_size: 2,
    ///     placeholders: TensorData::new(vec![false, true, true, true, true, false], [1, 6]),
    /// };
    /// let batch = SequenceBatch::from_ids(TensorData::zeros::<i64, _>([1, 6]))
    ///     .with_media(image)
    ///     .with_media_spans();
    /// let step = ContextParallel::solo(ContextParallelConfig::default()).shard(batch, &device)?;
    /// assert_eq!(step.documents().spans(0, 0), [1..5]);
    /// let plan = step.plan(AttentionOptions::causal_with_spans().mask)?;
    /// assert_eq!(plan.total_area(), 1 + 4 * 5 + 6);
    /// # Ok::<(), burn_cp::sharder::StepError>(())
    /// ```
    #[must_use]
    pub fn with_media_spans(mut self) -> Self {
        self.marks.media_spans = true;
        self
    }

    /// Prefixes, for calls that ask for them
    /// ([`AttentionOptions::prefix`](crate::attention::AttentionOptions::prefix)): for each row and document of the batch's
    /// documents how many real tokens at its begin see each other. If the batch has a placement, these are the documents of
    /// the placed rows.
    #[must_use]
    pub fn with_prefixes(mut self, prefixes: Vec<Vec<usize>>) -> Self {
        self.marks.prefixes = Some(prefixes);
        self
    }

    /// Masks of documents, for calls that ask for them
    /// ([`AttentionOptions::per_document`](crate::attention::AttentionOptions::per_document)): one for each row and document
    /// of the batch's documents. If the batch has a placement, these are the documents of the placed rows.
    #[must_use]
    pub fn with_masks(mut self, masks: Vec<Vec<MaskKind>>) -> Self {
        self.marks.masks = Some(masks);
        self
    }

    /// The documents of the rows that are dealt out with what the batch says of them. Media must have been checked.
    pub(crate) fn marked(
        &self,
        documents: Documents,
        size: [usize; 2],
    ) -> Result<Documents, BatchError> {
        let mut documents = documents;
        let once = |what, already| match already {
            true => Err(BatchError::MarkedTwice { what }),
            false => Ok(()),
        };
        if let Some(spans) = self.spans(size)? {
            once("spans", documents.has_spans())?;
            let spans = match &self.placement {
                Some(placement) => placed(&spans, placement, &documents)?,
                None => spans,
            };
            documents = documents.with_spans(&spans)?;
        }
        if let Some(prefixes) = &self.marks.prefixes {
            once("prefixes", documents.has_prefixes())?;
            documents = documents.with_prefixes(prefixes.clone())?;
        }
        if let Some(masks) = &self.marks.masks {
            once("masks", documents.has_masks())?;
            documents = documents.with_masks(masks.clone())?;
        }
        Ok(documents)
    }

    /// All spans, by row of the batch as it came.
    fn spans(&self, size: [usize; 2]) -> Result<Option<Vec<Vec<Range<usize>>>>, BatchError> {
        let given = self.marks.spans.as_ref();
        if given.is_none() && !self.marks.media_spans {
            return Ok(None);
        }
        let mut spans = given.cloned().unwrap_or_else(|| vec![Vec::new(); size[0]]);
        check_spans(&spans, size)?;
        if self.marks.media_spans {
            for media in &self.media {
                for (row, span) in media.frame_tokens(size)? {
                    spans[row].push(span);
                }
            }
            spans
                .iter_mut()
                .for_each(|row| row.sort_by_key(|span| span.start));
            check_spans(&spans, size)?;
        }
        Ok(Some(spans))
    }
}

impl<B: Backend> Media<B> {
    /// Row and tokens of each frame.
    fn frame_tokens(&self, size: [usize; 2]) -> Result<Vec<(usize, Range<usize>)>, BatchError> {
        let marked = host_bools(&self.name, &self.placeholders, size)?;
        let mut tokens = (0..marked.len()).filter(|&token| marked[token]);
        let merged = self.spatial_merge_size * self.spatial_merge_size;
        let frames = (self.grids.iter()).flat_map(|&[t, h, w]| (0..t).map(move |_| h * w / merged));
        let mut found = Vec::new();
        for (frame, num_tokens) in frames.enumerate() {
            let Some(first) = tokens.next() else { break };
            let mut last = first;
            for token in tokens.by_ref().take(num_tokens.saturating_sub(1)) {
                if token != last + 1 || token / size[1] != first / size[1] {
                    return Err(BatchError::FrameTokens {
                        what: self.name.clone(),
                        frame,
                        row: first / size[1],
                        token: last % size[1],
                    });
                }
                last = token;
            }
            found.push((first / size[1], first % size[1]..last % size[1] + 1));
        }
        Ok(found)
    }
}

/// The same spans in the placed rows.
fn placed(
    spans: &[Vec<Range<usize>>],
    placement: &Placement,
    documents: &Documents,
) -> Result<Vec<Vec<Range<usize>>>, BatchError> {
    let [num_rows, _] = placement.placed_size();
    let padding: Vec<Vec<bool>> = (0..num_rows)
        .map(|row| documents.padding_mask(row))
        .collect();
    let mut rows = vec![Vec::new(); num_rows];
    for (row, spans) in spans.iter().enumerate() {
        for span in spans {
            let slots = span
                .clone()
                .filter_map(|token| placement.target(row, token));
            // Padding may go anywhere, or nowhere: it is no member.
            let mut slots: Vec<(usize, usize)> =
                slots.filter(|&(row, slot)| !padding[row][slot]).collect();
            slots.sort_unstable();
            let together = match (slots.first(), slots.last()) {
                (Some(&(row, first)), Some(&(last_row, last))) if row == last_row => {
                    let tokens = first..last + 1;
                    let real = tokens.clone().filter(|&slot| !padding[row][slot]).count();
                    (real == slots.len()).then_some((row, tokens))
                }
                _ => None,
            };
            let Some((placed_row, tokens)) = together else {
                return Err(BatchError::SpanPlaced {
                    row,
                    tokens: span.clone(),
                });
            };
            rows[placed_row].push(tokens);
        }
    }
    rows.iter_mut()
        .for_each(|row: &mut Vec<Range<usize>>| row.sort_by_key(|span| span.start));
    Ok(rows)
}
