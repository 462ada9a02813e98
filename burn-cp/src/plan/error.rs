//! Why a plan cannot be made.

use thiserror::Error;

/// Why a plan was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Documents and layout describe rows of different length.
    #[error(
        "plan: expected documents in rows of {expected} tokens, as the layout has them, got rows of {got}; pad the documents to the length of the layout first"
    )]
    SeqLen {
        /// Tokens of a row of the layout.
        expected: usize,
        /// Tokens of a row of the documents.
        got: usize,
    },
    /// A count does not fit in 64 bits.
    #[error("plan: the {what} does not fit in 64 bits")]
    Overflow {
        /// The count.
        what: &'static str,
    },
}
