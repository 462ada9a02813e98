//! All gradients in one pass over the visible pairs: five products per pair, where kernels of their own for queries and for keys take
//! seven.
//!
//! A cube has a tile of keys of one key head and walks over the tiles of queries that see it. Scores are computed as keys × queries, a
//! block of both per plane. Weights and their gradients go through shared memory: for `dk` and `dv` a plane has some of the keys and half
//! of the dims, for `dq` some of the queries and a quarter of the dims.
//!
//! A tile of queries gets a share of its gradient from each tile of keys that it sees, so from several cubes, which add to it one after
//! the other, in an order that the schedule fixes: `turns` counts the shares of each tile of queries, and sums have one order. Cubes claim
//! tiles of keys in the order of their list, and a share waits only for those of tiles earlier in the list, so that the earliest tile that
//! is not done can always go on, however many cubes run at a time.
//!
//! No cube reads what another one has written but for the turns: memory itself adds, where its turn's adding is all that is under way. So
//! taking a turn needs no order of reads, and handing it on needs one of writes, which costs the plane that does it some time. Turns are
//! handed on by another plane than the one that waits for them.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::columns::{Queries, columns_of, copy_queries};
use super::shares::{BLOCKS, TURNS, add_share};
use crate::components::matrix::{
    Chunk, Copied, EXCHANGED, Exchanged, JOINT_KEYS, JOINT_QUERIES, JOINT_ROWS, JOINT_UNITS,
    JointTile, LOG2_E, Layout, MatrixBlueprint, Pair, Pair32, Products, Quad32, Run, Scalars,
    as_left, as_right, as_weighed, begin_copy, hand_over, held, joint_tile, keep_columns, operand,
    row_products, run, sums, times, weigh_exchanged, weight_pair,
};

/// The unit that hands turns on.
const HANDS_ON: u32 = JOINT_UNITS as u32 / 2;

/// One tile of keys of one key head per cube: `dk`, `dv`, and shares of `dq`. `rows` is that of the portable routine's `delta`, `turns`
/// is 0 at first.
#[cube]
pub(crate) fn gradients<F: Float>(
    q: &Tensor<Chunk<F>>,
    k: &Tensor<Chunk<F>>,
    v: &Tensor<Chunk<F>>,
    dout: &Tensor<Chunk<F>>,
    rows: &Array<f32>,
    tiles: &Array<i32>,
    runs: &Array<i32>,
    turns: &mut Array<Atomic<u32>>,
    shares: &mut Array<Atomic<Quad32>>,
    dk: &mut Tensor<Pair<F>>,
    dv: &mut Tensor<Pair<F>>,
    scalars: &Scalars,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let mut claimed = SharedMemory::<u32>::new(1usize);
    if UNIT_POS_X == 0 {
        claimed[0] = turns[0].fetch_add(1u32);
    }
    sync_cube();
    let tile = joint_tile(tiles, claimed[0]);
    let (k_layout, v_layout) = comptime!((blueprint.keys(), blueprint.values()));
    let parts = comptime!([
        Copied::by(JOINT_UNITS, k_layout, JOINT_KEYS),
        Copied::by(JOINT_UNITS, v_layout, JOINT_KEYS),
        Copied::by(JOINT_UNITS, k_layout, JOINT_QUERIES),
        Copied::by(JOINT_UNITS, v_layout, JOINT_QUERIES),
    ]);
    let (batch, token, head) = (tile.k_row, tile.k_token, tile.kv_head as u32);
    let (first, last) = (tile.first_key, tile.last_key);
    let mut own_keys = held::<F>(k, batch, head, token, first, last, 1usize, parts[0]);
    let mut own_values = held::<F>(v, batch, head, token, first, last, 1usize, parts[1]);
    let column_parts = comptime!([parts[2], parts[3]]);
    let mut loaded = columns_of::<F>(column_parts, JOINT_QUERIES);
    let len = comptime!(JOINT_KEYS * EXCHANGED.stride() * 4);
    let mut weights_of = SharedMemory::<Pair<F>>::new_aligned(len, 128usize);
    let mut changes_of = SharedMemory::<Pair<F>>::new_aligned(len, 128usize);
    let copied = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
    begin_copy::<F>(k, &mut own_keys, 0, 0usize, parts[0]);
    begin_copy::<F>(v, &mut own_values, 0, 0usize, parts[1]);

    let mut dk_sums = sums(comptime!(BLOCKS * k_layout.padded() / 16));
    let mut dv_sums = sums(comptime!(BLOCKS * v_layout.padded() / 16));
    let plane = plane_of(blueprint);
    let first_head = head * scalars.group;
    let mut n = tile.first_run;
    let mut member = 0u32;
    let mut block = 0i32;
    let mut step = 0u32;
    let mut done = 0usize;
    let mut done_turn = 0i32;
    if n < tile.last_run {
        let next = run(runs, n);
        let queries = Queries {
            batch: next.q_row,
            head: first_head,
            token: next.q_token,
            count: next.num_queries,
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
            JOINT_QUERIES,
        );
    }
    copied.commit_copy_async();
    copied.arrive();

    while n < tile.last_run {
        let now = run(runs, n);
        let here = place_of(q, &tile, &now, first_head + member, block);
        block += 1;
        if block == now.num_tiles {
            block = 0;
            member += 1;
            if member == scalars.group {
                member = 0;
                n += 1;
            }
        }
        copied.wait_parity(step & 1);
        sync_cube();
        // Every plane has added its part of the share before.
        if step > 0 && UNIT_POS_X == HANDS_ON {
            turns[TURNS + done].store((done_turn + 1) as u32);
        }
        // Asked for now, needed at the end of the products that follow.
        let mut seen = 0u32;
        if UNIT_POS_X == 0 && here.turn > 0 {
            seen = turns[TURNS + here.target].load();
        }
        if n < tile.last_run {
            let next = run(runs, n);
            let queries = Queries {
                batch: next.q_row,
                head: first_head + member,
                token: next.q_token,
                count: next.num_queries,
            };
            copy_queries::<F>(
                q,
                dout,
                rows,
                &mut loaded,
                &queries,
                block * comptime!(JOINT_QUERIES as i32),
                (step + 1) & 1,
                scalars.num_rows,
                column_parts,
                JOINT_QUERIES,
            );
            copied.commit_copy_async();
            copied.arrive();
        }
        let stage = (step & 1) as usize;
        step += 1;
        let count = comptime!(BLOCKS * JOINT_ROWS / 8);
        let mut s = sums(count);
        let mut dp = sums(count);
        let left = operand::<F>(&own_keys.memory, plane.keys, 0usize, parts[0]);
        let right = operand::<F>(&loaded.queries, plane.queries, stage, parts[2]);
        let products = comptime!(Products::new(BLOCKS, JOINT_ROWS, k_layout));
        row_products::<F>(&left, &right, &mut s, products);
        let left = operand::<F>(&own_values.memory, plane.values, 0usize, parts[1]);
        let right = operand::<F>(&loaded.douts, plane.douts, stage, parts[3]);
        let products = comptime!(Products::new(BLOCKS, JOINT_ROWS, v_layout));
        row_products::<F>(&left, &right, &mut dp, products);
        let numbers_at =
            stage * comptime!(2 * JOINT_QUERIES) + (plane.query + UNIT_POS_X % 4 * 2) as usize;
        weights(
            &mut s,
            &mut dp,
            &loaded.numbers,
            numbers_at,
            scalars,
            blueprint,
        );
        mask(&mut s, &now, &here, &plane);
        hand_over::<F>(
            &s,
            &mut weights_of,
            plane.key,
            plane.query,
            BLOCKS,
            JOINT_ROWS,
        );
        times(&mut s, &dp, count);
        hand_over::<F>(
            &s,
            &mut changes_of,
            plane.key,
            plane.query,
            BLOCKS,
            JOINT_ROWS,
        );
        if UNIT_POS_X == 0 && here.turn > 0 {
            while seen != here.turn as u32 {
                seen = turns[TURNS + here.target].load();
            }
        }
        sync_cube();

        let mut dq = sums(comptime!(BLOCKS * k_layout.padded() / 32));
        let right = operand::<F>(&own_keys.memory, plane.weighed_keys, 0usize, parts[0]);
        let sizes = comptime!(Exchanged {
            blocks: BLOCKS,
            rows: JOINT_KEYS,
            columns: k_layout.padded() / 4,
            layout: k_layout,
            transposed: true,
        });
        weigh_exchanged::<F>(&changes_of, plane.share, &right, &mut dq, sizes);
        let right = operand::<F>(&loaded.douts, plane.weighed_douts, stage, parts[3]);
        let sizes = comptime!(by_key(v_layout));
        weigh_exchanged::<F>(&weights_of, plane.weights, &right, &mut dv_sums, sizes);
        let right = operand::<F>(&loaded.queries, plane.weighed_queries, stage, parts[2]);
        let sizes = comptime!(by_key(k_layout));
        weigh_exchanged::<F>(&changes_of, plane.weights, &right, &mut dk_sums, sizes);
        add_share(shares, &dq, here.target, here.turn, k_layout);
        done = here.target;
        done_turn = here.turn;
    }
    sync_cube();
    if step > 0 && UNIT_POS_X == HANDS_ON {
        turns[TURNS + done].store((done_turn + 1) as u32);
    }
    store_half::<F>(dk, &dk_sums, &tile, &plane, scalars.scale, k_layout);
    store_half::<F>(dv, &dv_sums, &tile, &plane, f32::new(1.0), v_layout);
}

/// A plane's part of weights times rows of queries.
fn by_key(layout: Layout) -> Exchanged {
    Exchanged {
        blocks: BLOCKS,
        rows: JOINT_QUERIES,
        columns: layout.padded() / 2,
        layout,
        transposed: false,
    }
}

/// What a plane computes, and where a unit's rows for it are.
#[derive(CubeType, Clone, Copy)]
struct Plane {
    /// Its first key and query.
    key: u32,
    query: u32,
    /// Which half of the dims it has.
    half: u32,
    keys: usize,
    values: usize,
    queries: usize,
    douts: usize,
    weighed_keys: usize,
    weighed_queries: usize,
    weighed_douts: usize,
    weights: usize,
    share: usize,
}

#[cube]
fn plane_of(#[comptime] blueprint: MatrixBlueprint) -> Plane {
    let (k_layout, v_layout) = comptime!((blueprint.keys(), blueprint.values()));
    let (k_stride, v_stride) = comptime!((k_layout.stride(), v_layout.stride()));
    let rows = comptime!(JOINT_ROWS as u32);
    let index = UNIT_POS_X / 32;
    let (key, half) = (index % 4 * rows, index / 4);
    let query = half * rows;
    Plane {
        key,
        query,
        half,
        keys: as_left(key, k_stride),
        values: as_left(key, v_stride),
        queries: as_right(k_stride) + (query * comptime!(k_stride as u32)) as usize,
        douts: as_right(v_stride) + (query * comptime!(v_stride as u32)) as usize,
        weighed_keys: as_weighed(k_stride)
            + (index / 2 * comptime!((k_layout.chunks() / 4) as u32)) as usize,
        weighed_queries: as_weighed(k_stride)
            + (half * comptime!((k_layout.chunks() / 2) as u32)) as usize,
        weighed_douts: as_weighed(v_stride)
            + (half * comptime!((v_layout.chunks() / 2) as u32)) as usize,
        weights: as_left(key, EXCHANGED.stride()),
        share: as_right(EXCHANGED.stride()) + (index % 2 * comptime!(rows / 8)) as usize,
    }
}

/// A step: a tile of queries of a head.
#[derive(CubeType, Clone, Copy)]
struct Here {
    /// Number of the tile and head.
    target: usize,
    /// How many shares it has got before this one.
    turn: i32,
    num_queries: i32,
    /// Its first query's own key.
    own: i32,
}

#[cube]
fn place_of<F: Float>(
    q: &Tensor<Chunk<F>>,
    tile: &JointTile,
    now: &Run,
    head: u32,
    block: i32,
) -> Here {
    let start = block * comptime!(JOINT_QUERIES as i32);
    let num_queries = i32::min(now.num_queries - start, comptime!(JOINT_QUERIES as i32));
    let own = now.own + start;
    // Tiles that the queries see, relative to this one; shifts round down.
    let lowest = i32::max(now.first_key, own - now.left);
    let highest = i32::min(now.last_key - 1, own + num_queries - 1 + now.right);
    let low = lowest >> comptime!(JOINT_KEYS.trailing_zeros() as i32);
    let high = highest >> comptime!(JOINT_KEYS.trailing_zeros() as i32);
    let falling = i32::max(tile.turn_low, low) - low + i32::min(tile.turn_high, high);
    Here {
        target: (now.q_tile + block) as usize * q.shape(1) + head as usize,
        turn: select(tile.rising != 0, -low, falling),
        num_queries,
        own,
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
    #[comptime] blueprint: MatrixBlueprint,
) {
    let tiles = comptime!(JOINT_ROWS / 8);
    #[unroll]
    for j in 0..tiles {
        let mut offsets = Pair32::empty();
        let mut deltas = Pair32::empty();
        #[unroll]
        for e in 0..2usize {
            offsets[e] = -numbers[at + comptime!(j * 8 + e)] * LOG2_E;
            deltas[e] = numbers[at + comptime!(JOINT_QUERIES + j * 8 + e)];
        }
        #[unroll]
        for row in 0..comptime!(2 * BLOCKS) {
            let index = comptime!(row / 2 * tiles + j);
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
fn mask(s: &mut Sequence<Array<Pair32>>, now: &Run, here: &Here, plane: &Plane) {
    let far = comptime!(JOINT_ROWS as i32 - 1);
    let (key, query) = (plane.key as i32, plane.query as i32);
    let own = here.own + query;
    if query + far >= here.num_queries
        || key < now.first_key
        || key + far >= now.last_key
        || key + far > own + now.right
        || key < own + far - now.left
    {
        #[unroll]
        for row in 0..comptime!(2 * BLOCKS) {
            let key = key + (UNIT_POS_X % 32 / 4) as i32 + comptime!((row * 8) as i32);
            let end = i32::min(key + now.left + 1 - own, here.num_queries - query);
            let to = select(key >= now.first_key && key < now.last_key, end, -1);
            keep_columns(
                s,
                key - now.right - own,
                to,
                0.0,
                row,
                comptime!(JOINT_ROWS / 8),
            );
        }
    }
}

/// Stores a plane's half of the dims of its keys, times a factor.
#[cube]
fn store_half<F: Float>(
    to: &mut Tensor<Pair<F>>,
    sums: &Sequence<Array<Pair32>>,
    tile: &JointTile,
    plane: &Plane,
    factor: f32,
    #[comptime] layout: Layout,
) {
    let tiles = comptime!(layout.padded() / 16);
    let first = plane.half * comptime!((layout.padded() / 2) as u32) + UNIT_POS_X % 4 * 2;
    let base = tile.k_row as usize * to.stride(0) + tile.kv_head as usize * to.stride(1);
    #[unroll]
    for row in 0..comptime!(2 * BLOCKS) {
        let key = (plane.key + UNIT_POS_X % 32 / 4) as i32 + comptime!((row * 8) as i32);
        if key >= tile.first_key && key < tile.last_key {
            let token = (tile.k_token + key) as usize;
            let at = (base + token * to.stride(2) + first as usize) / 2;
            #[unroll]
            for j in 0..tiles {
                if first + comptime!((j * 8) as u32) < comptime!(layout.dim as u32) {
                    let sum = sums.index(comptime!(row / 2 * tiles + j))[comptime!(row % 2)];
                    to[at + comptime!(j * 4)] = Pair::<F>::cast_from(sum * Pair32::new(factor));
                }
            }
        }
    }
}
