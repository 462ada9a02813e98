//! Tiles of rows in shared memory, and the two products of attention.
//!
//! Every sum runs in one order that depends on no size but the vectors', one fused multiply-add after
//! the other: results do not depend on how a document is cut, and rows and columns that are filled up
//! with zeros change nothing.

use cubecl::prelude::*;

use super::{Blueprint, COLUMNS, Columns, LANES, UNITS};

/// Vectors of four dims that are multiplied in one turn of a loop.
const MULTIPLIED: usize = 4;
/// Vectors of four rows that are weighed in one turn of a loop.
const WEIGHED: usize = 2;

/// Four numbers.
pub(crate) type V4 = Vector<f32, Const<4>>;

/// Rows of a tensor for one batch row and head, counted from some token. Offsets in vectors.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) base: usize,
    pub(crate) stride: usize,
    /// Token of row 0.
    pub(crate) token: i32,
    /// Rows that are loaded, half-open; the others are 0.
    pub(crate) first: i32,
    pub(crate) last: i32,
}

/// Rows from `token` on, of which `first..last` are loaded.
#[cube]
pub(crate) fn rows_of<F: Float, N: Size>(
    tensor: &Tensor<Vector<F, N>>,
    batch: i32,
    head: u32,
    token: i32,
    first: i32,
    last: i32,
) -> Rows {
    let size = N::value();
    let base = batch as usize * tensor.stride(0) + head as usize * tensor.stride(1);
    Rows {
        base: base / size,
        stride: tensor.stride(2) / size,
        token,
        first,
        last,
    }
}

/// What part of some rows goes where in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Part {
    /// First vector in shared memory.
    to: usize,
    rows: usize,
    /// Vectors of four per row.
    vectors: usize,
    /// Vectors in shared memory from one row to the next.
    stride: usize,
    /// Dims of the tensor.
    dim: usize,
    /// Whether rows are stored so that the four neighbouring columns of a unit lie `LANES` apart.
    interleaved: bool,
}

/// Loads `part` of the rows from row `skip` and vector of four `start` on, as f32.
#[cube]
fn load<F: Float, N: Size>(
    from: &Tensor<Vector<F, N>>,
    rows: &Rows,
    skip: i32,
    start: usize,
    to: &mut SharedMemory<V4>,
    #[comptime] part: Part,
) {
    // Most tiles lie within what is to be loaded.
    let whole = rows.first <= skip && rows.last >= skip + comptime!(part.rows as i32);
    if whole && comptime!(part.dim.is_multiple_of(4 * part.vectors)) {
        load_items(from, rows, skip, start, to, false, part);
    } else {
        load_items(from, rows, skip, start, to, true, part);
    }
}

#[cube]
fn load_items<F: Float, N: Size>(
    from: &Tensor<Vector<F, N>>,
    rows: &Rows,
    skip: i32,
    start: usize,
    to: &mut SharedMemory<V4>,
    #[comptime] checked: bool,
    #[comptime] part: Part,
) {
    let total = comptime!(part.rows * part.vectors);
    #[unroll]
    for step in 0..comptime!(total.div_ceil(UNITS)) {
        let item = UNIT_POS as usize + comptime!(step * UNITS);
        if comptime!((step + 1) * UNITS <= total) {
            load_item(from, rows, skip, start, to, item, checked, part);
        } else {
            if item < total {
                load_item(from, rows, skip, start, to, item, checked, part);
            }
        }
    }
}

#[cube]
fn load_item<F: Float, N: Size>(
    from: &Tensor<Vector<F, N>>,
    rows: &Rows,
    skip: i32,
    start: usize,
    to: &mut SharedMemory<V4>,
    item: usize,
    #[comptime] checked: bool,
    #[comptime] part: Part,
) {
    let place = item / comptime!(part.vectors);
    let vector = item % comptime!(part.vectors);
    let row = if comptime!(part.interleaved) {
        (place % LANES) * 4 + place / LANES
    } else {
        place
    };
    let row = row as i32 + skip;
    let at = start + vector;
    let mut value = V4::new(0.0f32);
    if comptime!(checked) {
        if row >= rows.first && row < rows.last && at < comptime!(part.dim / 4) {
            value = four::<F, N>(from, rows, row, at);
        }
    } else {
        value = four::<F, N>(from, rows, row, at);
    }
    to[place * comptime!(part.stride) + vector + comptime!(part.to)] = value;
}

/// Vector of four `at` of a row.
#[cube]
fn four<F: Float, N: Size>(from: &Tensor<Vector<F, N>>, rows: &Rows, row: i32, at: usize) -> V4 {
    let index = rows.base + (rows.token + row) as usize * rows.stride;
    let size = N::value();
    let mut value = V4::new(0.0f32);
    if comptime!(size == 4) {
        value = V4::cast_from(from[index + at]);
    } else {
        #[unroll]
        for j in 0..4usize {
            value[j] = f32::cast_from(from[index + at * 4 + j]);
        }
    }
    value
}

/// `sums[i, j] += a[row i] · b[column j]`: rows `unit / 16 + 16 i` of `a`, columns
/// `unit % 16 * 4 + j` of `b`, over all dims.
#[cube]
pub(crate) fn products<F: Float, G: Float, N: Size>(
    a: &Tensor<Vector<F, N>>,
    a_rows: &Rows,
    b: &Tensor<Vector<G, N>>,
    b_rows: &Rows,
    stage: &mut SharedMemory<V4>,
    sums: &mut Array<f32>,
    #[comptime] dim: usize,
    #[comptime] blueprint: Blueprint,
) {
    let vectors = comptime!(blueprint.dim_chunk / 4);
    let stride = comptime!(blueprint.chunk_stride());
    let rows = comptime!(blueprint.rows());
    let a_part = comptime!(Part {
        to: 0,
        rows,
        vectors,
        stride,
        dim,
        interleaved: false
    });
    let b_part = comptime!(Part {
        to: rows * stride,
        rows: COLUMNS,
        interleaved: true,
        ..a_part
    });
    for chunk in 0..comptime!(dim.div_ceil(blueprint.dim_chunk)) {
        let start = chunk * vectors;
        load::<F, N>(a, a_rows, 0, start, stage, a_part);
        load::<G, N>(b, b_rows, 0, start, stage, b_part);
        sync_cube();
        multiply(stage, sums, blueprint);
        sync_cube();
    }
}

#[cube]
fn multiply(stage: &SharedMemory<V4>, sums: &mut Array<f32>, #[comptime] blueprint: Blueprint) {
    let stride = comptime!(blueprint.chunk_stride());
    let per_unit = comptime!(blueprint.rows_per_unit);
    let a_at = (UNIT_POS as usize / LANES) * stride;
    let b_at = (UNIT_POS as usize % LANES) * stride + comptime!(blueprint.rows() * stride);
    // Not all at once: units that hold fewer numbers leave room for another cube beside theirs.
    let steps = comptime!(blueprint.dim_chunk / 4);
    let inner = comptime!(steps.min(MULTIPLIED));
    for outer in 0..comptime!(steps / inner) {
        let a_at = a_at + outer * inner;
        let b_at = b_at + outer * inner;
        #[unroll]
        for d in 0..inner {
            let mut a = Array::<V4>::new(per_unit);
            #[unroll]
            for i in 0..per_unit {
                a[i] = stage[a_at + comptime!(i * LANES * stride + d)];
            }
            #[unroll]
            for j in 0..4usize {
                let b = stage[b_at + comptime!(j * LANES * stride + d)];
                #[unroll]
                for i in 0..per_unit {
                    let x = a[i];
                    let mut sum = sums[comptime!(i * 4 + j)];
                    #[unroll]
                    for e in 0..4usize {
                        sum = fma(x[e], b[e], sum);
                    }
                    sums[comptime!(i * 4 + j)] = sum;
                }
            }
        }
    }
}

/// `sums[i, c] += Σ weights[row i, r] · b[r, column c]` over the `COLUMNS` rows of `b`, with rows and
/// columns as [`Columns`] says.
#[cube]
pub(crate) fn weigh<F: Float, N: Size>(
    b: &Tensor<Vector<F, N>>,
    b_rows: &Rows,
    weights: &SharedMemory<V4>,
    stage: &mut SharedMemory<V4>,
    sums: &mut Array<V4>,
    #[comptime] dim: usize,
    #[comptime] blueprint: Blueprint,
) {
    let columns = comptime!(blueprint.columns(dim));
    let rows = comptime!(blueprint.row_chunk);
    let vectors = comptime!(columns.lanes * columns.vectors);
    let part = comptime!(Part {
        to: 0,
        rows,
        vectors,
        stride: vectors,
        dim,
        interleaved: false
    });
    for chunk in 0..comptime!(COLUMNS / rows) {
        let skip = (chunk * rows) as i32;
        load::<F, N>(b, b_rows, skip, 0usize, stage, part);
        sync_cube();
        accumulate(
            weights,
            stage,
            sums,
            chunk * comptime!(rows / 4),
            columns,
            blueprint,
        );
        sync_cube();
    }
}

#[cube]
fn accumulate(
    weights: &SharedMemory<V4>,
    stage: &SharedMemory<V4>,
    sums: &mut Array<V4>,
    start: usize,
    #[comptime] columns: Columns,
    #[comptime] blueprint: Blueprint,
) {
    let stride = comptime!(blueprint.weight_stride());
    let width = comptime!(columns.lanes * columns.vectors);
    let apart = comptime!(UNITS / columns.lanes * stride);
    let w_at = (UNIT_POS as usize / comptime!(columns.lanes)) * stride + start;
    let b_at = UNIT_POS as usize % comptime!(columns.lanes);
    let steps = comptime!(blueprint.row_chunk / 4);
    let inner = comptime!(steps.min(WEIGHED));
    for outer in 0..comptime!(steps / inner) {
        let w_at = w_at + outer * inner;
        let b_at = b_at + outer * comptime!(4 * inner * width);
        #[unroll]
        for r in 0..inner {
            let mut w = Array::<V4>::new(comptime!(columns.rows));
            #[unroll]
            for i in 0..comptime!(columns.rows) {
                w[i] = weights[w_at + comptime!(i * apart + r)];
            }
            #[unroll]
            for e in 0..4usize {
                #[unroll]
                for c in 0..comptime!(columns.vectors) {
                    let b = stage[b_at + comptime!((r * 4 + e) * width + c * columns.lanes)];
                    #[unroll]
                    for i in 0..comptime!(columns.rows) {
                        let x = w[i];
                        let at = comptime!(i * columns.vectors + c);
                        sums[at] = fma(V4::new(x[e]), b, sums[at]);
                    }
                }
            }
        }
    }
}

/// Numbers that are all 0.
#[cube]
pub(crate) fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = f32::new(0.0);
    }
    array
}

/// Sums for [`weigh`] that are all 0.
#[cube]
pub(crate) fn zero_sums(#[comptime] dim: usize, #[comptime] blueprint: Blueprint) -> Array<V4> {
    let columns = comptime!(blueprint.columns(dim));
    let len = comptime!(columns.rows * columns.vectors);
    let mut array = Array::<V4>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = V4::new(0.0f32);
    }
    array
}

/// Stores the sums of [`weigh`], times a factor for all, in the first `num_rows` rows from `token` on.
#[cube]
pub(crate) fn store<F: Float>(
    to: &mut Tensor<Vector<F, Const<4>>>,
    sums: &Array<V4>,
    place: &Place,
    factor: f32,
    #[comptime] dim: usize,
    #[comptime] blueprint: Blueprint,
) {
    let columns = comptime!(blueprint.columns(dim));
    let base = place.batch as usize * to.stride(0) + place.head as usize * to.stride(1);
    let stride = to.stride(2);
    let vector = UNIT_POS as usize % comptime!(columns.lanes);
    #[unroll]
    for i in 0..comptime!(columns.rows) {
        let row = UNIT_POS / comptime!(columns.lanes as u32)
            + comptime!((i * UNITS / columns.lanes) as u32);
        if (row as i32) < place.num_rows {
            let at = (base + (place.token + row as i32) as usize * stride) / 4;
            #[unroll]
            for c in 0..comptime!(columns.vectors) {
                let column = vector + comptime!(c * columns.lanes);
                if column < comptime!(dim / 4) {
                    let value = sums[comptime!(i * columns.vectors + c)] * V4::new(factor);
                    to[at + column] = Vector::cast_from(value);
                }
            }
        }
    }
}

/// Where [`store`] stores.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) batch: i32,
    pub(crate) head: u32,
    pub(crate) token: i32,
    pub(crate) num_rows: i32,
}
