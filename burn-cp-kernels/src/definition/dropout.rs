//! Dropout of attention weights.
//!
//! Whether a pair is dropped follows from the seed, the head, the document and the two positions in
//! it, and from nothing else: the mask is the same however a sequence is packed, cut or sharded, and
//! the backward pass draws it again instead of keeping it.

use serde::{Deserialize, Serialize};

use super::{AttentionError, Segment};

/// Dropout of attention weights: each is set to 0 with probability `p`, the others are divided by
/// `1 - p`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropout {
    /// Probability of a weight to be dropped, at least 0 and less than 1.
    pub p: f64,
    /// Seed of the mask. Steps and layers need seeds of their own, see [`Self::for_layer`].
    pub seed: u64,
}

impl Dropout {
    /// Dropout with probability `p` and this seed.
    #[must_use]
    pub fn new(p: f64, seed: u64) -> Self {
        Self { p, seed }
    }

    /// The same dropout with the seed that follows from this one for a layer.
    #[must_use]
    pub fn for_layer(self, layer: u64) -> Self {
        let seed = scramble(self.seed ^ scramble(layer.wrapping_add(1)));
        Self { seed, ..self }
    }

    /// Checks the probability.
    pub(crate) fn check(&self) -> Result<(), AttentionError> {
        if (0.0..1.0).contains(&self.p) {
            return Ok(());
        }
        Err(AttentionError::Option {
            what: "dropout p",
            expected: "at least 0 and less than 1",
            got: self.p.to_string(),
        })
    }

    /// The factor on weights that are kept.
    pub(crate) fn factor(&self) -> f64 {
        1.0 / (1.0 - self.p)
    }

    /// Hashes below this are dropped.
    pub(crate) fn threshold(&self) -> u32 {
        (self.p * 2f64.powi(32)) as u32
    }

    /// The two halves of the scrambled seed.
    pub(crate) fn seeds(&self) -> [u32; 2] {
        let seed = scramble(self.seed);
        [seed as u32, (seed >> 32) as u32]
    }

    /// The mask of query `t` of a segment for one head.
    pub(crate) fn row(
        &self,
        segment: &Segment,
        place: DropoutPlace,
        head: usize,
        t: usize,
    ) -> DropoutRow {
        let position = place.q_position.wrapping_add(t as u32);
        let document = place.document;
        let [a, b] = self.seeds();
        let head = head as u32;
        DropoutRow {
            a: mix(mix(mix(a ^ head) ^ document) ^ position),
            b: mix(mix(mix(b ^ position) ^ document) ^ head),
            first: segment.k_position as u32,
            threshold: self.threshold(),
            factor: self.factor(),
        }
    }
}

/// What the dropout of a segment is drawn from, besides the seed and the head: pieces of one document draw what the whole
/// one would if they say where they stand in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DropoutPlace {
    /// Number of the document, modulo 2^32.
    pub document: u32,
    /// Position in the document of the segment's first query, modulo 2^32.
    pub q_position: u32,
}

/// The dropout mask of one row of weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DropoutRow {
    a: u32,
    b: u32,
    first: u32,
    threshold: u32,
    factor: f64,
}

impl DropoutRow {
    /// The factor on the weight of key `j` of the segment: 0, or `1 / (1 - p)`.
    pub(crate) fn factor(&self, j: usize) -> f64 {
        let position = self.first.wrapping_add(j as u32);
        let mut x = self.a ^ position.wrapping_mul(KEY_FACTOR);
        x = (x ^ (x >> 16)).wrapping_mul(MIX_FACTORS[0]);
        x = (x ^ (x >> 15) ^ self.b).wrapping_mul(MIX_FACTORS[1]);
        x ^= x >> 16;
        if x < self.threshold { 0.0 } else { self.factor }
    }
}

/// Spreads neighbouring positions over the 32-bit numbers: odd, near 2^32 divided by the golden ratio.
pub(crate) const KEY_FACTOR: u32 = 0x9E37_79B1;

/// The factors of the 32-bit integer hash "lowbias32" by C. Wellons ("Prospecting for hash functions", 2018).
pub(crate) const MIX_FACTORS: [u32; 2] = [0x7FEB_352D, 0x846C_A68B];

fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(MIX_FACTORS[0]);
    let x = (x ^ (x >> 15)).wrapping_mul(MIX_FACTORS[1]);
    x ^ (x >> 16)
}

/// The output function of SplitMix64 (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195).
fn scramble(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn place(document: u32, q_position: u32) -> DropoutPlace {
        DropoutPlace {
            document,
            q_position,
        }
    }

    fn mask(dropout: Dropout, document: u32, head: usize) -> Vec<bool> {
        let segment = segment(300, 300, 0);
        (0..300)
            .flat_map(|t| {
                let row = dropout.row(&segment, place(document, 0), head, t);
                (0..300).map(move |j| row.factor(j) == 0.0)
            })
            .collect()
    }

    #[test]
    fn weights_are_dropped_with_their_probability_and_independently() {
        let base = Dropout::new(0.3, 11);
        let first = mask(base, 0, 0);
        let share = |hits: usize| hits as f64 / 90_000.0;
        let count = |mask: &[bool]| share(mask.iter().filter(|x| **x).count());
        assert!((count(&first) - 0.3).abs() < 0.008);
        let others = [
            mask(base, 1, 0),
            mask(base, 0, 1),
            mask(Dropout::new(0.3, 12), 0, 0),
            mask(base.for_layer(1), 0, 0),
            // The neighbouring key and the neighbouring query.
            first[1..].iter().copied().chain([false]).collect(),
            first[300..].iter().copied().chain([false; 300]).collect(),
        ];
        for other in others {
            let both = first.iter().zip(&other).filter(|(a, b)| **a && **b).count();
            assert!((share(both) - 0.09).abs() < 0.006, "{}", share(both));
        }
    }

    #[test]
    fn the_mask_does_not_depend_on_how_a_document_is_cut() {
        let dropout = Dropout::new(0.5, 3);
        let whole = dropout.row(&segment(100, 100, 0), place(4, 0), 2, 70);
        // Queries 60..90 of the document over its keys 20..90.
        let part = dropout.row(&segment(30, 70, 20), place(4, 60), 2, 10);
        for key in 20..90 {
            assert_eq!(whole.factor(key), part.factor(key - 20));
        }
    }

    #[test]
    fn probabilities_outside_their_range_are_refused() {
        for p in [-0.1, 1.0, f64::NAN] {
            assert!(Dropout::new(p, 0).check().is_err());
        }
        assert!(Dropout::new(0.0, 0).check().is_ok());
    }
}
