//! Context-parallel runs that burn-train drives (feature `train`).
//!
//! [`ContextParallelStrategy`] is a learning strategy for `burn_train::SupervisedTraining`, which keeps its loop's habits, metrics,
//! checkpoints, early stopping and display: ranks are threads, rank 0 does what burn-train does on one device, and the other
//! ranks take the same steps. [`ForRank`] is what a model's steps are given, [`GlobalLoss`] what they may return.
//!
//! Ranks as processes have no strategy here: each of them would run, report and save a training of its own.

mod item;
mod rank;
mod strategy;

pub use item::{ForRank, GlobalLoss};
pub use strategy::ContextParallelStrategy;

use crate::{comm::CommError, launch::DeviceError, nn::ParameterError, sharder::StepError};

/// Why a rank stopped, besides what its model's steps say.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Ranks could not talk to each other, or the mesh lacks an axis of the configuration.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The configuration contradicts itself.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Ranks start with different parameters.
    #[error(transparent)]
    Parameters(#[from] ParameterError),
    /// A rank has no device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An epoch in which no step could be made.
    #[error(
        "training items of epoch {epoch}: expected at least {expected}, one for each group of ranks that shares sequences, got {got}"
    )]
    TooFewItems {
        /// The epoch, from 1.
        epoch: usize,
        /// Items of a step.
        expected: usize,
        /// Items that the loader gave.
        got: usize,
    },
    /// Rank 0, which reads the data, ended before it had said that there is no more.
    #[error("rank 0 ended before the training had")]
    LeadLeft,
}
