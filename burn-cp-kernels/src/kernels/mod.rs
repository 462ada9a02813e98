//! Kernels: entry points that are launched, one folder per routine, and
//! the merging of results, which has none. They are made from `components`
//! and know no host data.

pub(crate) mod merge;
pub(crate) mod portable;
#[cfg(feature = "cuda")]
pub(crate) mod tensor_core;
