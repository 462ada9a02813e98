//! The kernels of the portable routine: CubeCL without tensor cores and plane operations.
//!
//! `forward` walks tiles of keys per tile of query rows, with the online softmax; the backward pass
//! is `delta` (a number per row), then `queries` (dq: tiles of keys per tile of rows) and `keys` (dk and
//! dv: queries per tile of keys). Nothing is added up across cubes, so no atomics, and every sum has
//! one order. Sources of the formulas: Milakov and Gimelshein, 2018 (arXiv:1805.02867); Dao et al.,
//! 2022 (arXiv:2205.14135).

// A kernel's parameters are its bindings, and its body is one piece of straight-line code.
#![allow(clippy::too_many_arguments, clippy::too_many_lines)]

pub(crate) mod delta;
pub(crate) mod forward;
pub(crate) mod keys;
pub(crate) mod queries;
