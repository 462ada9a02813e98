//! Launches of the portable routine.

use burn::tensor::DType;
use burn_cubecl::{
    CubeRuntime,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use cubecl::{
    ir::StorageType,
    prelude::{CubeCount, CubeDim},
};

use super::{
    schedule::{Tables, tables},
    tensors::{
        address_type, arg, empty, empty_like, filled, table, unused, vector_size,
        with_contiguous_dim,
    },
};
use crate::{
    components::{
        Blueprint, Features, KEY_TILE_FIELDS, ROW_TILE_FIELDS, UNITS, VISIT_FIELDS,
        scores::NumbersLaunch,
    },
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, Segments,
    },
    kernels::portable as kernels,
    routines::portable::blueprint,
};

/// What the launches of one call share.
struct Call<'a, R: CubeRuntime> {
    problem: &'a AttentionProblem,
    options: &'a AttentionOptions,
    blueprint: Blueprint,
    tables: Tables,
    like: CubeTensor<R>,
}

impl<'a, R: CubeRuntime> Call<'a, R> {
    fn new(
        like: &CubeTensor<R>,
        problem: &'a AttentionProblem,
        segments: &Segments,
        options: &'a AttentionOptions,
        sinks: bool,
    ) -> Result<Self, AttentionError> {
        let features = Features {
            softcap: options.softcap.is_some(),
            dropout: options.dropout.is_some(),
            sinks,
        };
        let shared = like.client.properties().hardware.max_shared_memory_size;
        let blueprint = blueprint(problem, features, shared)?;
        let tables = tables(&like.client, &like.device, segments, blueprint.rows())?;
        Ok(Self {
            problem,
            options,
            blueprint,
            tables,
            like: like.clone(),
        })
    }

    fn numbers(&self) -> NumbersLaunch<R> {
        let dropout = self.options.dropout;
        let [seed_a, seed_b] = dropout.map_or([0, 0], |dropout| dropout.seeds());
        NumbersLaunch::new(
            self.options.scale_for(self.problem.head_dim) as f32,
            self.options.softcap.unwrap_or(1.0) as f32,
            dropout.map_or(1.0, |dropout| dropout.factor()) as f32,
            dropout.map_or(0, |dropout| dropout.threshold()),
            seed_a,
            seed_b,
            f32::NEG_INFINITY,
        )
    }

    /// Cubes for `tiles` of `heads`: a dimension may not hold all tiles of a long sequence.
    fn count(&self, tiles: usize, heads: usize) -> CubeCount {
        let limit = self.like.client.properties().hardware.max_cube_count.0;
        let across = (tiles as u32).min(limit);
        CubeCount::Static(across, heads as u32, (tiles as u32).div_ceil(across))
    }

    fn num_rows(&self) -> usize {
        self.problem.lse_shape().iter().product()
    }

    fn group(&self) -> u32 {
        self.problem.group() as u32
    }
}

fn dtype(tensor: DType) -> StorageType {
    tensor.into()
}

fn cube_dim() -> CubeDim {
    CubeDim::new_1d(UNITS as u32)
}

/// Sinks as kernels read them.
fn sinks_f32<R: CubeRuntime>(sinks: CubeTensor<R>) -> CubeTensor<R> {
    let sinks = match sinks.dtype {
        DType::F32 => sinks,
        _ => cast(sinks, DType::F32),
    };
    into_contiguous(sinks)
}

/// The forward pass of a checked call.
pub(crate) fn forward<R: CubeRuntime>(
    input: AttentionInput<CubeTensor<R>>,
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionOutput<CubeTensor<R>>, AttentionError> {
    let call = Call::new(&input.q, problem, segments, options, input.sinks.is_some())?;
    let [q, k, v] = [input.q, input.k, input.v].map(with_contiguous_dim);
    let out = empty_like(&q, problem.out_shape(), q.dtype);
    let lse = empty(&q, &problem.lse_shape(), DType::F32);
    let tiles = call.tables.num_row_tiles;
    if problem.k_tokens * problem.k_batch == 0 {
        // Nothing to bind: devices refuse empty buffers.
        let zero = filled(&q, problem.out_shape().into(), 0.0, q.dtype);
        let blind = filled(
            &q,
            problem.lse_shape().into(),
            f32::NEG_INFINITY,
            DType::F32,
        );
        return Ok(AttentionOutput::new(zero, blind));
    }
    if tiles > 0 {
        let num_sinks = input.sinks.as_ref().map_or(1, |_| problem.num_heads);
        let sinks = match input.sinks {
            Some(sinks) => sinks_f32(sinks).handle,
            None => unused(&q.client),
        };
        // SAFETY: the records were made from checked segments and the tensors have the problem's
        // shapes, so every index is in bounds; `out` and `lse` are not shared yet.
        unsafe {
            kernels::forward::forward::launch_unchecked(
                &q.client,
                call.count(tiles, problem.num_heads),
                cube_dim(),
                address_type(&[&q, &k, &v, &out]),
                vector_size(&[&q, &k, &v]),
                arg(&q),
                arg(&k),
                arg(&v),
                table(&sinks, num_sinks),
                table(&call.tables.row_tiles, tiles * ROW_TILE_FIELDS),
                arg(&out),
                arg(&lse),
                call.numbers(),
                tiles as u32,
                call.group(),
                call.blueprint,
                dtype(q.dtype),
            );
        }
    }
    Ok(AttentionOutput::new(out, lse))
}

/// The backward pass of a checked call.
pub(crate) fn backward<R: CubeRuntime>(
    input: AttentionBackwardInput<CubeTensor<R>>,
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionGradients<CubeTensor<R>>, AttentionError> {
    let call = Call::new(&input.q, problem, segments, options, input.sinks.is_some())?;
    let [q, k, v] = [input.q, input.k, input.v].map(with_contiguous_dim);
    if problem.num_heads * problem.q_tokens * problem.q_batch == 0
        || problem.k_tokens * problem.k_batch == 0
    {
        let dsinks = input.sinks.map(|sinks| {
            let shape = [problem.num_heads].into();
            filled(&sinks, shape, 0.0, sinks.dtype)
        });
        let zero = |shape: [usize; 4]| filled(&q, shape.into(), 0.0, q.dtype);
        let dq = zero(problem.q_shape());
        let (dk, dv) = (zero(problem.k_shape()), zero(problem.v_shape()));
        return Ok(AttentionGradients::new(dq, dk, dv).with_dsinks(dsinks));
    }
    let [out, dout] = [input.out, input.dout].map(with_contiguous_dim);
    let lse = match input.lse.dtype {
        DType::F32 => input.lse,
        _ => cast(input.lse, DType::F32),
    };
    let size = vector_size(&[&q, &k, &v, &out, &dout]);
    let (rows, dsinks) = call.delta(&out, &dout, &lse, input.sinks, size);
    let tensors = Backward {
        q,
        k,
        v,
        dout,
        rows,
        size,
    };
    let dq = call.queries(&tensors);
    let (dk, dv) = call.keys(&tensors);
    Ok(AttentionGradients::new(dq, dk, dv).with_dsinks(dsinks))
}

/// What the kernels of the backward pass read.
struct Backward<R: CubeRuntime> {
    q: CubeTensor<R>,
    k: CubeTensor<R>,
    v: CubeTensor<R>,
    dout: CubeTensor<R>,
    rows: CubeTensor<R>,
    size: usize,
}

impl<R: CubeRuntime> Call<'_, R> {
    /// The numbers per row, `[2, q_batch, num_heads, q_tokens]`, and the gradient of the sinks.
    fn delta(
        &self,
        out: &CubeTensor<R>,
        dout: &CubeTensor<R>,
        lse: &CubeTensor<R>,
        sinks: Option<CubeTensor<R>>,
        size: usize,
    ) -> (CubeTensor<R>, Option<CubeTensor<R>>) {
        let [batch, heads, tokens] = self.problem.lse_shape();
        let num_rows = self.num_rows();
        let rows = empty(out, &[2, batch, heads, tokens], DType::F32);
        let sink_dtype = sinks.as_ref().map(|sinks| sinks.dtype);
        let per_row = match sinks {
            Some(_) => empty(out, &[num_rows], DType::F32),
            None => empty(out, &[1], DType::F32),
        };
        let sink_len = per_row.meta.shape()[0];
        let (sinks, num_sinks) = match sinks {
            Some(sinks) => (sinks_f32(sinks).handle, heads),
            None => (unused(&out.client), 1),
        };
        if num_rows > 0 {
            let cubes = num_rows.div_ceil(UNITS);
            // SAFETY: units beyond `num_rows` end at once, and the tensors have the problem's
            // shapes; `rows` and `per_row` are not shared yet.
            unsafe {
                kernels::delta::delta::launch_unchecked(
                    &out.client,
                    self.count(cubes, 1),
                    cube_dim(),
                    address_type(&[out, dout, &rows]),
                    size,
                    arg(out),
                    arg(dout),
                    arg(lse),
                    table(&sinks, num_sinks),
                    table(&rows.handle, 2 * num_rows),
                    table(&per_row.handle, sink_len),
                    self.numbers(),
                    num_rows,
                    self.problem.v_head_dim,
                    self.blueprint.features.sinks,
                    [dtype(out.dtype), dtype(dout.dtype)],
                );
            }
        }
        let dsinks = sink_dtype.map(|dtype| {
            let dsinks = empty(out, &[heads], DType::F32);
            // SAFETY: one cube per head, and `per_row` has a number per row of every head.
            unsafe {
                kernels::delta::sum_sinks::launch_unchecked(
                    &out.client,
                    CubeCount::Static(heads as u32, 1, 1),
                    cube_dim(),
                    address_type(&[&per_row]),
                    table(&per_row.handle, sink_len),
                    table(&dsinks.handle, heads),
                    heads,
                    batch,
                    tokens,
                );
            }
            match dtype {
                DType::F32 => dsinks,
                dtype => cast(dsinks, dtype),
            }
        });
        (rows, dsinks)
    }

    fn queries(&self, tensors: &Backward<R>) -> CubeTensor<R> {
        let Backward {
            q,
            k,
            v,
            dout,
            rows,
            size,
        } = tensors;
        let dq = empty_like(q, self.problem.q_shape(), q.dtype);
        let tiles = self.tables.num_row_tiles;
        if tiles > 0 {
            // SAFETY: as in `forward`; `dq` is not shared yet.
            unsafe {
                kernels::queries::queries::launch_unchecked(
                    &q.client,
                    self.count(tiles, self.problem.num_heads),
                    cube_dim(),
                    address_type(&[q, k, v, dout, rows, &dq]),
                    *size,
                    arg(q),
                    arg(k),
                    arg(v),
                    arg(dout),
                    table(&rows.handle, 2 * self.num_rows()),
                    table(&self.tables.row_tiles, tiles * ROW_TILE_FIELDS),
                    arg(&dq),
                    self.numbers(),
                    tiles as u32,
                    self.group(),
                    self.num_rows(),
                    self.blueprint,
                    [dtype(q.dtype), dtype(dout.dtype)],
                );
            }
        }
        dq
    }

    fn keys(&self, tensors: &Backward<R>) -> (CubeTensor<R>, CubeTensor<R>) {
        let Backward {
            q,
            k,
            v,
            dout,
            rows,
            size,
        } = tensors;
        let dk = empty_like(k, self.problem.k_shape(), k.dtype);
        let dv = empty_like(v, self.problem.v_shape(), v.dtype);
        let tiles = self.tables.num_key_tiles;
        if tiles > 0 {
            let visits = (self.tables.num_visits * VISIT_FIELDS).max(1);
            // SAFETY: as in `forward`; `dk` and `dv` are not shared yet.
            unsafe {
                kernels::keys::keys::launch_unchecked(
                    &q.client,
                    self.count(tiles, self.problem.num_kv_heads),
                    cube_dim(),
                    address_type(&[q, k, v, dout, rows, &dk, &dv]),
                    *size,
                    arg(q),
                    arg(k),
                    arg(v),
                    arg(dout),
                    table(&rows.handle, 2 * self.num_rows()),
                    table(&self.tables.key_tiles, tiles * KEY_TILE_FIELDS),
                    table(&self.tables.visits, visits),
                    arg(&dk),
                    arg(&dv),
                    self.numbers(),
                    tiles as u32,
                    self.group(),
                    self.num_rows(),
                    self.blueprint,
                    [dtype(q.dtype), dtype(dout.dtype)],
                );
            }
        }
        (dk, dv)
    }
}
