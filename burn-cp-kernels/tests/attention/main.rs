//! Varlen attention on the CPU backends and, with the feature `wgpu`, on software Vulkan, against the f64 reference, against textbook attention, and
//! against itself.

mod accuracy;
mod autodiff;
mod behaviour;
mod bits;
mod merging;
mod support;
#[cfg(feature = "wgpu")]
mod wgpu;
