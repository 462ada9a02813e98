//! One file per backend family: the only place that knows Burn's internals.
//!
//! `host` serves the backends of the CPU, `cube` those on a CubeCL runtime (`cuda`: what CUDA has besides), `fusion` those under
//! Burn's fusion, `autodiff` adds gradients to any other.

mod autodiff;
mod cat;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cubecl")]
mod fusion;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;
#[cfg(all(test, feature = "flex"))]
mod tests;

pub use cat::cat;
#[cfg(feature = "cubecl")]
pub use cube::CollectiveRuntime;
