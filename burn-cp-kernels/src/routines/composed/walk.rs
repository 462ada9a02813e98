//! Which blocks of queries and tiles of keys a segment is made of. Host arithmetic only.

use std::ops::Range;

use crate::definition::Segment;

/// Keys per tile. Tiles start at multiples of it in the document. At most 512, the longest sum
/// that Flex's matmul does not split.
pub(super) static TILE: std::sync::LazyLock<usize> = std::sync::LazyLock::new(|| std::env::var("TILE").unwrap().parse().unwrap());

/// Queries per block.
pub(super) static BLOCK: std::sync::LazyLock<usize> = std::sync::LazyLock::new(|| std::env::var("BLOCK").unwrap().parse().unwrap());

/// Blocks of the queries that see a key, counted within the segment, in order.
///
/// Causal blocks end where a query's own key ends a tile, so that the diagonal costs one partly
/// masked tile per block.
pub(super) fn blocks(segment: &Segment) -> impl Iterator<Item = Range<usize>> {
    let first = segment.num_blind_queries();
    let last = segment.num_q();
    // Position of query `first`: its own key's, or 0 where own keys mean nothing.
    let position = if segment.causal {
        segment.k_position + (segment.num_k() + first).saturating_sub(last)
    } else {
        0
    };
    cut(position..position + (last - first), *BLOCK)
        .map(move |block| block.start - position + first..block.end - position + first)
}

/// Keys that some query of a block sees, counted within the segment.
pub(super) fn keys(segment: &Segment, block: &Range<usize>) -> Range<usize> {
    segment.visible_keys(block.start).start..segment.visible_keys(block.end - 1).end
}

/// Keys that some query of the segment sees.
pub(super) fn all_keys(segment: &Segment) -> Range<usize> {
    let first = segment.num_blind_queries();
    if first == segment.num_q() {
        return 0..0;
    }
    keys(segment, &(first..segment.num_q()))
}

/// The tiles of a run of keys, counted within the segment, cut at tile boundaries of the document.
pub(super) fn tiles(segment: &Segment, keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let offset = segment.k_position;
    cut(keys.start + offset..keys.end + offset, *TILE)
        .map(move |tile| tile.start - offset..tile.end - offset)
}

/// Cuts a range at multiples of `size`.
fn cut(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        if start >= range.end {
            return None;
        }
        let end = ((start / size + 1) * size).min(range.end);
        let piece = start..end;
        start = end;
        Some(piece)
    })
}

