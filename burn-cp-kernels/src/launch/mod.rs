//! From tensors of a CubeCL backend to launched kernels: host data to records, tensors to bindings,
//! sizes to blueprints. A call launches kernels and nothing else; schedules are made and uploaded once
//! per list of segments and device.

mod delta;
pub(crate) mod hopper;
pub(crate) mod merge;
pub(crate) mod portable;
mod schedule;
#[cfg(feature = "cuda")]
pub(crate) mod tensor_core;
mod tensors;
