//! What one attention call is: segments, options, the problem that follows from the shapes, and
//! the errors of all of them.
//!
//! Pure host data. No tensor, no backend and no kernel is known here.

mod error;
mod io;
mod options;
mod problem;
mod segments;

pub use error::AttentionError;
pub use io::{AttentionBackwardInput, AttentionGradients, AttentionOutput};
pub use options::AttentionOptions;
pub use problem::AttentionProblem;
pub use segments::{Segment, Segments};
