//! From products to scores: scale, softcap and mask.

use cubecl::prelude::*;

use super::Features;

/// Numbers of a call that kernels do not have compiled in.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Numbers {
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    /// Dropout: the factor on weights that are kept, the hashes below which they are dropped, and
    /// the seeds.
    pub(crate) keep: f32,
    pub(crate) threshold: u32,
    pub(crate) seed_a: u32,
    pub(crate) seed_b: u32,
    /// Not to be had as a constant in every shading language.
    pub(crate) minus_infinity: f32,
}

/// The score of a masked pair. Finite, since a shading language may take infinities for
/// undefined; so small that its exponential is 0 whatever maximum is subtracted.
pub(crate) const MASKED: f32 = -3.0e38;
/// The maximum of no score. Greater than [`MASKED`] by more than any score.
pub(crate) const NO_SCORE: f32 = -1.0e30;

/// The score of a product.
#[cube]
pub(crate) fn score(product: f32, numbers: &Numbers, #[comptime] features: Features) -> f32 {
    let scaled = product * numbers.scale;
    if comptime!(features.softcap) {
        numbers.softcap * f32::tanh(scaled / numbers.softcap)
    } else {
        scaled
    }
}

/// The derivative of a score by its scaled product.
#[cube]
pub(crate) fn slope(score: f32, numbers: &Numbers, #[comptime] features: Features) -> f32 {
    if comptime!(features.softcap) {
        let ratio = score / numbers.softcap;
        f32::new(1.0) - ratio * ratio
    } else {
        f32::new(1.0)
    }
}

/// Whether a key `distance` after a query's own one is within its reach.
#[cube]
pub(crate) fn within(distance: i32, left: i32, right: i32) -> bool {
    distance <= right && distance + left >= 0
}

/// The gradient of a product but for the scale: `p (dp - delta)` times the slope. Exactly 0 for pairs of
/// weight 0, whatever the other numbers are.
#[cube]
pub(crate) fn product_gradient(p: f32, dp: f32, delta: f32, slope: f32) -> f32 {
    select(p == f32::new(0.0), f32::new(0.0), p * (dp - delta) * slope)
}
