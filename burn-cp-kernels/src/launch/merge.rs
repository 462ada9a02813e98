//! The launch that merges two results.

use burn::tensor::{DType, TensorMetadata};
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::prelude::CubeDim;

use super::{
    delta::{count, dtype},
    tensors::{
        address_type, arg, as_dtype, empty, empty_like, widest_vector_size, with_contiguous_dim,
    },
};
use crate::{components::UNITS, definition::AttentionOutput, kernels::merge as kernels};

/// Two checked results, and `out` in this dtype.
pub(crate) fn merge<R: CubeRuntime>(
    first: AttentionOutput<CubeTensor<R>>,
    second: AttentionOutput<CubeTensor<R>>,
    out_dtype: DType,
) -> AttentionOutput<CubeTensor<R>> {
    let [a, b] = [first.out, second.out].map(with_contiguous_dim);
    let [a_lse, b_lse] = [first.lse, second.lse].map(|lse| as_dtype(lse, DType::F32));
    let shape: [usize; 4] = a.shape().dims();
    let [batch, heads, tokens, dim] = shape;
    let out = empty_like(&a, shape, out_dtype);
    let lse = empty(&a, &[batch, heads, tokens], DType::F32);
    let size = widest_vector_size(&[&a, &b, &out]);
    let per_row = dim / size;
    let num_vectors = batch * heads * tokens * per_row;
    if num_vectors > 0 {
        // SAFETY: units beyond `num_vectors` end at once; all tensors have the shape of `out` or `lse`, and neither is shared yet.
        unsafe {
            kernels::merge::launch_unchecked(
                &a.client,
                count(&a, num_vectors.div_ceil(UNITS), 1),
                CubeDim::new_1d(UNITS as u32),
                address_type(&[&a, &b, &out]),
                size,
                arg(&a),
                arg(&a_lse),
                arg(&b),
                arg(&b_lse),
                arg(&out),
                arg(&lse),
                f32::NEG_INFINITY,
                num_vectors,
                per_row,
                [dtype(a.dtype), dtype(b.dtype), dtype(out_dtype)],
            );
        }
    }
    AttentionOutput::new(out, lse)
}
