//! Which blocks of queries and tiles of keys a segment is made of. Host arithmetic only.

use std::ops::Range;

use crate::definition::Segment;

/// Keys per tile. Tiles start at multiples of it in the document. At most 512, the longest sum
/// that Flex's matmul does not split.
pub(super) const TILE: usize = 64;

/// Queries per block.
pub(super) const BLOCK: usize = 64;

/// Blocks of the queries that see a key, counted within the segment, in order.
///
/// Causal blocks end where a query's own key ends a tile, so that the diagonal costs one partly
/// masked tile per block.
pub(super) fn blocks(segment: &Segment) -> impl Iterator<Item = Range<usize>> {
    let first = segment.num_blind_queries();
    let last = segment.num_q();
    // Position of query `first`: its own key's, or 0 where the mask does not follow own keys.
    let position = if segment.causal || segment.window.is_some() {
        segment.k_position + (segment.num_k() + first).saturating_sub(last)
    } else {
        0
    };
    cut(position..position + (last - first), BLOCK)
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
    cut(keys.start + offset..keys.end + offset, TILE)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::Window;

    fn segment(num_q: usize, num_k: usize, k_position: usize) -> Segment {
        Segment {
            q_row: 0,
            q: 0..num_q,
            k_row: 0,
            k: 0..num_k,
            k_position,
            causal: true,
            window: None,
        }
    }

    #[test]
    fn tiles_lie_at_document_positions() {
        let num_keys = 2 * TILE + 30;
        let tiles: Vec<_> = tiles(&segment(4, num_keys, TILE - 10), 0..num_keys).collect();
        let cuts = [10, TILE + 10, 2 * TILE + 10];
        assert_eq!(
            tiles,
            [0..10, 10..cuts[1], cuts[1]..cuts[2], cuts[2]..num_keys]
        );
    }

    #[test]
    fn blocks_cover_the_queries_that_see_a_key() {
        for (num_q, num_k, position) in
            [(5, 3, 0), (300, 1000, 77), (1, 1, 9), (3, 0, 0), (0, 4, 1)]
        {
            let segment = segment(num_q, num_k, position);
            let covered: Vec<usize> = blocks(&segment).flatten().collect();
            let expected: Vec<usize> = (segment.num_blind_queries()..num_q).collect();
            assert_eq!(covered, expected);
            assert!(blocks(&segment).all(|block| block.len() <= BLOCK));
        }
    }

    #[test]
    fn work_is_near_the_visible_pairs_and_pieces_are_bounded() {
        let mut segment = segment(3000, 4000, 5);
        for window in [None, Some(0), Some(200)] {
            segment.window = window.map(Window::left);
            let mut work = 0;
            for block in blocks(&segment) {
                for tile in tiles(&segment, keys(&segment, &block)) {
                    assert!(tile.len() <= TILE && block.len() <= BLOCK);
                    work += tile.len() * block.len();
                }
            }
            let visible: usize = (0..3000).map(|t| segment.visible_keys(t).len()).sum();
            // At both edges of the mask, at most a triangle of one block too much.
            assert!(work <= visible + 3000 * 2 * BLOCK);
        }
    }

    #[test]
    fn an_aligned_block_has_one_partly_masked_tile() {
        let segment = segment(4 * BLOCK, 4 * BLOCK, 0);
        for block in blocks(&segment) {
            assert_eq!(keys(&segment, &block), 0..block.end);
        }
    }
}
