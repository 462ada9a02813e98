//! What can go wrong in a step.

use super::{CapabilityError, ThdError};
use crate::{
    attention::PrepareError, batch::BatchError, comm::CommError, layout::LayoutError,
    plan::PlanError, vision::VisionError,
};

/// Why a batch could not be sharded, or a step not be run.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The batch is wrong. Every rank that holds it says so.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// Its tokens cannot be dealt out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Attention over it cannot be planned, or not be exchanged as asked.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A plan contradicts kernels or exchange.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The vision tower failed.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// The ranks could not talk to each other, or disagree.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The model asks for something that the batch does not carry.
    #[error("the step has no {what}; it has {available}")]
    Missing {
        /// What was asked for.
        what: String,
        /// What there is.
        available: String,
    },
    /// The step holds what the model does not declare to support.
    #[error(transparent)]
    Unsupported(#[from] CapabilityError),
    /// The batch is not packed as streams must be, or its media do not fit.
    #[error(transparent)]
    Thd(#[from] ThdError),
    /// A value does not fit what it is used with.
    #[error("{what}: expected {expected}, got {got}")]
    Invalid {
        /// What is wrong.
        what: String,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
}
