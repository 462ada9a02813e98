//! Kernels: entry points that are launched, one folder per routine. They are made from `components`
//! and know no host data.

pub(crate) mod portable;
