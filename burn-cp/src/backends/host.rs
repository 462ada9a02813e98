//! Flex and NdArray: ranks are threads, tensors are reference-counted buffers.

use burn::tensor::ops::FloatTensor;

use crate::{
    attention::{AttentionCall, AttentionInput, ContextParallelBackend, attend},
    collectives::CollectiveBackend,
    comm::RankContext,
    launch::{DeviceError, RankDevice},
};

macro_rules! host_backend {
    ($backend:ty) => {
        impl CollectiveBackend for $backend {}

        impl ContextParallelBackend for $backend {
            fn context_attention(
                input: AttentionInput<FloatTensor<Self>>,
                call: &AttentionCall,
            ) -> FloatTensor<Self> {
                attend::<Self>(input, call)
            }
        }
    };
}

/// The one device of the processor, for all ranks.
macro_rules! host_device {
    ($device:ty) => {
        impl RankDevice for $device {
            fn of_rank(_rank: &RankContext) -> Result<Self, DeviceError> {
                Ok(Self::default())
            }
        }
    };
}

#[cfg(feature = "flex")]
host_device!(burn::backend::flex::FlexDevice);
#[cfg(feature = "ndarray")]
host_device!(burn::backend::ndarray::NdArrayDevice);

#[cfg(feature = "flex")]
host_backend!(burn::backend::Flex);
#[cfg(feature = "ndarray")]
host_backend!(burn::backend::NdArray<f32>);
#[cfg(feature = "ndarray")]
host_backend!(burn::backend::NdArray<f64>);
