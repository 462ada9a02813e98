//! Asynchronous copies of rows into shared memory.

use cubecl::prelude::barrier::{copy_async, copy_async_checked};
use cubecl::prelude::*;

use super::{CHUNK, Chunk, Layout, Operand, UNITS};
use crate::components::tile::{Rows, rows_of};

/// What is copied where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Copied {
    layout: Layout,
    /// Number of rows.
    rows: usize,
    /// Units that copy.
    units: usize,
}

impl Copied {
    /// By cubes of [`UNITS`].
    pub(crate) fn new(layout: Layout, rows: usize) -> Self {
        Self::by(UNITS, layout, rows)
    }

    pub(crate) fn by(units: usize, layout: Layout, rows: usize) -> Self {
        Self {
            layout,
            rows,
            units,
        }
    }

    /// Chunks that the rows take.
    fn len(&self) -> usize {
        self.rows * self.layout.stride()
    }
}

/// Rows of a tensor and the memory that they are copied to, some at a time.
#[derive(CubeType)]
pub(crate) struct Held<F: Float> {
    pub(crate) rows: Rows,
    pub(crate) memory: SharedMemory<Chunk<F>>,
}

/// Rows from `token` on, of which `first..last` are loaded, and memory for `stages` times as many as are copied at a time.
#[cube]
pub(crate) fn held<F: Float>(
    tensor: &Tensor<Chunk<F>>,
    batch: i32,
    head: u32,
    token: i32,
    first: i32,
    last: i32,
    #[comptime] stages: usize,
    #[comptime] copied: Copied,
) -> Held<F> {
    Held::<F> {
        rows: rows_of::<F, Const<8>>(tensor, batch, head, token, first, last),
        memory: memory_of::<F>(stages, copied),
    }
}

/// Memory for `stages` times as many rows as are copied at a time.
#[cube]
pub(crate) fn memory_of<F: Float>(
    #[comptime] stages: usize,
    #[comptime] copied: Copied,
) -> SharedMemory<Chunk<F>> {
    SharedMemory::<Chunk<F>>::new_aligned(comptime!(stages * copied.len()), 128usize)
}

/// Starts copying the rows from `skip` on to a stage.
#[cube]
pub(crate) fn begin_copy<F: Float>(
    from: &Tensor<Chunk<F>>,
    held: &mut Held<F>,
    skip: i32,
    stage: usize,
    #[comptime] copied: Copied,
) {
    let start = stage * comptime!(copied.len());
    copy_rows::<F>(from, &held.rows, skip, &mut held.memory, start, copied);
}

/// A stage as an operand, given where a unit's row is.
#[cube]
pub(crate) fn operand<F: Float>(
    memory: &SharedMemory<Chunk<F>>,
    at: usize,
    stage: usize,
    #[comptime] copied: Copied,
) -> Operand<F> {
    Operand::<F> {
        memory: *memory,
        at: at + stage * comptime!(copied.len()),
    }
}

/// Starts copying the rows from row `skip` on to `to` from chunk `start` on. Rows that are not to be loaded, and what
/// the vectors lack to whole products, become 0.
#[cube]
fn copy_rows<F: Float>(
    from: &Tensor<Chunk<F>>,
    rows: &Rows,
    skip: i32,
    to: &mut SharedMemory<Chunk<F>>,
    start: usize,
    #[comptime] copied: Copied,
) {
    let first = rows.first - skip;
    let last = rows.last - skip;
    let whole = first <= 0 && last >= comptime!(copied.rows as i32);
    let filled = comptime!(copied.layout.dim / CHUNK == copied.layout.chunks());
    if whole && filled {
        copy_items(from, rows, skip, to, start, false, copied);
    } else {
        copy_items(from, rows, skip, to, start, true, copied);
    }
}

#[cube]
fn copy_items<F: Float>(
    from: &Tensor<Chunk<F>>,
    rows: &Rows,
    skip: i32,
    to: &mut SharedMemory<Chunk<F>>,
    start: usize,
    #[comptime] checked: bool,
    #[comptime] copied: Copied,
) {
    let chunks = comptime!(copied.layout.chunks());
    let stride = comptime!(copied.layout.stride());
    let total = comptime!(copied.rows * chunks);
    let units = comptime!(copied.units);
    if comptime!(units.is_multiple_of(chunks) && total.is_multiple_of(units)) {
        // Every unit stays in its column: the rows are a fixed number apart.
        let apart = comptime!(units / chunks);
        let row = UNIT_POS_X / comptime!(chunks as u32);
        let chunk = UNIT_POS_X % comptime!(chunks as u32);
        let at = start + (row * comptime!(stride as u32) + chunk) as usize;
        let token = rows.token + skip + row as i32;
        let mut source = rows.base + chunk as usize + token as usize * rows.stride;
        let further = rows.stride * apart;
        #[unroll]
        for step in 0..comptime!(total / units) {
            let item = Item {
                row: skip + row as i32 + comptime!((step * apart) as i32),
                chunk,
                from: source,
                to: at + comptime!(step * apart * stride),
            };
            copy_item(from, rows, &item, to, checked, copied.layout);
            source += further;
        }
    } else {
        #[unroll]
        for step in 0..comptime!(total.div_ceil(units)) {
            let index = UNIT_POS_X + comptime!((step * units) as u32);
            if index < comptime!(total as u32) {
                let row = index / comptime!(chunks as u32);
                let chunk = index % comptime!(chunks as u32);
                let token = rows.token + skip + row as i32;
                let item = Item {
                    row: skip + row as i32,
                    chunk,
                    from: rows.base + token as usize * rows.stride + chunk as usize,
                    to: start + (row * comptime!(stride as u32) + chunk) as usize,
                };
                copy_item(from, rows, &item, to, checked, copied.layout);
            }
        }
    }
}

/// A chunk on its way.
#[derive(CubeType, Clone, Copy)]
struct Item {
    row: i32,
    chunk: u32,
    from: usize,
    to: usize,
}

#[cube]
fn copy_item<F: Float>(
    from: &Tensor<Chunk<F>>,
    rows: &Rows,
    item: &Item,
    to: &mut SharedMemory<Chunk<F>>,
    #[comptime] checked: bool,
    #[comptime] layout: Layout,
) {
    let target = item.to;
    if comptime!(checked) {
        let wanted = item.row >= rows.first
            && item.row < rows.last
            && item.chunk < comptime!((layout.dim / CHUNK) as u32);
        // Nothing is read for a length of 0, but the address must be one of the tensor's.
        let source = select(wanted, item.from, rows.base);
        let end = source + select(wanted, 1usize, 0usize);
        copy_async_checked(
            &from.slice(source, end),
            &mut to.slice_mut(target, target + 1),
            comptime!(CHUNK as u32),
        );
    } else {
        let source = item.from;
        copy_async(
            &from.slice(source, source + 1),
            &mut to.slice_mut(target, target + 1),
            comptime!(CHUNK as u32),
        );
    }
}

/// Starts copying `count` numbers from `start` on, the last of `len` again where there are fewer. Units copy one each: those from
/// `unit` on, `count` of them.
#[cube]
pub(crate) fn copy_numbers(
    from: &Array<f32>,
    start: usize,
    len: u32,
    to: &mut SharedMemory<f32>,
    at: usize,
    #[comptime] unit: u32,
    #[comptime] count: u32,
) {
    if UNIT_POS_X >= unit && UNIT_POS_X < comptime!(unit + count) {
        let index = UNIT_POS_X - unit;
        let source = start + u32::min(index, len - 1) as usize;
        let target = at + index as usize;
        copy_async(
            &from.slice(source, source + 1),
            &mut to.slice_mut(target, target + 1),
            1u32,
        );
    }
}
