//! Two results over disjoint sets of keys, made one.

use burn::tensor::{DType, FloatDType, Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};

use super::{compute_dtype, load, store};
use crate::definition::AttentionOutput;

/// Below every logarithm of a sum that is not 0, and finite.
const LOWEST: f64 = -1e30;

/// As [`AttentionBackend::merge_attention`](crate::AttentionBackend::merge_attention), of checked results.
pub(crate) fn merge<B: Backend>(
    first: AttentionOutput<FloatTensor<B>>,
    second: AttentionOutput<FloatTensor<B>>,
    dtype: DType,
) -> AttentionOutput<FloatTensor<B>> {
    let compute = compute_dtype(first.lse.dtype());
    let load = |part: AttentionOutput<FloatTensor<B>>| -> (Tensor<B, 4>, Tensor<B, 4>) {
        let lse: Tensor<B, 3> = load::<B, 3>(part.lse, compute);
        (load::<B, 4>(part.out, compute), lse.unsqueeze_dim(3))
    };
    let ((a, a_lse), (b, b_lse)) = (load(first), load(second));
    let max = a_lse.clone().max_pair(b_lse.clone()).clamp_min(LOWEST);
    let (own, other) = ((a_lse - max.clone()).exp(), (b_lse - max.clone()).exp());
    let sum = own.clone() + other.clone();
    // The larger share is 1, or both are 0 where no key is seen.
    let norm = sum.clone().clamp_min(1.0);
    let out = a * (own / norm.clone()) + b * (other / norm);
    let lse: Tensor<B, 3> = (max + sum.log()).squeeze_dim(3);
    AttentionOutput::new(
        store::<B, 4>(out, FloatDType::from(dtype)),
        store::<B, 3>(lse, compute),
    )
}
