//! From documents, layout and mask to segments and pieces: ranges in, ranges out.
//!
//! Nothing here walks single tokens. The work grows with the number of documents, of ranges, and of the
//! pieces that they cut each other into.

use std::ops::Range;

use super::mask::{Part, Sight};
use super::table::Table;
use super::types::{KvPiece, RankPlan, Segment};
use super::{MaskKind, PlanError};
use crate::layout::Documents;

/// A run of queries of one document, consecutive in the shard, that all see in one way: one segment.
struct Queries {
    row: usize,
    document: usize,
    /// Local token index of the first query.
    local: usize,
    part: Part,
}

/// A run of document positions whose keys a rank needs.
struct KeyRun {
    row: usize,
    document: usize,
    positions: Range<usize>,
    /// Where it begins in the buffer.
    at: usize,
}

/// Derives everything about one rank except what others ask of it.
pub(super) fn rank_plan(
    documents: &Documents,
    table: &Table,
    mask: MaskKind,
    rank: usize,
) -> Result<RankPlan, PlanError> {
    let queries = queries(documents, table, mask, rank);
    let (key_runs, key_run_of) = key_runs(&queries);
    let pieces = pieces(&key_runs, table);
    let mut area = 0_u128;
    let mut tokens = 0;
    let mut segments = Vec::with_capacity(queries.len());
    for (query, &key_run) in queries.iter().zip(&key_run_of) {
        let Part {
            queries,
            keys,
            causal,
            window,
        } = &query.part;
        area = area.saturating_add(query.part.area());
        tokens += queries.len();
        let run = &key_runs[key_run];
        let start = run.at + (keys.start - run.positions.start);
        segments.push(Segment {
            q_row: query.row,
            q: query.local..query.local + queries.len(),
            k_row: 0,
            k: start..start + keys.len(),
            k_position: keys.start,
            causal: *causal,
            window: *window,
        });
    }
    let received = pieces.iter().filter(|piece| piece.source != rank);
    Ok(RankPlan {
        local_segments: local_segments(rank, &segments, &pieces),
        area: u64::try_from(area).map_err(|_| PlanError::Overflow {
            what: "number of visible pairs",
        })?,
        tokens,
        buffer_len: pieces
            .last()
            .map_or(0, |piece| piece.at + piece.local.len()),
        kv_tokens_received: received.map(|piece| piece.local.len()).sum(),
        kv_tokens_sent: 0,
        segments,
        pieces,
    })
}

/// The queries of a rank by the way in which they see, by row and local token.
fn queries(documents: &Documents, table: &Table, mask: MaskKind, rank: usize) -> Vec<Queries> {
    let runs = table.shard(rank);
    let mut queries = Vec::with_capacity(runs.len());
    for run in runs {
        let (row, document) = (run.row, run.document);
        let sight = Sight::of(documents, mask, row, document);
        let positions = run.position..run.position + run.local.len();
        sight.parts(positions, run.document_len, |part| {
            queries.push(Queries {
                row,
                document,
                local: run.local.start + (part.queries.start - run.position),
                part,
            });
        });
    }
    queries
}

/// The union of all keys needed, in buffer order, and for each part the key run that holds its keys.
fn key_runs(queries: &[Queries]) -> (Vec<KeyRun>, Vec<usize>) {
    let mut order: Vec<(usize, usize, usize, usize)> = (queries.iter().enumerate())
        .map(|(index, query)| (query.row, query.document, query.part.keys.start, index))
        .collect();
    // Local order is nearly always token order already, which a run-detecting sort sees at once.
    order.sort();
    let mut runs: Vec<KeyRun> = Vec::new();
    let mut run_of = vec![0; queries.len()];
    for (row, document, _, index) in order {
        let needed = &queries[index].part.keys;
        match runs.last_mut() {
            Some(last)
                if last.row == row
                    && last.document == document
                    && needed.start <= last.positions.end =>
            {
                last.positions.end = last.positions.end.max(needed.end);
            }
            last => {
                let at = last.map_or(0, |last| last.at + last.positions.len());
                runs.push(KeyRun {
                    row,
                    document,
                    positions: needed.clone(),
                    at,
                });
            }
        }
        run_of[index] = runs.len() - 1;
    }
    (runs, run_of)
}

/// Where each part of the buffer comes from, joined as far as one source has it in order.
fn pieces(key_runs: &[KeyRun], table: &Table) -> Vec<KvPiece> {
    let mut pieces: Vec<KvPiece> = Vec::new();
    let mut at = 0;
    for run in key_runs {
        debug_assert_eq!(run.at, at);
        table.owners(run.row, run.document, &run.positions, |source, local| {
            let num = local.len();
            match pieces.last_mut() {
                Some(last)
                    if last.source == source
                        && last.row == run.row
                        && last.local.end == local.start =>
                {
                    last.local.end = local.end;
                }
                _ => pieces.push(KvPiece {
                    source,
                    row: run.row,
                    local,
                    at,
                }),
            }
            at += num;
        });
    }
    pieces
}

/// The segments over the rank's own shard, if each finds its keys there as one run of its own row.
fn local_segments(rank: usize, segments: &[Segment], pieces: &[KvPiece]) -> Option<Vec<Segment>> {
    segments
        .iter()
        .map(|segment| {
            // Pieces are maximal, so that keys spread over two of them are not one run of the shard.
            // Keys are of the row of their queries, since documents are.
            let next = pieces.partition_point(|piece| piece.at <= segment.k.start);
            let piece = &pieces[next.checked_sub(1)?];
            let fits = piece.source == rank && segment.k.end <= piece.at + piece.local.len();
            let start = piece.local.start + (segment.k.start - piece.at);
            fits.then(|| Segment {
                k_row: segment.q_row,
                k: start..start + segment.k.len(),
                ..segment.clone()
            })
        })
        .collect()
}
