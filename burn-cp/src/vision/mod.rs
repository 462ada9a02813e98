//! The vision tower, split over ranks by frames.
//!
//! A frame (one image, or one temporal slice of a video) attends within itself only, so frames can be computed anywhere.
//! [`FrameSharded`] gives every rank of a group a contiguous share of them, balanced by cost, and gathers the embeddings in
//! order, or hands every rank the rows that it asks for. This room knows pixels, grids and rows of features; it does not know
//! which tokens the embeddings replace.

mod config;
mod delivery;
mod error;
mod form;
mod frames;
mod partition;
mod sharded;
#[cfg(test)]
mod tests;

use std::error::Error;

use burn::tensor::{Tensor, backend::Backend};

pub use config::{VisionDelivery, VisionShardingConfig};
pub use error::{TowerFault, VisionError};
pub use frames::{FrameShare, FrameShares, plan_frames};
pub use partition::{PartitionError, balanced_cuts};
pub use sharded::FrameSharded;

/// What a vision tower makes of its frames.
#[derive(Debug, Clone)]
pub struct VisionFeatures<B: Backend> {
    /// `[merged tokens, hidden]`, in the order of the grids; or, where features go to their consumers, those of this rank's
    /// tokens in the order of its tokens, and one row that stands for nothing where it has no such token.
    pub embeddings: Tensor<B, 2>,
    /// Features for several decoder layers, each `[merged tokens, width]` with the embeddings' rows; may be empty. All of the embeddings' dtype.
    pub deepstack: Vec<Tensor<B, 2>>,
}

/// Whatever kept a vision tower from embedding its frames.
pub type TowerError = Box<dyn Error + Send + Sync>;

/// A vision tower whose frames are independent: attention within a frame, positions within a frame.
pub trait VisionTower<B: Backend> {
    /// Patches per side of a block that becomes one token.
    fn spatial_merge_size(&self) -> usize;

    /// Width of the tower's hidden states; the cost of a frame of `p` patches is `p·(p + 3·width)` unless told otherwise.
    fn hidden_size(&self) -> usize;

    /// Whether any of its parameters is trained. Must be the same on every rank.
    fn is_trainable(&self) -> bool;

    /// Runs the tower: pixels `[rows, patch_dim]`, entry by entry and frame by frame, with the grids `(t, h, w)` of the
    /// entries in patches; `rows = Σ t·h·w`. Embeds `Σ t·h·w / merge²` tokens. Never called without an entry.
    ///
    /// # Errors
    /// Whatever it cannot do. Where frames are split, every rank gets the first failing rank's error.
    fn forward(
        &self,
        pixels: Tensor<B, 2>,
        grids: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, TowerError>;
}
