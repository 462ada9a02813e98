//! From a batch that every rank of a group holds to what each of them works on.
//!
//! [`ContextParallel::shard`] checks the batch, deals its tokens out, plans attention, and cuts this rank's part out of every
//! stream. No tensor travels: every rank derives the same plan, and one host message confirms that they did. The result, a
//! [`CpStep`], is immutable and passed to the model explicitly. [`ThdSharder`] does the same for packed batches in streams, one
//! for each microbatch of a pipeline, with media beside the tokens.

mod arrangement;
mod broadcast;
mod capabilities;
mod check;
mod config;
mod context;
mod cut;
mod error;
mod media;
mod names;
mod step;
mod thd;
mod verbs;

pub use crate::batch::IGNORED_LABEL;
pub use capabilities::{CapabilityError, ModelCapabilities, Violation};
pub use config::{ContextParallelConfig, PrimaryStream};
pub use context::ContextParallel;
pub use error::StepError;
pub use step::CpStep;
pub use thd::{
    MediaEntries, MediaKind, MediaMask, MediaSlot, ThdConfig, ThdError, ThdSharder, ThdStep,
};
pub use verbs::Coordinates;
