//! What a plan says about one rank.

use std::ops::Range;

/// A run of queries and the run of keys that they see: one entry of a varlen attention call.
///
/// The queries are consecutive in the shard and in their document. Causal segments are aligned at the
/// end: of `nq` queries and `nk` keys, query `t` sees the keys `0..=nk - nq + t` of the segment, less
/// those more than `window` before the last of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Batch row of the queries.
    pub q_row: usize,
    /// Queries: local token indices within the row `q_row` of the rank's shard.
    pub q: Range<usize>,
    /// Batch row of the keys: 0 for an exchanged buffer, which is one stream, `q_row` for the shard.
    pub k_row: usize,
    /// Keys: token indices within the row `k_row` of the keys and values.
    pub k: Range<usize>,
    /// Document position of the first key.
    pub k_position: usize,
    /// Whether keys behind a query are hidden.
    pub causal: bool,
    /// How many keys before its own a query sees; all of them if `None`.
    pub window: Option<usize>,
}

/// A run of the K/V buffer of a rank and the shard that it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KvPiece {
    /// The rank that owns the tokens; may be the rank itself.
    pub source: usize,
    /// Batch row of the tokens.
    pub row: usize,
    /// Local token indices within the row `row` of the shard of `source`.
    pub local: Range<usize>,
    /// Offset of the first of them in the buffer.
    pub at: usize,
}

/// A run of tokens of one row of a rank's shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TokenSpan {
    /// Batch row.
    pub row: usize,
    /// Local token indices within that row.
    pub local: Range<usize>,
}

/// Where the segments of a rank find their keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvSource {
    /// In the rank's own shard, in order: no buffer is needed.
    Local,
    /// In the buffer that the pieces make up.
    Buffer,
}

/// What one rank computes, and what it needs for that.
///
/// The K/V buffer is one stream ordered by (row, document, document position), without gaps: exactly the
/// keys that some query of the rank sees, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankPlan {
    /// Segments over the K/V buffer, by row and local token. Every real token of the shard is a query of
    /// exactly one, padding of none. Empty if the shard is all padding.
    pub segments: Vec<Segment>,
    /// The same segments over the rank's own shard, if that alone is enough: every segment finds its keys
    /// there as one run of its own row.
    pub local_segments: Option<Vec<Segment>>,
    /// Where the K/V buffer comes from, in buffer order; each piece as long as can be.
    pub pieces: Vec<KvPiece>,
    /// Tokens of the K/V buffer.
    pub buffer_len: usize,
    /// Visible (query, key) pairs of one head.
    pub area: u64,
    /// Real tokens of the shard, over all rows.
    pub tokens: usize,
    /// Tokens of the buffer that other ranks own.
    pub kv_tokens_received: usize,
    /// Tokens that this rank owns and others need, counted once for each that needs them.
    pub kv_tokens_sent: usize,
}

impl RankPlan {
    /// Whether the rank needs the buffer at all.
    ///
    /// A rank that does not still takes part in the exchange when others need its tokens; see
    /// [`AttentionPlan::moves_tokens`](super::AttentionPlan::moves_tokens).
    pub fn kv_source(&self) -> KvSource {
        if self.local_segments.is_some() {
            KvSource::Local
        } else {
            KvSource::Buffer
        }
    }
}
