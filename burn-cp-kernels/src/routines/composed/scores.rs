//! What happens to scores and weights besides masks: softcap and dropout.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData, backend::Backend};

use crate::definition::{AttentionProblem, Dropout, DropoutPlace, Segment};

/// `softcap · tanh(scores / softcap)`.
pub(super) fn cap<B: Backend>(scores: Tensor<B, 4>, softcap: Option<f64>) -> Tensor<B, 4> {
    match softcap {
        Some(softcap) => (scores / softcap).tanh() * softcap,
        None => scores,
    }
}

/// The derivative of [`cap`], from its result: `1 - (capped / softcap)²`.
pub(super) fn cap_slope<B: Backend>(capped: Tensor<B, 4>, softcap: f64) -> Tensor<B, 4> {
    let ratio = capped / softcap;
    (ratio.clone() * ratio).neg() + 1.0
}

/// A segment, its place in its document, and the dropout of its weights.
pub(super) struct Dropping<'a> {
    pub(super) segment: &'a Segment,
    pub(super) place: DropoutPlace,
    pub(super) dropout: Option<Dropout>,
}

impl Dropping<'_> {
    /// The factors on the weights of a block and a tile,
    /// `[1, num_kv_heads, group * rows, width]`; `None` without dropout.
    pub(super) fn factors<B: Backend>(
        &self,
        problem: &AttentionProblem,
        block: &Range<usize>,
        tile: &Range<usize>,
        like: &Tensor<B, 4>,
    ) -> Option<Tensor<B, 4>> {
        let dropout = self.dropout?;
        let mut factors = Vec::with_capacity(problem.num_heads * block.len() * tile.len());
        for head in 0..problem.num_heads {
            for t in block.clone() {
                let row = dropout.row(self.segment, self.place, head, t);
                factors.extend(tile.clone().map(|j| row.factor(j)));
            }
        }
        let rows = problem.group() * block.len();
        let shape = [1, problem.num_kv_heads, rows, tile.len()];
        let data = TensorData::new(factors, shape).convert_dtype(like.dtype());
        Some(Tensor::from_data(data, (&like.device(), like.dtype())))
    }
}
