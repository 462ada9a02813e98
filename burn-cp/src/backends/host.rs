//! Flex and NdArray: ranks are threads, tensors are reference-counted buffers.

use burn::tensor::ops::FloatTensor;

use crate::{
    attention::{AttentionCall, ContextParallelBackend, attend},
    collectives::CollectiveBackend,
};

macro_rules! host_backend {
    ($backend:ty) => {
        impl CollectiveBackend for $backend {}

        impl ContextParallelBackend for $backend {
            fn context_attention(
                q: FloatTensor<Self>,
                k: FloatTensor<Self>,
                v: FloatTensor<Self>,
                call: &AttentionCall,
            ) -> FloatTensor<Self> {
                attend::<Self>(q, k, v, call)
            }
        }
    };
}

#[cfg(feature = "flex")]
host_backend!(burn::backend::Flex);
#[cfg(feature = "ndarray")]
host_backend!(burn::backend::NdArray<f32>);
#[cfg(feature = "ndarray")]
host_backend!(burn::backend::NdArray<f64>);
