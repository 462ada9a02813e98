//! What keeps a packed batch from being dealt out as streams.

use super::MediaKind;
use crate::sharder::StepError;

/// Why a batch is no packed batch, or its media do not fit. Found on the host, before anything moves.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ThdError {
    /// Rows that would be left over.
    #[error(
        "num_chunks: expected a number that divides the {rows} rows of the batch, got {got}; no row is left out"
    )]
    Remainder {
        /// Rows of the batch.
        rows: usize,
        /// Chunks that were asked for.
        got: usize,
    },
    /// A batch that does not say where its documents end.
    #[error(
        "expected a packed batch, whose documents are known by their lengths (with_seq_lens) or otherwise (with_documents), got one without documents"
    )]
    NotPacked,
    /// A batch that has been placed already.
    #[error(
        "expected a batch without a placement, since its rows become streams here, got one that places them in {got:?} [rows, slots]"
    )]
    Placed {
        /// Rows and slots after placement.
        got: [usize; 2],
    },
    /// Media that come with the batch and not by chunk.
    #[error(
        "expected the media of a packed batch in one slot per chunk, got a batch that carries {got} media"
    )]
    MediaInBatch {
        /// Media of the batch.
        got: usize,
    },
    /// Chunks without a slot, or slots without a chunk.
    #[error(
        "media slots: expected {expected}, one for each chunk of token ids and none for embeddings, got {got}"
    )]
    MediaSlots {
        /// Slots that are consumed.
        expected: usize,
        /// Slots that were given.
        got: usize,
    },
    /// Media of which no token could wait for a feature.
    #[error(
        "{kind}: expected the id of their placeholder tokens in the configuration, since a slot brings them, got none"
    )]
    NoPlaceholderId {
        /// What the slot brings.
        kind: MediaKind,
    },
    /// The documents leave tokens without one.
    #[error(
        "padded lengths: expected documents that add up to the {expected} tokens of the stream, got {got}; padding belongs to the document ahead of it"
    )]
    Uncovered {
        /// Tokens of the stream.
        expected: usize,
        /// Tokens of its documents, their padding included.
        got: usize,
    },
    /// Features of another number than the stream's placeholders.
    #[error(
        "{kind}: expected {expected} feature rows, one per placeholder of the stream, got {got}"
    )]
    FeatureRows {
        /// Of what the features are.
        kind: MediaKind,
        /// Placeholders of the stream.
        expected: usize,
        /// Rows that were given.
        got: usize,
    },
    /// Tokens that the stream does not have.
    #[error("media mask: expected tokens below {expected}, the length of the stream, got {got}")]
    PastMask {
        /// Tokens of the stream.
        expected: usize,
        /// The token.
        got: usize,
    },
    /// Something else is wrong with one of several chunks. Rows and documents are counted within it.
    #[error("chunk {chunk}: {source}")]
    Chunk {
        /// The chunk.
        chunk: usize,
        /// What is wrong.
        source: Box<StepError>,
    },
}
