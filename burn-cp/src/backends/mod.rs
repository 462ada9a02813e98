//! One file per backend family: the only place that knows Burn's internals.
//!
//! `host` serves the backends of the CPU, `cube` those on a CubeCL runtime, `autodiff` adds gradients to any other.

mod autodiff;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;
#[cfg(all(test, feature = "flex"))]
mod tests;
