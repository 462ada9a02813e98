//! What CUDA has besides the portable kernels.

use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::{Runtime, cuda::CudaRuntime, features::Tma};

use super::AttentionRuntime;
use crate::{
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, Routine, Segments,
    },
    launch::hopper,
    routines::hopper::check,
};

impl AttentionRuntime for CudaRuntime {
    const NAME: &'static str = "cuda";

    fn own_check(
        device: &<Self as CubeRuntime>::CubeDevice,
        problem: &AttentionProblem,
        dtype: DType,
        options: &AttentionOptions,
    ) -> Result<(), AttentionError> {
        let client = Self::client(device);
        let tma = client.properties().features.tma;
        // The copy engine came with 9.0, its wide mode with the next capability, which lacks the
        // matrix instructions of 9.0.
        if !tma.contains(Tma::Base) || tma.contains(Tma::Im2colWide) {
            return Err(AttentionError::Routine {
                routine: Routine::Hopper,
                expected: "a CUDA device of compute capability 9.0".into(),
                got: format!("another capability on {device:?}"),
            });
        }
        check(problem, dtype, options)
    }

    fn own_forward(
        input: AttentionInput<CubeTensor<Self>>,
        problem: &AttentionProblem,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionOutput<CubeTensor<Self>> {
        hopper::forward(input, problem, segments, options)
    }

    fn own_backward(
        input: AttentionBackwardInput<CubeTensor<Self>>,
        problem: &AttentionProblem,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionGradients<CubeTensor<Self>> {
        hopper::backward(input, problem, segments, options)
    }
}
