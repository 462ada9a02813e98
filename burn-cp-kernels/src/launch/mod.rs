//! From tensors of a CubeCL backend to launched kernels: host data to records, tensors to bindings,
//! sizes to blueprints. A call launches kernels and nothing else; schedules are made and uploaded once
//! per list of segments and device.

pub(crate) mod hopper;
pub(crate) mod portable;
mod schedule;
mod tensors;
