//! Numbers per query row that the backward pass starts from.

use cubecl::prelude::*;

use crate::components::{UNITS, scores::Numbers, tile::V4};

/// One row of one head per unit: `rows` gets, in planes of `[batch, num_heads, tokens]`, the
/// log-sum-exp with the sink and `delta = Σ dout · out`; with sinks, `sink_rows` the row's share of the
/// gradient of the sink.
///
/// The sum runs in the order of the products of `dout` and `v`, so that where a query has all its weight
/// on one key, `out` is that key's value and the gradient of its score 0 exactly.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn delta<O: Float, G: Float, N: Size>(
    out: &Tensor<Vector<O, N>>,
    dout: &Tensor<Vector<G, N>>,
    lse: &Tensor<f32>,
    sinks: &Array<f32>,
    rows: &mut Array<f32>,
    sink_rows: &mut Array<f32>,
    numbers: Numbers,
    num_rows: usize,
    #[comptime] dim: usize,
    #[comptime] with_sinks: bool,
    #[define(O, G)] _dtypes: [StorageType; 2],
) {
    let row = ABSOLUTE_POS;
    if row >= num_rows {
        terminate!();
    }
    let token = row % lse.shape(2);
    let head = row / lse.shape(2) % lse.shape(1);
    let batch = row / lse.shape(2) / lse.shape(1);
    let size = N::value();
    let o_at = (batch * out.stride(0) + head * out.stride(1) + token * out.stride(2)) / size;
    let g_at = (batch * dout.stride(0) + head * dout.stride(1) + token * dout.stride(2)) / size;
    let mut sum = f32::new(0.0);
    for at in 0..comptime!(dim / 4) {
        let o = four::<O, N>(out, o_at, at);
        let g = four::<G, N>(dout, g_at, at);
        #[unroll]
        for e in 0..4usize {
            sum = fma(g[e], o[e], sum);
        }
    }
    let alone = lse[batch * lse.stride(0) + head * lse.stride(1) + token * lse.stride(2)];
    let mut total = alone;
    if comptime!(with_sinks) {
        let sink = sinks[head];
        let max = f32::max(alone, sink);
        total = max + f32::ln(f32::exp(alone - max) + f32::exp(sink - max));
        let share = f32::exp(sink - total) * sum;
        let blind = alone == numbers.minus_infinity;
        sink_rows[row] = select(blind, f32::new(0.0), -share);
    }
    // A row without keys takes part in no product. 0 keeps its masked scores small.
    let blind = alone == numbers.minus_infinity;
    rows[row] = select(blind, f32::new(0.0), total);
    rows[num_rows + row] = sum;
}

#[cube]
fn four<F: Float, N: Size>(from: &Tensor<Vector<F, N>>, base: usize, at: usize) -> V4 {
    let size = N::value();
    let mut value = V4::new(0.0f32);
    if comptime!(size == 4) {
        value = V4::cast_from(from[base + at]);
    } else {
        #[unroll]
        for j in 0..4usize {
            value[j] = f32::cast_from(from[base + at * 4 + j]);
        }
    }
    value
}

/// One head per cube: the sum of its rows, in one order.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sum_sinks(
    sink_rows: &Array<f32>,
    dsinks: &mut Array<f32>,
    num_heads: usize,
    num_batches: usize,
    num_tokens: usize,
) {
    let head = CUBE_POS_X as usize;
    let mut partial = SharedMemory::<f32>::new(UNITS);
    let mut sum = f32::new(0.0);
    for batch in 0..num_batches {
        let base = (batch * num_heads + head) * num_tokens;
        for step in 0..num_tokens.div_ceil(UNITS) {
            let token = step * UNITS + UNIT_POS as usize;
            if token < num_tokens {
                sum += sink_rows[base + token];
            }
        }
    }
    partial[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = f32::new(0.0);
        for unit in 0..UNITS {
            total += partial[unit];
        }
        dsinks[head] = total;
    }
}
