//! The gradients of keys and values.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use crate::components::{
    matrix::{
        Chunk, Copied, KeyPart, LOG2_E, Layout, MatrixBlueprint, Operand, Pair, Pair32, Products,
        SIDE, Scalars, Weighed, as_left, as_right, as_weighed, copy_numbers, copy_rows, first_row,
        keep_columns, operands, row_products, store_rows, sums, times, weigh_ahead, weigh_block,
        weight_pair,
    },
    records::{Visit, key_tile, visit},
    tile::{Place, rows_of},
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
    let (k_stride, v_stride) = comptime!((k_layout.stride(), v_layout.stride()));
    let num_keys = comptime!(blueprint.key_rows());
    let columns = comptime!(blueprint.key_columns);
    let mut k_memory =
        SharedMemory::<Chunk<F>>::new_aligned(comptime!(num_keys * k_stride), 128usize);
    // Values alone need no gradients of weights.
    let v_chunks = comptime!(if part.keys() { num_keys * v_stride } else { 1 });
    let mut v_memory = SharedMemory::<Chunk<F>>::new_aligned(v_chunks, 128usize);
    let mut q_memory =
        SharedMemory::<Chunk<F>>::new_aligned(comptime!(2 * columns * k_stride), 128usize);
    let mut o_memory =
        SharedMemory::<Chunk<F>>::new_aligned(comptime!(2 * columns * v_stride), 128usize);
    let mut numbers = SharedMemory::<f32>::new_aligned(comptime!(4 * columns), 128usize);
    let copied = Barrier::shared(CUBE_DIM, UNIT_POS == 0);

    let k_part = comptime!(Copied {
        layout: k_layout,
        rows: num_keys
    });
    let v_part = comptime!(Copied {
        layout: v_layout,
        rows: num_keys
    });
    let k_rows = rows_of::<F, Const<8>>(k, tile.k_row, kv_head, tile.k_token, 0, tile.num_keys);
    copy_rows::<F>(k, &k_rows, 0, &mut k_memory, 0usize, k_part);
    if comptime!(part.keys()) {
        let v_rows = rows_of::<F, Const<8>>(v, tile.k_row, kv_head, tile.k_token, 0, tile.num_keys);
        copy_rows::<F>(v, &v_rows, 0, &mut v_memory, 0usize, v_part);
    }

    let blocks = comptime!(blueprint.key_blocks);
    let mut dk_sums = sums(comptime!(if part.keys() {
        blocks * k_layout.padded() / 8
    } else {
        0
    }));
    let mut dv_sums = sums(comptime!(if part.values() {
        blocks * v_layout.padded() / 8
    } else {
        0
    }));
    let row = UNIT_POS_X / 32 * comptime!((SIDE * blocks) as u32);
    let k_at = as_left(row, k_stride);
    let v_at = as_left(row, v_stride);
    let q_at = as_right(k_stride);
    let o_at = as_right(v_stride);
    let q_weighed = as_weighed(k_stride);
    let o_weighed = as_weighed(v_stride);

    // Steps go over heads, visits and blocks of queries, so that the first rows of a visit are loaded during the last step before.
    let mut member = 0u32;
    let mut n = tile.first_visit;
    let mut start = 0i32;
    let mut step = 0u32;
    if tile.first_visit == tile.last_visit {
        member = scalars.group;
    } else {
        let now = visit(visits, n);
        let head = kv_head * scalars.group;
        copy_queries::<F>(
            q,
            dout,
            rows,
            &mut q_memory,
            &mut o_memory,
            &mut numbers,
            &now,
            head,
            start,
            0u32,
            scalars,
            blueprint,
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
            let head = kv_head * scalars.group + member;
            copy_queries::<F>(
                q,
                dout,
                rows,
                &mut q_memory,
                &mut o_memory,
                &mut numbers,
                &next,
                head,
                start,
                (step + 1) & 1,
                scalars,
                blueprint,
            );
            copied.commit_copy_async();
            copied.arrive();
        }
        let stage = (step & 1) as usize;
        step += 1;
        let q_from = stage * comptime!(columns * k_stride);
        let o_from = stage * comptime!(columns * v_stride);
        let left = Operand::<F> {
            memory: k_memory,
            at: k_at,
        };
        let right = Operand::<F> {
            memory: q_memory,
            at: q_at + q_from,
        };
        let products = comptime!(Products {
            blocks,
            columns,
            dim: k_layout.padded(),
            stride: k_stride
        });
        let count = comptime!(blocks * columns / 8);
        let mut s = sums(count);
        row_products::<F>(&left, &right, &mut s, products);
        let mut dp = sums(count);
        if comptime!(part.keys()) {
            let left = Operand::<F> {
                memory: v_memory,
                at: v_at,
            };
            let right = Operand::<F> {
                memory: o_memory,
                at: o_at + o_from,
            };
            let products = comptime!(Products {
                dim: v_layout.padded(),
                stride: v_stride,
                ..products
            });
            row_products::<F>(&left, &right, &mut dp, products);
        }
        let at = stage * comptime!(2 * columns) + (UNIT_POS_X % 4 * 2) as usize;
        weights(&mut s, &mut dp, &numbers, at, scalars, part, blueprint);
        let nearest = now.shift - start_now;
        if start_now + columns as i32 > now.num_queries
            || nearest + comptime!(num_keys as i32 - 1) > now.right
            || nearest - comptime!(columns as i32 - 1) + now.left < 0
        {
            mask(&mut s, &now, start_now, blueprint);
        }
        if comptime!(part.values()) {
            let rows = Operand::<F> {
                memory: o_memory,
                at: o_weighed + o_from,
            };
            add::<F>(&s, &rows, &mut dv_sums, blocks, columns, v_layout);
        }
        if comptime!(part.keys()) {
            times(&mut s, &dp, count);
            let rows = Operand::<F> {
                memory: q_memory,
                at: q_weighed + q_from,
            };
            add::<F>(&s, &rows, &mut dk_sums, blocks, columns, k_layout);
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

/// Starts copying queries of a visit from `start` on, and what belongs to them.
#[cube]
fn copy_queries<F: Float>(
    q: &Tensor<Chunk<F>>,
    dout: &Tensor<Chunk<F>>,
    rows: &Array<f32>,
    q_memory: &mut SharedMemory<Chunk<F>>,
    o_memory: &mut SharedMemory<Chunk<F>>,
    numbers: &mut SharedMemory<f32>,
    now: &Visit,
    head: u32,
    start: i32,
    stage: u32,
    scalars: &Scalars,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let columns = comptime!(blueprint.key_columns);
    let (k_layout, v_layout) = comptime!((blueprint.keys(), blueprint.values()));
    let stage = stage as usize;
    let q_to = stage * comptime!(columns * k_layout.stride());
    let o_to = stage * comptime!(columns * v_layout.stride());
    let q_rows = rows_of::<F, Const<8>>(q, now.q_row, head, now.q_token, 0, now.num_queries);
    let o_rows = rows_of::<F, Const<8>>(dout, now.q_row, head, now.q_token, 0, now.num_queries);
    let q_part = comptime!(Copied {
        layout: k_layout,
        rows: columns
    });
    let o_part = comptime!(Copied {
        layout: v_layout,
        rows: columns
    });
    copy_rows::<F>(q, &q_rows, start, q_memory, q_to, q_part);
    copy_rows::<F>(dout, &o_rows, start, o_memory, o_to, o_part);
    let base = (now.q_row as usize * q.shape(1) + head as usize) * q.shape(2);
    let from = base + (now.q_token + start) as usize;
    let len = (now.num_queries - start) as u32;
    let to = stage * comptime!(2 * columns);
    let half = comptime!(columns as u32);
    copy_numbers(rows, from, len, numbers, to, 0u32, half);
    copy_numbers(
        rows,
        from + scalars.num_rows,
        len,
        numbers,
        to + columns,
        half,
        half,
    );
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

/// Clears the weights of queries that do not see a key.
#[cube]
fn mask(
    s: &mut Sequence<Array<Pair32>>,
    now: &Visit,
    start: i32,
    #[comptime] blueprint: MatrixBlueprint,
) {
    let blocks = comptime!(blueprint.key_blocks);
    #[unroll]
    for row in 0..comptime!(2 * blocks) {
        let key = first_row(blocks) as i32 + comptime!((row * 8) as i32) + now.shift - start;
        let to = i32::min(key + now.left + 1, now.num_queries - start);
        let from = key - now.right;
        keep_columns(s, from, to, 0.0, row, comptime!(blueprint.key_columns / 8));
    }
}

/// Adds weighed rows to sums.
#[cube]
fn add<F: Float>(
    s: &Sequence<Array<Pair32>>,
    rows: &Operand<F>,
    sums: &mut Sequence<Array<Pair32>>,
    #[comptime] blocks: usize,
    #[comptime] columns: usize,
    #[comptime] layout: Layout,
) {
    let weighed = comptime!(Weighed {
        blocks,
        rows: columns,
        dim: layout.padded(),
        stride: layout.stride()
    });
    let mut loaded = weigh_ahead::<F>(rows);
    #[unroll]
    for block in 0..comptime!(columns / SIDE) {
        let weights = operands::<F>(s, blocks, comptime!(columns / 8), comptime!(block * 2));
        weigh_block::<F>(&weights, rows, &mut loaded, sums, block, weighed);
    }
}
