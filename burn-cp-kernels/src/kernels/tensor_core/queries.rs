//! The gradient of queries.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use crate::components::{
    matrix::{
        Chunk, Copied, LOG2_E, MatrixBlueprint, Operand, Pair, Pair32, Products, QUERY_COLUMNS,
        SIDE, Scalars, as_left, as_right, as_weighed, begin_copy, first_row, held, keep_columns,
        operand, row_products, store_rows, sums, times, weigh_rows, weight_pair,
    },
    records::{RowTile, row_tile},
    tile::Place,
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
    let num_rows = comptime!(blueprint.query_rows());
    let parts = comptime!([
        Copied::new(k_layout, num_rows),
        Copied::new(v_layout, num_rows),
        Copied::new(k_layout, QUERY_COLUMNS),
        Copied::new(v_layout, QUERY_COLUMNS),
    ]);
    let kv_head = head / scalars.group;
    let (batch, token) = (tile.k_row, tile.k_token);
    let (first, last) = (tile.first_column, tile.last_column);
    let (q_row, q_token, rows_here) = (tile.q_row, tile.q_token, tile.num_rows);
    let mut queries = held::<F>(q, q_row, head, q_token, 0, rows_here, 1usize, parts[0]);
    let mut douts = held::<F>(dout, q_row, head, q_token, 0, rows_here, 1usize, parts[1]);
    let mut keys = held::<F>(k, batch, kv_head, token, first, last, 2usize, parts[2]);
    let mut values = held::<F>(v, batch, kv_head, token, first, last, 2usize, parts[3]);
    let copied = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
    let columns = comptime!(QUERY_COLUMNS as i32);
    let first_step = first / columns;
    let last_step = (last + comptime!(columns - 1)) / columns;
    begin_copy::<F>(q, &mut queries, 0, 0usize, parts[0]);
    begin_copy::<F>(dout, &mut douts, 0, 0usize, parts[1]);
    if first_step < last_step {
        begin_copy::<F>(k, &mut keys, first_step * columns, 0usize, parts[2]);
        begin_copy::<F>(v, &mut values, first_step * columns, 0usize, parts[3]);
    }
    copied.commit_copy_async();
    copied.arrive();

    let blocks = comptime!(blueprint.query_blocks);
    let numbers = numbers_of(rows, q, &tile, head, scalars, blocks);
    let mut total = sums(comptime!(blocks * k_layout.padded() / 8));
    let row = UNIT_POS_X / 32 * comptime!((SIDE * blocks) as u32);
    let at = Offsets {
        queries: as_left(row, k_layout.stride()),
        douts: as_left(row, v_layout.stride()),
        keys: as_right(k_layout.stride()),
        values: as_right(v_layout.stride()),
        weighed: as_weighed(k_layout.stride()),
    };
    for n in first_step..last_step {
        let step = (n - first_step) as u32;
        copied.wait_parity(step & 1);
        sync_cube();
        if n + 1 < last_step {
            let stage = ((step + 1) & 1) as usize;
            begin_copy::<F>(k, &mut keys, (n + 1) * columns, stage, parts[2]);
            begin_copy::<F>(v, &mut values, (n + 1) * columns, stage, parts[3]);
            copied.commit_copy_async();
            copied.arrive();
        }
        let stage = (step & 1) as usize;
        let operands = Operands::<F> {
            queries: operand::<F>(&queries.memory, at.queries, 0usize, parts[0]),
            douts: operand::<F>(&douts.memory, at.douts, 0usize, parts[1]),
            keys: operand::<F>(&keys.memory, at.keys, stage, parts[2]),
            values: operand::<F>(&values.memory, at.values, stage, parts[3]),
            weighed: operand::<F>(&keys.memory, at.weighed, stage, parts[2]),
        };
        step_of(
            &operands,
            &mut total,
            &numbers,
            &tile,
            n * columns,
            scalars,
            blueprint,
        );
    }
    let place = Place {
        batch: tile.q_row,
        head,
        token: tile.q_token,
        num_rows: tile.num_rows,
    };
    store_rows::<F>(dq, &total, &place, scalars.scale, blocks, k_layout);
}

/// Where a unit's rows are in the operands.
#[derive(CubeType, Clone, Copy)]
struct Offsets {
    queries: usize,
    douts: usize,
    keys: usize,
    values: usize,
    weighed: usize,
}

/// What one step is computed from.
#[derive(CubeType)]
struct Operands<F: Float> {
    queries: Operand<F>,
    douts: Operand<F>,
    keys: Operand<F>,
    values: Operand<F>,
    weighed: Operand<F>,
}

/// Adds the shares of the columns from `start` on.
#[cube]
fn step_of<F: Float>(
    operands: &Operands<F>,
    total: &mut Sequence<Array<Pair32>>,
    numbers: &Numbers,
    tile: &RowTile,
    start: i32,
    scalars: &Scalars,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let blocks = comptime!(blueprint.query_blocks);
    let (k_layout, v_layout) = comptime!((blueprint.keys(), blueprint.values()));
    let count = comptime!(blocks * QUERY_COLUMNS / 8);
    let mut s = sums(count);
    let products = comptime!(Products::new(blocks, QUERY_COLUMNS, k_layout));
    row_products::<F>(&operands.queries, &operands.keys, &mut s, products);
    let mut dp = sums(count);
    let products = comptime!(Products::new(blocks, QUERY_COLUMNS, v_layout));
    row_products::<F>(&operands.douts, &operands.values, &mut dp, products);
    weights(&mut s, &mut dp, numbers, scalars, blueprint);
    // Columns that every row sees need no mask.
    let last_own = tile.own + comptime!(blueprint.query_rows() as i32 - 1);
    let seen_from = i32::max(tile.first_column, last_own - tile.left);
    let seen_to = i32::min(tile.last_column, tile.own + tile.right + 1);
    if start < seen_from || start + comptime!(QUERY_COLUMNS as i32) > seen_to {
        mask(&mut s, tile, start, blocks);
    }
    times(&mut s, &dp, count);
    weigh_rows::<F>(
        &s,
        &operands.weighed,
        total,
        blocks,
        QUERY_COLUMNS,
        k_layout,
    );
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
