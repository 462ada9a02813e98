//! CubeCL backends: between devices as the runtime can, else through the host.

use burn::tensor::{DType, ops::FloatTensor};
use burn_cp_kernels::AttentionRuntime;
use burn_cubecl::{BoolElement, CubeBackend, FloatElement, IntElement};

use crate::{
    attention::{AttentionCall, AttentionInput, ContextParallelBackend, attend},
    collectives::{Call, Collective, CollectiveBackend, Payload, Pending, start_through_host},
    comm::ProcessGroup,
};
#[cfg(feature = "wgpu")]
use crate::{
    comm::RankContext,
    launch::{DeviceError, RankDevice},
};

/// A runtime's tensors, whatever the element types of the backend that they belong to.
type Plain<R> = CubeBackend<R, f32, i32, u8>;

/// A CubeCL runtime whose tensors can be exchanged between ranks.
///
/// The hidden method is the runtime's own transport, which CUDA has and others do not.
pub trait CollectiveRuntime: AttentionRuntime {
    /// Starts a collective from device to device. Gives the payload back where the group's ranks have no such connection; the same
    /// answer on every rank.
    #[doc(hidden)]
    fn own_collective(
        payload: Payload<Plain<Self>>,
        _op: &Collective,
        _group: &ProcessGroup,
        _call: &Call,
    ) -> Result<Pending<Plain<Self>>, Payload<Plain<Self>>> {
        Err(payload)
    }

    /// As [`CollectiveBackend::moves_any_rows`].
    #[doc(hidden)]
    fn moves_any_rows(
        _tensor: (&[usize], DType),
        _device: &Self::Device,
        _op: &Collective,
        _group: &ProcessGroup,
    ) -> bool {
        false
    }
}

#[cfg(feature = "wgpu")]
impl CollectiveRuntime for burn::backend::wgpu::WgpuRuntime {}

/// The device that wgpu takes by default, for all ranks.
#[cfg(feature = "wgpu")]
impl RankDevice for burn::backend::wgpu::WgpuDevice {
    fn of_rank(_rank: &RankContext) -> Result<Self, DeviceError> {
        Ok(Self::default())
    }
}

/// The same tensor in a backend with other element types.
macro_rules! recast {
    ($payload:expr) => {
        match $payload {
            Payload::Float(tensor) => Payload::Float(tensor),
            Payload::Int(tensor) => Payload::Int(tensor),
            Payload::Bool(tensor) => Payload::Bool(tensor),
        }
    };
}

impl<R, F, I, BT> CollectiveBackend for CubeBackend<R, F, I, BT>
where
    R: CollectiveRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn collective_start(
        payload: Payload<Self>,
        op: &Collective,
        group: &ProcessGroup,
        call: Call,
    ) -> Pending<Self> {
        match R::own_collective(recast!(payload), op, group, &call) {
            Ok(pending) => Pending::new(move || recast!(pending.finish())),
            Err(payload) => start_through_host::<Self>(recast!(payload), op, group, call),
        }
    }

    fn moves_any_rows(
        tensor: (&[usize], DType),
        device: &Self::Device,
        op: &Collective,
        group: &ProcessGroup,
    ) -> bool {
        R::moves_any_rows(tensor, device, op, group)
    }
}

impl<R, F, I, BT> ContextParallelBackend for CubeBackend<R, F, I, BT>
where
    R: CollectiveRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn context_attention(
        input: AttentionInput<FloatTensor<Self>>,
        call: &AttentionCall,
    ) -> FloatTensor<Self> {
        attend::<Self>(input, call)
    }
}
