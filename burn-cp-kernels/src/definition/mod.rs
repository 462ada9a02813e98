//! What one attention call is: segments, options, the problem that follows from the shapes, and
//! the errors of all of them.
//!
//! Pure host data. No tensor, no backend and no kernel is known here.

mod cache;
mod dropout;
mod error;
mod io;
mod options;
mod problem;
mod routine;
mod segment;
mod segments;

pub use dropout::{Dropout, DropoutPlace};
#[cfg(feature = "cubecl")]
pub(crate) use dropout::{KEY_FACTOR, MIX_FACTORS};
pub use error::AttentionError;
pub use io::{AttentionBackwardInput, AttentionGradients, AttentionInput, AttentionOutput};
pub use options::AttentionOptions;
pub use problem::AttentionProblem;
pub use routine::{Routine, RoutineChoice};
pub use segment::{Segment, Window};
pub use segments::Segments;
