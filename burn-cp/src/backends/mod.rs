//! One file per backend family: the only place that knows Burn's internals.
//!
//! `host` serves the backends of the CPU, `autodiff` adds gradients to any other.

mod autodiff;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;
#[cfg(all(test, feature = "flex"))]
mod tests;
