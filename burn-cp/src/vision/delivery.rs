//! How features get from the ranks whose towers made them to the ranks that need them.

use std::ops::Range;

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

use super::{FrameShares, VisionError, VisionFeatures};
use crate::{
    collectives::{self, CollectiveBackend, ExchangePlan, Piece},
    comm::ProcessGroup,
};

impl FrameShares {
    /// The exchange that hands each rank `r` the rows `wanted[r]` of the features of all frames, in that order: the view of
    /// `rank`. A rank that wants none gets the first row that it made itself, which stands for nothing.
    ///
    /// Pure host; its input are the rows that each rank's tower makes, dummies included and the floor not.
    ///
    /// # Errors
    /// [`VisionError::Rows`], whose rank is one of the group: rows past the last real one, or ranges that end before they
    /// start. [`VisionError::Exchange`]: not one list per rank, or frames that are not split.
    pub fn delivery(
        &self,
        wanted: &[Vec<Range<usize>>],
        rank: usize,
    ) -> Result<ExchangePlan, VisionError> {
        let sizes = self.num_tokens_per_rank();
        let mut starts = Vec::with_capacity(sizes.len());
        let mut num_rows = 0;
        for size in &sizes {
            starts.push(num_rows);
            num_rows += size;
        }
        let mut pieces = Vec::with_capacity(wanted.len());
        for (taker, rows) in wanted.iter().enumerate() {
            check_rows(rows, self.num_real_tokens(), taker)?;
            let mut list: Vec<Piece> = rows
                .iter()
                .flat_map(|rows| pieces_of(rows, &starts, &sizes))
                .collect();
            if list.is_empty() {
                // Every tower makes a row, if only of a dummy frame.
                list.push(Piece {
                    source: taker,
                    range: 0..1,
                });
            }
            pieces.push(list);
        }
        Ok(ExchangePlan::new(&sizes, &pieces, rank)?)
    }
}

/// Where a run of rows comes from; `starts` and `sizes` are those of each rank's rows among all.
fn pieces_of<'a>(
    rows: &'a Range<usize>,
    starts: &'a [usize],
    sizes: &'a [usize],
) -> impl Iterator<Item = Piece> + 'a {
    let first = starts.partition_point(|start| *start <= rows.start).max(1) - 1;
    let sources = (first..starts.len()).take_while(|source| starts[*source] < rows.end);
    sources.filter_map(move |source| {
        let start = rows.start.max(starts[source]);
        let end = rows.end.min(starts[source] + sizes[source]);
        (start < end).then(|| Piece {
            source,
            range: start - starts[source]..end - starts[source],
        })
    })
}

/// Refuses rows that `expected` rows do not have.
pub(super) fn check_rows(
    rows: &[Range<usize>],
    expected: usize,
    rank: usize,
) -> Result<(), VisionError> {
    let wrong = rows
        .iter()
        .find(|rows| rows.end > expected || rows.start > rows.end);
    wrong.map_or(Ok(()), |rows| {
        Err(VisionError::Rows {
            rank,
            start: rows.start,
            end: rows.end,
            expected,
        })
    })
}

/// Embeddings and deepstack layers side by side: `[rows, Σ widths]`.
pub(super) fn message<B: Backend>(features: VisionFeatures<B>) -> Tensor<B, 2> {
    let mut parts = features.deepstack;
    parts.insert(0, features.embeddings);
    if parts.len() == 1 {
        parts.swap_remove(0)
    } else {
        crate::cat(parts, 1)
    }
}

/// The inverse of [`message`].
pub(super) fn split<B: Backend>(message: Tensor<B, 2>, widths: &[usize]) -> VisionFeatures<B> {
    let mut column = 0;
    let mut parts = widths.iter().map(|width| {
        let start = column;
        column += width;
        message.clone().narrow(1, start, *width)
    });
    let embeddings = parts
        .next()
        .expect("the first width is that of the embeddings");
    let deepstack = parts.collect();
    VisionFeatures {
        embeddings,
        deepstack,
    }
}

/// The rows of all ranks' frames on every rank, in order and without those of dummy frames.
pub(super) fn gather<B: CollectiveBackend>(
    message: Tensor<B, 2>,
    shares: &FrameShares,
    group: &ProcessGroup,
) -> Tensor<B, 2> {
    let all = collectives::all_gather_sized(message, 0, &shares.num_tokens_per_rank(), group);
    // Dummy frames come last.
    match shares.num_real_tokens() {
        num_rows if num_rows == all.dims()[0] => all,
        num_rows => all.narrow(0, 0, num_rows),
    }
}

/// The rows that this rank takes.
pub(super) fn deliver<B: CollectiveBackend>(
    message: Tensor<B, 2>,
    plan: ExchangePlan,
    group: &ProcessGroup,
) -> Tensor<B, 2> {
    collectives::exchange(message, 0, &plan.into(), group)
}

/// The rows that this rank takes of features that it has in full: what [`deliver`] would hand it, or the first row.
pub(super) fn select<B: Backend>(
    features: VisionFeatures<B>,
    rows: &[Range<usize>],
) -> VisionFeatures<B> {
    #[allow(
        clippy::cast_possible_wrap,
        reason = "rows of a tensor that is there fit into 63 bits"
    )]
    let mut index: Vec<i64> = rows
        .iter()
        .cloned()
        .flatten()
        .map(|row| row as i64)
        .collect();
    if index.is_empty() {
        index.push(0);
    }
    let select = |part: Tensor<B, 2>| {
        let data = TensorData::new(index.clone(), [index.len()]);
        let index = Tensor::<B, 1, Int>::from_data(data, &part.device());
        part.select(0, index)
    };
    VisionFeatures {
        embeddings: select(features.embeddings),
        deepstack: features.deepstack.into_iter().map(select).collect(),
    }
}
