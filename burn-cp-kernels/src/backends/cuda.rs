//! What CUDA has besides the portable kernels.

use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::{
    Runtime,
    cuda::CudaRuntime,
    features::{MmaConfig, Tma},
    ir::StorageType,
};

use super::AttentionRuntime;
use crate::{
    components::Features,
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, Routine, Segments,
    },
    launch::{hopper, tensor_core},
    routines::{
        hopper::check,
        tensor_core::{blueprint, check as check_tensor_core},
    },
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

    fn tensor_core_check(
        device: &<Self as CubeRuntime>::CubeDevice,
        problem: &AttentionProblem,
        dtype: DType,
        options: &AttentionOptions,
    ) -> Result<(), AttentionError> {
        check_tensor_core(problem, dtype, options)?;
        let client = Self::client(device);
        let properties = client.properties();
        let features = &properties.features;
        let operand: StorageType = dtype.into();
        let shape = MmaConfig {
            a_type: operand,
            b_type: operand,
            cd_type: StorageType::from(DType::F32),
            m: 16,
            n: 8,
            k: 16,
        };
        let loads = features.matmul.ldmatrix.contains(&operand);
        if !features.matmul.mma.contains(&shape) || !loads || !features.copy_async {
            return Err(AttentionError::Routine {
                routine: Routine::TensorCore,
                expected: "a CUDA device of compute capability 8.0 or later".into(),
                got: format!("an earlier one, {device:?}"),
            });
        }
        let shared = properties.hardware.max_shared_memory_size;
        blueprint(problem, Features::default(), shared, false).map(|_| ())
    }

    fn tensor_core_forward(
        input: AttentionInput<CubeTensor<Self>>,
        problem: &AttentionProblem,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> Result<AttentionOutput<CubeTensor<Self>>, AttentionError> {
        tensor_core::forward(input, problem, segments, options)
    }

    fn tensor_core_backward(
        input: AttentionBackwardInput<CubeTensor<Self>>,
        problem: &AttentionProblem,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> Result<AttentionGradients<CubeTensor<Self>>, AttentionError> {
        tensor_core::backward(input, problem, segments, options)
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
