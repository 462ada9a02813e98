//! Why the command refused.

use std::path::PathBuf;

use burn_cp::{layout::LayoutError, plan::PlanError};
use thiserror::Error;

/// What was wrong with flags or files.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlanCommandError {
    /// A flag's value is out of range.
    #[error("--{flag}: expected {expected}, got {got}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What it takes.
        expected: &'static str,
        /// Its value.
        got: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A line is not a pack.
    #[error("{}, line {line}: expected the document lengths of a pack, [100, 80, 44] or {{\"lengths\": [100, 80, 44]}}, of at least one token in all; {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A file without a pack.
    #[error("{}: expected a pack on each line, got no line", path.display())]
    NoPacks {
        /// The file.
        path: PathBuf,
    },
    /// The documents cannot be laid out at all.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A plan cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The picture could not be drawn.
    #[error("{}: cannot draw: {reason}", path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The result could not be written as JSON.
    #[error("cannot write JSON: {source}")]
    Json {
        /// The reason.
        source: serde_json::Error,
    },
}
