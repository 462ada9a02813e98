//! The dropout mask of `definition::Dropout`, on the device.

use cubecl::prelude::*;

use super::scores::Numbers;
use crate::definition::{KEY_FACTOR, MIX_FACTORS};

/// What the mask of one query row is made from.
#[cube]
pub(crate) fn row_states(numbers: &Numbers, head: u32, document: u32, position: u32) -> (u32, u32) {
    (
        mix(mix(mix(numbers.seed_a ^ head) ^ document) ^ position),
        mix(mix(mix(numbers.seed_b ^ position) ^ document) ^ head),
    )
}

/// The factor on the weight of a key: 0, or `1 / (1 - p)`.
#[cube]
pub(crate) fn factor(a: u32, b: u32, position: u32, numbers: &Numbers) -> f32 {
    let x = a ^ (position * KEY_FACTOR);
    let x = (x ^ (x >> 16)) * comptime!(MIX_FACTORS[0]);
    let x = (x ^ (x >> 15) ^ b) * comptime!(MIX_FACTORS[1]);
    let x = x ^ (x >> 16);
    select(x < numbers.threshold, f32::new(0.0), numbers.keep)
}

#[cube]
fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)) * comptime!(MIX_FACTORS[0]);
    let x = (x ^ (x >> 15)) * comptime!(MIX_FACTORS[1]);
    x ^ (x >> 16)
}
