//! Attention in Burn's tensor operations, forward and backward, for any backend without autodiff.
//!
//! Queries are taken in blocks, keys in tiles, and a block walks the tiles it sees with the online
//! softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867; in tiles: Dao et al., 2022,
//! arXiv:2205.14135). Only one block × tile of scores exists at a time. The backward pass
//! recomputes the scores and turns them into probabilities with `lse`.
//!
//! **Bits.** A query row's result must not depend on how its document was cut into segments. So
//! tiles lie at fixed places of the *document*; a key that a row does not see counts as an exact
//! zero; and every sum over keys runs inside a matmul (a column of ones is appended to `v`, which
//! makes the softmax normaliser one more output column), because a matmul of Burn's Flex backend
//! adds its products one after the other, so that zeros before and after change nothing, while
//! `sum_dim` adds in lanes whose number depends on the length. See `forward` for the two shapes
//! that Flex would send to another matmul kernel.
//!
//! `walk` says which blocks and tiles there are (host), `mask` makes the masks of tiles that are
//! partly seen, `scores` applies softcap and dropout, `pieces` puts the results together; `merge` makes two
//! results over disjoint sets of keys one.

mod backward;
mod forward;
mod mask;
mod merge;
mod pieces;
mod scores;
mod walk;

use burn::tensor::{
    DType, FloatDType, Tensor, TensorData, TensorPrimitive, backend::Backend, ops::FloatTensor,
};

pub(crate) use backward::backward;
pub(crate) use forward::forward;
pub(crate) use merge::merge;

use crate::definition::AttentionProblem;

/// The dtype that a call computes in: f64 for f64 inputs, else f32.
fn compute_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}

/// The most negative finite number of a compute dtype.
fn lowest(dtype: FloatDType) -> f64 {
    match dtype {
        FloatDType::F64 => f64::MIN,
        _ => f64::from(f32::MIN),
    }
}

/// The smallest normal number of a compute dtype.
fn tiniest(dtype: FloatDType) -> f64 {
    match dtype {
        FloatDType::F64 => f64::MIN_POSITIVE,
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// Wraps a primitive and casts it to the compute dtype.
fn load<B: Backend, const D: usize>(tensor: FloatTensor<B>, dtype: FloatDType) -> Tensor<B, D> {
    cast(
        Tensor::from_primitive(TensorPrimitive::Float(tensor)),
        dtype,
    )
}

/// Unwraps a tensor in the dtype that the caller gets.
fn store<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: FloatDType) -> FloatTensor<B> {
    cast(tensor, dtype).into_primitive().tensor()
}

fn cast<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: FloatDType) -> Tensor<B, D> {
    if tensor.dtype() == DType::from(dtype) {
        return tensor;
    }
    tensor.cast(dtype)
}

/// Keys or values times a factor, transposed: `[batch, heads, tokens, dim]` to
/// `[batch, heads, dim, tokens]` (one more column if there is only one token).
///
/// Multiplying by a broadcast tensor rather than by a scalar makes Flex lay the result out in this
/// order in memory; tiles of it are then good matmul operands, and never contiguous along `dim`,
/// where Flex has a kernel of its own for small products, which adds in another order.
fn transposed<B: Backend>(tensor: Tensor<B, 4>, factor: f64) -> Tensor<B, 4> {
    let factor = Tensor::<B, 4>::from_data(
        TensorData::new(vec![factor], [1, 1, 1, 1]).convert_dtype(tensor.dtype()),
        (&tensor.device(), tensor.dtype()),
    );
    let tensor = tensor.swap_dims(2, 3) * factor;
    if tensor.dims()[3] == 1 {
        // A single column would be contiguous along `dim` after all.
        return Tensor::cat(vec![tensor.clone(), tensor], 3);
    }
    tensor
}

/// Rows of one block of queries, the heads of a group folded into the rows:
/// `[q_batch, num_heads, q_tokens, d]` to `[1, num_kv_heads, group * rows, d]`.
fn block_rows<B: Backend>(
    tensor: &Tensor<B, 4>,
    problem: &AttentionProblem,
    row: usize,
    tokens: std::ops::Range<usize>,
) -> Tensor<B, 4> {
    let [_, num_heads, _, dim] = tensor.dims();
    let rows = problem.group() * tokens.len();
    tensor
        .clone()
        .slice([row..row + 1, 0..num_heads, tokens, 0..dim])
        .reshape([1, problem.num_kv_heads, rows, dim])
}
