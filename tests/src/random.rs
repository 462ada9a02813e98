//! Random inputs from a seed.

use std::ops::RangeInclusive;

use rand::{Rng, SeedableRng, rngs::SmallRng, seq::SliceRandom};

/// A generator whose every draw follows from its seed.
#[derive(Debug, Clone)]
pub struct Random(SmallRng);

impl Random {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(SmallRng::seed_from_u64(seed))
    }

    /// An integer of the range.
    pub fn int(&mut self, range: RangeInclusive<usize>) -> usize {
        self.0.random_range(range)
    }

    /// `true` once in `times`.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.int(1..=times) == 1
    }

    /// One of the values.
    pub fn one_of<T: Clone>(&mut self, values: &[T]) -> T {
        values[self.int(0..=values.len() - 1)].clone()
    }

    /// Puts the values in a random order.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        values.shuffle(&mut self.0);
    }

    /// Floats of about unit size, mean 0, exact in `f32`.
    pub fn floats(&mut self, len: usize) -> Vec<f64> {
        (0..len)
            .map(|_| f64::from(self.0.random_range(-1.75_f32..1.75)))
            .collect()
    }

    /// Integers in `-8..=8`: their sums over a few ranks are exact in every float dtype.
    pub fn small_ints(&mut self, len: usize) -> Vec<f64> {
        (0..len)
            .map(|_| self.0.random_range(-8_i8..=8).into())
            .collect()
    }
}
