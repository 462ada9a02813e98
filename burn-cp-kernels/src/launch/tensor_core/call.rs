//! One call: bindings, tables, launches.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{
    InfoBuilder,
    cuda::CudaRuntime,
    features::Tma,
    prelude::{AddressType, CubeCount},
    server::{Binding, Handle, KernelArguments},
};

use super::{
    gradients::gradients,
    task::{Entry, Task},
};
use crate::{
    components::{
        Features, KEY_TILE_FIELDS, ROW_TILE_FIELDS, VISIT_FIELDS,
        matrix::{KeyPart, MatrixBlueprint},
    },
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, Segments,
    },
    launch::{
        delta::delta,
        schedule::{Tables, tables},
        tensors::{
            as_dtype, empty, empty_like, filled, no_gradients, sinks_f32, unused, with_chunks,
            with_contiguous_dim,
        },
    },
    routines::tensor_core::blueprint,
};

pub(super) type Tensor = CubeTensor<CudaRuntime>;

/// Largest count of cubes along the second dimension.
const MAX_ACROSS: usize = 65535;

/// Keys that segments have on average where one kernel computes all gradients: with fewer, much of its tiles is empty.
const MIN_JOINT_KEYS: usize = 512;

/// Buffers of a launch, in the order of the kernel's parameters, and what CubeCL passes about them.
#[derive(Default)]
pub(super) struct Bindings {
    buffers: Vec<Binding>,
    info: InfoBuilder,
}

impl Bindings {
    /// A tensor that the kernel reads or writes in vectors of `size`.
    pub(super) fn tensor(mut self, tensor: &Tensor, size: usize) -> Self {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let vectors = shape.num_elements() / size;
        self.info.metadata.register_tensor(
            shape.num_dims() as u64,
            vectors as u64,
            vectors as u64,
            shape.clone(),
            strides.clone(),
            AddressType::U64,
        );
        self.buffers.push(tensor.handle.clone().binding());
        self
    }

    pub(super) fn array(mut self, handle: &Handle, len: usize) -> Self {
        let len = len as u64;
        self.info
            .metadata
            .register_array(len, len, AddressType::U64);
        self.buffers.push(handle.clone().binding());
        self
    }
}

/// What the launches of one call share.
pub(super) struct Call<'a> {
    pub(super) problem: &'a AttentionProblem,
    options: &'a AttentionOptions,
    pub(super) blueprint: MatrixBlueprint,
    tables: Tables,
    like: Tensor,
}

impl<'a> Call<'a> {
    fn new(
        like: &Tensor,
        problem: &'a AttentionProblem,
        segments: &Segments,
        options: &'a AttentionOptions,
        sinks: bool,
    ) -> Result<Self, AttentionError> {
        let features = Features {
            softcap: options.softcap.is_some(),
            dropout: false,
            sinks,
        };
        let properties = like.client.properties();
        let shared = properties.hardware.max_shared_memory_size;
        // They came together, with 9.0.
        let adds = properties.features.tma.contains(Tma::Base);
        let blueprint = blueprint(problem, features, shared, adds)?;
        let rows = [blueprint.query_rows(), blueprint.key_rows()];
        let tables = tables(&like.client, &like.device, segments, rows)?;
        Ok(Self {
            problem,
            options,
            blueprint,
            tables,
            like: like.clone(),
        })
    }

    fn num_rows(&self) -> usize {
        self.problem.lse_shape().iter().product()
    }

    /// Launches a kernel with a cube for each of `tiles` of each of `heads`.
    fn launch(&self, entry: Entry, tiles: usize, heads: usize, bindings: Bindings) {
        let across = tiles.min(MAX_ACROSS);
        if tiles > 0 {
            let counts = [heads, across, tiles.div_ceil(across)].map(|count| count as u32);
            self.launch_cubes(entry, tiles, counts, bindings);
        }
    }

    /// Launches a kernel with a cube for each of `tiles`.
    pub(super) fn launch_all(&self, entry: Entry, tiles: usize, bindings: Bindings) {
        self.launch_cubes(entry, tiles, [tiles as u32, 1, 1], bindings);
    }

    fn launch_cubes(
        &self,
        entry: Entry,
        tiles: usize,
        [x, y, z]: [u32; 3],
        mut bindings: Bindings,
    ) {
        let scalars = &mut bindings.info.scalars;
        scalars.push(self.options.scale_for(self.problem.head_dim) as f32);
        scalars.push(self.options.softcap.unwrap_or(1.0) as f32);
        scalars.push(f32::NEG_INFINITY);
        scalars.push(tiles as u32);
        scalars.push(self.problem.group() as u32);
        scalars.push(self.num_rows() as u64);
        let client = &self.like.client;
        let task = Task {
            entry,
            blueprint: self.blueprint,
            is_bf16: self.like.dtype == DType::BF16,
            properties: Some(client.properties().clone()),
        };
        let arguments = KernelArguments::new()
            .with_buffers(bindings.buffers)
            .with_info(bindings.info.finish(AddressType::U64));
        // SAFETY: the bindings are those of the kernel's parameters, the records were made from checked
        // segments and the tensors have the problem's shapes, so every index is in bounds; outputs
        // are not shared yet.
        unsafe { client.launch_unchecked(Box::new(task), CubeCount::Static(x, y, z), arguments) };
    }
}

/// The forward pass of a checked call.
pub(crate) fn forward(
    input: AttentionInput<Tensor>,
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionOutput<Tensor>, AttentionError> {
    let call = Call::new(&input.q, problem, segments, options, input.sinks.is_some())?;
    let [q, k, v] = [input.q, input.k, input.v].map(with_chunks);
    if problem.k_tokens * problem.k_batch == 0 {
        // Nothing to bind: devices refuse empty buffers.
        let zero = filled(&q, problem.out_shape().into(), 0.0, q.dtype);
        let shape = problem.lse_shape().into();
        let blind = filled(&q, shape, f32::NEG_INFINITY, DType::F32);
        return Ok(AttentionOutput::new(zero, blind));
    }
    let out = empty_like(&q, problem.out_shape(), q.dtype);
    let lse = empty(&q, &problem.lse_shape(), DType::F32);
    let (sinks, num_sinks) = match input.sinks {
        Some(sinks) => (sinks_f32(sinks).handle, problem.num_heads),
        None => (unused(&q.client), 1),
    };
    let tiles = call.tables.num_row_tiles;
    let bindings = Bindings::default()
        .tensor(&q, 8)
        .tensor(&k, 8)
        .tensor(&v, 8)
        .array(&sinks, num_sinks)
        .array(&call.tables.row_tiles, tiles * ROW_TILE_FIELDS)
        .tensor(&out, 2)
        .tensor(&lse, 1);
    call.launch(Entry::Forward, tiles, problem.num_heads, bindings);
    Ok(AttentionOutput::new(out, lse))
}

/// Whether segments are long enough for tiles of the kernel for all gradients, which are larger than those of the others.
fn is_joint(segments: &Segments) -> bool {
    let lens = segments.iter().map(|segment| segment.num_k());
    let seen: Vec<usize> = lens.filter(|len| *len > 0).collect();
    seen.iter().sum::<usize>() >= MIN_JOINT_KEYS * seen.len()
}

/// The backward pass of a checked call.
pub(crate) fn backward(
    input: AttentionBackwardInput<Tensor>,
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionGradients<Tensor>, AttentionError> {
    let call = Call::new(&input.q, problem, segments, options, input.sinks.is_some())?;
    let [q, k, v] = [input.q, input.k, input.v].map(with_chunks);
    if call.num_rows() == 0 {
        let dsinks = input.sinks.map(|sinks| {
            let shape = [problem.num_heads].into();
            filled(&sinks, shape, 0.0, sinks.dtype)
        });
        return Ok(no_gradients(&q, problem).with_dsinks(dsinks));
    }
    let [out, dout] = [input.out, input.dout].map(with_contiguous_dim);
    let lse = as_dtype(input.lse, DType::F32);
    let (rows, dsinks) = delta(problem, options, [&out, &dout, &lse], input.sinks);
    if problem.k_tokens * problem.k_batch == 0 {
        return Ok(no_gradients(&q, problem).with_dsinks(dsinks));
    }
    let dout = with_chunks(as_dtype(dout, q.dtype));
    let shared = || {
        Bindings::default()
            .tensor(&q, 8)
            .tensor(&k, 8)
            .tensor(&v, 8)
            .tensor(&dout, 8)
            .array(&rows.handle, 2 * call.num_rows())
    };
    if call.blueprint.joint && is_joint(segments) {
        let grads = gradients(&call, segments, [&q, &k, &v], shared);
        return Ok(grads.with_dsinks(dsinks));
    }
    let dq = empty_like(&q, problem.q_shape(), q.dtype);
    let dk = empty_like(&k, problem.k_shape(), k.dtype);
    let dv = empty_like(&v, problem.v_shape(), v.dtype);
    let tables = &call.tables;
    let tiles = tables.num_row_tiles;
    let bindings = shared()
        .array(&tables.row_tiles, tiles * ROW_TILE_FIELDS)
        .tensor(&dq, 2);
    call.launch(Entry::Queries, tiles, problem.num_heads, bindings);
    let tiles = tables.num_key_tiles;
    let parts: &[KeyPart] = match call.blueprint.key_parts {
        true => &[KeyPart::Keys, KeyPart::Values],
        false => &[KeyPart::Both],
    };
    for part in parts {
        let bindings = shared()
            .array(&tables.key_tiles, tiles * KEY_TILE_FIELDS)
            .array(&tables.visits, (tables.num_visits * VISIT_FIELDS).max(1))
            .tensor(&dk, 2)
            .tensor(&dv, 2);
        call.launch(Entry::Keys(*part), tiles, problem.num_kv_heads, bindings);
    }
    Ok(AttentionGradients::new(dq, dk, dv).with_dsinks(dsinks))
}
