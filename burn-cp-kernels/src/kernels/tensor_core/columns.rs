//! Columns of the gradients of keys and values: queries, what came back for them, and their numbers, two blocks at a time.

use cubecl::prelude::*;

use crate::components::{
    matrix::{Chunk, Copied, Held, begin_copy, copy_numbers, memory_of},
    tile::rows_of,
};

/// What is loaded for every step.
#[derive(CubeType)]
pub(super) struct Columns<F: Float> {
    pub(super) queries: SharedMemory<Chunk<F>>,
    pub(super) douts: SharedMemory<Chunk<F>>,
    pub(super) numbers: SharedMemory<f32>,
}

/// Memory for two blocks of `columns` queries, which are copied as `parts` say.
#[cube]
pub(super) fn columns_of<F: Float>(
    #[comptime] parts: [Copied; 2],
    #[comptime] columns: usize,
) -> Columns<F> {
    Columns::<F> {
        queries: memory_of::<F>(2usize, parts[0]),
        douts: memory_of::<F>(2usize, parts[1]),
        numbers: SharedMemory::<f32>::new_aligned(comptime!(4 * columns), 128usize),
    }
}

/// Queries of one head: a batch row, the first one's token, and how many there are.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Queries {
    pub(super) batch: i32,
    pub(super) head: u32,
    pub(super) token: i32,
    pub(super) count: i32,
}

/// Starts copying queries from `start` on to a stage, and what belongs to them. `rows` is that of the portable routine's `delta`, which has
/// two times `num_rows` numbers.
#[cube]
pub(super) fn copy_queries<F: Float>(
    q: &Tensor<Chunk<F>>,
    dout: &Tensor<Chunk<F>>,
    rows: &Array<f32>,
    to: &mut Columns<F>,
    from: &Queries,
    start: i32,
    stage: u32,
    num_rows: usize,
    #[comptime] parts: [Copied; 2],
    #[comptime] columns: usize,
) {
    let stage = stage as usize;
    let (batch, head, token, last) = (from.batch, from.head, from.token, from.count);
    let mut queries = Held::<F> {
        rows: rows_of::<F, Const<8>>(q, batch, head, token, 0, last),
        memory: to.queries,
    };
    let mut douts = Held::<F> {
        rows: rows_of::<F, Const<8>>(dout, batch, head, token, 0, last),
        memory: to.douts,
    };
    begin_copy::<F>(q, &mut queries, start, stage, parts[0]);
    begin_copy::<F>(dout, &mut douts, start, stage, parts[1]);
    let base = (batch as usize * q.shape(1) + head as usize) * q.shape(2);
    let from = base + (token + start) as usize;
    let len = (last - start) as u32;
    let at = stage * comptime!(2 * columns);
    let half = comptime!(columns as u32);
    let numbers = &mut to.numbers;
    copy_numbers(rows, from, len, numbers, at, 0u32, half);
    let from = from + num_rows;
    copy_numbers(rows, from, len, numbers, at + columns, half, half);
}
