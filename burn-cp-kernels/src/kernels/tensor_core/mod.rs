//! Kernels for matrix units, 16-bit floats and asynchronous copies of CUDA devices: the forward pass, all gradients in one pass and, for
//! the sizes and devices that this does not serve, the gradient of queries and those of keys and values. Rows are loaded while the ones before are computed with.

// State of a kernel is registers and shared memory, which entry points declare and parts get one by one.
#![allow(clippy::too_many_arguments, clippy::too_many_lines)]

mod columns;
pub(crate) mod forward;
pub(crate) mod gradients;
pub(crate) mod keys;
pub(crate) mod queries;
pub(crate) mod shares;
