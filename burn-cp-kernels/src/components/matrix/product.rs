//! Products of fragments.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::{Chunk, Layout, Pair, Pair32, SIDE, operands};

/// Sums of `count` blocks of 8 columns that are all 0.
#[cube]
pub(crate) fn sums(#[comptime] count: usize) -> Sequence<Array<Pair32>> {
    let mut all = Sequence::<Array<Pair32>>::new();
    #[unroll]
    for _ in 0..count {
        let mut sum = Array::<Pair32>::new(2usize);
        sum[0] = Pair32::new(0.0f32);
        sum[1] = Pair32::new(0.0f32);
        all.push(sum);
    }
    all
}

/// Chunk of a unit's row in a left operand of 16 rows and 16 numbers, whose rows are `stride` chunks apart.
#[cube]
pub(crate) fn as_left(row: u32, #[comptime] stride: usize) -> usize {
    let lane = UNIT_POS_X % 32;
    ((row + lane % 16) * comptime!(stride as u32) + lane / 16) as usize
}

/// The same for two right operands whose columns are 8 rows each.
#[cube]
pub(crate) fn as_right(#[comptime] stride: usize) -> usize {
    let lane = UNIT_POS_X % 32;
    ((lane / 16 * 8 + lane % 8) * comptime!(stride as u32) + lane / 8 % 2) as usize
}

/// The same for two right operands whose rows are 16 rows, and whose columns 8 numbers of them each.
#[cube]
pub(crate) fn as_weighed(#[comptime] stride: usize) -> usize {
    let lane = UNIT_POS_X % 32;
    ((lane / 8 % 2 * 8 + lane % 8) * comptime!(stride as u32) + lane / 16) as usize
}

/// Four fragments from where a unit's row is.
#[cube]
pub(super) fn fragments<F: Float>(
    from: &SharedMemory<Chunk<F>>,
    at: usize,
    #[comptime] transposed: bool,
) -> Array<Pair<F>> {
    let unit = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    unit.load_matrix::<Chunk<F>, Const<2>>(
        &from.slice(at, at + 1),
        MatrixIdent::A,
        4usize,
        transposed,
    )
}

/// Adds the products of a left operand with two right ones to two sums from `at` on.
#[cube]
pub(super) fn multiply<F: Float>(
    left: &Array<Pair<F>>,
    right: &Array<Pair<F>>,
    sums: &mut Sequence<Array<Pair32>>,
    #[comptime] at: usize,
) {
    let unit = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut first = Array::<Pair<F>>::new(2usize);
    first[0] = right[0];
    first[1] = right[1];
    let mut second = Array::<Pair<F>>::new(2usize);
    second[0] = right[2];
    second[1] = right[3];
    unit.execute_inplace(left, &first, sums.index_mut(at));
    unit.execute_inplace(left, &second, sums.index_mut(comptime!(at + 1)));
}

/// Rows in shared memory from where a unit's row is.
#[derive(CubeType)]
pub(crate) struct Operand<F: Float> {
    pub(crate) memory: SharedMemory<Chunk<F>>,
    pub(crate) at: usize,
}

/// Sizes of a product of rows with rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Products {
    /// Blocks of 16 rows on the left.
    pub(crate) blocks: usize,
    /// Rows on the right.
    pub(crate) columns: usize,
    /// Numbers per row, a multiple of 16.
    pub(crate) dim: usize,
    /// Chunks from one row to the next.
    pub(crate) stride: usize,
}

impl Products {
    /// Of rows that are laid out alike.
    pub(crate) fn new(blocks: usize, columns: usize, layout: Layout) -> Self {
        Self {
            blocks,
            columns,
            dim: layout.padded(),
            stride: layout.stride(),
        }
    }
}

/// `sums[i, j] += left[i] · right[j]`. Fragments are loaded one product ahead.
#[cube]
pub(crate) fn row_products<F: Float>(
    left: &Operand<F>,
    right: &Operand<F>,
    sums: &mut Sequence<Array<Pair32>>,
    #[comptime] products: Products,
) {
    let pairs = comptime!(products.columns / 16);
    let blocks = comptime!(products.blocks);
    let steps = comptime!(products.dim / SIDE);
    let stride = comptime!(products.stride);
    let mut lefts = Sequence::<Array<Pair<F>>>::new();
    let mut rights = Sequence::<Array<Pair<F>>>::new();
    #[unroll]
    for t in 0..blocks {
        lefts.push(fragments::<F>(
            &left.memory,
            left.at + comptime!(t * SIDE * stride),
            false,
        ));
    }
    rights.push(fragments::<F>(&right.memory, right.at, false));
    #[unroll]
    for i in 0..comptime!(steps * pairs) {
        let (step, pair) = comptime!((i / pairs, i % pairs));
        let next = comptime!(i + 1);
        if comptime!(next < steps * pairs) {
            let at = right.at + comptime!(next % pairs * 16 * stride + next / pairs * 2);
            rights.push(fragments::<F>(&right.memory, at, false));
        }
        if comptime!(pair + 1 == pairs && step + 1 < steps) {
            #[unroll]
            for t in 0..blocks {
                let at = left.at + comptime!(t * SIDE * stride + (step + 1) * 2);
                lefts.push(fragments::<F>(&left.memory, at, false));
            }
        }
        #[unroll]
        for t in 0..blocks {
            multiply::<F>(
                lefts.index(comptime!(step * blocks + t)),
                rights.index(i),
                sums,
                comptime!((t * pairs + pair) * 2),
            );
        }
    }
}

/// Sizes of a product of weights with rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Weighed {
    /// Blocks of 16 rows of weights.
    pub(crate) blocks: usize,
    /// Rows that are weighed.
    pub(crate) rows: usize,
    /// Numbers per row, a multiple of 16.
    pub(crate) dim: usize,
    /// Chunks from one row to the next.
    pub(crate) stride: usize,
}

impl Weighed {
    pub(crate) fn new(blocks: usize, rows: usize, layout: Layout) -> Self {
        Self {
            blocks,
            rows,
            dim: layout.padded(),
            stride: layout.stride(),
        }
    }
}

/// `sums[i] += Σ weights[i, r] · rows[r]` over the 16 rows of block `block`. `loaded` holds the fragments that blocks before
/// this one have loaded, and the first one of this, from [`weigh_ahead`] on.
#[cube]
pub(crate) fn weigh_block<F: Float>(
    weights: &Sequence<Array<Pair<F>>>,
    rows: &Operand<F>,
    loaded: &mut Sequence<Array<Pair<F>>>,
    sums: &mut Sequence<Array<Pair32>>,
    #[comptime] block: usize,
    #[comptime] weighed: Weighed,
) {
    let pairs = comptime!(weighed.dim / 16);
    let total = comptime!(pairs * weighed.rows / SIDE);
    let stride = comptime!(weighed.stride);
    #[unroll]
    for pair in 0..pairs {
        let index = comptime!(block * pairs + pair);
        let next = comptime!(index + 1);
        if comptime!(next < total) {
            let at = rows.at + comptime!(next / pairs * SIDE * stride + next % pairs * 2);
            loaded.push(fragments::<F>(&rows.memory, at, true));
        }
        #[unroll]
        for t in 0..comptime!(weighed.blocks) {
            multiply::<F>(
                weights.index(t),
                loaded.index(index),
                sums,
                comptime!((t * pairs + pair) * 2),
            );
        }
    }
}

/// The first fragments of [`weigh_block`].
#[cube]
pub(crate) fn weigh_ahead<F: Float>(rows: &Operand<F>) -> Sequence<Array<Pair<F>>> {
    let mut loaded = Sequence::<Array<Pair<F>>>::new();
    loaded.push(fragments::<F>(&rows.memory, rows.at, true));
    loaded
}

/// `sums[i] += Σ weights[i, r] · rows[r]` over `columns` rows, with weights that are sums.
#[cube]
pub(crate) fn weigh_rows<F: Float>(
    weights: &Sequence<Array<Pair32>>,
    rows: &Operand<F>,
    sums: &mut Sequence<Array<Pair32>>,
    #[comptime] blocks: usize,
    #[comptime] columns: usize,
    #[comptime] layout: Layout,
) {
    let weighed = comptime!(Weighed::new(blocks, columns, layout));
    let mut loaded = weigh_ahead::<F>(rows);
    #[unroll]
    for block in 0..comptime!(columns / SIDE) {
        let left = operands::<F>(
            weights,
            blocks,
            comptime!(columns / 8),
            comptime!(block * 2),
        );
        weigh_block::<F>(&left, rows, &mut loaded, sums, block, weighed);
    }
}
