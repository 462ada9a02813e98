//! Rows of sums: masks, exponents, and where they are stored.

use cubecl::prelude::*;

use super::{LOG2_E, Layout, Pair, Pair32, SIDE, Scalars, exp2, tanh};
use crate::components::tile::Place;

/// Row of a tile that row 0 of a unit's sums is; row `i` is `8 i` further. A plane has `blocks` blocks of 16.
#[cube]
pub(crate) fn first_row(#[comptime] blocks: usize) -> u32 {
    UNIT_POS_X / 32 * comptime!((SIDE * blocks) as u32) + UNIT_POS_X % 32 / 4
}

/// First column of a unit's sums; the others are 1, 8, 9, 16, .. further.
#[cube]
pub(crate) fn first_column() -> i32 {
    (UNIT_POS_X % 4 * 2) as i32
}

/// Replaces what row `row` has outside columns `from..to` by a value.
#[cube]
pub(crate) fn keep_columns(
    sums: &mut Sequence<Array<Pair32>>,
    from: i32,
    to: i32,
    #[comptime] value: f32,
    #[comptime] row: usize,
    #[comptime] tiles: usize,
) {
    let from = from - first_column();
    let to = to - first_column();
    #[unroll]
    for j in 0..tiles {
        let sum = sums.index_mut(comptime!(row / 2 * tiles + j));
        let x = sum[comptime!(row % 2)];
        let mut y = Pair32::empty();
        #[unroll]
        for e in 0..2usize {
            let column = comptime!((j * 8 + e) as i32);
            y[e] = select(column >= from && column < to, x[e], f32::new(value));
        }
        sum[comptime!(row % 2)] = y;
    }
}

/// The factor on products that makes them exponents of 2. Those that went through [`cap`] have it already.
#[cube]
pub(crate) fn exponent(scalars: &Scalars, #[comptime] softcap: bool) -> f32 {
    if comptime!(softcap) {
        f32::new(1.0)
    } else {
        scalars.scale * LOG2_E
    }
}

/// A product as the exponent that its softcap makes of it, and the derivative of the score by the scaled product.
#[cube]
pub(crate) fn cap(product: f32, scalars: &Scalars) -> (f32, f32) {
    let ratio = tanh(product * (scalars.scale / scalars.softcap));
    let slope = f32::new(1.0) - ratio * ratio;
    (ratio * (scalars.softcap * LOG2_E), slope)
}

/// In half `h` of a block's sums: products to weights, given what is added to exponents, and gradients of weights to those of
/// scaled products but for the weight, given `delta`.
#[cube]
pub(crate) fn weight_pair(
    products: &mut Array<Pair32>,
    gradients: &mut Array<Pair32>,
    offsets: Pair32,
    deltas: Pair32,
    scalars: &Scalars,
    #[comptime] h: usize,
    #[comptime] softcap: bool,
) {
    let factor = exponent(scalars, softcap);
    let x = products[h];
    let g = gradients[h];
    let mut weight = Pair32::empty();
    let mut change = Pair32::empty();
    #[unroll]
    for e in 0..2usize {
        if comptime!(softcap) {
            let (value, slope) = cap(x[e], scalars);
            weight[e] = exp2(value + offsets[e]);
            change[e] = (g[e] - deltas[e]) * slope;
        } else {
            weight[e] = exp2(fma(x[e], factor, offsets[e]));
            change[e] = g[e] - deltas[e];
        }
    }
    products[h] = weight;
    gradients[h] = change;
}

/// `a *= b`, for the first `count` sums.
#[cube]
pub(crate) fn times(
    a: &mut Sequence<Array<Pair32>>,
    b: &Sequence<Array<Pair32>>,
    #[comptime] count: usize,
) {
    #[unroll]
    for at in 0..count {
        let product = a.index_mut(at);
        let other = b.index(at);
        #[unroll]
        for h in 0..2usize {
            product[h] = product[h] * other[h];
        }
    }
}

/// The weights of 16 columns from tile `at` on as left operands, one per block of rows.
#[cube]
pub(crate) fn operands<F: Float>(
    sums: &Sequence<Array<Pair32>>,
    #[comptime] blocks: usize,
    #[comptime] tiles: usize,
    #[comptime] at: usize,
) -> Sequence<Array<Pair<F>>> {
    let mut all = Sequence::<Array<Pair<F>>>::new();
    #[unroll]
    for t in 0..blocks {
        let mut pairs = Array::<Pair<F>>::new(4usize);
        #[unroll]
        for part in 0..4usize {
            let sum = sums.index(comptime!(t * tiles + at + part / 2));
            pairs[part] = Pair::<F>::cast_from(sum[comptime!(part % 2)]);
        }
        all.push(pairs);
    }
    all
}

/// Stores row `row` of sums, times a factor, at row `token` of `place`.
#[cube]
pub(crate) fn store_row<F: Float>(
    to: &mut Tensor<Pair<F>>,
    sums: &Sequence<Array<Pair32>>,
    place: &Place,
    offset: u32,
    factor: f32,
    #[comptime] row: usize,
    #[comptime] layout: Layout,
) {
    let tiles = comptime!(layout.padded() / 8);
    let token = (place.token + offset as i32) as usize;
    let base = place.batch as usize * to.stride(0) + place.head as usize * to.stride(1);
    let base = (base + token * to.stride(2)) / 2 + (UNIT_POS_X % 4) as usize;
    #[unroll]
    for j in 0..tiles {
        if comptime!(j * 8 < layout.dim) {
            let sum = sums.index(comptime!(row / 2 * tiles + j))[comptime!(row % 2)];
            to[base + comptime!(j * 4)] = Pair::<F>::cast_from(sum * Pair32::new(factor));
        }
    }
}

/// Stores all rows of sums, times one factor.
#[cube]
pub(crate) fn store_rows<F: Float>(
    to: &mut Tensor<Pair<F>>,
    sums: &Sequence<Array<Pair32>>,
    place: &Place,
    factor: f32,
    #[comptime] blocks: usize,
    #[comptime] layout: Layout,
) {
    #[unroll]
    for row in 0..comptime!(2 * blocks) {
        let offset = first_row(blocks) + comptime!((row * 8) as u32);
        if (offset as i32) < place.num_rows {
            store_row::<F>(to, sums, place, offset, factor, row, layout);
        }
    }
}
