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
    /// A mask of two things that are not defined together.
    #[error("plan: {first} and {second} cannot be combined in one mask")]
    Pair {
        /// One of the two.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A mask asks for something that did not come with the documents.
    #[error(
        "plan: the mask {mask} needs {what} of the documents, got documents without; give them to the batch or to its documents, empty ones where there are none"
    )]
    Unmarked {
        /// The mask.
        mask: &'static str,
        /// What it needs.
        what: &'static str,
    },
}
