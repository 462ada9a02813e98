//! Which token takes which feature row.

use std::ops::Range;

use burn::tensor::{Bool, Int, Tensor, TensorData, backend::Backend};

use super::arrangement::Arrangement;
use crate::batch::BatchError;

/// For every token of a batch the feature row that replaces it, if any. Host data.
#[derive(Debug, Clone)]
pub(super) struct Placeholders {
    rows: Vec<Option<usize>>,
    num_rows: usize,
}

impl Placeholders {
    pub(super) fn none(size: [usize; 2]) -> Self {
        Self {
            rows: vec![None; size[0] * size[1]],
            num_rows: 0,
        }
    }

    /// Gives the marked tokens, in order, the next `embeddings` feature rows.
    pub(super) fn mark(
        &mut self,
        what: &str,
        mask: &[bool],
        embeddings: usize,
    ) -> Result<(), BatchError> {
        let placeholders = mask.iter().filter(|marked| **marked).count();
        if placeholders != embeddings {
            return Err(BatchError::Placeholders {
                what: what.to_owned(),
                placeholders,
                embeddings,
            });
        }
        for (row, _) in self
            .rows
            .iter_mut()
            .zip(mask)
            .filter(|(_, marked)| **marked)
        {
            *row = Some(self.num_rows);
            self.num_rows += 1;
        }
        Ok(())
    }

    /// The feature row of each token of the batch.
    pub(super) fn rows(&self) -> &[Option<usize>] {
        &self.rows
    }

    /// The part of `ranges` of every padded row; added tokens have none.
    pub(super) fn select(
        &self,
        arrangement: &Arrangement,
        ranges: &[Range<usize>],
    ) -> LocalPlaceholders {
        let [batch, padded_len] = arrangement.padded_size();
        let placed = arrangement.place(&self.rows, None);
        let mut rows = Vec::new();
        for row in placed.chunks_exact(padded_len) {
            for range in ranges {
                rows.extend_from_slice(&row[range.clone()]);
            }
        }
        LocalPlaceholders {
            batch,
            rows,
            num_rows: self.num_rows,
        }
    }
}

/// The placeholders among a rank's tokens.
#[derive(Debug, Clone)]
pub(super) struct LocalPlaceholders {
    batch: usize,
    rows: Vec<Option<usize>>,
    num_rows: usize,
}

impl LocalPlaceholders {
    /// No placeholder among `batch · tokens` tokens.
    pub(super) fn none(batch: usize, tokens: usize) -> Self {
        Self {
            batch,
            rows: vec![None; batch * tokens],
            num_rows: 0,
        }
    }

    /// Bool `[batch, local_tokens]`.
    pub(super) fn mask<B: Backend>(&self, device: &B::Device) -> Tensor<B, 2, Bool> {
        let mask: Vec<bool> = self.rows.iter().map(Option::is_some).collect();
        let shape = [self.batch, self.rows.len() / self.batch];
        Tensor::from_data(TensorData::new(mask, shape), device)
    }

    /// The feature rows of a rank's placeholders, in the order of its tokens, as runs.
    pub(super) fn wanted(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for row in self.rows.iter().flatten() {
            match runs.last_mut() {
                Some(run) if run.end == *row => run.end += 1,
                _ => runs.push(*row..*row + 1),
            }
        }
        runs
    }

    /// [`Self::scatter`] of this rank's own feature rows, in the order of its tokens; one row without meaning where it has none.
    pub(super) fn scatter_own<B: Backend>(&self, features: Tensor<B, 2>) -> Tensor<B, 3> {
        let num_own = self.rows.iter().flatten().count();
        let mut next = 0..num_own;
        let own = |row: &Option<usize>| row.and_then(|_| next.next());
        let rows = self.rows.iter().map(own).collect();
        let own = Self {
            batch: self.batch,
            rows,
            num_rows: num_own.max(1),
        };
        own.scatter(features)
    }

    /// Feature rows `[num_rows, width]` at the tokens that they replace, zeros elsewhere: `[batch, local_tokens, width]`.
    pub(super) fn scatter<B: Backend>(&self, features: Tensor<B, 2>) -> Tensor<B, 3> {
        let [num_rows, width] = features.dims();
        assert_eq!(
            num_rows, self.num_rows,
            "scatter_media: one feature row per placeholder of the batch, or of this rank where features go to their consumers"
        );
        let device = features.device();
        // Tokens without a feature take a row of zeros at the end; a rank without media thus stays on the tower's graph.
        let zero = Tensor::zeros([1, width], (&device, features.dtype()));
        let with_zero = crate::cat(vec![features, zero], 0);
        #[allow(clippy::cast_possible_wrap)]
        let index: Vec<i64> = self
            .rows
            .iter()
            .map(|row| row.unwrap_or(num_rows) as i64)
            .collect();
        let num_tokens = index.len();
        let index = Tensor::<B, 1, Int>::from_data(TensorData::new(index, [num_tokens]), &device);
        with_zero
            .select(0, index)
            .reshape([self.batch, num_tokens / self.batch, width])
    }
}
