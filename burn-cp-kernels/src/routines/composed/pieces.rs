//! Puts results together: each token of the output is covered by one piece or by none.
//!
//! Pieces are collected and concatenated once, since Burn's `slice_assign` may copy the whole
//! destination for every piece.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use burn::tensor::{Tensor, backend::Backend};

use super::walk;
use crate::definition::Segments;

/// Pieces of a tensor `[batch, heads, tokens, dim]`, by batch row and first token.
pub(super) struct Pieces<B: Backend> {
    map: BTreeMap<(usize, usize), Tensor<B, 4>>,
}

impl<B: Backend> Pieces<B> {
    pub(super) fn new() -> Self {
        Self {
            map: BTreeMap::new(),
        }
    }

    /// Adds `piece [1, heads, len, dim]` to what starts at this token; both are equally long.
    pub(super) fn add(&mut self, row: usize, start: usize, piece: Tensor<B, 4>) {
        let sum = match self.map.remove(&(row, start)) {
            Some(earlier) => earlier + piece,
            None => piece,
        };
        self.map.insert((row, start), sum);
    }

    /// The whole tensor; tokens without a piece get `fill`.
    pub(super) fn assemble(
        self,
        shape: [usize; 4],
        fill: f64,
        like: &Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        let [batch, heads, tokens, dim] = shape;
        let options = (&like.device(), like.dtype());
        let filler = |len: usize| Tensor::full([1, heads, len, dim], fill, options);
        let mut rows: Vec<Vec<Tensor<B, 4>>> = (0..batch).map(|_| Vec::new()).collect();
        let mut ends = vec![0; batch];
        for ((row, start), piece) in self.map {
            if start > ends[row] {
                rows[row].push(filler(start - ends[row]));
            }
            ends[row] = start + piece.dims()[2];
            rows[row].push(piece);
        }
        for (row, end) in rows.iter_mut().zip(ends) {
            if end < tokens || row.is_empty() {
                row.push(filler(tokens - end));
            }
        }
        if rows.is_empty() {
            return Tensor::full(shape, fill, options);
        }
        Tensor::cat(rows.into_iter().map(|row| Tensor::cat(row, 2)).collect(), 0)
    }
}

/// Where the tiles of segments that share keys must be cut so that each part can be summed alone.
pub(super) struct KeyCuts {
    cuts: BTreeSet<(usize, usize)>,
}

impl KeyCuts {
    pub(super) fn new(segments: &Segments) -> Self {
        let mut cuts = BTreeSet::new();
        for segment in segments {
            for tile in walk::tiles(segment, walk::all_keys(segment)) {
                cuts.insert((segment.k_row, segment.k.start + tile.start));
                cuts.insert((segment.k_row, segment.k.start + tile.end));
            }
        }
        Self { cuts }
    }

    /// The parts of a tile of keys of one batch row, in order.
    pub(super) fn parts(&self, row: usize, tile: Range<usize>) -> Vec<Range<usize>> {
        let mut start = tile.start;
        let mut parts = Vec::new();
        for &(_, end) in self.cuts.range((row, tile.start + 1)..=(row, tile.end)) {
            parts.push(start..end);
            start = end;
        }
        parts
    }
}
