//! Shares of the gradient of queries: how the kernel for all gradients adds them, and `dq` from their sums.
//!
//! The sums of a tile of queries lie in memory in the order of the units that add to them, in f32.

use cubecl::prelude::*;

use crate::components::matrix::{
    JOINT_QUERIES, JOINT_ROWS, Layout, MatrixBlueprint, Pair, Pair32, Quad32, Scalars,
};

/// Numbers in the buffer of turns before those of tiles of queries; the first one counts the tiles of keys that were claimed.
pub(crate) const TURNS: usize = 32;
/// Blocks of 16 rows of a plane's sums.
pub(super) const BLOCKS: usize = 2;

/// First of a unit's numbers in a share, whose order is that of the units' sums; the others are 32 apart.
#[cube]
fn share_at(target: usize, #[comptime] layout: Layout) -> usize {
    let per_plane = comptime!((2 * layout.padded()) as u32);
    target * comptime!(JOINT_QUERIES * layout.padded() / 4)
        + (UNIT_POS_X / 32 * per_plane + UNIT_POS_X % 32) as usize
}

/// Adds a plane's part of a share to those of earlier turns.
#[cube]
pub(super) fn add_share(
    shares: &mut Array<Atomic<Quad32>>,
    dq: &Sequence<Array<Pair32>>,
    target: usize,
    turn: i32,
    #[comptime] layout: Layout,
) {
    let at = share_at(target, layout);
    #[unroll]
    for i in 0..comptime!(BLOCKS * layout.padded() / 32) {
        let sum = dq.index(i);
        let mut quad = Quad32::empty();
        #[unroll]
        for e in 0..4usize {
            quad[e] = sum[comptime!(e / 2)][comptime!(e % 2)];
        }
        if turn > 0 {
            shares[at + comptime!(i * 32)].fetch_add(quad);
        } else {
            shares[at + comptime!(i * 32)].store(quad);
        }
    }
}

/// One tile of queries of one head per cube: `dq` from its shares; rows of tiles without a share are 0. `q_tiles` has batch row, first token
/// and number of rows of each tile.
#[cube]
pub(crate) fn finish<F: Float>(
    q_tiles: &Array<i32>,
    turns: &Array<u32>,
    shares: &Array<Quad32>,
    dq: &mut Tensor<Pair<F>>,
    scalars: &Scalars,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let layout = comptime!(blueprint.keys());
    let tiles = comptime!(layout.padded() / 32);
    let target = CUBE_POS_X as usize;
    let heads = dq.shape(1);
    let record = target / heads * 4;
    let head = target % heads;
    let any = turns[TURNS + target] > 0;
    let num_rows = q_tiles[record + 2];
    let token = q_tiles[record + 1];
    let base = q_tiles[record] as usize * dq.stride(0) + head * dq.stride(1);
    let from = share_at(target, layout);
    let (index, lane) = (UNIT_POS_X / 32, UNIT_POS_X % 32);
    let first = index / 2 * comptime!((layout.padded() / 4) as u32) + lane % 4 * 2;
    #[unroll]
    for i in 0..comptime!(BLOCKS * tiles) {
        let mut quad = Quad32::new(0.0f32);
        if any {
            quad = shares[from + comptime!(i * 32)];
        }
        #[unroll]
        for h in 0..2usize {
            let row = index % 2 * comptime!(JOINT_ROWS as u32)
                + lane / 4
                + comptime!((i / tiles * 16 + h * 8) as u32);
            let dim = first + comptime!((i % tiles * 8) as u32);
            if (row as i32) < num_rows && dim < comptime!(layout.dim as u32) {
                let mut pair = Pair32::empty();
                pair[0] = quad[comptime!(2 * h)] * scalars.scale;
                pair[1] = quad[comptime!(2 * h + 1)] * scalars.scale;
                let token = (token + row as i32) as usize;
                let at = (base + token * dq.stride(2) + dim as usize) / 2;
                dq[at] = Pair::<F>::cast_from(pair);
            }
        }
    }
}
