//! Tensors as kernels take them.

use std::fmt::Debug;

use burn::tensor::{DType, Shape, TensorMetadata};
use burn_cubecl::{
    CubeRuntime,
    kernel::{cast, into_contiguous},
    ops::numeric::full_device_dtype,
    tensor::CubeTensor,
};
use cubecl::prelude::{AddressType, ArrayArg, InputScalar, TensorArg};
use cubecl::{client::ComputeClient, server::Handle, stream_id::StreamId};

use crate::definition::{AttentionGradients, AttentionProblem};

/// A tensor whose last dim is contiguous: itself, or a copy.
pub(crate) fn with_contiguous_dim<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let last = tensor.rank() - 1;
    if tensor.meta.strides()[last] == 1 || tensor.meta.shape()[last] == 1 {
        return tensor;
    }
    into_contiguous(tensor)
}

/// Numbers that kernels can load at once from all of these tensors: 4, or 1.
pub(crate) fn vector_size<R: CubeRuntime>(tensors: &[&CubeTensor<R>]) -> usize {
    if has_vectors_of(4, tensors) { 4 } else { 1 }
}

/// The most numbers that a kernel loads at once from all of these tensors: 16 bytes where the device does that.
pub(crate) fn widest_vector_size<R: CubeRuntime>(tensors: &[&CubeTensor<R>]) -> usize {
    let widest = tensors.iter().max_by_key(|tensor| tensor.dtype.size());
    let sizes = widest.into_iter().flat_map(|tensor| {
        let sizes = tensor.client.io_optimized_vector_sizes(tensor.dtype.size());
        sizes.collect::<Vec<_>>()
    });
    let mut fitting = sizes.filter(|size| has_vectors_of(*size, tensors));
    fitting.next().unwrap_or(1)
}

/// Whether all rows of the tensors are vectors of so many numbers, which begin at multiples of their length.
fn has_vectors_of<R: CubeRuntime>(size: usize, tensors: &[&CubeTensor<R>]) -> bool {
    tensors.iter().all(|tensor| {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let last = shape.num_dims() - 1;
        let outer = (0..last).all(|dim| shape[dim] == 1 || strides[dim] % size == 0);
        outer
            && shape[last] % size == 0
            && offset(tensor).is_multiple_of((size * tensor.dtype.size()) as u64)
    })
}

/// A tensor whose rows start at multiples of 8 numbers and 16 bytes, for 16-bit floats whose last dim is such a multiple:
/// itself, or a copy.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn with_chunks<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let last = shape.num_dims() - 1;
    let outer = (0..last).all(|dim| shape[dim] == 1 || strides[dim] % 8 == 0);
    let contiguous = strides[last] == 1 || shape[last] == 1;
    if outer && contiguous && offset(&tensor).is_multiple_of(16) {
        return tensor;
    }
    let tensor = into_contiguous(tensor);
    if offset(&tensor).is_multiple_of(16) {
        return tensor;
    }
    // Contiguous, in a buffer that it shares.
    tensor.copy()
}

/// A tensor as `dtype`.
pub(crate) fn as_dtype<R: CubeRuntime>(tensor: CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    match tensor.dtype == dtype {
        true => tensor,
        false => cast(tensor, dtype),
    }
}

/// Sinks as kernels read them.
pub(crate) fn sinks_f32<R: CubeRuntime>(sinks: CubeTensor<R>) -> CubeTensor<R> {
    into_contiguous(as_dtype(sinks, DType::F32))
}

/// Bytes before the tensor in its buffer.
fn offset<R: CubeRuntime>(tensor: &CubeTensor<R>) -> u64 {
    tensor.handle.offset_start.unwrap_or(0)
}

/// Gradients of a call in which nothing sees anything, all 0.
pub(super) fn no_gradients<R: CubeRuntime>(
    q: &CubeTensor<R>,
    problem: &AttentionProblem,
) -> AttentionGradients<CubeTensor<R>> {
    let zero = |shape: [usize; 4]| filled(q, shape.into(), 0.0, q.dtype);
    AttentionGradients::new(
        zero(problem.q_shape()),
        zero(problem.k_shape()),
        zero(problem.v_shape()),
    )
}

/// Where a table is: the device, and the calling thread's stream on it. Memory goes back to the stream that it came from, which does not wait for
/// what others still read.
pub(super) fn table_place(device: &impl Debug) -> String {
    format!("{device:?} {:?}", StreamId::current())
}

/// An uninitialised tensor with the order of dims in memory of `like`, if that is one of the two usual
/// ones: heads before tokens, or tokens before heads. All of rank 4, `[batch, heads, tokens, dim]`.
pub(crate) fn empty_like<R: CubeRuntime>(
    like: &CubeTensor<R>,
    shape: [usize; 4],
    dtype: DType,
) -> CubeTensor<R> {
    let [batch, heads, tokens, dim] = shape;
    let strides = like.meta.strides();
    let token_major = strides[1] < strides[2] && like.meta.shape()[1] > 1;
    if !token_major {
        return empty(like, &shape, dtype);
    }
    let mut tensor = empty(like, &[batch, tokens, heads, dim], dtype);
    tensor.meta.swap(1, 2);
    tensor
}

/// An uninitialised contiguous tensor on the device of `like`.
pub(crate) fn empty<R: CubeRuntime>(
    like: &CubeTensor<R>,
    shape: &[usize],
    dtype: DType,
) -> CubeTensor<R> {
    let shape = Shape::from(shape.to_vec());
    let handle = like
        .client
        .empty(shape.num_elements().max(1) * dtype.size());
    let (client, device) = (like.client.clone(), like.device.clone());
    CubeTensor::new_contiguous(client, device, shape, handle, dtype)
}

/// A contiguous tensor of one value on the device of `like`; without elements, a tensor all the same.
pub(crate) fn filled<R: CubeRuntime>(
    like: &CubeTensor<R>,
    shape: Vec<usize>,
    value: f32,
    dtype: DType,
) -> CubeTensor<R> {
    if shape.contains(&0) {
        return empty(like, &shape, dtype);
    }
    let value = InputScalar::new(value, dtype);
    let (client, device) = (like.client.clone(), like.device.clone());
    full_device_dtype(client, shape.into(), device, value, dtype)
}

/// The address type with which kernels reach every number of these tensors.
pub(crate) fn address_type<R: CubeRuntime>(tensors: &[&CubeTensor<R>]) -> AddressType {
    let types = tensors.iter().map(|tensor| tensor.required_address_type());
    types.max().unwrap_or_default()
}

/// A binding with the tensor's own strides.
pub(crate) fn arg<R: CubeRuntime>(tensor: &CubeTensor<R>) -> TensorArg<R> {
    tensor.clone().into_tensor_arg()
}

/// A binding of a table of `len` numbers.
pub(crate) fn table<R: CubeRuntime>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: the handle was made for at least `len` numbers by the caller.
    unsafe { ArrayArg::from_raw_parts(handle.clone(), len) }
}

/// The handle of some number, for bindings that a kernel does not read.
pub(crate) fn unused<R: CubeRuntime>(client: &ComputeClient<R>) -> Handle {
    client.empty(4)
}
