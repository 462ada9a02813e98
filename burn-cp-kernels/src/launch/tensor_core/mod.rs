//! Launches of the tensor core routine, on CubeCL's client of a CUDA device.
//!
//! `task` makes kernels of what is in `kernels/tensor_core`, `call` puts tensors and tables together,
//! `gradients` does so for the backward pass in one kernel.

mod call;
mod gradients;
mod task;

pub(crate) use call::{backward, forward};
