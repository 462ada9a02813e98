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
    /// A left halo cannot bring a token that is not the left neighbour's.
    #[error(
        "left-halo: expected rank {rank} to need tokens of {} only, got tokens of rank {got}; needed-only serves every layout",
        expected.map_or("itself".to_owned(), |left| format!("itself and rank {left}"))
    )]
    NotLeftNeighbour {
        /// The rank that needs them.
        rank: usize,
        /// Its left neighbour, if it has one.
        expected: Option<usize>,
        /// The rank that has them.
        got: usize,
    },
    /// Heads cannot be dealt out evenly.
    #[error("head-all-to-all: expected a number of {what} that {expected} ranks divide, got {got}")]
    HeadDivisibility {
        /// Which heads.
        what: &'static str,
        /// Number of ranks.
        expected: usize,
        /// Number of heads.
        got: usize,
    },
    /// Attention dropout with an exchange in which a rank does not see heads and positions as one rank does.
    #[error(
        "{exchange} and dropout of attention cannot be combined; all-gather, needed-only and left-halo serve dropout"
    )]
    Dropout {
        /// The exchange.
        exchange: &'static str,
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
