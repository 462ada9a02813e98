//! Fused backends: a collective is started at once, on the inner backend's tensors.
//!
//! A stream of lazy operations may reorder what it fuses; ranks must meet in program order. So the stream runs what the payload
//! depends on, the inner backend exchanges, and the result comes back as a new tensor of the stream. The device is not waited for.
//! What is computed between start and finish runs when the stream gets to it, which may be after the exchange.

use burn::tensor::{DType, Shape, TensorMetadata, ops::FloatTensor};
use burn_cp_kernels::AttentionBackend;
use burn_fusion::{
    Client, Fusion, FusionBackend, FusionHandle, FusionTensor, NoOp, stream::OperationStreams,
};
use burn_ir::{InitOperationIr, OperationIr, OperationOutput};

use crate::{
    attention::{AttentionCall, AttentionInput, ContextParallelBackend, attend},
    collectives::{Call, Collective, CollectiveBackend, Payload, Pending},
    comm::ProcessGroup,
};

type Runtime<B> = <B as FusionBackend>::FusionRuntime;

impl<B: FusionBackend + CollectiveBackend> CollectiveBackend for Fusion<B> {
    fn collective_start(
        payload: Payload<Self>,
        op: &Collective,
        group: &ProcessGroup,
        call: Call,
    ) -> Pending<Self> {
        let (inner, client) = resolve::<B>(payload);
        let pending = B::collective_start(inner, op, group, call);
        Pending::new(move || match pending.finish() {
            Payload::Float(tensor) => {
                let (shape, dtype) = (tensor.shape(), tensor.dtype());
                let handle = B::float_tensor_handle(tensor);
                Payload::Float(register::<B>(&client, handle, shape, dtype))
            }
            Payload::Int(tensor) => {
                let (shape, dtype) = (tensor.shape(), tensor.dtype());
                let handle = B::int_tensor_handle(tensor);
                Payload::Int(register::<B>(&client, handle, shape, dtype))
            }
            Payload::Bool(tensor) => {
                let (shape, dtype) = (tensor.shape(), tensor.dtype());
                let handle = B::bool_tensor_handle(tensor);
                Payload::Bool(register::<B>(&client, handle, shape, dtype))
            }
        })
    }

    fn moves_any_rows(
        tensor: (&[usize], DType),
        device: &Self::Device,
        op: &Collective,
        group: &ProcessGroup,
    ) -> bool {
        B::moves_any_rows(tensor, device, op, group)
    }
}

/// The inner backend's tensor, whose operations have been submitted.
fn resolve<B: FusionBackend>(payload: Payload<Fusion<B>>) -> (Payload<B>, Client<Runtime<B>>) {
    match payload {
        Payload::Float(tensor) => {
            let client = tensor.client.clone();
            let tensor = client.clone().resolve_tensor_float::<B>(tensor);
            (Payload::Float(tensor), client)
        }
        Payload::Int(tensor) => {
            let client = tensor.client.clone();
            let tensor = client.clone().resolve_tensor_int::<B>(tensor);
            (Payload::Int(tensor), client)
        }
        Payload::Bool(tensor) => {
            let client = tensor.client.clone();
            let tensor = client.clone().resolve_tensor_bool::<B>(tensor);
            (Payload::Bool(tensor), client)
        }
    }
}

/// A tensor of the stream whose value is there.
fn register<B: FusionBackend>(
    client: &Client<Runtime<B>>,
    handle: FusionHandle<Runtime<B>>,
    shape: Shape,
    dtype: DType,
) -> FusionTensor<Runtime<B>> {
    let init = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
    client
        .register(
            OperationStreams::default(),
            OperationIr::Init(init),
            NoOp::<B>::new(),
        )
        .output()
}

impl<B: FusionBackend + CollectiveBackend> ContextParallelBackend for Fusion<B>
where
    Self: AttentionBackend,
{
    fn context_attention(
        input: AttentionInput<FloatTensor<Self>>,
        call: &AttentionCall,
    ) -> FloatTensor<Self> {
        attend::<Self>(input, call)
    }
}
