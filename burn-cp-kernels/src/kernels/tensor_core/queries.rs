//! The gradient of queries.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use crate::components::{
    matrix::{
        Chunk, Copied, LOG2_E, MatrixBlueprint, Operand, Pair, Pair32, Products, QUERY_COLUMNS,
        SIDE, Scalars, Weighed, as_left, as_right, as_weighed, copy_rows, first_row, keep_columns,
        operands, row_products, store_rows, sums, times, weigh_ahead, weigh_block, weight_pair,
    },
    records::{RowTile, row_tile},
    tile::{Place, rows_of},
};

/// One tile of query rows of one head per cube: `dq`. `rows` is that of the portable routine's `delta`.
#[cube]
pub(crate) fn queries<F: Float>(
    q: &Tensor<Chunk<F>>,
    k: &Tensor<Chunk<F>>,
    v: &Tensor<Chunk<F>>,
    dout: &Tensor<Chunk<F>>,
    rows: &Array<f32>,
    tiles: &Array<i32>,
    dq: &mut Tensor<Pair<F>>,
    scalars: &Scalars,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let index = CUBE_POS_Y + CUBE_POS_Z * CUBE_COUNT_Y;
    if index >= scalars.num_tiles {
        terminate!();
    }
    let head = CUBE_POS_X;
    let tile = row_tile(tiles, index);
    let (k_layout, v_layout) = comptime!((blueprint.keys(), blueprint.values()));
    let (k_stride, v_stride) = comptime!((k_layout.stride(), v_layout.stride()));
    let num_rows = comptime!(blueprint.query_rows());
    let mut q_memory =
        SharedMemory::<Chunk<F>>::new_aligned(comptime!(num_rows * k_stride), 128usize);
    let mut o_memory =
        SharedMemory::<Chunk<F>>::new_aligned(comptime!(num_rows * v_stride), 128usize);
    let mut k_memory =
        SharedMemory::<Chunk<F>>::new_aligned(comptime!(2 * QUERY_COLUMNS * k_stride), 128usize);
    let mut v_memory =
        SharedMemory::<Chunk<F>>::new_aligned(comptime!(2 * QUERY_COLUMNS * v_stride), 128usize);
    let copied = Barrier::shared(CUBE_DIM, UNIT_POS == 0);

    let kv_head = head / scalars.group;
    let (first, last) = (tile.first_column, tile.last_column);
    let q_rows = rows_of::<F, Const<8>>(q, tile.q_row, head, tile.q_token, 0, tile.num_rows);
    let o_rows = rows_of::<F, Const<8>>(dout, tile.q_row, head, tile.q_token, 0, tile.num_rows);
    let k_rows = rows_of::<F, Const<8>>(k, tile.k_row, kv_head, tile.k_token, first, last);
    let v_rows = rows_of::<F, Const<8>>(v, tile.k_row, kv_head, tile.k_token, first, last);
    let k_part = comptime!(Copied {
        layout: k_layout,
        rows: QUERY_COLUMNS
    });
    let v_part = comptime!(Copied {
        layout: v_layout,
        rows: QUERY_COLUMNS
    });
    let q_part = comptime!(Copied {
        layout: k_layout,
        rows: num_rows
    });
    let o_part = comptime!(Copied {
        layout: v_layout,
        rows: num_rows
    });
    let columns = comptime!(QUERY_COLUMNS as i32);
    let first_step = first / columns;
    let last_step = (last + comptime!(columns - 1)) / columns;
    copy_rows::<F>(q, &q_rows, 0, &mut q_memory, 0usize, q_part);
    copy_rows::<F>(dout, &o_rows, 0, &mut o_memory, 0usize, o_part);
    if first_step < last_step {
        let skip = first_step * columns;
        copy_rows::<F>(k, &k_rows, skip, &mut k_memory, 0usize, k_part);
        copy_rows::<F>(v, &v_rows, skip, &mut v_memory, 0usize, v_part);
    }
    copied.commit_copy_async();
    copied.arrive();

    let blocks = comptime!(blueprint.query_blocks);
    let numbers = numbers_of(rows, q, &tile, head, scalars, blocks);
    let mut total = sums(comptime!(blocks * k_layout.padded() / 8));
    let row = UNIT_POS_X / 32 * comptime!((SIDE * blocks) as u32);
    let q_at = as_left(row, k_stride);
    let o_at = as_left(row, v_stride);
    let k_at = as_right(k_stride);
    let v_at = as_right(v_stride);
    let w_at = as_weighed(k_stride);
    let seen_from = i32::max(first, tile.own + comptime!(num_rows as i32 - 1) - tile.left);
    let seen_to = i32::min(last, tile.own + tile.right + 1);

    for n in first_step..last_step {
        let step = (n - first_step) as u32;
        copied.wait_parity(step & 1);
        sync_cube();
        if n + 1 < last_step {
            let skip = (n + 1) * columns;
            let stage = ((step + 1) & 1) as usize;
            let k_to = stage * comptime!(QUERY_COLUMNS * k_stride);
            let v_to = stage * comptime!(QUERY_COLUMNS * v_stride);
            copy_rows::<F>(k, &k_rows, skip, &mut k_memory, k_to, k_part);
            copy_rows::<F>(v, &v_rows, skip, &mut v_memory, v_to, v_part);
            copied.commit_copy_async();
            copied.arrive();
        }
        let k_from = (step & 1) as usize * comptime!(QUERY_COLUMNS * k_stride);
        let v_from = (step & 1) as usize * comptime!(QUERY_COLUMNS * v_stride);
        let left = Operand::<F> {
            memory: q_memory,
            at: q_at,
        };
        let right = Operand::<F> {
            memory: k_memory,
            at: k_at + k_from,
        };
        let products = comptime!(Products {
            blocks,
            columns: QUERY_COLUMNS,
            dim: k_layout.padded(),
            stride: k_stride
        });
        let tiles = comptime!(QUERY_COLUMNS / 8);
        let mut s = sums(comptime!(blocks * tiles));
        row_products::<F>(&left, &right, &mut s, products);
        let left = Operand::<F> {
            memory: o_memory,
            at: o_at,
        };
        let right = Operand::<F> {
            memory: v_memory,
            at: v_at + v_from,
        };
        let products = comptime!(Products {
            dim: v_layout.padded(),
            stride: v_stride,
            ..products
        });
        let mut dp = sums(comptime!(blocks * tiles));
        row_products::<F>(&left, &right, &mut dp, products);

        let keys = Operand::<F> {
            memory: k_memory,
            at: w_at + k_from,
        };
        let mut loaded = weigh_ahead::<F>(&keys);
        weights(&mut s, &mut dp, &numbers, scalars, blueprint);
        let start = n * columns;
        if start < seen_from || start + columns > seen_to {
            mask(&mut s, &tile, start, blocks);
        }
        times(&mut s, &dp, comptime!(blocks * tiles));
        let weighed = comptime!(Weighed {
            blocks,
            rows: QUERY_COLUMNS,
            dim: k_layout.padded(),
            stride: k_stride
        });
        #[unroll]
        for block in 0..comptime!(QUERY_COLUMNS / SIDE) {
            let weights = operands::<F>(&s, blocks, tiles, comptime!(block * 2));
            weigh_block::<F>(&weights, &keys, &mut loaded, &mut total, block, weighed);
        }
    }
    let place = Place {
        batch: tile.q_row,
        head,
        token: tile.q_token,
        num_rows: tile.num_rows,
    };
    store_rows::<F>(dq, &total, &place, scalars.scale, blocks, k_layout);
}

/// Numbers of a unit's rows.
#[derive(CubeType)]
struct Numbers {
    /// What is added to exponents: log-sum-exps in base 2, negative.
    offsets: Array<f32>,
    deltas: Array<f32>,
}

#[cube]
fn numbers_of<F: Float>(
    rows: &Array<f32>,
    q: &Tensor<Chunk<F>>,
    tile: &RowTile,
    head: u32,
    scalars: &Scalars,
    #[comptime] blocks: usize,
) -> Numbers {
    let mut offsets = Array::<f32>::new(comptime!(2 * blocks));
    let mut deltas = Array::<f32>::new(comptime!(2 * blocks));
    let base = (tile.q_row as usize * q.shape(1) + head as usize) * q.shape(2);
    #[unroll]
    for at in 0..comptime!(2 * blocks) {
        // Rows behind the last one are not stored.
        let row = first_row(blocks) as i32 + comptime!((at * 8) as i32);
        let row = i32::min(row, tile.num_rows - 1);
        let from = base + (tile.q_token + row) as usize;
        offsets[at] = -rows[from] * LOG2_E;
        deltas[at] = rows[from + scalars.num_rows];
    }
    Numbers { offsets, deltas }
}

/// Products to weights, and `dp` to the gradients of scaled products but for the weights.
#[cube]
fn weights(
    s: &mut Sequence<Array<Pair32>>,
    dp: &mut Sequence<Array<Pair32>>,
    numbers: &Numbers,
    scalars: &Scalars,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let tiles = comptime!(QUERY_COLUMNS / 8);
    #[unroll]
    for row in 0..comptime!(2 * blueprint.query_blocks) {
        let offset = numbers.offsets[row];
        let delta = numbers.deltas[row];
        #[unroll]
        for j in 0..tiles {
            let at = comptime!(row / 2 * tiles + j);
            let offsets = Pair32::new(offset);
            let deltas = Pair32::new(delta);
            weight_pair(
                s.index_mut(at),
                dp.index_mut(at),
                offsets,
                deltas,
                scalars,
                comptime!(row % 2),
                blueprint.features.softcap,
            );
        }
    }
}

/// Clears the weights that a row does not see.
#[cube]
fn mask(s: &mut Sequence<Array<Pair32>>, tile: &RowTile, start: i32, #[comptime] blocks: usize) {
    #[unroll]
    for row in 0..comptime!(2 * blocks) {
        let own = tile.own + first_row(blocks) as i32 + comptime!((row * 8) as i32);
        let from = i32::max(tile.first_column, own - tile.left) - start;
        let to = i32::min(tile.last_column, own + tile.right + 1) - start;
        keep_columns(s, from, to, 0.0, row, comptime!(QUERY_COLUMNS / 8));
    }
}
