//! Varlen attention on the CPU backends against the f64 reference, against textbook attention, and
//! against itself.

mod accuracy;
mod autodiff;
mod behaviour;
mod bits;
mod support;
