//! What can be wrong with a batch.

use crate::layout::LayoutError;

/// A batch that cannot be sharded. Found on the host, before anything moves; equal on every rank that holds the batch.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// No rows or no tokens.
    #[error("the batch is empty: its primary stream has shape {shape:?}")]
    Empty {
        /// Shape of the primary stream.
        shape: Vec<usize>,
    },
    /// A stream has another shape than the primary stream asks for.
    #[error("{what}: expected shape {expected}, got {got:?}")]
    Shape {
        /// Name of the stream.
        what: String,
        /// The shape that fits.
        expected: String,
        /// The stream's shape.
        got: Vec<usize>,
    },
    /// A host stream has another kind of element.
    #[error("{what}: expected {expected} elements, got {got}")]
    Dtype {
        /// Name of the stream.
        what: String,
        /// Kind that was expected.
        expected: &'static str,
        /// Dtype of the stream.
        got: String,
    },
    /// A label is neither a class nor the ignored value.
    #[error(
        "label {label} at row {row}, token {token} is outside the vocabulary: expected 0..{vocab_size}, or -100 for ignored"
    )]
    Label {
        /// Row of the batch.
        row: usize,
        /// Token within the row.
        token: usize,
        /// The label.
        label: i64,
        /// Number of classes.
        vocab_size: usize,
    },
    /// A loss mask without labels that it could mask.
    #[error("loss mask: expected labels to be given before it, got none")]
    NoLabels,
    /// A loss mask holds something else than 0 and 1.
    #[error("loss mask, token {token} of all rows: expected 0 or 1, got {got}")]
    LossMask {
        /// Token, counted through all rows.
        token: usize,
        /// The value.
        got: f64,
    },
    /// The documents describe another batch.
    #[error("documents: expected {expected:?} [batch, seq] as the primary stream, got {got:?}")]
    Documents {
        /// `[batch, seq]` of the primary stream.
        expected: [usize; 2],
        /// `[batch, seq]` of the document table.
        got: [usize; 2],
    },
    /// The placement is one of another batch.
    #[error("placement: expected {expected:?} [batch, seq] as the primary stream, got {got:?}")]
    Placement {
        /// `[batch, seq]` of the primary stream.
        expected: [usize; 2],
        /// `[batch, seq]` of the placement's input.
        got: [usize; 2],
    },
    /// A placement without documents of the placed rows.
    #[error("placement: expected documents of the placed rows, {placed:?}, got none")]
    NoDocuments {
        /// Rows and slots after placement.
        placed: [usize; 2],
    },
    /// A placement drops a token that counts, or moves it out of every document.
    #[error(
        "placement: expected a slot within a document for token {token} of row {row}, which has {what}, got none"
    )]
    Dropped {
        /// What would be lost.
        what: &'static str,
        /// Row of the batch.
        row: usize,
        /// Token within the row.
        token: usize,
    },
    /// A mask lets tokens see later ones of their document.
    #[error(
        "attention mask: expected causal documents, got one in which tokens see later ones; give the documents by ids and ask for full attention in the model"
    )]
    NotCausal,
    /// Grids and pixel rows disagree.
    #[error("{what}: the grids {grids:?} need {expected} pixel rows, got {got}")]
    PixelRows {
        /// Name of the media.
        what: String,
        /// The grids `(t, h, w)`.
        grids: Vec<[usize; 3]>,
        /// Σ t·h·w.
        expected: usize,
        /// Rows of the pixel tensor.
        got: usize,
    },
    /// A grid is empty or does not divide into merge blocks.
    #[error(
        "{what}: grid {grid:?} must be at least 1 everywhere and within the size of an index, with height and width divisible by {merge}"
    )]
    Grid {
        /// Name of the media.
        what: String,
        /// The grid `(t, h, w)`.
        grid: [usize; 3],
        /// The tower's spatial merge size.
        merge: usize,
    },
    /// The tokens that wait for features and the features that will come are not equally many.
    #[error("{what}: {placeholders} placeholder tokens, but {embeddings} embeddings")]
    Placeholders {
        /// Name of the media or stream.
        what: String,
        /// Marked tokens.
        placeholders: usize,
        /// Rows that the tower makes, or that were given.
        embeddings: usize,
    },
    /// Two media mark one token.
    #[error("token {token} of row {row} is a placeholder of two media, {first} and {second}")]
    PlaceholderTwice {
        /// Row of the batch.
        row: usize,
        /// Token within the row.
        token: usize,
        /// Name of the first media.
        first: String,
        /// Name of the second media.
        second: String,
    },
    /// A stream that nobody declared.
    #[error("stream {name:?} is not declared; declared streams: {declared:?}")]
    UnknownStream {
        /// Name of the stream.
        name: String,
        /// Names that the configuration declares.
        declared: Vec<String>,
    },
    /// The batch and its documents both say what only one can.
    #[error("{what}: expected them from the batch or from its documents, got them from both")]
    MarkedTwice {
        /// Spans, prefixes or masks.
        what: &'static str,
    },
    /// The tokens of a frame do not follow each other, so that they are no span.
    #[error(
        "{what}, frame {frame}: expected its tokens one behind the other in row {row} to make a span of them, got a gap behind token {token}; give such spans by with_spans"
    )]
    FrameTokens {
        /// Name of the media.
        what: String,
        /// Frame of the media, counted through its entries.
        frame: usize,
        /// Row of its first token.
        row: usize,
        /// Token behind which its next one is missing.
        token: usize,
    },
    /// A placement takes the tokens of a span apart, or away.
    #[error(
        "spans: expected tokens {tokens:?} of row {row} to stand together in one document after placement, got them apart or gone"
    )]
    SpanPlaced {
        /// Row of the batch.
        row: usize,
        /// The span.
        tokens: std::ops::Range<usize>,
    },
    /// The document table or the layout does not fit.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}
