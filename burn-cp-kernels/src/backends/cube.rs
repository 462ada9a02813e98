//! CubeCL backends: the fused kernels, or the composed routine by force.

use burn::tensor::{
    DType,
    ops::{Device, FloatTensor},
};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::AttentionBackend;
use crate::{
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, Routine, RoutineChoice, Segments,
    },
    launch,
    routines::{check_backward, check_inputs, composed, portable},
};

/// A CubeCL runtime that has kernels for attention.
pub trait AttentionRuntime: CubeRuntime {
    /// What a user calls the runtime; for messages.
    const NAME: &'static str;
}

#[cfg(feature = "wgpu")]
impl AttentionRuntime for cubecl::wgpu::WgpuRuntime {
    const NAME: &'static str = "wgpu";
}

#[cfg(feature = "cuda")]
impl AttentionRuntime for cubecl::cuda::CudaRuntime {
    const NAME: &'static str = "cuda";
}

/// The routine of a call, or why there is none.
fn choose<R: AttentionRuntime>(
    problem: &AttentionProblem,
    dtype: DType,
    device: &R::Device,
    options: &AttentionOptions,
) -> Result<RoutineChoice, AttentionError> {
    let portable = || -> Result<(), AttentionError> {
        portable::check(problem, dtype)?;
        let client = R::client(device);
        let storage: cubecl::ir::StorageType = dtype.into();
        if client.properties().type_usage(storage).is_empty() {
            return Err(AttentionError::DType {
                what: "q",
                expected: format!("a dtype of the {} device {device:?}", R::NAME),
                got: format!("{dtype:?}"),
            });
        }
        Ok(())
    };
    match options.routine {
        Some(Routine::Composed) => Ok(RoutineChoice::new(Routine::Composed, "forced")),
        Some(Routine::Portable) => {
            portable()?;
            Ok(RoutineChoice::new(Routine::Portable, "forced"))
        }
        None => {
            portable()?;
            let reason = format!("runs on every device of {}", R::NAME);
            Ok(RoutineChoice::new(Routine::Portable, reason))
        }
        Some(routine) => Err(AttentionError::Routine {
            routine,
            expected: "a device and a build with that routine".into(),
            got: format!("{} device {device:?}", R::NAME),
        }),
    }
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
            match choose::<R>(&problem, q.dtype, &q.device, options)?.routine {
                Routine::Composed => {
                    Ok(composed::backward::<Self>(input.clone(), segments, options))
                }
                _ => launch::portable::backward(input.clone(), &problem, segments, options),
            }
        };
        run().unwrap_or_else(|error| panic!("{error}"))
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
