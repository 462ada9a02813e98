//! Policies: from documents and a number of ranks to ranges.
//!
//! A new way of sharding is one more arm of [`LayoutPolicy::layout`] that deals out other ranges;
//! nothing else changes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Documents, LayoutError, TokenLayout, Visibility, balanced, dual_chunk};

/// How token ranges are dealt out to ranks.
///
/// In configuration files: `"identity"`, `{ contiguous = { multiple = 1 } }`, `"head-tail"`,
/// `"dual-chunk-swap"`, `{ balanced = {} }`, `{ custom = [[{ start, end }, ..], ..] }`. (The
/// configuration of a run reads further names.)
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum LayoutPolicy {
    /// One rank owns everything; refused in larger worlds. Adds no padding.
    Identity,
    /// Equal consecutive parts, one per rank.
    ///
    /// Rows are padded to a multiple of `world_size * max(multiple, 2)`, so that the length of every part is
    /// a multiple of `multiple`, or of 2 where that is 1 or 0.
    Contiguous {
        /// What the length of every part is a multiple of.
        #[serde(default = "one")]
        multiple: usize,
    },
    /// Part `r` from the front and part `r` from the back of `2 * world_size` equal parts; rows are padded
    /// to a multiple of `2 * world_size`.
    HeadTail,
    /// Head-tail within every document of one packed stream: of each extent, cut into `2 * world_size`
    /// equal chunks, part `r` from the front and part `r` from the back, documents in order.
    ///
    /// Padding aside, every rank then has the same work under a causal mask over documents. Takes one row
    /// ([`Documents::flattened`]), in which `2 * world_size` divides every extent
    /// ([`align_documents`](super::align_documents)). Padding outside extents is dealt out in the same way;
    /// between documents it must divide too, at the end of the row it is extended until it does. For one rank nothing has to.
    DualChunkSwap,
    /// Whole documents, and as few pieces of them as can be, such that every rank has about the same attention work (the mean
    /// at least 0.95 of the most, unless a few tokens or very long documents forbid it), receives few keys and values, and
    /// holds at most half more tokens than the mean.
    ///
    /// Shares are uneven. Takes one row ([`Documents::flattened`]) and adds no padding, but for ranks that would be left
    /// without a token. How few K/V tokens any balanced layout can get by with says
    /// [`least_kv_received`](super::least_kv_received).
    Balanced {
        /// Which tokens see each other: what the work is.
        #[serde(default)]
        visibility: Visibility,
    },
    /// Ranges of each rank in local order, as given.
    ///
    /// They cover at least the tokens there are; what they cover beyond is padding. A rank without tokens
    /// gets one new padding token at the end of the row, since no rank may be handed an empty stream.
    Custom(Vec<Vec<Range<usize>>>),
}

fn one() -> usize {
    1
}

impl LayoutPolicy {
    /// Deals out the tokens of `documents` to `world_size` ranks.
    ///
    /// The layout may be longer than the documents: pad them to [`TokenLayout::seq_len`] with
    /// [`Documents::padded_to`] before a plan is made. Every rank that asks with the same documents gets
    /// the same layout.
    ///
    /// # Errors
    ///
    /// No ranks; a policy for another number of ranks; custom ranges that overlap, leave gaps or do not
    /// reach the end of the documents; several rows, or extents that do not divide, for dual-chunk-swap; several
    /// rows, or work past 64 bits, for balanced layouts; a padded length that overflows.
    pub fn layout(
        &self,
        documents: &Documents,
        world_size: usize,
    ) -> Result<TokenLayout, LayoutError> {
        if world_size == 0 {
            return Err(LayoutError::ZeroRanks);
        }
        let seq_len = documents.seq_len();
        match self {
            Self::Identity if world_size > 1 => Err(LayoutError::WorldSize {
                what: "identity",
                expected: 1,
                got: world_size,
            }),
            Self::Identity => TokenLayout::contiguous(seq_len, 1),
            Self::Contiguous { multiple } => {
                let padded = pad("contiguous", seq_len, world_size, (*multiple).max(2))?;
                TokenLayout::contiguous(padded, world_size)
            }
            Self::HeadTail => {
                let padded = pad("head-tail", seq_len, world_size, 2)?;
                TokenLayout::head_tail(padded, world_size)
            }
            Self::DualChunkSwap => dual_chunk::layout(documents, world_size),
            Self::Balanced { visibility } => balanced::layout(documents, world_size, *visibility),
            Self::Custom(ranks) => custom(ranks.clone(), seq_len, world_size),
        }
    }
}

fn pad(
    what: &'static str,
    seq_len: usize,
    world_size: usize,
    multiple: usize,
) -> Result<usize, LayoutError> {
    world_size
        .checked_mul(multiple)
        .and_then(|divisor| seq_len.checked_next_multiple_of(divisor))
        .ok_or(LayoutError::Overflow { what, got: seq_len })
}

/// A layout of these ranges, in which a rank without any gets a padding token.
pub(super) fn custom(
    mut ranks: Vec<Vec<Range<usize>>>,
    seq_len: usize,
    world_size: usize,
) -> Result<TokenLayout, LayoutError> {
    if ranks.len() != world_size {
        return Err(LayoutError::WorldSize {
            what: "custom",
            expected: ranks.len(),
            got: world_size,
        });
    }
    let covered = ranks.iter().flatten().map(|range| range.end).max();
    let mut end = covered.unwrap_or(0).max(seq_len);
    for ranges in &mut ranks {
        // A reversed range is not an empty share but a mistake; the layout reports it.
        if ranges.iter().all(|range| range.start == range.end) {
            let next = end.checked_add(1).ok_or(LayoutError::Overflow {
                what: "custom",
                got: seq_len,
            })?;
            *ranges = std::iter::once(end..next).collect();
            end = next;
        }
    }
    TokenLayout::new(end, ranks)
}
