//! CubeCL backends, plain and fused: ranks are threads of one process, and what travels goes through the host.

use burn::tensor::ops::FloatTensor;
use burn_cp_kernels::{AttentionBackend, AttentionRuntime};
use burn_cubecl::{BoolElement, CubeBackend, FloatElement, IntElement};
use burn_fusion::{Fusion, FusionBackend};

use crate::{
    attention::{AttentionCall, ContextParallelBackend, attend},
    collectives::{Call, Collective, CollectiveBackend, Payload, run_through_host},
    comm::ProcessGroup,
};

impl<R, F, I, BT> CollectiveBackend for CubeBackend<R, F, I, BT>
where
    R: AttentionRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn collective(
        payload: Payload<Self>,
        op: &Collective,
        group: &ProcessGroup,
        call: Call,
    ) -> Payload<Self> {
        run_through_host(payload, op, group, call)
    }
}

impl<R, F, I, BT> ContextParallelBackend for CubeBackend<R, F, I, BT>
where
    R: AttentionRuntime,
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

/// Collectives run as they are called: reading a tensor makes the stream of this rank run what it has registered.
impl<B: FusionBackend> CollectiveBackend for Fusion<B> {
    fn collective(
        payload: Payload<Self>,
        op: &Collective,
        group: &ProcessGroup,
        call: Call,
    ) -> Payload<Self> {
        run_through_host(payload, op, group, call)
    }
}

impl<B: FusionBackend> ContextParallelBackend for Fusion<B>
where
    Self: AttentionBackend,
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
