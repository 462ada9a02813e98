//! The one place where this crate waits for a device: values of tensors are brought to the host here, and every time is counted.
//!
//! A wait inside a layer leaves the device idle until the host has caught up, so that it matters that there is none; the count lets
//! tests and users see it.

use std::cell::Cell;

use burn::tensor::{TensorData, backend::Backend, try_read_sync};

use super::Payload;

thread_local! {
    // Of a thread, since a rank runs its forward and backward passes in one; nothing but tests and reports depends on it.
    static NUM_READS: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread has waited for a device inside this crate, from its start on.
///
/// Sharding, attention and collectives over NCCL do not wait, forward or backward. Reading a loss
/// ([`TokenLoss::global_value`](crate::loss::TokenLoss::global_value)), clipping by the global norm, and starting up do so once each
/// (start-up once per parameter). Tensors of devices that travel through the host are waited for whenever they travel. What
/// callers read themselves is not counted.
pub fn num_host_reads() -> u64 {
    NUM_READS.get()
}

/// The values of a tensor, once the device has computed them.
///
/// # Panics
/// The device fails.
pub(crate) fn read_to_host<B: Backend>(payload: Payload<B>) -> TensorData {
    NUM_READS.set(NUM_READS.get() + 1);
    let read = match payload {
        Payload::Float(tensor) => try_read_sync(B::float_into_data(tensor)),
        Payload::Int(tensor) => try_read_sync(B::int_into_data(tensor)),
        Payload::Bool(tensor) => try_read_sync(B::bool_into_data(tensor)),
    };
    read.expect("a device that can be waited for")
        .unwrap_or_else(|error| panic!("cannot read a tensor: {error}"))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::{backend::Flex, tensor::Tensor};

    use super::*;

    #[test]
    fn every_read_is_counted() {
        let before = num_host_reads();
        let x = Tensor::<Flex, 1>::from_floats([1.0, 2.0], &Default::default());
        let data = read_to_host::<Flex>(Payload::Float(x.into_primitive().tensor()));
        assert_eq!(data.to_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(num_host_reads(), before + 1);
    }
}
