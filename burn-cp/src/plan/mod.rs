//! Who computes which part of attention, and which keys and values move for it.
//!
//! An [`AttentionPlan`] is derived from documents, layout and mask, on the host and without communication.
//! It knows token ranges only: how a layout was dealt out does not matter to it, uneven shares, padding
//! anywhere and ranks without a real token included. For each rank it lists
//!
//! - the K/V buffer: the keys that some query of the rank sees, ordered by row, document and document
//!   position, and the [`KvPiece`]s it is put together from;
//! - the [`Segment`]s: runs of queries that see in one way, each with the one contiguous run of that buffer
//!   which holds its keys, so that varlen kernels apply to every layout and every mask;
//!
//! and for each pair of ranks the tokens that move, with the work and the bytes that this costs.
//!
//! Pure host data. Moving tensors as planned is the business of `attention`; nothing here knows
//! tensors, devices or process groups.

mod attention_plan;
mod cost;
mod derive;
mod error;
mod hash;
mod mask;
mod predict;
mod strategy;
mod table;
#[cfg(test)]
mod tests;
mod types;

pub use crate::layout::MaskKind;
pub use attention_plan::AttentionPlan;
pub use cost::{CostShape, ExchangeBytes};
pub use error::PlanError;
pub use predict::{Hardware, RankCost, StrategyCost};
pub use strategy::ExchangeStrategy;
pub use types::{KvPiece, KvSource, RankPlan, Segment, TokenSpan};
