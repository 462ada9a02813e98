//! The gradients of keys and values.

use cubecl::prelude::*;

use crate::components::{
    Blueprint, COLUMNS, LANES, dropout,
    records::{Visit, key_tile, visit},
    scores::{MASKED, Numbers, product_gradient, score, slope, within},
    tile::{Place, V4, products, rows_of, store, weigh, zero_sums, zeros},
};

/// One tile of keys of one key head per cube: `dk` and `dv`. `rows` is that of `delta`.
///
/// Rows of the tile are keys, columns are queries. Sums run over the heads of the group, within a
/// head over the segments in the order of their list, within a segment over the queries.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn keys<F: Float, G: Float, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    dout: &Tensor<Vector<G, N>>,
    rows: &Array<f32>,
    tiles: &Array<i32>,
    visits: &Array<i32>,
    dk: &mut Tensor<Vector<F, Const<4>>>,
    dv: &mut Tensor<Vector<F, Const<4>>>,
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
    let kv_head = CUBE_POS_Y;
    let tile = key_tile(tiles, index);
    let (dim, v_dim) = comptime!((blueprint.head_dim, blueprint.v_head_dim));
    let per_unit = comptime!(blueprint.rows_per_unit);
    let stride = comptime!(blueprint.weight_stride());
    let mut stage = SharedMemory::<V4>::new(comptime!(blueprint.stage()));
    let mut weights = SharedMemory::<V4>::new(comptime!(blueprint.rows() * stride));
    let y = UNIT_POS as usize / LANES;
    let x = UNIT_POS as usize % LANES;

    let k_rows = rows_of::<F, N>(k, tile.k_row, kv_head, tile.k_token, 0, tile.num_keys);
    let v_rows = rows_of::<F, N>(v, tile.k_row, kv_head, tile.k_token, 0, tile.num_keys);
    let mut dk_sums = zero_sums(dim, blueprint);
    let mut dv_sums = zero_sums(v_dim, blueprint);

    for member in 0..group {
        let head = kv_head * group + member;
        for n in tile.first_visit..tile.last_visit {
            let visit = visit(visits, n);
            let blocks = (visit.num_queries + comptime!(COLUMNS as i32 - 1)) / COLUMNS as i32;
            for block in 0..blocks {
                let start = block * COLUMNS as i32;
                let token = visit.q_token + start;
                let last = visit.num_queries - start;
                let q_rows = rows_of::<F, N>(q, visit.q_row, head, token, 0, last);
                let o_rows = rows_of::<G, N>(dout, visit.q_row, head, token, 0, last);
                let mut s = zeros(comptime!(per_unit * 4));
                let mut dp = zeros(comptime!(per_unit * 4));
                products::<F, F, N>(k, &k_rows, q, &q_rows, &mut stage, &mut s, dim, blueprint);
                products::<F, G, N>(
                    v, &v_rows, dout, &o_rows, &mut stage, &mut dp, v_dim, blueprint,
                );
                let base = (visit.q_row as usize * q.shape(1) + head as usize) * q.shape(2);
                #[unroll]
                for j in 0..4usize {
                    let query = start + (x * 4 + j) as i32;
                    let column = Column {
                        query,
                        head,
                        at: base + (visit.q_token + query) as usize,
                    };
                    column_gradients(
                        &mut s, &mut dp, rows, &visit, &column, num_rows, &numbers, j, blueprint,
                    );
                }
                put(&mut weights, &dp, y, x, blueprint);
                weigh::<G, N>(
                    dout,
                    &o_rows,
                    &weights,
                    &mut stage,
                    &mut dv_sums,
                    v_dim,
                    blueprint,
                );
                put(&mut weights, &s, y, x, blueprint);
                weigh::<F, N>(
                    q,
                    &q_rows,
                    &weights,
                    &mut stage,
                    &mut dk_sums,
                    dim,
                    blueprint,
                );
            }
        }
    }
    let place = Place {
        batch: tile.k_row,
        head: kv_head,
        token: tile.k_token,
        num_rows: tile.num_keys,
    };
    store::<F>(dk, &dk_sums, &place, numbers.scale, dim, blueprint);
    store::<F>(dv, &dv_sums, &place, f32::new(1.0), v_dim, blueprint);
}

/// A query as a column of a tile.
#[derive(CubeType, Clone, Copy)]
struct Column {
    /// Counted within the visit.
    query: i32,
    head: u32,
    /// Index of its numbers in `rows`.
    at: usize,
}

/// Turns column `j` of a unit: products of keys and queries into gradients of products, and products of
/// values and `dout` into the weights of `dout`.
#[cube]
fn column_gradients(
    s: &mut Array<f32>,
    dp: &mut Array<f32>,
    rows: &Array<f32>,
    visit: &Visit,
    column: &Column,
    num_rows: usize,
    numbers: &Numbers,
    #[comptime] j: usize,
    #[comptime] blueprint: Blueprint,
) {
    let y = UNIT_POS as usize / LANES;
    let within_visit = column.query < visit.num_queries;
    let mut lse = f32::new(0.0);
    let mut delta = f32::new(0.0);
    if within_visit {
        lse = rows[column.at];
        delta = rows[num_rows + column.at];
    }
    let position = visit.q_position + column.query as u32;
    let mut a = u32::new(0);
    let mut b = u32::new(0);
    if comptime!(blueprint.features.dropout) {
        let (first, second) = dropout::row_states(numbers, column.head, visit.document, position);
        a = first;
        b = second;
    }
    #[unroll]
    for i in 0..comptime!(blueprint.rows_per_unit) {
        let at = comptime!(i * 4 + j);
        let key = (y + comptime!(i * LANES)) as i32;
        let seen = within_visit
            && key >= visit.first_key
            && key < visit.last_key
            && within(key + visit.shift - column.query, visit.left, visit.right);
        let value = score(s[at], numbers, blueprint.features);
        let p = f32::exp(select(seen, value, f32::new(MASKED)) - lse);
        let slope = slope(value, numbers, blueprint.features);
        if comptime!(blueprint.features.dropout) {
            let kept = dropout::factor(a, b, visit.k_position + key as u32, numbers);
            s[at] = product_gradient(p, dp[at] * kept, delta, slope);
            dp[at] = p * kept;
        } else {
            s[at] = product_gradient(p, dp[at], delta, slope);
            dp[at] = p;
        }
    }
}

/// Writes a unit's four columns to the shared weights.
#[cube]
fn put(
    weights: &mut SharedMemory<V4>,
    values: &Array<f32>,
    y: usize,
    x: usize,
    #[comptime] blueprint: Blueprint,
) {
    #[unroll]
    for i in 0..comptime!(blueprint.rows_per_unit) {
        let mut weight = V4::new(0.0f32);
        #[unroll]
        for j in 0..4usize {
            weight[j] = values[comptime!(i * 4 + j)];
        }
        weights[(y + comptime!(i * LANES)) * comptime!(blueprint.weight_stride()) + x] = weight;
    }
}
