//! The layout that balances causal work within every document of one packed stream.

use std::ops::Range;

use super::{Document, Documents, LayoutError, TokenLayout};

const WHAT: &str = "dual-chunk-swap";

/// Deals out chunk `r` from the front and chunk `r` from the back of every run of tokens to rank `r`. One rank owns all
/// tokens in order, so that nothing has to divide.
///
/// The runs are the extents of the documents and whatever lies between and behind them. Every token
/// needs an owner, so that padding outside the documents is dealt out as a document would be.
pub(super) fn layout(documents: &Documents, world_size: usize) -> Result<TokenLayout, LayoutError> {
    if documents.batch_size() != 1 {
        return Err(LayoutError::NotFlattened {
            what: WHAT,
            expected: 1,
            got: documents.batch_size(),
        });
    }
    let seq_len = documents.seq_len();
    if world_size == 1 {
        return TokenLayout::contiguous(seq_len, 1);
    }
    let overflow = LayoutError::Overflow {
        what: WHAT,
        got: seq_len,
    };
    let num_chunks = world_size.checked_mul(2).ok_or(overflow.clone())?;
    let (mut runs, end) = covered_runs(documents.row(0), num_chunks)?;
    let tail = (seq_len - end)
        .checked_next_multiple_of(num_chunks)
        .and_then(|tail| end.checked_add(tail))
        .ok_or(overflow)?;
    runs.push(end..tail);
    let ranks = (0..world_size)
        .map(|rank| {
            let chunks = |run: &Range<usize>| {
                let (start, len) = (run.start, run.len() / num_chunks);
                [rank, num_chunks - 1 - rank]
                    .map(|chunk| start + chunk * len..start + (chunk + 1) * len)
            };
            runs.iter().flat_map(chunks).collect()
        })
        .collect();
    TokenLayout::new(tail, ranks)
}

/// Extents and the gaps ahead of them, all divisible, and the end of the last one.
fn covered_runs(
    documents: &[Document],
    num_chunks: usize,
) -> Result<(Vec<Range<usize>>, usize), LayoutError> {
    let mut runs = Vec::with_capacity(documents.len() + 1);
    let mut end = 0;
    for (document, Document { extent, .. }) in documents.iter().enumerate() {
        // An empty extent within a gap must not cut the gap in two.
        if extent.is_empty() {
            continue;
        }
        let gap = end..extent.start;
        if !gap.len().is_multiple_of(num_chunks) {
            return Err(LayoutError::GapDivisibility {
                what: WHAT,
                expected: num_chunks,
                got: gap,
            });
        }
        if !extent.len().is_multiple_of(num_chunks) {
            return Err(LayoutError::DocumentDivisibility {
                what: WHAT,
                document,
                expected: num_chunks,
                got: extent.clone(),
            });
        }
        end = extent.end;
        runs.extend([gap, extent.clone()]);
    }
    Ok((runs, end))
}
