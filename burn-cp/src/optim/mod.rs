//! Gradients and parameters over ranks.
//!
//! Gradients of [`TokenLoss::local`](crate::loss::TokenLoss) are summed over the axes of the loss; afterwards every rank holds
//! those of one device, and optimizers, clipping and schedules run as on one device.

mod clip;
mod sync;

pub use clip::clip_by_global_norm;
pub use sync::{GradientSync, broadcast_parameters, sync_gradients};
