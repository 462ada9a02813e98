//! What can be wrong with spans, prefixes and masks of documents.

use std::ops::Range;

use thiserror::Error;

use super::MaskKind;

/// Why spans, prefixes or masks of documents were refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MarkError {
    /// A span that runs backwards, begins before the end of the span ahead of it, or leaves the row.
    #[error(
        "spans, row {row}, span {span}: expected a range within {expected:?}, behind the spans ahead of it, got {got:?}"
    )]
    SpanOrder {
        /// The row.
        row: usize,
        /// Place of the span in the row's list.
        span: usize,
        /// Where it may lie.
        expected: Range<usize>,
        /// Where it lies.
        got: Range<usize>,
    },
    /// A span without a token of a document.
    #[error(
        "spans, row {row}, span {span}: expected real tokens of a document, got none in {got:?}"
    )]
    SpanEmpty {
        /// The row.
        row: usize,
        /// Place of the span in the row's list.
        span: usize,
        /// Where it lies.
        got: Range<usize>,
    },
    /// A span over several documents.
    #[error(
        "spans, row {row}, span {span}: expected tokens of one document, got {got:?} with tokens of documents {} and {}",
        .documents[0], .documents[1]
    )]
    SpanCrosses {
        /// The row.
        row: usize,
        /// Place of the span in the row's list.
        span: usize,
        /// Where it lies.
        got: Range<usize>,
        /// The first two documents that it holds tokens of.
        documents: [usize; 2],
    },
    /// A span in document positions, as tables are stored, that does not fit its document.
    #[error(
        "spans, row {row}, document {document}: expected positions within {expected:?}, at least one, got {got:?}"
    )]
    SpanPositions {
        /// The row.
        row: usize,
        /// The document.
        document: usize,
        /// Where it may lie.
        expected: Range<usize>,
        /// Where it lies.
        got: Range<usize>,
    },
    /// A prefix that is longer than its document.
    #[error(
        "prefixes, row {row}, document {document}: expected at most the {expected} real tokens of the document, got {got}"
    )]
    PrefixLen {
        /// The row.
        row: usize,
        /// The document.
        document: usize,
        /// Real tokens of the document.
        expected: usize,
        /// Length of the prefix.
        got: usize,
    },
    /// A document's own mask says that documents have their own masks.
    #[error(
        "masks, row {row}, document {document}: expected the mask of one document, got {got:?}"
    )]
    Nested {
        /// The row.
        row: usize,
        /// The document.
        document: usize,
        /// The mask.
        got: MaskKind,
    },
}
