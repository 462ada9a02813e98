//! The forward pass.

use cubecl::prelude::*;

use crate::components::{
    Blueprint, COLUMNS, LANES, UNITS, dropout,
    records::{RowTile, row_tile},
    scores::{MASKED, NO_SCORE, Numbers, score, within},
    tile::{Place, V4, products, rows_of, store, weigh, zero_sums, zeros},
};

/// One tile of query rows of one head per cube: `out` and `lse`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward<F: Float, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    sinks: &Array<f32>,
    tiles: &Array<i32>,
    out: &mut Tensor<Vector<F, Const<4>>>,
    lse: &mut Tensor<f32>,
    numbers: Numbers,
    num_tiles: u32,
    group: u32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS_X + CUBE_POS_Z * CUBE_COUNT_X;
    if index >= num_tiles {
        terminate!();
    }
    let head = CUBE_POS_Y;
    let tile = row_tile(tiles, index);
    let v_dim = comptime!(blueprint.v_head_dim);
    let rows = comptime!(blueprint.rows());
    let per_unit = comptime!(blueprint.rows_per_unit);
    let stride = comptime!(blueprint.weight_stride());
    let mut stage = SharedMemory::<V4>::new(comptime!(blueprint.stage()));
    let mut weights = SharedMemory::<V4>::new(comptime!(rows * stride));
    let mut partial = SharedMemory::<f32>::new(comptime!(rows * LANES));
    let mut maxima = SharedMemory::<f32>::new(rows);
    let mut factors = SharedMemory::<f32>::new(rows);
    let y = UNIT_POS as usize / LANES;
    let x = UNIT_POS as usize % LANES;

    let q_rows = rows_of::<F, N>(q, tile.q_row, head, tile.q_token, 0, tile.num_rows);
    let mut sums = zero_sums(v_dim, blueprint);
    let mut normalisers = zeros(per_unit);
    let mut state_a = Array::<u32>::new(per_unit);
    let mut state_b = Array::<u32>::new(per_unit);
    if comptime!(blueprint.features.dropout) {
        #[unroll]
        for i in 0..per_unit {
            let position = tile.q_position + (y + comptime!(i * LANES)) as u32;
            let (a, b) = dropout::row_states(&numbers, head, tile.document, position);
            state_a[i] = a;
            state_b[i] = b;
        }
    }
    if (UNIT_POS as usize) < rows {
        maxima[UNIT_POS as usize] = f32::new(NO_SCORE);
    }

    for n in tile.first_tile..tile.last_tile {
        let start = n * COLUMNS as i32;
        let token = tile.k_token + start;
        let (first, last) = (tile.first_column - start, tile.last_column - start);
        let k_rows = rows_of::<F, N>(k, tile.k_row, head / group, token, first, last);
        let mut s = zeros(comptime!(per_unit * 4));
        products::<F, F, N>(
            q,
            &q_rows,
            k,
            &k_rows,
            &mut stage,
            &mut s,
            comptime!(blueprint.head_dim),
            blueprint,
        );
        // Columns that every row sees need no mask.
        let last_own = tile.own + comptime!(rows as i32 - 1);
        if first <= 0
            && last >= COLUMNS as i32
            && within(start - last_own, tile.left, tile.right)
            && within(
                start + comptime!(COLUMNS as i32 - 1) - tile.own,
                tile.left,
                tile.right,
            )
        {
            score_rows(
                &mut s,
                &mut partial,
                &tile,
                start,
                &numbers,
                false,
                blueprint,
            );
        } else {
            score_rows(
                &mut s,
                &mut partial,
                &tile,
                start,
                &numbers,
                true,
                blueprint,
            );
        }
        sync_cube();
        if x < per_unit {
            let row = y + x * LANES;
            let before = maxima[row];
            let mut max = before;
            #[unroll]
            for lane in 0..LANES {
                max = f32::max(max, partial[row * LANES + lane]);
            }
            maxima[row] = max;
            factors[row] = f32::exp(before - max);
        }
        sync_cube();
        #[unroll]
        for i in 0..per_unit {
            let row = y + comptime!(i * LANES);
            let max = maxima[row];
            let mut sum = normalisers[i] * factors[row];
            let mut weight = V4::new(0.0f32);
            #[unroll]
            for j in 0..4usize {
                let p = f32::exp(s[comptime!(i * 4 + j)] - max);
                sum += p;
                if comptime!(blueprint.features.dropout) {
                    let position = tile.k_position + start as u32 + (x * 4 + j) as u32;
                    weight[j] = p * dropout::factor(state_a[i], state_b[i], position, &numbers);
                } else {
                    weight[j] = p;
                }
            }
            normalisers[i] = sum;
            weights[row * stride + x] = weight;
        }
        rescale(&mut sums, &factors, blueprint);
        let v_rows = rows_of::<F, N>(v, tile.k_row, head / group, token, first, last);
        weigh::<F, N>(
            v, &v_rows, &weights, &mut stage, &mut sums, v_dim, blueprint,
        );
    }

    #[unroll]
    for i in 0..per_unit {
        partial[(y + comptime!(i * LANES)) * LANES + x] = normalisers[i];
    }
    sync_cube();
    if x < per_unit {
        let row = y + x * LANES;
        let mut sum = f32::new(0.0);
        #[unroll]
        for lane in 0..LANES {
            sum += partial[row * LANES + lane];
        }
        let seen = sum != f32::new(0.0);
        let total = maxima[row] + f32::ln(sum);
        let mut factor = select(seen, f32::new(1.0) / sum, f32::new(0.0));
        if comptime!(blueprint.features.sinks) {
            let share = f32::new(1.0) / (f32::new(1.0) + f32::exp(sinks[head as usize] - total));
            factor = select(seen, factor * share, f32::new(0.0));
        }
        factors[row] = factor;
        if (row as i32) < tile.num_rows {
            let at = tile.q_row as usize * lse.stride(0)
                + head as usize * lse.stride(1)
                + (tile.q_token + row as i32) as usize;
            lse[at] = select(seen, total, numbers.minus_infinity);
        }
    }
    sync_cube();
    rescale(&mut sums, &factors, blueprint);
    let place = Place {
        batch: tile.q_row,
        head,
        token: tile.q_token,
        num_rows: tile.num_rows,
    };
    store::<F>(out, &sums, &place, f32::new(1.0), v_dim, blueprint);
}

/// Turns products into scores, those that are masked into `MASKED`, and leaves each unit's maximum per row.
#[cube]
fn score_rows(
    s: &mut Array<f32>,
    partial: &mut SharedMemory<f32>,
    tile: &RowTile,
    start: i32,
    numbers: &Numbers,
    #[comptime] masked: bool,
    #[comptime] blueprint: Blueprint,
) {
    let y = UNIT_POS as usize / LANES;
    let x = UNIT_POS as usize % LANES;
    #[unroll]
    for i in 0..comptime!(blueprint.rows_per_unit) {
        let row = y + comptime!(i * LANES);
        let own = tile.own + row as i32;
        let mut max = f32::new(NO_SCORE);
        #[unroll]
        for j in 0..4usize {
            let at = comptime!(i * 4 + j);
            let mut value = score(s[at], numbers, blueprint.features);
            if comptime!(masked) {
                let column = start + (x * 4 + j) as i32;
                let seen = column >= tile.first_column
                    && column < tile.last_column
                    && within(column - own, tile.left, tile.right);
                value = select(seen, value, f32::new(MASKED));
            }
            s[at] = value;
            max = f32::max(max, value);
        }
        partial[row * LANES + x] = max;
    }
}

/// Multiplies the sums of each row by its factor.
#[cube]
fn rescale(sums: &mut Array<V4>, factors: &SharedMemory<f32>, #[comptime] blueprint: Blueprint) {
    let columns = comptime!(blueprint.columns(blueprint.v_head_dim));
    #[unroll]
    for i in 0..comptime!(columns.rows) {
        let row =
            UNIT_POS as usize / comptime!(columns.lanes) + comptime!(i * UNITS / columns.lanes);
        let factor = V4::new(factors[row]);
        #[unroll]
        for c in 0..comptime!(columns.vectors) {
            let at = comptime!(i * columns.vectors + c);
            sums[at] = sums[at] * factor;
        }
    }
}
