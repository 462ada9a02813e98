//! Weights that planes hand to each other through shared memory, by key and query.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::product::{fragments, multiply};
use super::{EXCHANGED, Layout, Operand, Pair, Pair32, SIDE};

/// Pairs in a chunk.
const PAIRS: usize = 4;

/// Stores sums of `blocks` blocks of 16 keys from `key` on, for queries from `query` on, `columns` of them.
#[cube]
pub(crate) fn hand_over<F: Float>(
    sums: &Sequence<Array<Pair32>>,
    to: &mut SharedMemory<Pair<F>>,
    key: u32,
    query: u32,
    #[comptime] blocks: usize,
    #[comptime] columns: usize,
) {
    let lane = UNIT_POS_X % 32;
    let stride = comptime!(PAIRS * EXCHANGED.stride());
    let at = ((key + lane / 4) * comptime!(stride as u32) + query / 2 + lane % 4) as usize;
    #[unroll]
    for row in 0..comptime!(2 * blocks) {
        #[unroll]
        for j in 0..comptime!(columns / 8) {
            let sum = sums.index(comptime!(row / 2 * columns / 8 + j))[comptime!(row % 2)];
            to[at + comptime!(row * 8 * stride + j * PAIRS)] = Pair::<F>::cast_from(sum);
        }
    }
}

/// Sizes of a product of exchanged weights with rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Exchanged {
    /// Blocks of 16 rows of sums: of keys or, if `transposed`, of queries.
    pub(crate) blocks: usize,
    /// Rows that are weighed: of queries or, if `transposed`, of keys.
    pub(crate) rows: usize,
    /// Numbers of each that are weighed, a multiple of 16.
    pub(crate) columns: usize,
    /// What the rows are laid out like.
    pub(crate) layout: Layout,
    pub(crate) transposed: bool,
}

/// `sums[i] += Σ weights[i, r] · rows[r]`. `at` is the chunk of a unit's row: `as_left` of the first key or, if transposed, `as_right`
/// and the chunk of the first query. Fragments are loaded one product ahead.
#[cube]
pub(crate) fn weigh_exchanged<F: Float>(
    weights: &SharedMemory<Pair<F>>,
    at: usize,
    rows: &Operand<F>,
    sums: &mut Sequence<Array<Pair32>>,
    #[comptime] sizes: Exchanged,
) {
    let pairs = comptime!(sizes.columns / 16);
    let steps = comptime!(sizes.rows / SIDE);
    let stride = comptime!(sizes.layout.stride());
    let (next_block, next_step) = comptime!(match sizes.transposed {
        true => (2, SIDE * EXCHANGED.stride()),
        false => (SIDE * EXCHANGED.stride(), 2),
    });
    let mut lefts = Sequence::<Array<Pair<F>>>::new();
    let mut rights = Sequence::<Array<Pair<F>>>::new();
    #[unroll]
    for t in 0..comptime!(sizes.blocks) {
        let at = at + comptime!(t * next_block);
        lefts.push(weight_fragments::<F>(weights, at, sizes.transposed));
    }
    rights.push(fragments::<F>(&rows.memory, rows.at, true));
    #[unroll]
    for i in 0..comptime!(steps * pairs) {
        let (step, pair) = comptime!((i / pairs, i % pairs));
        let next = comptime!(i + 1);
        if comptime!(next < steps * pairs) {
            let at = rows.at + comptime!(next / pairs * SIDE * stride + next % pairs * 2);
            rights.push(fragments::<F>(&rows.memory, at, true));
        }
        if comptime!(pair + 1 == pairs && step + 1 < steps) {
            #[unroll]
            for t in 0..comptime!(sizes.blocks) {
                let at = at + comptime!(t * next_block + (step + 1) * next_step);
                lefts.push(weight_fragments::<F>(weights, at, sizes.transposed));
            }
        }
        #[unroll]
        for t in 0..comptime!(sizes.blocks) {
            multiply::<F>(
                lefts.index(comptime!(step * sizes.blocks + t)),
                rights.index(i),
                sums,
                comptime!((t * pairs + pair) * 2),
            );
        }
    }
}

/// Four fragments from the chunk of a unit's row.
#[cube]
fn weight_fragments<F: Float>(
    from: &SharedMemory<Pair<F>>,
    at: usize,
    #[comptime] transposed: bool,
) -> Array<Pair<F>> {
    let unit = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let at = at * PAIRS;
    unit.load_matrix::<Pair<F>, Const<2>>(
        &from.slice(at, at + 1),
        MatrixIdent::A,
        4usize,
        transposed,
    )
}
