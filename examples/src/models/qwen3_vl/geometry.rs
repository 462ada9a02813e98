//! Where the patches of a batch stand: order, frames, and places within the learned position grid. Host data.
//!
//! Rows of patches come frame by frame, and within a frame square by square, a square being the
//! `merge x merge` patches that become one token; within a square row by row.

use std::ops::Range;

/// Places of all patch rows of some grids.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PatchGeometry {
    /// Rows of each frame.
    pub(super) frames: Vec<Range<usize>>,
    /// `[row of patches, column of patches]` within the frame, for each row.
    pub(super) places: Vec<[usize; 2]>,
    /// The four entries of the learned grid around each row's place.
    pub(super) corners: Vec<[usize; 4]>,
    /// Their weights, which sum to 1.
    pub(super) weights: Vec<[f64; 4]>,
}

impl PatchGeometry {
    /// Geometry of grids `(t, h, w)` in patches, for squares of side `merge` and a learned grid of side `side`.
    ///
    /// The learned grid is stretched so that its corners fall on a frame's corners, and read bilinearly in between, which
    /// is what Qwen3-VL does at resolutions it has no table for.
    pub(super) fn new(grids: &[[usize; 3]], merge: usize, side: usize) -> Self {
        let mut geometry = Self {
            frames: vec![],
            places: vec![],
            corners: vec![],
            weights: vec![],
        };
        for &[slices, height, width] in grids {
            let places = merge_order(height, width, merge);
            let (corners, weights): (Vec<_>, Vec<_>) = places
                .iter()
                .map(|&[y, x]| interpolate(stretch(y, height, side), stretch(x, width, side), side))
                .unzip();
            for _ in 0..slices {
                let start = geometry.places.len();
                geometry.frames.push(start..start + places.len());
                geometry.places.extend_from_slice(&places);
                geometry.corners.extend_from_slice(&corners);
                geometry.weights.extend_from_slice(&weights);
            }
        }
        geometry
    }

    /// Number of patch rows.
    pub(super) fn num_rows(&self) -> usize {
        self.places.len()
    }

    /// Angles `[rows, head_dim / 2]` of the 2-D rotary embedding: the first half of the planes turns with the row of
    /// patches, the second with the column, each by `place · theta^(-2i / (head_dim / 2))`.
    pub(super) fn angles(&self, head_dim: usize, theta: f64) -> Vec<f64> {
        let per_axis = head_dim / 4;
        let frequency = |plane: usize| theta.powf(-(plane as f64) / per_axis as f64);
        let frequencies: Vec<f64> = (0..per_axis).map(frequency).collect();
        self.places
            .iter()
            .flatten()
            .flat_map(|&place| {
                frequencies
                    .iter()
                    .map(move |frequency| place as f64 * frequency)
            })
            .collect()
    }
}

/// Places of a frame's patches, square by square.
fn merge_order(height: usize, width: usize, merge: usize) -> Vec<[usize; 2]> {
    let mut places = Vec::with_capacity(height * width);
    for top in (0..height).step_by(merge) {
        for left in (0..width).step_by(merge) {
            for y in top..top + merge {
                places.extend((left..left + merge).map(|x| [y, x]));
            }
        }
    }
    places
}

/// Place `at` of `len` on a grid of `side` entries whose ends coincide.
fn stretch(at: usize, len: usize, side: usize) -> f64 {
    (at * (side - 1)) as f64 / (len.max(2) - 1) as f64
}

fn interpolate(y: f64, x: f64, side: usize) -> ([usize; 4], [f64; 4]) {
    // Coordinates are within 0..=side - 1.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let split = |at: f64| {
        let low = at.floor() as usize;
        (low, (low + 1).min(side - 1), at - at.floor())
    };
    let ((top, bottom, down), (left, right, across)) = (split(y), split(x));
    (
        [
            top * side + left,
            top * side + right,
            bottom * side + left,
            bottom * side + right,
        ],
        [
            (1.0 - down) * (1.0 - across),
            (1.0 - down) * across,
            down * (1.0 - across),
            down * across,
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_ordered_by_frame_and_by_square() {
        let geometry = PatchGeometry::new(&[[1, 2, 4], [2, 2, 2]], 2, 4);
        assert_eq!(geometry.frames, [0..8, 8..12, 12..16]);
        let square = [[0, 0], [0, 1], [1, 0], [1, 1]];
        assert_eq!(geometry.places[..4], square);
        assert_eq!(geometry.places[4..8], square.map(|[y, x]| [y, x + 2]));
        assert_eq!(geometry.places[8..12], square);
        assert_eq!(geometry.places[12..], square);
        assert_eq!(geometry.num_rows(), 16);
    }

    #[test]
    fn weights_sum_to_one_and_reproduce_a_plane() {
        let side = 5;
        for (height, width) in [(2, 2), (4, 6), (10, 2), (14, 12)] {
            let geometry = PatchGeometry::new(&[[1, height, width]], 2, side);
            for row in 0..geometry.num_rows() {
                let [y, x] = geometry.places[row];
                let (corners, weights) = (geometry.corners[row], geometry.weights[row]);
                assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
                // Bilinear interpolation is exact for a function that is linear in both coordinates.
                let plane = |at: usize| (at / side) as f64 * 3.0 - (at % side) as f64;
                let got: f64 = corners
                    .iter()
                    .zip(weights)
                    .map(|(&at, weight)| plane(at) * weight)
                    .sum();
                let unit = (side - 1) as f64;
                let want = y as f64 * unit / (height - 1) as f64 * 3.0
                    - x as f64 * unit / (width - 1) as f64;
                assert!(
                    (got - want).abs() < 1e-9,
                    "{height}x{width} {row}: {got} {want}"
                );
            }
        }
    }

    #[test]
    fn a_frame_of_the_learned_size_reads_the_grid_itself() {
        let geometry = PatchGeometry::new(&[[1, 4, 4]], 2, 4);
        for (&[y, x], (corners, weights)) in geometry
            .places
            .iter()
            .zip(geometry.corners.iter().zip(&geometry.weights))
        {
            assert_eq!((corners[0], *weights), (y * 4 + x, [1.0, 0.0, 0.0, 0.0]));
        }
    }

    #[test]
    fn half_of_the_planes_turns_with_each_axis() {
        let geometry = PatchGeometry::new(&[[1, 4, 2]], 2, 2);
        let angles = geometry.angles(8, 100.0);
        // The last patch stands at [3, 1].
        let expected = [3.0, 0.3, 1.0, 0.1];
        for (got, want) in angles[angles.len() - 4..].iter().zip(expected) {
            assert!((got - want).abs() < 1e-12);
        }
    }
}
