//! What can be wrong with documents, layouts and policies.

use thiserror::Error;

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
}
