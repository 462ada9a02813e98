//! Launches of the portable routine.

use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::prelude::{CubeCount, CubeDim};

use super::{
    delta::{count, delta, dtype, numbers},
    schedule::{Tables, tables},
    tensors::{
        address_type, arg, as_dtype, empty, empty_like, filled, no_gradients, sinks_f32, table,
        unused, vector_size, with_contiguous_dim,
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
        let tables = tables(&like.client, &like.device, segments, [blueprint.rows(); 2])?;
        Ok(Self {
            problem,
            options,
            blueprint,
            tables,
            like: like.clone(),
        })
    }

    fn numbers(&self) -> NumbersLaunch<R> {
        numbers(self.problem, self.options)
    }

    fn count(&self, tiles: usize, heads: usize) -> CubeCount {
        count(&self.like, tiles, heads)
    }

    fn num_rows(&self) -> usize {
        self.problem.lse_shape().iter().product()
    }

    fn group(&self) -> u32 {
        self.problem.group() as u32
    }
}

fn cube_dim() -> CubeDim {
    CubeDim::new_1d(UNITS as u32)
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
    if problem.num_heads * problem.q_tokens * problem.q_batch == 0 {
        let dsinks = input.sinks.map(|sinks| {
            let shape = [problem.num_heads].into();
            filled(&sinks, shape, 0.0, sinks.dtype)
        });
        return Ok(no_gradients(&q, problem).with_dsinks(dsinks));
    }
    let [out, dout] = [input.out, input.dout].map(with_contiguous_dim);
    let lse = as_dtype(input.lse, DType::F32);
    let size = vector_size(&[&q, &k, &v, &out, &dout]);
    let (rows, dsinks) = delta(problem, options, [&out, &dout, &lse], input.sinks);
    if problem.k_tokens * problem.k_batch == 0 {
        return Ok(no_gradients(&q, problem).with_dsinks(dsinks));
    }
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
