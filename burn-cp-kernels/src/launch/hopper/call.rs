//! One call: tables, tensor maps, launches.

use burn::tensor::DType;
use burn_cubecl::{
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use cubecl::{
    client::ComputeClient,
    cuda::CudaRuntime,
    prelude::CubeCount,
    prelude::*,
    server::{Handle, KernelArguments, TensorMapBinding, TensorMapMeta},
    zspace::metadata::Metadata,
};

use super::{
    plan,
    source::{Entry, Source, Variant},
};
use crate::{
    definition::{
        AttentionBackwardInput, AttentionGradients, AttentionInput, AttentionOptions,
        AttentionOutput, AttentionProblem, Segments,
    },
    launch::tensors::{empty, empty_like, table_place, unused, with_contiguous_dim},
    routines::hopper::padded,
};

type Tensor = CubeTensor<CudaRuntime>;
type Client = ComputeClient<CudaRuntime>;

/// Rows of `q` and `dout` per copy.
const QUERY_ROWS: usize = 64;

/// A table on a device, and what it was made for.
struct Table<K> {
    key: (String, K),
    handles: Vec<Handle>,
    /// Numbers of records; a handle may be longer than what was put in it.
    lens: [usize; 2],
}

/// The tables of this kind and key on the device of `like`, made at the first call.
fn tables<K: PartialEq + Clone + Send + Sync + 'static>(
    like: &Tensor,
    segments: &Segments,
    key: K,
    make: impl FnOnce() -> (Vec<Vec<u8>>, [usize; 2]),
) -> (Vec<Handle>, [usize; 2]) {
    let key = (table_place(&like.device), key);
    let table = segments.cache().get_or_make(
        |table: &Table<K>| table.key == key,
        || {
            let (tables, lens) = make();
            let upload = |bytes: &Vec<u8>| like.client.create_from_slice(bytes);
            Table {
                key: key.clone(),
                handles: tables.iter().map(upload).collect(),
                lens,
            }
        },
    );
    (table.handles.clone(), table.lens)
}

/// Numbers of a call that depend on its layout in memory; kept like tables, since they rarely change.
fn parameters(like: &Tensor, segments: &Segments, numbers: [i64; 16]) -> Handle {
    let (handles, _) = tables(like, segments, numbers, || {
        (vec![bytemuck::cast_slice(&numbers).to_vec()], [1, 0])
    });
    handles[0].clone()
}

fn bytes<T: bytemuck::NoUninit>(records: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(records).to_vec()
}

/// What a plan depends on besides the segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PlanKey {
    backward: bool,
    heads: [usize; 2],
    dims: [usize; 2],
    num_blocks: usize,
}

struct Call<'a> {
    client: Client,
    problem: &'a AttentionProblem,
    /// With the sizes of vectors that the kernels compute with.
    padded: AttentionProblem,
    options: &'a AttentionOptions,
    variant: Variant,
    num_blocks: usize,
}

impl<'a> Call<'a> {
    fn new(
        q: &Tensor,
        problem: &'a AttentionProblem,
        options: &'a AttentionOptions,
        sinks: bool,
    ) -> Self {
        let hardware = &q.client.properties().hardware;
        let padded = padded(problem).expect("the call was checked");
        Self {
            client: q.client.clone(),
            problem,
            padded,
            options,
            variant: Variant::new(
                &padded,
                q.dtype == DType::BF16,
                options.softcap.is_some(),
                sinks,
            ),
            num_blocks: hardware.num_streaming_multiprocessors.unwrap_or(132) as usize,
        }
    }

    fn key(&self, backward: bool) -> PlanKey {
        PlanKey {
            backward,
            heads: [self.problem.num_heads, self.problem.num_kv_heads],
            dims: [self.padded.head_dim, self.padded.v_head_dim],
            num_blocks: self.num_blocks,
        }
    }

    fn scale(&self) -> i64 {
        float(self.options.scale_for(self.problem.head_dim))
    }

    fn softcap(&self) -> i64 {
        float(self.options.softcap.unwrap_or(0.0))
    }

    fn launch(
        &self,
        entry: Entry,
        blocks: usize,
        maps: Vec<TensorMapBinding>,
        buffers: &[&Handle],
    ) {
        // What is read through maps comes again at the end, behind what the kernel declares: CubeCL orders a stream behind others' work on
        // buffers, not on what maps read.
        let mapped: Vec<_> = maps.iter().map(|map| map.binding.clone()).collect();
        let bindings = buffers.iter().map(|handle| (*handle).clone().binding());
        let bindings = bindings.chain(mapped);
        let arguments = KernelArguments::new()
            .with_tensor_maps(maps)
            .with_buffers(bindings.collect());
        let source = Box::new(Source::new(entry, self.variant));
        let count = CubeCount::Static(blocks as u32, 1, 1);
        // SAFETY: the tables were made from checked segments for these sizes, the numbers from
        // these tensors, and outputs are not shared yet.
        unsafe { self.client.launch_unchecked(source, count, arguments) };
    }

    /// The numbers of the kernels at both ends of the backward pass, and of the one between them. `lengths` are those of the
    /// tables of items and of tiles of queries.
    fn backward_numbers(
        &self,
        [num_items, num_q_tiles]: [i64; 2],
        [out, dout, lse, dq, dk, dv]: [&Tensor; 6],
    ) -> ([i64; 16], [i64; 16]) {
        let problem = self.problem;
        let columns = [problem.head_dim as i64, problem.v_head_dim as i64];
        let ends = numbers([
            &strides(out),
            &strides(dout),
            &strides(lse)[..2],
            &strides(dq),
            &[self.scale(), problem.num_heads as i64, num_q_tiles],
            &columns,
        ]);
        let main = [
            self.scale(),
            self.softcap(),
            num_items,
            problem.group() as i64,
            num_q_tiles,
        ];
        let main = numbers([&strides(dk), &strides(dv), &main, &columns]);
        (ends, main)
    }

    /// Sinks as kernels read them.
    fn sinks(&self, sinks: Option<Tensor>) -> Handle {
        match sinks {
            Some(sinks) => sinks_f32(sinks).handle,
            None => unused(&self.client),
        }
    }

    /// The gradient of sinks, from what the backward pass knows of every row.
    fn sinks_gradient(
        &self,
        sinks: &Handle,
        dtype: DType,
        like: &Tensor,
        [ends, stats]: [&Handle; 2],
    ) -> Tensor {
        let heads = self.problem.num_heads;
        let dsinks = empty(like, &[heads], DType::F32);
        let buffers = [ends, stats, sinks, &dsinks.handle];
        self.launch(Entry::BackwardSinks, heads, vec![], &buffers);
        match dtype {
            DType::F32 => dsinks,
            dtype => cast(dsinks, dtype),
        }
    }
}

/// An f32 as the kernels read it from an i64.
fn float(value: f64) -> i64 {
    i64::from((value as f32).to_bits())
}

/// A tensor that the copy engine can read: the last dim contiguous, rows at multiples of 16 bytes.
fn copyable(tensor: Tensor) -> Tensor {
    let tensor = with_contiguous_dim(tensor);
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let aligned = (0..3).all(|dim| shape[dim] == 1 || strides[dim] % 8 == 0);
    let offset = tensor.handle.offset_start.unwrap_or(0);
    if aligned && offset.is_multiple_of(16) && (0..3).all(|dim| strides[dim] > 0) {
        return tensor;
    }
    into_contiguous(tensor)
}

/// A map of `rows` tokens of one head by 64 dims per copy.
fn map(tensor: &Tensor, rows: usize) -> TensorMapBinding {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    // The stride of a dim of one is never used, but must be a legal one.
    let stride = |dim: usize, other: usize| match shape[dim] {
        1 => other.next_multiple_of(8),
        _ => strides[dim],
    };
    let head = stride(1, shape[3]);
    let token = stride(2, shape[3]);
    let batch = stride(0, token * shape[2]);
    TensorMapBinding {
        binding: tensor.handle.clone().binding(),
        map: TensorMapMeta {
            format: TensorMapFormat::Tiled(TiledArgs {
                tile_size: [1, rows, 1, 64].into(),
            }),
            metadata: Metadata::new(
                [shape[0], shape[2], shape[1], shape[3]],
                [batch, token, head, 1],
            ),
            elem_stride: [1, 1, 1, 1].into(),
            interleave: TensorMapInterleave::None,
            swizzle: TensorMapSwizzle::B128,
            prefetch: TensorMapPrefetch::B256,
            oob_fill: OobFill::Zero,
            storage_ty: tensor.dtype.into(),
        },
    }
}

/// Strides by batch row, head and token.
fn strides(tensor: &Tensor) -> [i64; 3] {
    [0, 1, 2].map(|dim| tensor.meta.strides()[dim] as i64)
}

fn sinks_f32(sinks: Tensor) -> Tensor {
    into_contiguous(match sinks.dtype {
        DType::F32 => sinks,
        _ => cast(sinks, DType::F32),
    })
}

fn numbers<const N: usize>(parts: [&[i64]; N]) -> [i64; 16] {
    let mut numbers = [0; 16];
    for (to, number) in numbers.iter_mut().zip(parts.concat()) {
        *to = number;
    }
    numbers
}

/// The forward pass of a checked call.
pub(crate) fn forward(
    input: AttentionInput<Tensor>,
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> AttentionOutput<Tensor> {
    let [q, k, v] = [input.q, input.k, input.v].map(copyable);
    let mut call = Call::new(&q, problem, options, input.sinks.is_some());
    call.num_blocks = call.num_blocks.saturating_sub(options.sm_margin).max(1);
    let out = empty_like(&q, problem.out_shape(), q.dtype);
    let lse = empty(&q, &problem.lse_shape(), DType::F32);
    let (plan, [num_items, _]) = tables(&q, segments, call.key(false), || {
        let plan = plan::forward(segments, &call.padded, call.num_blocks);
        (
            vec![bytes(&plan.items), bytes(&plan.lists)],
            [plan.items.len(), 0],
        )
    });
    if num_items > 0 {
        let lse_strides = strides(&lse);
        let parameters = parameters(
            &q,
            segments,
            numbers([
                &strides(&out),
                &lse_strides[..2],
                &[call.scale(), call.softcap(), problem.v_head_dim as i64],
            ]),
        );
        let sinks = call.sinks(input.sinks);
        let keys = plan::forward_keys(call.padded.head_dim);
        let maps = vec![map(&q, QUERY_ROWS), map(&k, keys), map(&v, keys)];
        let buffers = [
            &plan[0],
            &plan[1],
            &parameters,
            &sinks,
            &out.handle,
            &lse.handle,
        ];
        call.launch(Entry::Forward, call.num_blocks, maps, &buffers);
    }
    AttentionOutput::new(out, lse)
}

/// The backward pass of a checked call. `out` and `dout` have the dtype of `q`.
pub(crate) fn backward(
    input: AttentionBackwardInput<Tensor>,
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> AttentionGradients<Tensor> {
    let [q, k, v, dout] = [input.q, input.k, input.v, input.dout].map(copyable);
    let out = with_contiguous_dim(input.out);
    let lse = into_contiguous(match input.lse.dtype {
        DType::F32 => input.lse,
        _ => cast(input.lse, DType::F32),
    });
    let call = Call::new(&q, problem, options, input.sinks.is_some());
    let (plan, [num_items, num_q_tiles]) = tables(&q, segments, call.key(true), || {
        let plan = plan::backward(segments, &call.padded, call.num_blocks);
        let tables = vec![
            bytes(&plan.items),
            bytes(&plan.visits),
            bytes(&plan.q_tiles),
        ];
        (tables, [plan.items.len(), plan.q_tiles.len()])
    });
    let queries = plan::backward_queries(call.padded.head_dim);
    let heads = problem.num_heads;
    let [dq, dk, dv] = [
        empty_like(&q, problem.q_shape(), q.dtype),
        empty_like(&k, problem.k_shape(), k.dtype),
        empty_like(&v, problem.v_shape(), v.dtype),
    ];
    let per_tile = heads * num_q_tiles;
    let floats = |len: usize| q.client.empty(4 * len.max(1));
    let stats = floats(per_tile * 2 * queries);
    let turns = floats(32 + per_tile);
    let shares = floats(per_tile * queries * call.padded.head_dim);
    let lengths = [num_items as i64, num_q_tiles as i64];
    let (ends, main) = call.backward_numbers(lengths, [&out, &dout, &lse, &dq, &dk, &dv]);
    let ends = parameters(&q, segments, ends);
    let main = parameters(&q, segments, main);
    let sinks_dtype = input.sinks.as_ref().map(|sinks| sinks.dtype);
    let sinks = call.sinks(input.sinks);
    if per_tile > 0 {
        let begin = [
            &plan[2],
            &ends,
            &out.handle,
            &dout.handle,
            &lse.handle,
            &sinks,
            &stats,
            &turns,
        ];
        call.launch(Entry::BackwardBegin, per_tile, vec![], &begin);
    }
    if num_items > 0 {
        let keys = plan::backward_keys(call.padded.head_dim);
        let maps = vec![
            map(&q, QUERY_ROWS),
            map(&k, keys),
            map(&v, keys),
            map(&dout, QUERY_ROWS),
        ];
        let buffers = [
            &plan[0], &plan[1], &main, &stats, &turns, &shares, &dk.handle, &dv.handle,
        ];
        call.launch(Entry::Backward, call.num_blocks, maps, &buffers);
    }
    if per_tile > 0 {
        let end = [&plan[2], &ends, &shares, &turns, &dq.handle];
        call.launch(Entry::BackwardEnd, per_tile, vec![], &end);
    }
    let dsinks = sinks_dtype.map(|dtype| call.sinks_gradient(&sinks, dtype, &q, [&ends, &stats]));
    AttentionGradients::new(dq, dk, dv).with_dsinks(dsinks)
}
