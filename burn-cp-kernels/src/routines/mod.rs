//! Ways to compute attention, and the check of a call's tensors that all of them share.
//!
//! `composed` is written in Burn's tensor operations and runs on every backend without autodiff;
//! `portable` launches kernels on any CubeCL runtime, `tensor_core` such as only CUDA runs, `hopper` some of CUDA's own. Which backend uses which routine is said in
//! `backends`.

mod check;
pub(crate) mod composed;
#[cfg(feature = "cubecl")]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) mod hopper;
#[cfg(feature = "cubecl")]
pub(crate) mod portable;
mod sinks;
#[cfg(all(test, feature = "cubecl"))]
mod table;
#[cfg(feature = "cubecl")]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) mod tensor_core;

#[cfg(feature = "cubecl")]
pub(crate) use check::check_outputs;
pub(crate) use check::{check_backward, check_inputs, check_merge};
