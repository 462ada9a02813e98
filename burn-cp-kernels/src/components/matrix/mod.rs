//! Parts of kernels for matrix units: fragments of rows in shared memory, products of them, copies.
//!
//! A plane has some blocks of 16 rows of the left operand. Its sums are, per block and 8 columns, two pairs per unit: columns
//! `2 (lane % 4)` and the next, of rows `lane / 4` and `lane / 4 + 8`. Operands are 16-bit floats, sums f32.

mod blueprint;
mod copy;
mod exchange;
mod product;
mod records;
mod rows;

pub(crate) use blueprint::{
    CHUNK, EXCHANGED, JOINT_KEYS, JOINT_QUERIES, JOINT_ROWS, JOINT_UNITS, KeyPart, Layout,
    MatrixBlueprint, QUERY_COLUMNS, SIDE, UNITS,
};
pub(crate) use copy::{Copied, Held, begin_copy, copy_numbers, held, memory_of, operand};
pub(crate) use exchange::{Exchanged, hand_over, weigh_exchanged};
pub(crate) use product::{
    Operand, Products, Weighed, as_left, as_right, as_weighed, row_products, sums, weigh_ahead,
    weigh_block, weigh_rows,
};
pub(crate) use records::{JOINT_FIELDS, JointTile, Run, joint_tile, run};
pub(crate) use rows::{
    cap, exponent, first_row, keep_columns, operands, store_row, store_rows, times, weight_pair,
};

use cubecl::prelude::*;

/// Eight numbers of a row.
pub(crate) type Chunk<F> = Vector<F, Const<8>>;
/// Two numbers of an operand.
pub(crate) type Pair<F> = Vector<F, Const<2>>;
/// Two numbers of sums.
pub(crate) type Pair32 = Vector<f32, Const<2>>;

/// Four numbers of sums: two pairs.
pub(crate) type Quad32 = Vector<f32, Const<4>>;

/// log2(e).
pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// `2^x`, and 0 where that is not a normal number.
///
/// CubeCL has no such function. The launch defines the name that CubeCL gives to a fast exponential,
/// which nothing else in these kernels uses, as this one.
#[cube(fast_math = FastMath::all())]
pub(crate) fn exp2(x: f32) -> f32 {
    f32::exp(x)
}

/// `a / b` but for the last bits.
#[cube(fast_math = FastMath::all())]
pub(crate) fn quotient(a: f32, b: f32) -> f32 {
    a / b
}

/// `tanh(x)` but for the last bits; near 0, where the digits of the other form cancel, by its series, to 3e-7 at the limit.
#[cube]
pub(crate) fn tanh(x: f32) -> f32 {
    let power = exp2(x * comptime!(2.0 * LOG2_E));
    let far = f32::new(1.0) - quotient(f32::new(2.0), power + f32::new(1.0));
    let y = x * x;
    let seventh = y * comptime!(-17.0f32 / 315.0) + comptime!(2.0f32 / 15.0);
    let series = x * y * (y * seventh - comptime!(1.0f32 / 3.0)) + x;
    select(f32::abs(x) < f32::new(0.25), series, far)
}

/// Numbers of a call that kernels do not have compiled in.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Scalars {
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    /// Not to be had as a constant.
    pub(crate) minus_infinity: f32,
    pub(crate) num_tiles: u32,
    pub(crate) group: u32,
    /// Query rows times heads.
    pub(crate) num_rows: usize,
}
