//! The error type of this crate.

use std::ops::Range;

use super::Routine;

/// Why an attention call was refused. Raised before any work is done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// A batch row or a token range of a segment lies outside its buffer.
    #[error(
        "segment {segment}: {what} is outside the buffer: expected at most {expected}, got {got}"
    )]
    OutOfBounds {
        /// Index of the segment in the list.
        segment: usize,
        /// The field at fault: `q_row`, `q`, `k_row` or `k`.
        what: &'static str,
        /// The largest legal value (a row index, or the end of a range).
        expected: usize,
        /// The value found.
        got: usize,
    },
    /// A range ends before it starts.
    #[error("segment {segment}: {what} runs backwards: expected start <= end, got {got:?}")]
    ReversedRange {
        /// Index of the segment in the list.
        segment: usize,
        /// The field at fault: `q` or `k`.
        what: &'static str,
        /// The range found.
        got: Range<usize>,
    },
    /// A query row is named by two segments.
    #[error(
        "query rows of batch row {row}: expected each in at most one segment, got {first:?} \
         (segment {first_segment}) and {second:?} (segment {second_segment})"
    )]
    OverlappingQueries {
        /// Batch row of the query buffer.
        row: usize,
        /// Index of the segment that starts first.
        first_segment: usize,
        /// Its query range.
        first: Range<usize>,
        /// Index of the other segment.
        second_segment: usize,
        /// Its query range.
        second: Range<usize>,
    },
    /// A count that follows from the input does not fit the machine's integers.
    #[error("{what} overflows: expected at most {expected}, got {got}")]
    Overflow {
        /// What was counted.
        what: String,
        /// The largest legal value.
        expected: usize,
        /// The factors or terms found.
        got: String,
    },
    /// A tensor has another shape than the rest of the call implies.
    #[error("shape of {what}: expected {expected}, got {got}")]
    Shape {
        /// The tensor at fault.
        what: &'static str,
        /// The shape that was needed; `_` where any size is legal.
        expected: String,
        /// The shape found.
        got: String,
    },
    /// `num_heads` is not a multiple of `num_kv_heads`.
    #[error("num_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")]
    HeadGroups {
        /// Heads of the queries.
        num_heads: usize,
        /// Heads of keys and values.
        num_kv_heads: usize,
    },
    /// A tensor has another dtype than the queries, or one that attention cannot use.
    #[error("dtype of {what}: expected {expected}, got {got}")]
    DType {
        /// The tensor at fault.
        what: &'static str,
        /// The dtype that was needed.
        expected: String,
        /// The dtype found.
        got: String,
    },
    /// A tensor lives on another device than the queries.
    #[error("device of {what}: expected {expected}, got {got}")]
    Device {
        /// The tensor at fault.
        what: &'static str,
        /// The device of the queries.
        expected: String,
        /// The device found.
        got: String,
    },
    /// An option has a value that makes no sense.
    #[error("option {what}: expected {expected}, got {got}")]
    Option {
        /// The option at fault.
        what: &'static str,
        /// What would be legal.
        expected: &'static str,
        /// The value found.
        got: String,
    },
    /// The size of a vector is one that the routine has no kernel for.
    #[error("{what} in routine {routine}: expected {expected}, got {got}")]
    HeadDim {
        /// The size at fault: `head_dim` or `v_head_dim`.
        what: &'static str,
        /// The routine that was to run.
        routine: Routine,
        /// What the routine can.
        expected: String,
        /// The size found.
        got: usize,
    },
    /// A routine was asked for that the backend or its device cannot run.
    #[error("routine {routine}: expected {expected}, got {got}")]
    Routine {
        /// The routine asked for.
        routine: Routine,
        /// What it needs.
        expected: String,
        /// What there is.
        got: String,
    },
}
