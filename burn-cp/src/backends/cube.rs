//! CubeCL backends: ranks are threads of one process, tensors are reference-counted buffers of a device.
//!
//! CubeCL gives each thread a stream of its own, and makes a stream wait for the one that wrote a buffer which it reads.

use burn::tensor::ops::FloatTensor;
use burn_cp_kernels::AttentionRuntime;
use burn_cubecl::{BoolElement, CubeBackend, FloatElement, IntElement};

use crate::{
    attention::{AttentionCall, ContextParallelBackend, attend},
    collectives::CollectiveBackend,
};

/// A CubeCL runtime whose tensors can be exchanged between ranks.
pub trait CollectiveRuntime: AttentionRuntime {}

#[cfg(feature = "wgpu")]
impl CollectiveRuntime for cubecl::wgpu::WgpuRuntime {}
#[cfg(feature = "cuda")]
impl CollectiveRuntime for cubecl::cuda::CudaRuntime {}

impl<R, F, I, BT> CollectiveBackend for CubeBackend<R, F, I, BT>
where
    R: CollectiveRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
}

impl<R, F, I, BT> ContextParallelBackend for CubeBackend<R, F, I, BT>
where
    R: CollectiveRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn context_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: &AttentionCall,
    ) -> FloatTensor<Self> {
        attend::<Self>(q, k, v, call)
    }
}
