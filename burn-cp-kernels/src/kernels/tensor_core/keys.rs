//! The gradients of keys and values.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::columns::{Queries, columns_of, copy_queries};
use crate::components::{
    matrix::{
        Chunk, Copied, KeyPart, LOG2_E, MatrixBlueprint, Operand, Pair, Pair32, Products, SIDE,
        Scalars, as_left, as_right, as_weighed, begin_copy, first_row, held, keep_columns, operand,
        row_products, store_rows, sums, times, weigh_rows, weight_pair,
    },
    records::{Visit, key_tile, visit},
    tile::Place,
};

/// One tile of keys of one key head per cube: `dk` and `dv`, or one of them. `rows` is that of the portable routine's `delta`.
///
/// Rows of the tile are keys, columns are queries. Sums run over the heads of the group, within a head over the segments in the
/// order of their list, within a segment over the queries.
#[cube]
pub(crate) fn keys<F: Float>(
    q: &Tensor<Chunk<F>>,
    k: &Tensor<Chunk<F>>,
    v: &Tensor<Chunk<F>>,
    dout: &Tensor<Chunk<F>>,
    rows: &Array<f32>,
    tiles: &Array<i32>,
    visits: &Array<i32>,
    dk: &mut Tensor<Pair<F>>,
    dv: &mut Tensor<Pair<F>>,
    scalars: &Scalars,
    #[comptime] part: KeyPart,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let index = CUBE_POS_Y + CUBE_POS_Z * CUBE_COUNT_Y;
    if index >= scalars.num_tiles {
        terminate!();
    }
    let kv_head = CUBE_POS_X;
    let tile = key_tile(tiles, index);
    let (k_layout, v_layout) = comptime!((blueprint.keys(), blueprint.values()));
    let columns = comptime!(blueprint.key_columns);
    let parts = comptime!([
        Copied::new(k_layout, blueprint.key_rows()),
        // Values alone need no gradients of weights.
        Copied::new(v_layout, if part.keys() { blueprint.key_rows() } else { 1 }),
        Copied::new(k_layout, columns),
        Copied::new(v_layout, columns),
    ]);
    let (batch, token, num_keys) = (tile.k_row, tile.k_token, tile.num_keys);
    let mut own_keys = held::<F>(k, batch, kv_head, token, 0, num_keys, 1usize, parts[0]);
    let mut own_values = held::<F>(v, batch, kv_head, token, 0, num_keys, 1usize, parts[1]);
    let column_parts = comptime!([parts[2], parts[3]]);
    let mut loaded = columns_of::<F>(column_parts, columns);
    let copied = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
    begin_copy::<F>(k, &mut own_keys, 0, 0usize, parts[0]);
    if comptime!(part.keys()) {
        begin_copy::<F>(v, &mut own_values, 0, 0usize, parts[1]);
    }

    let blocks = comptime!(blueprint.key_blocks);
    let (k_count, v_count) = comptime!(part.counts(&blueprint));
    let mut dk_sums = sums(k_count);
    let mut dv_sums = sums(v_count);
    let row = UNIT_POS_X / 32 * comptime!((SIDE * blocks) as u32);
    let at = Offsets {
        keys: as_left(row, k_layout.stride()),
        values: as_left(row, v_layout.stride()),
        queries: as_right(k_layout.stride()),
        douts: as_right(v_layout.stride()),
        weighed_queries: as_weighed(k_layout.stride()),
        weighed_douts: as_weighed(v_layout.stride()),
    };

    // Steps go over heads, visits and blocks of queries, so that the first rows of a visit are loaded during the last step before.
    let first_head = kv_head * scalars.group;
    let mut member = 0u32;
    let mut n = tile.first_visit;
    let mut start = 0i32;
    let mut step = 0u32;
    if tile.first_visit == tile.last_visit {
        member = scalars.group;
    } else {
        let now = visit(visits, n);
        let queries = Queries {
            batch: now.q_row,
            head: first_head,
            token: now.q_token,
            count: now.num_queries,
        };
        copy_queries::<F>(
            q,
            dout,
            rows,
            &mut loaded,
            &queries,
            0,
            0u32,
            scalars.num_rows,
            column_parts,
            columns,
        );
    }
    copied.commit_copy_async();
    copied.arrive();

    while member < scalars.group {
        let now = visit(visits, n);
        let start_now = start;
        start += columns as i32;
        if start >= now.num_queries {
            start = 0;
            n += 1;
            if n == tile.last_visit {
                n = tile.first_visit;
                member += 1;
            }
        }
        copied.wait_parity(step & 1);
        sync_cube();
        if member < scalars.group {
            let next = visit(visits, n);
            let head = first_head + member;
            let stage = (step + 1) & 1;
            let queries = Queries {
                batch: next.q_row,
                head,
                token: next.q_token,
                count: next.num_queries,
            };
            copy_queries::<F>(
                q,
                dout,
                rows,
                &mut loaded,
                &queries,
                start,
                stage,
                scalars.num_rows,
                column_parts,
                columns,
            );
            copied.commit_copy_async();
            copied.arrive();
        }
        let stage = (step & 1) as usize;
        step += 1;
        let operands = Operands::<F> {
            keys: operand::<F>(&own_keys.memory, at.keys, 0usize, parts[0]),
            values: operand::<F>(&own_values.memory, at.values, 0usize, parts[1]),
            queries: operand::<F>(&loaded.queries, at.queries, stage, parts[2]),
            douts: operand::<F>(&loaded.douts, at.douts, stage, parts[3]),
            weighed_queries: operand::<F>(&loaded.queries, at.weighed_queries, stage, parts[2]),
            weighed_douts: operand::<F>(&loaded.douts, at.weighed_douts, stage, parts[3]),
        };
        let from = stage * comptime!(2 * columns) + (UNIT_POS_X % 4 * 2) as usize;
        let mut s = sums(comptime!(blocks * columns / 8));
        let mut dp = sums(comptime!(blocks * columns / 8));
        products_of(&operands, &mut s, &mut dp, part, blueprint);
        weights(
            &mut s,
            &mut dp,
            &loaded.numbers,
            from,
            scalars,
            part,
            blueprint,
        );
        mask(&mut s, &now, start_now, blueprint);
        if comptime!(part.values()) {
            let rows = &operands.weighed_douts;
            weigh_rows::<F>(&s, rows, &mut dv_sums, blocks, columns, v_layout);
        }
        if comptime!(part.keys()) {
            times(&mut s, &dp, comptime!(blocks * columns / 8));
            let rows = &operands.weighed_queries;
            weigh_rows::<F>(&s, rows, &mut dk_sums, blocks, columns, k_layout);
        }
    }
    let place = Place {
        batch: tile.k_row,
        head: kv_head,
        token: tile.k_token,
        num_rows: tile.num_keys,
    };
    if comptime!(part.keys()) {
        store_rows::<F>(dk, &dk_sums, &place, scalars.scale, blocks, k_layout);
    }
    if comptime!(part.values()) {
        store_rows::<F>(dv, &dv_sums, &place, f32::new(1.0), blocks, v_layout);
    }
}

/// Where a unit's rows are in the operands.
#[derive(CubeType, Clone, Copy)]
struct Offsets {
    keys: usize,
    values: usize,
    queries: usize,
    douts: usize,
    weighed_queries: usize,
    weighed_douts: usize,
}

/// What one step is computed from.
#[derive(CubeType)]
struct Operands<F: Float> {
    keys: Operand<F>,
    values: Operand<F>,
    queries: Operand<F>,
    douts: Operand<F>,
    weighed_queries: Operand<F>,
    weighed_douts: Operand<F>,
}

/// Products of keys with queries and, if they are needed, of values with `dout`.
#[cube]
fn products_of<F: Float>(
    operands: &Operands<F>,
    s: &mut Sequence<Array<Pair32>>,
    dp: &mut Sequence<Array<Pair32>>,
    #[comptime] part: KeyPart,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let (blocks, columns) = comptime!((blueprint.key_blocks, blueprint.key_columns));
    let products = comptime!(Products::new(blocks, columns, blueprint.keys()));
    row_products::<F>(&operands.keys, &operands.queries, s, products);
    if comptime!(part.keys()) {
        let products = comptime!(Products::new(blocks, columns, blueprint.values()));
        row_products::<F>(&operands.values, &operands.douts, dp, products);
    }
}

/// Products to weights, and gradients of weights to those of scaled products but for the weight. The numbers of column 0 are at `at`.
#[cube]
fn weights(
    s: &mut Sequence<Array<Pair32>>,
    dp: &mut Sequence<Array<Pair32>>,
    numbers: &SharedMemory<f32>,
    at: usize,
    scalars: &Scalars,
    #[comptime] part: KeyPart,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let columns = comptime!(blueprint.key_columns);
    #[unroll]
    for j in 0..comptime!(columns / 8) {
        let mut offsets = Pair32::empty();
        let mut deltas = Pair32::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            offsets[e] = -numbers[at + comptime!(j * 8 + e)] * LOG2_E;
            if comptime!(part.keys()) {
                deltas[e] = numbers[at + comptime!(columns + j * 8 + e)];
            }
        }
        #[unroll]
        for row in 0..comptime!(2 * blueprint.key_blocks) {
            let index = comptime!(row / 2 * columns / 8 + j);
            weight_pair(
                s.index_mut(index),
                dp.index_mut(index),
                offsets,
                deltas,
                scalars,
                comptime!(row % 2),
                blueprint.features.softcap,
            );
        }
    }
}

/// Clears the weights of queries that do not see a key, if there are any.
#[cube]
fn mask(
    s: &mut Sequence<Array<Pair32>>,
    now: &Visit,
    start: i32,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let (blocks, columns) = comptime!((blueprint.key_blocks, blueprint.key_columns));
    let nearest = now.shift - start;
    if start + comptime!(columns as i32) > now.num_queries
        || nearest + comptime!(blueprint.key_rows() as i32 - 1) > now.right
        || nearest - comptime!(columns as i32 - 1) + now.left < 0
    {
        #[unroll]
        for row in 0..comptime!(2 * blocks) {
            let key = first_row(blocks) as i32 + comptime!((row * 8) as i32) + nearest;
            let to = i32::min(key + now.left + 1, now.num_queries - start);
            let from = key - now.right;
            keep_columns(s, from, to, 0.0, row, comptime!(columns / 8));
        }
    }
}
