//! What every backward pass over rows starts from: `delta`, and the gradient of sinks.

use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::{
    ir::StorageType,
    prelude::{CubeCount, CubeDim},
};

use super::tensors::{address_type, arg, as_dtype, empty, sinks_f32, table, unused, vector_size};
use crate::{
    components::{UNITS, scores::NumbersLaunch},
    definition::{AttentionOptions, AttentionProblem},
    kernels::portable::delta as kernels,
};

/// The numbers of a call.
pub(super) fn numbers<R: CubeRuntime>(
    problem: &AttentionProblem,
    options: &AttentionOptions,
) -> NumbersLaunch<R> {
    let dropout = options.dropout;
    let [seed_a, seed_b] = dropout.map_or([0, 0], |dropout| dropout.seeds());
    NumbersLaunch::new(
        options.scale_for(problem.head_dim) as f32,
        options.softcap.unwrap_or(1.0) as f32,
        dropout.map_or(1.0, |dropout| dropout.factor()) as f32,
        dropout.map_or(0, |dropout| dropout.threshold()),
        seed_a,
        seed_b,
        f32::NEG_INFINITY,
    )
}

/// Cubes for `tiles` of `heads`: a dimension may not hold all tiles of a long sequence.
pub(super) fn count<R: CubeRuntime>(like: &CubeTensor<R>, tiles: usize, heads: usize) -> CubeCount {
    let limit = like.client.properties().hardware.max_cube_count.0;
    let across = (tiles as u32).min(limit);
    CubeCount::Static(across, heads as u32, (tiles as u32).div_ceil(across))
}

pub(super) fn dtype(tensor: DType) -> StorageType {
    tensor.into()
}

/// The numbers per row, `[2, q_batch, num_heads, q_tokens]`, and the gradient of the sinks. There are rows, and the last dims of
/// `out` and `dout` are contiguous.
pub(super) fn delta<R: CubeRuntime>(
    problem: &AttentionProblem,
    options: &AttentionOptions,
    [out, dout, lse]: [&CubeTensor<R>; 3],
    sinks: Option<CubeTensor<R>>,
) -> (CubeTensor<R>, Option<CubeTensor<R>>) {
    let [batch, heads, tokens] = problem.lse_shape();
    let num_rows = batch * heads * tokens;
    let rows = empty(out, &[2, batch, heads, tokens], DType::F32);
    let with_sinks = sinks.is_some();
    let sink_dtype = sinks.as_ref().map(|sinks| sinks.dtype);
    let sink_len = if with_sinks { num_rows } else { 1 };
    let per_row = empty(out, &[sink_len], DType::F32);
    let (sinks, num_sinks) = match sinks {
        Some(sinks) => (sinks_f32(sinks).handle, heads),
        None => (unused(&out.client), 1),
    };
    let cubes = num_rows.div_ceil(UNITS);
    // SAFETY: units beyond `num_rows` end at once, and the tensors have the problem's shapes; `rows`
    // and `per_row` are not shared yet.
    unsafe {
        kernels::delta::launch_unchecked(
            &out.client,
            count(out, cubes, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(&[out, dout, &rows]),
            vector_size(&[out, dout]),
            arg(out),
            arg(dout),
            arg(lse),
            table(&sinks, num_sinks),
            table(&rows.handle, 2 * num_rows),
            table(&per_row.handle, sink_len),
            numbers(problem, options),
            num_rows,
            problem.v_head_dim,
            with_sinks,
            [dtype(out.dtype), dtype(dout.dtype)],
        );
    }
    let dsinks = sink_dtype.map(|dtype| {
        let dsinks = empty(out, &[heads], DType::F32);
        // SAFETY: one cube per head, and `per_row` has a number per row of every head.
        unsafe {
            kernels::sum_sinks::launch_unchecked(
                &out.client,
                CubeCount::Static(heads as u32, 1, 1),
                CubeDim::new_1d(UNITS as u32),
                address_type(&[&per_row]),
                table(&per_row.handle, sink_len),
                table(&dsinks.handle, heads),
                heads,
                batch,
                tokens,
            );
        }
        as_dtype(dsinks, dtype)
    });
    (rows, dsinks)
}
