//! The CPU backends: both use the composed routine.

use burn::tensor::{
    DType,
    ops::{Device, FloatTensor},
};
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
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, Routine, RoutineChoice, Segments,
    },
    routines::composed,
};

fn only_composed(options: &AttentionOptions) -> Result<RoutineChoice, AttentionError> {
    match options.routine {
        None => Ok(RoutineChoice::new(
            Routine::Composed,
            "the only routine on the CPU",
        )),
        Some(Routine::Composed) => Ok(RoutineChoice::new(Routine::Composed, "forced")),
        Some(routine) => Err(AttentionError::Routine {
            routine,
            expected: "a backend on a CubeCL runtime".into(),
            got: "a CPU backend, which runs composed only".into(),
        }),
    }
}

fn refuse_others(options: &AttentionOptions) {
    if let Err(error) = only_composed(options) {
        panic!("{error}");
    }
}

#[cfg(feature = "flex")]
impl AttentionBackend for burn::backend::Flex {
    fn attention_forward(
        input: AttentionInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionOutput<FloatTensor<Self>> {
        refuse_others(options);
        composed::forward::<Self>(input, segments, options)
    }

    fn attention_backward(
        input: AttentionBackwardInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionGradients<FloatTensor<Self>> {
        refuse_others(options);
        composed::backward::<Self>(input, segments, options)
    }

    fn attention_routine(
        _problem: &AttentionProblem,
        _dtype: DType,
        _device: &Device<Self>,
        options: &AttentionOptions,
    ) -> Result<RoutineChoice, AttentionError> {
        only_composed(options)
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
        input: AttentionInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionOutput<FloatTensor<Self>> {
        refuse_others(options);
        composed::forward::<Self>(input, segments, options)
    }

    fn attention_backward(
        input: AttentionBackwardInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionGradients<FloatTensor<Self>> {
        refuse_others(options);
        composed::backward::<Self>(input, segments, options)
    }

    fn attention_routine(
        _problem: &AttentionProblem,
        _dtype: DType,
        _device: &Device<Self>,
        options: &AttentionOptions,
    ) -> Result<RoutineChoice, AttentionError> {
        only_composed(options)
    }
}
