//! The gradient of the queries.

use cubecl::prelude::*;

use crate::components::{
    Blueprint, COLUMNS, LANES, dropout,
    records::row_tile,
    scores::{MASKED, Numbers, product_gradient, score, slope, within},
    tile::{Place, V4, products, rows_of, store, weigh, zero_sums, zeros},
};

/// One tile of query rows of one head per cube: `dq`. `rows` is that of `delta`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn queries<F: Float, G: Float, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    dout: &Tensor<Vector<G, N>>,
    rows: &Array<f32>,
    tiles: &Array<i32>,
    dq: &mut Tensor<Vector<F, Const<4>>>,
    numbers: Numbers,
    num_tiles: u32,
    group: u32,
    num_rows: usize,
    #[comptime] blueprint: Blueprint,
    #[define(F, G)] _dtypes: [StorageType; 2],
) {
    let index = CUBE_POS_X + CUBE_POS_Z * CUBE_COUNT_X;
    if index >= num_tiles {
        terminate!();
    }
    let head = CUBE_POS_Y;
    let tile = row_tile(tiles, index);
    let dim = comptime!(blueprint.head_dim);
    let per_unit = comptime!(blueprint.rows_per_unit);
    let stride = comptime!(blueprint.weight_stride());
    let mut stage = SharedMemory::<V4>::new(comptime!(blueprint.stage()));
    let mut weights = SharedMemory::<V4>::new(comptime!(blueprint.rows() * stride));
    let y = UNIT_POS as usize / LANES;
    let x = UNIT_POS as usize % LANES;

    let q_rows = rows_of::<F, N>(q, tile.q_row, head, tile.q_token, 0, tile.num_rows);
    let o_rows = rows_of::<G, N>(dout, tile.q_row, head, tile.q_token, 0, tile.num_rows);
    let mut sums = zero_sums(dim, blueprint);
    let mut lse = zeros(per_unit);
    let mut delta = zeros(per_unit);
    let mut state_a = Array::<u32>::new(per_unit);
    let mut state_b = Array::<u32>::new(per_unit);
    #[unroll]
    for i in 0..per_unit {
        let row = y + comptime!(i * LANES);
        if (row as i32) < tile.num_rows {
            let per_head = dq.shape(2);
            let at = (tile.q_row as usize * dq.shape(1) + head as usize) * per_head
                + (tile.q_token + row as i32) as usize;
            lse[i] = rows[at];
            delta[i] = rows[num_rows + at];
        }
        if comptime!(blueprint.features.dropout) {
            let position = tile.q_position + row as u32;
            let (a, b) = dropout::row_states(&numbers, head, tile.document, position);
            state_a[i] = a;
            state_b[i] = b;
        }
    }

    for n in tile.first_tile..tile.last_tile {
        let start = n * COLUMNS as i32;
        let token = tile.k_token + start;
        let (first, last) = (tile.first_column - start, tile.last_column - start);
        let k_rows = rows_of::<F, N>(k, tile.k_row, head / group, token, first, last);
        let v_rows = rows_of::<F, N>(v, tile.k_row, head / group, token, first, last);
        let mut s = zeros(comptime!(per_unit * 4));
        let mut dp = zeros(comptime!(per_unit * 4));
        products::<F, F, N>(q, &q_rows, k, &k_rows, &mut stage, &mut s, dim, blueprint);
        products::<G, F, N>(
            dout,
            &o_rows,
            v,
            &v_rows,
            &mut stage,
            &mut dp,
            comptime!(blueprint.v_head_dim),
            blueprint,
        );
        #[unroll]
        for i in 0..per_unit {
            let row = y + comptime!(i * LANES);
            let own = tile.own + row as i32;
            let mut weight = V4::new(0.0f32);
            #[unroll]
            for j in 0..4usize {
                let at = comptime!(i * 4 + j);
                let column = start + (x * 4 + j) as i32;
                let seen = column >= tile.first_column
                    && column < tile.last_column
                    && within(column - own, tile.left, tile.right);
                let value = score(s[at], &numbers, blueprint.features);
                let p = f32::exp(select(seen, value, f32::new(MASKED)) - lse[i]);
                let slope = slope(value, &numbers, blueprint.features);
                if comptime!(blueprint.features.dropout) {
                    let position = tile.k_position + column as u32;
                    let kept = dropout::factor(state_a[i], state_b[i], position, &numbers);
                    weight[j] = product_gradient(p, dp[at] * kept, delta[i], slope);
                } else {
                    weight[j] = product_gradient(p, dp[at], delta[i], slope);
                }
            }
            weights[row * stride + x] = weight;
        }
        weigh::<F, N>(k, &k_rows, &weights, &mut stage, &mut sums, dim, blueprint);
    }
    let place = Place {
        batch: tile.q_row,
        head,
        token: tile.q_token,
        num_rows: tile.num_rows,
    };
    store::<F>(dq, &sums, &place, numbers.scale, dim, blueprint);
}
