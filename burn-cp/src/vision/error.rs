//! What can go wrong around a vision tower.

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::PartitionError;
use crate::{collectives::ExchangeError, comm::CommError};

/// Why there are no vision features.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// There is nothing to embed.
    #[error("vision tower: expected the grid of at least one image or video, got none")]
    NoEntries,
    /// A grid is empty or does not divide into merge blocks.
    #[error(
        "vision tower: grid {grid:?} must be at least 1 everywhere, with height and width divisible by {merge}"
    )]
    Grid {
        /// The grid `(t, h, w)`.
        grid: [usize; 3],
        /// The tower's spatial merge size.
        merge: usize,
    },
    /// Grids whose patches cannot be counted.
    #[error("vision tower: the patches of the grids up to {grid:?} are more than fit an index")]
    TooLarge {
        /// The grid `(t, h, w)` at which counting ended.
        grid: [usize; 3],
    },
    /// Grids and pixel rows disagree.
    #[error("vision tower: the grids {grids:?} need {expected} pixel rows, got {got}")]
    PixelRows {
        /// The grids `(t, h, w)`.
        grids: Vec<[usize; 3]>,
        /// Σ t·h·w.
        expected: usize,
        /// Rows of the pixel tensor.
        got: usize,
    },
    /// A tower with gradients over ranks whose gradients are not parts of one sum.
    #[error(
        "vision tower: its parameters or pixels have gradients, so expected a group within {expected}, got {got}, whose \
         ranks {outside:?} are replicas and would count every gradient again; freeze the tower or split it over {expected}"
    )]
    TrainableScope {
        /// Name of the group whose ranks hold different tokens of one batch.
        expected: String,
        /// Name of the group over which the tower was to be split.
        got: String,
        /// Global ranks of the latter that are not in the former.
        outside: Vec<usize>,
    },
    /// Frames that cannot be dealt out.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// Features are to go to their consumers, and none are named.
    #[error(
        "vision tower: delivery to-consumers expected the rows that this rank takes (FrameSharded::for_rows), got none; \
         set vision.delivery = \"gathered\" if every rank needs all rows"
    )]
    NoConsumers,
    /// A rank wants rows that the frames do not make. The same error on every rank, where frames are split.
    #[error(
        "vision tower: rank {rank} takes rows {start}..{end}, expected rows within 0..{expected}"
    )]
    Rows {
        /// Global rank.
        rank: usize,
        /// First row.
        start: usize,
        /// End of the rows.
        end: usize,
        /// Rows that the frames make.
        expected: usize,
    },
    /// The tower failed on a rank. The same error on every rank of the group, also on those where it did not fail.
    #[error("rank {rank} failed in vision tower: {fault}")]
    Tower {
        /// Global rank.
        rank: usize,
        /// What its tower did.
        fault: TowerFault,
    },
    /// Rows that cannot be delivered: not one list of them per rank.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// Communication failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// What a vision tower did wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TowerFault {
    /// It panicked.
    #[error("panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// It returned an error.
    #[error("{error}")]
    Failed {
        /// The error and what caused it.
        error: String,
    },
    /// It made more or fewer rows than its grids have tokens.
    #[error("{what}: expected {expected} rows, one per merged token, got {got}")]
    NumTokens {
        /// Embeddings, or which deepstack layer.
        what: String,
        /// Tokens of the grids that it was given.
        expected: usize,
        /// Rows that it returned.
        got: usize,
    },
    /// A deepstack layer has another dtype than the embeddings.
    #[error("{what}: expected the embeddings' dtype {expected:?}, got {got:?}")]
    Dtype {
        /// Which deepstack layer.
        what: String,
        /// Dtype of the embeddings.
        expected: DType,
        /// Dtype of the layer.
        got: DType,
    },
    /// Its output has another form than that of the other ranks' towers.
    #[error("output differs from the other ranks': expected {expected}, got {got}")]
    Form {
        /// What most ranks returned: number of deepstack layers, widths, dtype, trainability.
        expected: String,
        /// What this rank returned.
        got: String,
    },
}
