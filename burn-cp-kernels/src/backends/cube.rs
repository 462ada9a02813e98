//! CubeCL backends: the fused kernels, or the composed routine by force.

use burn::tensor::{
    DType,
    ops::{Device, FloatTensor},
};
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, tensor::CubeTensor,
};

use super::AttentionBackend;
use crate::{
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, Routine, RoutineChoice, Segments,
    },
    launch,
    routines::{check_backward, check_inputs, check_merge, check_outputs, composed, portable},
};

/// A CubeCL runtime that has kernels for attention.
///
/// The hidden methods are the runtime's own kernels, which CUDA has and others do not.
pub trait AttentionRuntime: CubeRuntime {
    /// What a user calls the runtime; for messages.
    const NAME: &'static str;

    /// Why the runtime's own kernels do not serve this call, if so.
    #[doc(hidden)]
    fn own_check(
        device: &Self::Device,
        _problem: &AttentionProblem,
        _dtype: DType,
        _options: &AttentionOptions,
    ) -> Result<(), AttentionError> {
        Err(AttentionError::Routine {
            routine: Routine::Hopper,
            expected: "a CUDA device of compute capability 9.0".into(),
            got: format!("{} device {device:?}", Self::NAME),
        })
    }

    /// Why the kernels for this runtime's matrix units do not serve this call, if so.
    #[doc(hidden)]
    fn tensor_core_check(
        device: &Self::Device,
        _problem: &AttentionProblem,
        _dtype: DType,
        _options: &AttentionOptions,
    ) -> Result<(), AttentionError> {
        Err(AttentionError::Routine {
            routine: Routine::TensorCore,
            expected: "a CUDA device of compute capability 8.0 or later".into(),
            got: format!("{} device {device:?}", Self::NAME),
        })
    }

    /// The forward pass of a call that passed [`Self::tensor_core_check`].
    #[doc(hidden)]
    fn tensor_core_forward(
        _input: AttentionInput<CubeTensor<Self>>,
        _problem: &AttentionProblem,
        _segments: &Segments,
        _options: &AttentionOptions,
    ) -> Result<AttentionOutput<CubeTensor<Self>>, AttentionError> {
        unreachable!("this runtime's tensor_core_check refuses every call")
    }

    /// The backward pass of a call that passed [`Self::tensor_core_check`].
    #[doc(hidden)]
    fn tensor_core_backward(
        _input: AttentionBackwardInput<CubeTensor<Self>>,
        _problem: &AttentionProblem,
        _segments: &Segments,
        _options: &AttentionOptions,
    ) -> Result<AttentionGradients<CubeTensor<Self>>, AttentionError> {
        unreachable!("this runtime's tensor_core_check refuses every call")
    }

    /// The forward pass of a call that passed [`Self::own_check`].
    #[doc(hidden)]
    fn own_forward(
        _input: AttentionInput<CubeTensor<Self>>,
        _problem: &AttentionProblem,
        _segments: &Segments,
        _options: &AttentionOptions,
    ) -> AttentionOutput<CubeTensor<Self>> {
        unreachable!("this runtime's own_check refuses every call")
    }

    /// The backward pass of a call that passed [`Self::own_check`].
    #[doc(hidden)]
    fn own_backward(
        _input: AttentionBackwardInput<CubeTensor<Self>>,
        _problem: &AttentionProblem,
        _segments: &Segments,
        _options: &AttentionOptions,
    ) -> AttentionGradients<CubeTensor<Self>> {
        unreachable!("this runtime's own_check refuses every call")
    }
}

#[cfg(feature = "wgpu")]
impl AttentionRuntime for cubecl::wgpu::WgpuRuntime {
    const NAME: &'static str = "wgpu";
}

/// The routine of a call, or why there is none.
fn choose<R: AttentionRuntime>(
    problem: &AttentionProblem,
    dtype: DType,
    device: &R::Device,
    options: &AttentionOptions,
) -> Result<RoutineChoice, AttentionError> {
    let forced = |routine| Ok(RoutineChoice::new(routine, "forced"));
    match options.routine {
        Some(Routine::Composed) => forced(Routine::Composed),
        Some(Routine::Portable) => {
            check_portable::<R>(problem, dtype, device)?;
            forced(Routine::Portable)
        }
        Some(Routine::Hopper) => {
            R::own_check(device, problem, dtype, options)?;
            forced(Routine::Hopper)
        }
        Some(Routine::TensorCore) => {
            R::tensor_core_check(device, problem, dtype, options)?;
            forced(Routine::TensorCore)
        }
        None => Ok(fastest::<R>(problem, dtype, device, options)?),
    }
}

/// The fastest routine that serves a call.
fn fastest<R: AttentionRuntime>(
    problem: &AttentionProblem,
    dtype: DType,
    device: &R::Device,
    options: &AttentionOptions,
) -> Result<RoutineChoice, AttentionError> {
    let own = match R::own_check(device, problem, dtype, options) {
        Ok(()) => {
            return Ok(RoutineChoice::new(
                Routine::Hopper,
                "the fastest on this device",
            ));
        }
        Err(why) => why,
    };
    match R::tensor_core_check(device, problem, dtype, options) {
        Ok(()) => {
            let reason = format!("the device has tensor cores; not hopper: {own}");
            Ok(RoutineChoice::new(Routine::TensorCore, reason))
        }
        Err(cores) => {
            check_portable::<R>(problem, dtype, device)?;
            let reason = format!(
                "serves every device of {}; not hopper: {own}; not tensor_core: {cores}",
                R::NAME
            );
            Ok(RoutineChoice::new(Routine::Portable, reason))
        }
    }
}

fn check_portable<R: AttentionRuntime>(
    problem: &AttentionProblem,
    dtype: DType,
    device: &R::Device,
) -> Result<(), AttentionError> {
    portable::check(problem, dtype)?;
    let storage: cubecl::ir::StorageType = dtype.into();
    if R::client(device)
        .properties()
        .type_usage(storage)
        .is_empty()
    {
        return Err(AttentionError::DType {
            what: "q",
            expected: format!("a dtype of the {} device {device:?}", R::NAME),
            got: format!("{dtype:?}"),
        });
    }
    Ok(())
}

impl<R, F, I, BT> AttentionBackend for CubeBackend<R, F, I, BT>
where
    R: AttentionRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn attention_forward(
        input: AttentionInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionOutput<FloatTensor<Self>> {
        let run = || -> Result<_, AttentionError> {
            let problem = check_inputs::<Self>(&input, segments, options)?;
            let q = &input.q;
            match choose::<R>(&problem, q.dtype, &q.device, options)?.routine {
                Routine::Composed => {
                    Ok(composed::forward::<Self>(input.clone(), segments, options))
                }
                Routine::Hopper => Ok(R::own_forward(input.clone(), &problem, segments, options)),
                Routine::TensorCore => {
                    R::tensor_core_forward(input.clone(), &problem, segments, options)
                }
                _ => launch::portable::forward(input.clone(), &problem, segments, options),
            }
        };
        run().unwrap_or_else(|error| panic!("{error}"))
    }

    fn attention_backward(
        input: AttentionBackwardInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionGradients<FloatTensor<Self>> {
        let run = || -> Result<_, AttentionError> {
            let problem = check_backward::<Self>(&input, segments, options)?;
            let q = &input.q;
            let choice = choose::<R>(&problem, q.dtype, &q.device, options)?;
            let one_dtype = input.out.dtype == q.dtype && input.dout.dtype == q.dtype;
            let dtypes = [q.dtype, input.out.dtype, input.dout.dtype];
            check_outputs(choice.routine, dtypes, options)?;
            match choice.routine {
                Routine::Hopper if one_dtype => {
                    Ok(R::own_backward(input.clone(), &problem, segments, options))
                }
                Routine::TensorCore if one_dtype || options.routine.is_some() => {
                    R::tensor_core_backward(input.clone(), &problem, segments, options)
                }
                Routine::Composed => {
                    Ok(composed::backward::<Self>(input.clone(), segments, options))
                }
                _ => launch::portable::backward(input.clone(), &problem, segments, options),
            }
        };
        run().unwrap_or_else(|error| panic!("{error}"))
    }

    fn merge_attention(
        first: AttentionOutput<FloatTensor<Self>>,
        second: AttentionOutput<FloatTensor<Self>>,
        dtype: DType,
    ) -> AttentionOutput<FloatTensor<Self>> {
        check_merge::<Self>(&first, &second).unwrap_or_else(|error| panic!("{error}"));
        if first.lse.dtype == DType::F64 {
            return composed::merge::<Self>(first, second, dtype);
        }
        launch::merge::merge(first, second, dtype)
    }

    fn attention_routine(
        problem: &AttentionProblem,
        dtype: DType,
        device: &Device<Self>,
        options: &AttentionOptions,
    ) -> Result<RoutineChoice, AttentionError> {
        choose::<R>(problem, dtype, device, options)
    }
}
