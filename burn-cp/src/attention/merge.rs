//! Partial results over disjoint sets of keys, made one. A sink joins the sum of exponentials once, in the end.

use burn::tensor::{DType, FloatDType, TensorMetadata, ops::FloatTensor};
use burn_cp_kernels::AttentionOutput;

use super::{
    InnerAttention,
    rows::{unwrap, wrap},
};

/// Results merged so far, in `f32` at least.
#[derive(Debug)]
pub(super) struct Merger<B: InnerAttention> {
    merged: AttentionOutput<FloatTensor<B>>,
    /// The last one, not merged yet: it decides whether the result is the whole, in its own dtype.
    last: Option<AttentionOutput<FloatTensor<B>>>,
    dtype: DType,
}

impl<B: InnerAttention> Merger<B> {
    /// Starts from one partial result, without sinks.
    pub(super) fn new(partial: AttentionOutput<FloatTensor<B>>) -> Self {
        Self {
            dtype: partial.out.dtype(),
            merged: partial,
            last: None,
        }
    }

    /// Merges one more, without sinks, over other keys.
    pub(super) fn add(self, partial: AttentionOutput<FloatTensor<B>>) -> Self {
        let dtype = self.wide();
        Self {
            dtype: self.dtype,
            merged: self.merge(dtype),
            last: Some(partial),
        }
    }

    /// The whole result, in the partial ones' dtype; `lse` is without the sinks `[num_heads]`.
    pub(super) fn finish(self, sinks: Option<&FloatTensor<B>>) -> AttentionOutput<FloatTensor<B>> {
        let dtype = self.dtype;
        let Some(sinks) = sinks else {
            return self.merge(dtype);
        };
        let wide = self.wide();
        let AttentionOutput { out, lse, .. } = self.merge(wide);
        let by_row = wrap::<B, 3>(&lse).unsqueeze_dim::<4>(3);
        let [_, num_heads, _, _] = by_row.dims();
        let sinks = wrap::<B, 1>(sinks)
            .cast(FloatDType::from(lse.dtype()))
            .reshape([1, num_heads, 1, 1]);
        let out = wrap::<B, 4>(&out).cast(FloatDType::from(wide));
        // A row without keys has -inf, which a sink may have as well.
        let by_row = by_row.clamp_min(f64::from(f32::MIN));
        let out = out / ((sinks - by_row).exp() + 1.0);
        AttentionOutput::new(unwrap(out.cast(FloatDType::from(dtype))), lse)
    }

    fn wide(&self) -> DType {
        match self.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    fn merge(self, dtype: DType) -> AttentionOutput<FloatTensor<B>> {
        match self.last {
            Some(last) => B::merge_attention(self.merged, last, dtype),
            None => self.merged,
        }
    }
}
