//! Partial results over disjoint sets of keys, made one.
//!
//! With `lse = log(exp(lse_a) + exp(lse_b))`, the output over both sets is `out_a · exp(lse_a - lse) + out_b · exp(lse_b - lse)`: the
//! online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867) over sets instead of single keys. A sink joins the sum once, in
//! the end.

use burn::tensor::{DType, FloatDType, Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};
use burn_cp_kernels::AttentionOutput;

use super::rows::{unwrap, wrap};

/// Below every logarithm of a sum that is not 0, and finite.
const LOWEST: f64 = -1e30;

/// Results merged so far, in `f32` at least.
#[derive(Debug)]
pub(super) struct Merger<B: Backend> {
    /// `[batch, num_heads, tokens, v_head_dim]`.
    out: Tensor<B, 4>,
    /// `[batch, num_heads, tokens, 1]`.
    lse: Tensor<B, 4>,
    dtype: DType,
}

impl<B: Backend> Merger<B> {
    /// Starts from one partial result, without sinks.
    pub(super) fn new(partial: &AttentionOutput<FloatTensor<B>>) -> Self {
        let (out, lse) = widened::<B>(partial);
        Self {
            out,
            lse,
            dtype: partial.out.dtype(),
        }
    }

    /// Merges one more, without sinks, over other keys.
    pub(super) fn add(self, partial: &AttentionOutput<FloatTensor<B>>) -> Self {
        let (out, lse) = widened::<B>(partial);
        let max = self.lse.clone().max_pair(lse.clone()).clamp_min(LOWEST);
        let (own, other) = ((self.lse - max.clone()).exp(), (lse - max.clone()).exp());
        let sum = own.clone() + other.clone();
        // The larger share is 1, or both are 0 where no key is seen.
        let norm = sum.clone().clamp_min(1.0);
        Self {
            out: self.out * (own / norm.clone()) + out * (other / norm),
            lse: max + sum.log(),
            dtype: self.dtype,
        }
    }

    /// The whole result, in the partial ones' dtype; `lse` is without the sinks `[num_heads]`.
    pub(super) fn finish(self, sinks: Option<&FloatTensor<B>>) -> AttentionOutput<FloatTensor<B>> {
        let mut out = self.out;
        if let Some(sinks) = sinks {
            let [_, num_heads, _, _] = out.dims();
            let sinks = wrap::<B, 1>(sinks)
                .cast(FloatDType::from(self.lse.dtype()))
                .reshape([1, num_heads, 1, 1]);
            out = out / ((sinks - self.lse.clone()).exp() + 1.0);
        }
        let [batch, heads, tokens, _] = self.lse.dims();
        AttentionOutput::new(
            unwrap(out.cast(FloatDType::from(self.dtype))),
            unwrap(self.lse.reshape([batch, heads, tokens])),
        )
    }
}

/// `out` and `lse [.., 1]` in the dtype that they are merged in.
fn widened<B: Backend>(partial: &AttentionOutput<FloatTensor<B>>) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let dtype = match partial.out.dtype() {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    };
    let lse = wrap::<B, 3>(&partial.lse).cast(dtype);
    (wrap::<B, 4>(&partial.out).cast(dtype), lse.unsqueeze_dim(3))
}
