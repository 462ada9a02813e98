//! The CPU backends: both use the composed routine.

use burn::tensor::ops::FloatTensor;
#[cfg(feature = "ndarray")]
use burn::{
    backend::{
        NdArray,
        ndarray::{NdArrayTensor, SharedArray},
    },
    tensor::backend::Backend,
};

use super::AttentionBackend;
use crate::{
    definition::{
        AttentionBackwardInput, AttentionGradients, AttentionOptions, AttentionOutput, Segments,
    },
    routines::composed,
};

#[cfg(feature = "flex")]
impl AttentionBackend for burn::backend::Flex {
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionOutput<FloatTensor<Self>> {
        composed::forward::<Self>(q, k, v, segments, options)
    }

    fn attention_backward(
        input: AttentionBackwardInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionGradients<FloatTensor<Self>> {
        composed::backward::<Self>(input, segments, options)
    }
}

#[cfg(feature = "ndarray")]
impl<E, I, Q> AttentionBackend for NdArray<E, I, Q>
where
    NdArrayTensor: From<SharedArray<E>>,
    NdArrayTensor: From<SharedArray<I>>,
    Self: Backend,
{
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionOutput<FloatTensor<Self>> {
        composed::forward::<Self>(q, k, v, segments, options)
    }

    fn attention_backward(
        input: AttentionBackwardInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionGradients<FloatTensor<Self>> {
        composed::backward::<Self>(input, segments, options)
    }
}
