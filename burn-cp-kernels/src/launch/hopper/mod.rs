//! Launches of the hopper routine: CUDA sources on CubeCL's client and stream.
//!
//! `plan` makes the schedules, `source` turns a source file into something that CubeCL compiles and
//! launches, `call` puts tensors and tables together. The kernels are in `kernels/hopper`. Schedules are host
//! data and are tested without CUDA.

#[cfg(feature = "cuda")]
mod call;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, unused_imports))]
pub(crate) mod plan;
#[cfg(feature = "cuda")]
mod source;

#[cfg(feature = "cuda")]
pub(crate) use call::{backward, forward};
