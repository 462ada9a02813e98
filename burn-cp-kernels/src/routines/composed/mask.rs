//! Masks of tiles of which a block sees only a part.

use std::{collections::HashMap, ops::Range};

use burn::tensor::{Bool, Tensor, TensorData, backend::Backend};

use super::walk::{BLOCK, TILE};
use crate::definition::{Segment, Segments};

/// Where a block of queries and a tile of keys meet.
pub(super) struct Meeting {
    /// Number of queries of the block.
    rows: usize,
    /// Number of keys of the tile.
    width: usize,
    /// Own key of the block's first query, counted from the tile's first key.
    own: isize,
    /// Keys before and after the own one that are visible; `None` where that masks nothing.
    left: Option<isize>,
    right: Option<isize>,
}

impl Meeting {
    /// Both ranges are counted within the segment.
    pub(super) fn new(segment: &Segment, block: &Range<usize>, tile: &Range<usize>) -> Self {
        // Positions fit an isize: the segments are checked.
        let own = segment.num_k() as isize - segment.num_q() as isize + block.start as isize
            - tile.start as isize;
        // A reach longer than any document masks nothing.
        let bound = |reach: Option<usize>| reach.and_then(|reach| isize::try_from(reach).ok());
        let (left, right) = segment.reach();
        Self {
            rows: block.len(),
            width: tile.len(),
            own,
            left: bound(left),
            right: bound(right),
        }
    }

    /// How far the first query sees, counted from the tile's first key, if some query of the block
    /// must not see a later key of the tile.
    fn cut_above(&self) -> Option<isize> {
        let last = self.own.saturating_add(self.right?);
        (last < self.width as isize - 1).then_some(last)
    }

    /// How far back the first query sees, counted from the tile's first key, if some query of the
    /// block must not see an earlier key of the tile.
    fn cut_below(&self) -> Option<isize> {
        let first = self.own.saturating_sub(self.left?);
        (first + self.rows as isize - 1 > 0).then_some(first)
    }

    /// Whether some query of the block lies so late that it sees nothing of the tile.
    pub(super) fn leaves_rows_behind(&self) -> bool {
        self.cut_below()
            .is_some_and(|first| first + self.rows as isize > self.width as isize)
    }
}

/// Makes masks. All masks of one kind are windows into one small triangle, which is made at the
/// first use.
pub(super) struct Masks<B: Backend> {
    device: B::Device,
    rows: usize,
    width: usize,
    bases: HashMap<bool, Tensor<B, 4, Bool>>,
}

impl<B: Backend> Masks<B> {
    pub(super) fn new(segments: &Segments, device: &B::Device) -> Self {
        let longest = |len: fn(&Segment) -> usize| segments.iter().map(len).max().unwrap_or(0);
        Self {
            device: device.clone(),
            rows: longest(Segment::num_q).min(BLOCK),
            width: longest(Segment::num_k).min(TILE),
            bases: HashMap::new(),
        }
    }

    /// Replaces by `-inf` the scores `[1, num_kv_heads, group * rows, width]` of pairs that must
    /// not see each other. A replaced score leaves no trace, not even of a NaN.
    pub(super) fn apply(&mut self, scores: Tensor<B, 4>, meeting: &Meeting) -> Tensor<B, 4> {
        let (above, below) = (meeting.cut_above(), meeting.cut_below());
        if above.is_none() && below.is_none() {
            return scores;
        }
        let dims = scores.dims();
        let heads = dims[1] * dims[2] / meeting.rows;
        let mut scores = scores.reshape([1, heads, meeting.rows, meeting.width]);
        if let Some(last) = above {
            let mask = self.window(true, last, meeting);
            scores = scores.mask_fill(mask, f64::NEG_INFINITY);
        }
        if let Some(first) = below {
            let mask = self.window(false, first, meeting);
            scores = scores.mask_fill(mask, f64::NEG_INFINITY);
        }
        scores.reshape(dims)
    }

    /// `[1, 1, rows, width]`, true where key `j > edge + t` (`above`) or `j < edge + t`.
    fn window(&mut self, above: bool, edge: isize, meeting: &Meeting) -> Tensor<B, 4, Bool> {
        let (rows, width) = (self.rows, self.width);
        let base = self
            .bases
            .entry(above)
            .or_insert_with(|| triangle(above, rows, width, &self.device))
            .clone();
        // `-rows < edge < width` where a block and a tile see each other in part.
        let start = (width as isize - edge) as usize;
        base.slice([0..1, 0..1, 0..meeting.rows, start..start + meeting.width])
    }
}

/// `[1, 1, rows, rows + 2 * width]`, true where `x - width > t` (`above`) or `x - width < t`.
fn triangle<B: Backend>(
    above: bool,
    rows: usize,
    width: usize,
    device: &B::Device,
) -> Tensor<B, 4, Bool> {
    let columns = rows + 2 * width;
    let cells = (0..rows)
        .flat_map(|t| (0..columns).map(move |x| if above { x > width + t } else { x < width + t }));
    let data = TensorData::new(cells.collect::<Vec<bool>>(), [1, 1, rows, columns]);
    Tensor::from_data(data, device)
}
