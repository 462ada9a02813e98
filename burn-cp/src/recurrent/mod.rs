//! Layers through which tokens meet outside of attention: recurrences and causal convolutions over sharded sequences.
//!
//! Such a layer walks a document from its first token to its last, so its rank must stand behind the ranks of earlier tokens:
//! a [`Recurrence`] brings a step's tokens into the order of the sequence and back, tells a rank which documents go on across
//! its borders ([`RankContext`]), and offers what crosses them: the tokens to the left that a convolution reaches
//! ([`Recurrence::causal_conv1d`], [`Recurrence::shifted`], [`Recurrence::left_halo`]) and the state that a recurrence enters
//! with ([`Recurrence::carry`], [`Recurrence::affine_scan`]). All of it is differentiable and built from planned exchanges, which
//! every rank derives from documents and layout; where no document crosses a border nothing travels.
//!
//! Documents are their real tokens: padding, also between a document's tokens, is passed over as if it were not there, so a
//! document yields what it would yield alone. This room knows no gates, no projections and no models.

mod context;
mod convolution;
mod order;
mod recurrence;
mod scan;
#[cfg(test)]
mod tests;

pub use context::{RankContext, RecurrentError};
pub use order::SequenceOrder;
pub use recurrence::Recurrence;
pub use scan::Transition;
