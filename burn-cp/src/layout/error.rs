//! What can be wrong with documents, layouts and policies.

use thiserror::Error;

use super::MarkError;

/// Why documents or a layout were refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// There is no batch row.
    #[error("{what}: expected at least one batch row, got none")]
    EmptyBatch {
        /// What was being built.
        what: &'static str,
    },
    /// Rows have no tokens.
    #[error("{what}: expected rows of at least one token, got rows of none")]
    EmptyStream {
        /// What was being built.
        what: &'static str,
    },
    /// Two tables that belong together have different numbers of rows.
    #[error("{what}: expected {expected} batch rows, got {got}")]
    NumRows {
        /// The table.
        what: &'static str,
        /// Rows that it should have.
        expected: usize,
        /// Rows that it has.
        got: usize,
    },
    /// A row is longer or shorter than the others.
    #[error("{what}, row {row}: expected {expected} entries, got {got}")]
    RowLen {
        /// The table.
        what: &'static str,
        /// The row.
        row: usize,
        /// Entries that it should have.
        expected: usize,
        /// Entries that it has.
        got: usize,
    },
    /// A value that counts or names something is negative.
    #[error("{what}, row {row}, entry {index}: expected a value of at least 0, got {got}")]
    Negative {
        /// The table.
        what: &'static str,
        /// The row.
        row: usize,
        /// Place in the row.
        index: usize,
        /// The value.
        got: i64,
    },
    /// `cu_seqlens` does not begin with 0.
    #[error("cu_seqlens, row {row}: expected the first boundary to be 0, got {got:?}")]
    FirstBoundary {
        /// The row.
        row: usize,
        /// The first boundary, if there is any.
        got: Option<i64>,
    },
    /// `cu_seqlens` goes back.
    #[error(
        "cu_seqlens, row {row}, entry {index}: expected a boundary of at least {expected}, got {got}"
    )]
    DecreasingBoundary {
        /// The row.
        row: usize,
        /// Place in the row.
        index: usize,
        /// The boundary before it.
        expected: i64,
        /// The boundary.
        got: i64,
    },
    /// A padded length is shorter than the real one.
    #[error(
        "padded lengths, row {row}, document {document}: expected at least its {expected} real tokens, got {got}"
    )]
    PaddedLength {
        /// The row.
        row: usize,
        /// The document.
        document: usize,
        /// Real length.
        expected: usize,
        /// Padded length.
        got: usize,
    },
    /// A document runs past the end of its row.
    #[error(
        "documents, row {row}, document {document}: expected it to end within {expected} tokens, got an end at {got}"
    )]
    PastStream {
        /// The row.
        row: usize,
        /// The document.
        document: usize,
        /// Tokens of a row.
        expected: usize,
        /// End of the document.
        got: usize,
    },
    /// A document begins before the one ahead of it has ended, or comes out of order.
    #[error(
        "documents, row {row}, document {document}: expected a start at or after {expected}, where the document before it ends, got {got}"
    )]
    DocumentOrder {
        /// The row.
        row: usize,
        /// The document.
        document: usize,
        /// End of the document before it.
        expected: usize,
        /// Start of the document.
        got: usize,
    },
    /// The real tokens of a document overlap, are out of order or leave its extent.
    #[error(
        "documents, row {row}, document {document}: expected ordered runs within {expected:?}, got {got:?}"
    )]
    DocumentRuns {
        /// The row.
        row: usize,
        /// The document.
        document: usize,
        /// Where the run may lie.
        expected: std::ops::Range<usize>,
        /// The run.
        got: std::ops::Range<usize>,
    },
    /// One of two tables has a length where the other has none.
    #[error(
        "seq_lens_padded, row {row}, entry {index}: expected an absent entry in both tables or in neither, got {expected} in seq_lens and {got} here"
    )]
    AbsentLength {
        /// The row.
        row: usize,
        /// Place in the row.
        index: usize,
        /// Entry of the real lengths.
        expected: i64,
        /// Entry of the padded lengths.
        got: i64,
    },
    /// The padding id stands between content.
    #[error(
        "token ids, row {row}: expected the padding id {padding_id} at the end of the row only, got it at token {got}, where it also occurs as content; give lengths or a mask instead"
    )]
    PaddingInContent {
        /// The row.
        row: usize,
        /// The padding id.
        padding_id: i64,
        /// First place that content follows.
        got: usize,
    },
    /// Boundaries cannot express padding within a document.
    #[error(
        "boundaries, row {row}, document {document}: expected its real tokens at {expected:?}, got {got:?}"
    )]
    Unpacked {
        /// The row.
        row: usize,
        /// The document.
        document: usize,
        /// Where real tokens would have to be.
        expected: std::ops::Range<usize>,
        /// Where they are.
        got: Vec<std::ops::Range<usize>>,
    },
    /// A dense mask has the wrong shape.
    #[error("dense mask: expected the shape [batch, 1, seq, seq], got {got:?}")]
    MaskShape {
        /// The shape.
        got: [usize; 4],
    },
    /// A dense mask does not have the entries that its shape says.
    #[error("dense mask: expected entries for the shape {expected:?}, got {got}")]
    MaskLen {
        /// The shape.
        expected: [usize; 4],
        /// Number of entries.
        got: usize,
    },
    /// An additive mask holds a value that neither keeps nor masks.
    #[error(
        "additive mask, flat entry {index}: expected 0 (keep) or at most -10000 (masked), got {got}"
    )]
    MaskValue {
        /// Place in row-major order.
        index: usize,
        /// The value.
        got: String,
    },
    /// A dense mask that documents cannot express.
    #[error(
        "dense mask, row {row}: expected it to be causal within every document or full within every document, got one where query {query} {} key {key}",
        if *got { "sees" } else { "does not see" }
    )]
    MaskPair {
        /// The row.
        row: usize,
        /// The query of the first pair that differs.
        query: usize,
        /// Its key.
        key: usize,
        /// Whether the query sees the key.
        got: bool,
    },
    /// Rows cannot be shortened by padding them.
    #[error("padding documents: expected a length of at least {expected} tokens, got {got}")]
    Shorter {
        /// Tokens of a row.
        expected: usize,
        /// Tokens asked for.
        got: usize,
    },
    /// A world without ranks.
    #[error("layout: expected at least one rank, got none")]
    ZeroRanks,
    /// The length of a row cannot be dealt out evenly.
    #[error("{what} layout over {world_size} ranks: expected a length that {expected} divides, got {got} ({got} % {expected} = {})", got % expected)]
    Divisibility {
        /// The layout.
        what: &'static str,
        /// Number of ranks.
        world_size: usize,
        /// The divisor.
        expected: usize,
        /// Tokens of a row.
        got: usize,
    },
    /// The layout is for another number of ranks.
    #[error("{what} layout: expected a world of {expected} ranks, got {got}")]
    WorldSize {
        /// The layout.
        what: &'static str,
        /// Ranks that it is for.
        expected: usize,
        /// Ranks that there are.
        got: usize,
    },
    /// The layout is for one stream.
    #[error(
        "{what} layout: expected one flattened stream ({expected} batch row), got {got} rows; put them one behind the other with `Documents::flattened`"
    )]
    NotFlattened {
        /// The layout.
        what: &'static str,
        /// Rows that it is for.
        expected: usize,
        /// Rows that there are.
        got: usize,
    },
    /// The padded length of a document cannot be dealt out evenly.
    #[error("{what} layout, document {document} at {}..{}: expected a padded length that {expected} divides, got {} ({} % {expected} = {}); pack with `align_documents` or `Documents::aligned` first", got.start, got.end, got.len(), got.len(), got.len() % expected)]
    DocumentDivisibility {
        /// The layout.
        what: &'static str,
        /// The document.
        document: usize,
        /// The divisor.
        expected: usize,
        /// Extent of the document.
        got: std::ops::Range<usize>,
    },
    /// Padding between documents cannot be dealt out evenly.
    #[error("{what} layout: expected padding between documents that {expected} divides, got {} tokens at {}..{}; count it to the extent of a document, or drop it with `Documents::aligned`", got.len(), got.start, got.end)]
    GapDivisibility {
        /// The layout.
        what: &'static str,
        /// The divisor.
        expected: usize,
        /// Tokens between two documents or ahead of the first.
        got: std::ops::Range<usize>,
    },
    /// Documents cannot be aligned in this way.
    #[error("aligning documents: expected a multiple of {expected} and not 0, got {got}")]
    Alignment {
        /// What must divide.
        expected: usize,
        /// Length of the row, or the multiple that was asked for.
        got: usize,
    },
    /// A range that ends before it starts.
    #[error(
        "layout, rank {rank}: expected a range that does not end before it starts, got {start}..{end}"
    )]
    ReversedRange {
        /// The rank.
        rank: usize,
        /// Start of the range.
        start: usize,
        /// End of the range.
        end: usize,
    },
    /// A rank owns no token.
    #[error("layout, rank {rank}: expected at least one token, got none")]
    EmptyRank {
        /// The rank.
        rank: usize,
    },
    /// A token is owned twice.
    #[error(
        "layout: expected every token to have one owner, got token {token} for rank {rank} as well as for an other range"
    )]
    Overlap {
        /// The token.
        token: usize,
        /// One of its owners.
        rank: usize,
    },
    /// Tokens without an owner.
    #[error("layout: expected ranges that cover 0..{expected}, got none for the tokens {}..{}", got.start, got.end)]
    Gap {
        /// Tokens of a row.
        expected: usize,
        /// Tokens that nobody owns.
        got: std::ops::Range<usize>,
    },
    /// Ranges beyond the end of the rows.
    #[error(
        "layout: expected ranges within 0..{expected}, got one that ends at {got} for rank {rank}"
    )]
    PastEnd {
        /// The rank.
        rank: usize,
        /// Tokens of a row.
        expected: usize,
        /// End of the range.
        got: usize,
    },
    /// A slot that is taken, or that does not exist.
    #[error(
        "placement, row {row}, token {token}: expected a free slot within 0..{expected}, got {got}"
    )]
    Slot {
        /// Row of the batch.
        row: usize,
        /// Token within the row.
        token: usize,
        /// Slots of a placed row.
        expected: usize,
        /// The slot.
        got: usize,
    },
    /// Values for another number of tokens.
    #[error("{what}: expected {expected} values, got {got}")]
    NumValues {
        /// What they are for.
        what: &'static str,
        /// Tokens or slots.
        expected: usize,
        /// Values.
        got: usize,
    },
    /// A token that a padding mask counts as real, and no document does.
    #[error(
        "row {row}, token {token}: expected padding or a token of a document, got a real token outside every document"
    )]
    Homeless {
        /// Row of the batch.
        row: usize,
        /// Token within the row.
        token: usize,
    },
    /// The padded length does not fit in a `usize`.
    #[error(
        "{what} layout of {got} tokens: the padded length does not fit in {} bits",
        usize::BITS
    )]
    Overflow {
        /// The layout.
        what: &'static str,
        /// Tokens of a row before padding.
        got: usize,
    },
    /// Spans, prefixes or masks that do not fit their documents.
    #[error(transparent)]
    Mark(#[from] MarkError),
}
