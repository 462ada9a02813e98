//! Collectives of tensors on devices without a connection of their own: values travel and are summed on the host.
//!
//! CubeCL gives each thread a stream of its own. A buffer that one rank hands to another by reference may be reused by its owner before
//! the other's commands that read it are submitted, so nothing of a device is shared here.

use burn::{
    backend::Flex,
    tensor::{BoolStore, DType, backend::Backend},
};

use super::{
    Call, Collective, CollectiveBackend, Payload, host_read::read_to_host, run_on_threads,
};
use crate::comm::ProcessGroup;

/// Runs a collective on the host, as a CPU backend does; each rank waits for its device first. A group of one moves nothing.
///
/// Every rank of `group` must call it. A failure ends the rank with a typed panic.
///
/// # Panics
/// The device fails.
pub fn run_through_host<B: Backend>(
    payload: Payload<B>,
    op: &Collective,
    group: &ProcessGroup,
    call: Call,
) -> Payload<B> {
    if group.size() == 1 {
        return run_on_threads(payload, op, group, call);
    }
    let dtype = payload.dtype();
    let device = match &payload {
        Payload::Float(tensor) => B::float_device(tensor),
        Payload::Int(tensor) => B::int_device(tensor),
        Payload::Bool(tensor) => B::bool_device(tensor),
    };
    let result = Flex::collective(
        to_backend(payload, host_dtype(dtype), &Default::default()),
        op,
        group,
        call,
    );
    to_backend::<Flex, B>(result, dtype, &device)
}

/// How the host keeps a dtype: backends differ in how they store booleans.
fn host_dtype(dtype: DType) -> DType {
    match dtype {
        DType::Bool(_) => DType::Bool(BoolStore::Native),
        other => other,
    }
}

/// The same values on another backend; waits for them.
fn to_backend<From: Backend, To: Backend>(
    payload: Payload<From>,
    dtype: DType,
    device: &To::Device,
) -> Payload<To> {
    let shape = payload.shape();
    // A device has nothing to read or write of a tensor without elements; CUDA's refuses to.
    if shape.num_elements() == 0 {
        return match payload {
            Payload::Float(_) => Payload::Float(To::float_empty(shape, device, dtype.into())),
            Payload::Int(_) => Payload::Int(To::int_empty(shape, device, dtype.into())),
            Payload::Bool(_) => Payload::Bool(To::bool_empty(shape, device, dtype.into())),
        };
    }
    let kind = match &payload {
        Payload::Float(_) => {
            |data, device: &To::Device| Payload::Float(To::float_from_data(data, device))
        }
        Payload::Int(_) => {
            |data, device: &To::Device| Payload::Int(To::int_from_data(data, device))
        }
        Payload::Bool(_) => {
            |data, device: &To::Device| Payload::Bool(To::bool_from_data(data, device))
        }
    };
    let data = read_to_host(payload);
    kind(data.convert_dtype(dtype), device)
}
