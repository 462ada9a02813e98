//! The forward pass.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use crate::components::{
    COLUMNS,
    matrix::{
        Chunk, Copied, LOG2_E, MatrixBlueprint, Operand, Pair, Pair32, Products, SIDE, Scalars,
        Weighed, as_left, as_right, as_weighed, begin_copy, cap, exp2, exponent, first_row, held,
        keep_columns, operand, row_products, store_row, sums, weigh_ahead, weigh_block,
    },
    records::{RowTile, row_tile},
    scores::{MASKED, NO_SCORE},
    tile::Place,
};

/// Sums are scaled down where a row's maximum has grown by a power of two greater than this. Until then
/// its weights are greater than 1. A row's own scores alone decide, so that its result depends on nothing else.
const LATE: f32 = 8.0;

/// One tile of query rows of one head per cube: `out` and `lse`.
#[cube]
pub(crate) fn forward<F: Float>(
    q: &Tensor<Chunk<F>>,
    k: &Tensor<Chunk<F>>,
    v: &Tensor<Chunk<F>>,
    sinks: &Array<f32>,
    tiles: &Array<i32>,
    out: &mut Tensor<Pair<F>>,
    lse: &mut Tensor<f32>,
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
    let q_part = comptime!(Copied::new(k_layout, num_rows));
    let k_part = comptime!(Copied::new(k_layout, COLUMNS));
    let v_part = comptime!(Copied::new(v_layout, COLUMNS));
    let kv_head = head / scalars.group;
    let (batch, token) = (tile.k_row, tile.k_token);
    let (first, last) = (tile.first_column, tile.last_column);
    let q_token = tile.q_token;
    let mut queries = held::<F>(
        q,
        tile.q_row,
        head,
        q_token,
        0,
        tile.num_rows,
        1usize,
        q_part,
    );
    let mut keys = held::<F>(k, batch, kv_head, token, first, last, 2usize, k_part);
    let mut values = held::<F>(v, batch, kv_head, token, first, last, 2usize, v_part);
    let copied = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
    begin_copy::<F>(q, &mut queries, 0, 0usize, q_part);
    if tile.first_tile < tile.last_tile {
        let skip = tile.first_tile * COLUMNS as i32;
        begin_copy::<F>(k, &mut keys, skip, 0usize, k_part);
        begin_copy::<F>(v, &mut values, skip, 0usize, v_part);
    }
    copied.commit_copy_async();
    copied.arrive();

    let blocks = comptime!(blueprint.query_blocks);
    let mut state = State {
        sums: sums(comptime!(blocks * v_layout.padded() / 8)),
        maxima: filled(NO_SCORE, comptime!(2 * blocks)),
        normalisers: filled(0.0, comptime!(2 * blocks)),
    };
    let row = UNIT_POS_X / 32 * comptime!((SIDE * blocks) as u32);
    let q_at = as_left(row, k_layout.stride());
    let k_at = as_right(k_layout.stride());
    let v_at = as_weighed(v_layout.stride());
    // Columns that every row sees.
    let seen_from = i32::max(first, tile.own + comptime!(num_rows as i32 - 1) - tile.left);
    let seen_to = i32::min(last, tile.own + tile.right + 1);

    for n in tile.first_tile..tile.last_tile {
        let step = (n - tile.first_tile) as u32;
        copied.wait_parity(step & 1);
        sync_cube();
        if n + 1 < tile.last_tile {
            let skip = (n + 1) * COLUMNS as i32;
            let stage = ((step + 1) & 1) as usize;
            begin_copy::<F>(k, &mut keys, skip, stage, k_part);
            begin_copy::<F>(v, &mut values, skip, stage, v_part);
            copied.commit_copy_async();
            copied.arrive();
        }
        let stage = (step & 1) as usize;
        let operands = Operands::<F> {
            queries: operand::<F>(&queries.memory, q_at, 0usize, q_part),
            keys: operand::<F>(&keys.memory, k_at, stage, k_part),
            values: operand::<F>(&values.memory, v_at, stage, v_part),
        };
        let start = n * COLUMNS as i32;
        if start >= seen_from && start + COLUMNS as i32 <= seen_to {
            columns(
                &operands, &mut state, &tile, start, scalars, false, blueprint,
            );
        } else {
            columns(
                &operands, &mut state, &tile, start, scalars, true, blueprint,
            );
        }
    }
    finish::<F>(&mut state, &tile, head, sinks, out, lse, scalars, blueprint);
}

/// What one tile of columns is computed from.
#[derive(CubeType)]
struct Operands<F: Float> {
    queries: Operand<F>,
    keys: Operand<F>,
    values: Operand<F>,
}

/// What the columns so far come to, for the rows of a unit.
#[derive(CubeType)]
struct State {
    sums: Sequence<Array<Pair32>>,
    /// What is subtracted from a row's products, not scaled.
    maxima: Array<f32>,
    /// Of this unit's columns.
    normalisers: Array<f32>,
}

#[cube]
fn filled(#[comptime] value: f32, #[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = f32::new(value);
    }
    array
}

/// One tile of columns.
#[cube]
fn columns<F: Float>(
    operands: &Operands<F>,
    state: &mut State,
    tile: &RowTile,
    start: i32,
    scalars: &Scalars,
    #[comptime] masked: bool,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let blocks = comptime!(blueprint.query_blocks);
    let (k_layout, v_layout) = comptime!((blueprint.keys(), blueprint.values()));
    let tiles = comptime!(COLUMNS / 8);
    let mut s = sums(comptime!(blocks * tiles));
    let products = comptime!(Products::new(blocks, COLUMNS, k_layout));
    row_products::<F>(&operands.queries, &operands.keys, &mut s, products);
    let mut loaded = weigh_ahead::<F>(&operands.values);
    if comptime!(blueprint.features.softcap) {
        cap_all(&mut s, scalars, comptime!(blocks * tiles));
    }
    if comptime!(masked) {
        mask(&mut s, tile, start, blocks);
    }
    let factor = exponent(scalars, blueprint.features.softcap);
    let offsets = raise(&s, state, factor, blueprint);
    let weighed = comptime!(Weighed::new(blocks, COLUMNS, v_layout));
    #[unroll]
    for block in 0..comptime!(COLUMNS / SIDE) {
        let mut weights = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for t in 0..blocks {
            let mut pairs = Array::<Pair<F>>::new(4usize);
            #[unroll]
            for part in 0..4usize {
                let (half, h) = comptime!((part / 2, part % 2));
                let row = comptime!(t * 2 + h);
                let x = s.index(comptime!(t * tiles + block * 2 + half))[h];
                let mut p = Pair32::empty();
                p[0] = exp2(fma(x[0], factor, offsets[row]));
                p[1] = exp2(fma(x[1], factor, offsets[row]));
                state.normalisers[row] += p[0] + p[1];
                pairs[part] = Pair::<F>::cast_from(p);
            }
            weights.push(pairs);
        }
        weigh_block::<F>(
            &weights,
            &operands.values,
            &mut loaded,
            &mut state.sums,
            block,
            weighed,
        );
    }
}

/// Products to capped scores, as exponents of 2.
#[cube]
fn cap_all(s: &mut Sequence<Array<Pair32>>, scalars: &Scalars, #[comptime] count: usize) {
    #[unroll]
    for at in 0..count {
        let sum = s.index_mut(at);
        #[unroll]
        for h in 0..2usize {
            let x = sum[h];
            let mut y = Pair32::empty();
            let (first, _) = cap(x[0], scalars);
            let (second, _) = cap(x[1], scalars);
            y[0] = first;
            y[1] = second;
            sum[h] = y;
        }
    }
}

/// Makes `MASKED` of what a row does not see.
#[cube]
fn mask(s: &mut Sequence<Array<Pair32>>, tile: &RowTile, start: i32, #[comptime] blocks: usize) {
    #[unroll]
    for row in 0..comptime!(2 * blocks) {
        let own = tile.own + first_row(blocks) as i32 + comptime!((row * 8) as i32);
        let from = i32::max(tile.first_column, own - tile.left) - start;
        let to = i32::min(tile.last_column, own + tile.right + 1) - start;
        keep_columns(s, from, to, MASKED, row, comptime!(COLUMNS / 8));
    }
}

/// Raises the maxima of rows where that is due, scales their sums down, and returns what is added to a row's scaled products.
#[cube]
fn raise(
    s: &Sequence<Array<Pair32>>,
    state: &mut State,
    factor: f32,
    #[comptime] blueprint: MatrixBlueprint,
) -> Array<f32> {
    let rows = comptime!(2 * blueprint.query_blocks);
    let mut maxima = Array::<f32>::new(rows);
    #[unroll]
    for row in 0..rows {
        let mut max = state.maxima[row];
        #[unroll]
        for j in 0..comptime!(COLUMNS / 8) {
            let x = s.index(comptime!(row / 2 * COLUMNS / 8 + j))[comptime!(row % 2)];
            max = f32::max(max, f32::max(x[0], x[1]));
        }
        maxima[row] = max;
    }
    #[unroll]
    for row in 0..rows {
        maxima[row] = f32::max(maxima[row], plane_shuffle_xor(maxima[row], 1u32));
    }
    #[unroll]
    for row in 0..rows {
        maxima[row] = f32::max(maxima[row], plane_shuffle_xor(maxima[row], 2u32));
    }
    let late = f32::new(LATE) / factor;
    let mut due = false;
    #[unroll]
    for row in 0..rows {
        due = due || maxima[row] > state.maxima[row] + late;
    }
    if plane_any(due) {
        let tiles = comptime!(blueprint.values().padded() / 8);
        #[unroll]
        for row in 0..rows {
            let before = state.maxima[row];
            let max = select(maxima[row] > before + late, maxima[row], before);
            let down = exp2((before - max) * factor);
            state.maxima[row] = max;
            state.normalisers[row] *= down;
            #[unroll]
            for j in 0..tiles {
                let sum = state.sums.index_mut(comptime!(row / 2 * tiles + j));
                sum[comptime!(row % 2)] = sum[comptime!(row % 2)] * Pair32::new(down);
            }
        }
    }
    let mut offsets = Array::<f32>::new(rows);
    #[unroll]
    for row in 0..rows {
        offsets[row] = -state.maxima[row] * factor;
    }
    offsets
}

/// Normalises and stores.
#[cube]
fn finish<F: Float>(
    state: &mut State,
    tile: &RowTile,
    head: u32,
    sinks: &Array<f32>,
    out: &mut Tensor<Pair<F>>,
    lse: &mut Tensor<f32>,
    scalars: &Scalars,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let blocks = comptime!(blueprint.query_blocks);
    let lane = UNIT_POS_X % 32;
    let scale = exponent(scalars, blueprint.features.softcap) * comptime!(1.0 / LOG2_E);
    let place = Place {
        batch: tile.q_row,
        head,
        token: tile.q_token,
        num_rows: tile.num_rows,
    };
    #[unroll]
    for at in 0..comptime!(2 * blocks) {
        let mut sum = state.normalisers[at];
        sum += plane_shuffle_xor(sum, 1u32);
        sum += plane_shuffle_xor(sum, 2u32);
        let seen = sum != f32::new(0.0);
        let total = state.maxima[at] * scale + f32::ln(sum);
        let mut share = select(seen, f32::new(1.0) / sum, f32::new(0.0));
        if comptime!(blueprint.features.sinks) {
            let ratio = exp2((sinks[head as usize] - total) * LOG2_E);
            share = select(seen, share / (f32::new(1.0) + ratio), f32::new(0.0));
        }
        let row = first_row(blocks) + comptime!((at * 8) as u32);
        if (row as i32) < tile.num_rows {
            store_row::<F>(out, &state.sums, &place, row, share, at, blueprint.values());
            if lane & 3 == 0 {
                let at = tile.q_row as usize * lse.stride(0) + head as usize * lse.stride(1);
                let token = (tile.q_token + row as i32) as usize;
                lse[at + token] = select(seen, total, scalars.minus_infinity);
            }
        }
    }
}
