//! The backend that the tests run on: Flex, or with the feature `wgpu` or `cuda` that device, also fused (`fused`). Asking for a device
//! by its feature and finding none makes every test fail.

use burn::tensor::DType;
use burn_cp_examples::train::Device;

#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
mod chosen {
    pub(super) type TestBackend = burn::backend::Flex;
    pub(super) const DTYPES: &[super::DType] = &[
        super::DType::F16,
        super::DType::BF16,
        super::DType::F32,
        super::DType::F64,
    ];
    pub(super) const OTHER_DTYPE: super::DType = super::DType::F64;
    pub(super) const HEAD_DIM_STEP: usize = 1;
    pub(super) const DEVICE: super::Device = super::Device::Cpu;
}

#[cfg(feature = "wgpu")]
mod chosen {
    #[cfg(not(feature = "fused"))]
    pub(super) type TestBackend =
        burn::backend::wgpu::CubeBackend<burn::backend::wgpu::WgpuRuntime, f32, i32, u32>;
    #[cfg(feature = "fused")]
    pub(super) type TestBackend = burn::backend::Wgpu<f32, i32, u32>;
    pub(super) const DTYPES: &[super::DType] = &[super::DType::F32];
    pub(super) const OTHER_DTYPE: super::DType = super::DType::F16;
    pub(super) const HEAD_DIM_STEP: usize = 8;
    pub(super) const DEVICE: super::Device = super::Device::Wgpu;
}

#[cfg(all(feature = "cuda", not(feature = "wgpu")))]
mod chosen {
    #[cfg(not(feature = "fused"))]
    pub(super) type TestBackend = burn_cubecl::CubeBackend<cubecl::cuda::CudaRuntime, f32, i32, u8>;
    #[cfg(feature = "fused")]
    pub(super) type TestBackend = burn::backend::Cuda<f32, i32>;
    pub(super) const DTYPES: &[super::DType] =
        &[super::DType::F16, super::DType::BF16, super::DType::F32];
    pub(super) const OTHER_DTYPE: super::DType = super::DType::BF16;
    pub(super) const HEAD_DIM_STEP: usize = 8;
    pub(super) const DEVICE: super::Device = super::Device::Cuda;
}

/// The backend under test, without autodiff.
pub type TestBackend = chosen::TestBackend;

/// Where the programs compute.
pub const DEVICE: Device = chosen::DEVICE;

/// Float dtypes that it computes in.
pub const DTYPES: &[DType] = chosen::DTYPES;

/// A float dtype other than `f32` that it stores.
pub const OTHER_DTYPE: DType = chosen::OTHER_DTYPE;

/// What messages call [`OTHER_DTYPE`].
pub const OTHER_DTYPE_NAME: &str = match OTHER_DTYPE {
    DType::F64 => "F64",
    DType::BF16 => "BF16",
    _ => "F16",
};

/// `size`, or the next size of vectors that the backend's attention serves.
pub const fn head_dim(size: usize) -> usize {
    size.next_multiple_of(chosen::HEAD_DIM_STEP)
}
