//! From documents, layout and mask to segments and pieces: ranges in, ranges out.
//!
//! Nothing here walks single tokens. The work grows with the number of documents, of ranges, and of the
//! pieces that they cut each other into.

use std::ops::Range;

use super::PlanError;
use super::mask::MaskKind;
use super::types::{KvPiece, RankPlan, Segment};
use crate::layout::{Document, Documents, TokenLayout};

/// A run of real tokens of a row with its place in its document.
struct RealRun {
    tokens: Range<usize>,
    document: usize,
    /// Document position of the first token.
    position: usize,
}

/// The real runs of one row, ascending by token, which also is ascending by document and position.
pub(super) struct RowTable {
    runs: Vec<RealRun>,
    /// First run of each document; the number of runs at the end.
    first_run: Vec<usize>,
}

impl RowTable {
    fn new(documents: &[Document]) -> Self {
        let mut runs = Vec::with_capacity(documents.len());
        let mut first_run = Vec::with_capacity(documents.len() + 1);
        for (index, document) in documents.iter().enumerate() {
            first_run.push(runs.len());
            let mut position = 0;
            for tokens in &document.runs {
                runs.push(RealRun {
                    tokens: tokens.clone(),
                    document: index,
                    position,
                });
                position += tokens.len();
            }
        }
        first_run.push(runs.len());
        Self { runs, first_run }
    }

    /// One table per batch row.
    pub(super) fn of(documents: &Documents) -> Vec<Self> {
        documents.rows().map(Self::new).collect()
    }

    /// The real runs within the token range, cut to it.
    fn real_within(&self, tokens: &Range<usize>) -> impl Iterator<Item = RealRun> {
        let first = self
            .runs
            .partition_point(|run| run.tokens.end <= tokens.start);
        let Range { start, end } = *tokens;
        self.runs[first..]
            .iter()
            .take_while(move |run| run.tokens.start < end)
            .map(move |run| {
                let cut = run.tokens.start.max(start)..run.tokens.end.min(end);
                RealRun {
                    document: run.document,
                    position: run.position + (cut.start - run.tokens.start),
                    tokens: cut,
                }
            })
    }

    fn document_runs(&self, document: usize) -> &[RealRun] {
        &self.runs[self.first_run[document]..self.first_run[document + 1]]
    }

    fn document_len(&self, document: usize) -> usize {
        let last = self.document_runs(document).last();
        last.map_or(0, |run| run.position + run.tokens.len())
    }

    /// The token runs of a document that hold the document positions, in order.
    fn tokens_at(
        &self,
        document: usize,
        positions: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> {
        let runs = self.document_runs(document);
        let first = runs.partition_point(|run| run.position + run.tokens.len() <= positions.start);
        let Range { start, end } = *positions;
        runs[first..]
            .iter()
            .take_while(move |run| run.position < end)
            .map(move |run| {
                let from = start.saturating_sub(run.position);
                let to = run.tokens.len().min(end - run.position);
                run.tokens.start + from..run.tokens.start + to
            })
    }
}

/// A maximal run of queries: consecutive in the shard and in the document.
struct QueryRun {
    row: usize,
    document: usize,
    local: Range<usize>,
    positions: Range<usize>,
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
    tables: &[RowTable],
    layout: &TokenLayout,
    mask: MaskKind,
    rank: usize,
) -> Result<RankPlan, PlanError> {
    let queries = query_runs(tables, layout, rank);
    let (key_runs, key_run_of) = key_runs(&queries, mask, tables);
    let pieces = pieces(&key_runs, tables, layout);
    let mut area = 0_u128;
    let mut segments = Vec::with_capacity(queries.len());
    for (query, &key_run) in queries.iter().zip(&key_run_of) {
        let len = tables[query.row].document_len(query.document);
        let keys = mask.keys(&query.positions, len);
        area = area.saturating_add(mask.area(&query.positions, len));
        let run = &key_runs[key_run];
        let start = run.at + (keys.start - run.positions.start);
        segments.push(Segment {
            q_row: query.row,
            q: query.local.clone(),
            k_row: 0,
            k: start..start + keys.len(),
            k_position: keys.start,
            causal: mask.is_causal(),
            window: mask.window(),
        });
    }
    let received = pieces.iter().filter(|piece| piece.source != rank);
    Ok(RankPlan {
        local_segments: local_segments(rank, &segments, &pieces),
        area: u64::try_from(area).map_err(|_| PlanError::Overflow {
            what: "number of visible pairs",
        })?,
        tokens: queries.iter().map(|query| query.local.len()).sum(),
        buffer_len: pieces
            .last()
            .map_or(0, |piece| piece.at + piece.local.len()),
        kv_tokens_received: received.map(|piece| piece.local.len()).sum(),
        kv_tokens_sent: 0,
        segments,
        pieces,
    })
}

fn query_runs(tables: &[RowTable], layout: &TokenLayout, rank: usize) -> Vec<QueryRun> {
    let mut queries: Vec<QueryRun> = Vec::new();
    for (row, table) in tables.iter().enumerate() {
        let mut offset = 0;
        for range in layout.ranges(rank) {
            for run in table.real_within(range) {
                let local = offset + (run.tokens.start - range.start);
                let num = run.tokens.len();
                match queries.last_mut() {
                    Some(last)
                        if last.row == row
                            && last.document == run.document
                            && last.local.end == local
                            && last.positions.end == run.position =>
                    {
                        last.local.end += num;
                        last.positions.end += num;
                    }
                    _ => queries.push(QueryRun {
                        row,
                        document: run.document,
                        local: local..local + num,
                        positions: run.position..run.position + num,
                    }),
                }
            }
            offset += range.len();
        }
    }
    queries
}

/// The union of all keys needed, in buffer order, and for each query run the key run that holds its keys.
fn key_runs(
    queries: &[QueryRun],
    mask: MaskKind,
    tables: &[RowTable],
) -> (Vec<KeyRun>, Vec<usize>) {
    let keys = |query: &QueryRun| {
        let len = tables[query.row].document_len(query.document);
        mask.keys(&query.positions, len)
    };
    let mut order: Vec<(usize, usize, usize, usize)> = (queries.iter().enumerate())
        .map(|(index, query)| (query.row, query.document, keys(query).start, index))
        .collect();
    // Local order is nearly always token order already, which a run-detecting sort sees at once.
    order.sort();
    let mut runs: Vec<KeyRun> = Vec::new();
    let mut run_of = vec![0; queries.len()];
    for (row, document, _, index) in order {
        let needed = keys(&queries[index]);
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
                    positions: needed,
                    at,
                });
            }
        }
        run_of[index] = runs.len() - 1;
    }
    (runs, run_of)
}

/// Where each part of the buffer comes from, joined as far as one source has it in order.
fn pieces(key_runs: &[KeyRun], tables: &[RowTable], layout: &TokenLayout) -> Vec<KvPiece> {
    let mut pieces: Vec<KvPiece> = Vec::new();
    let mut at = 0;
    for run in key_runs {
        debug_assert_eq!(run.at, at);
        for tokens in tables[run.row].tokens_at(run.document, &run.positions) {
            for owned in layout.owned_ranges(tokens) {
                let num = owned.local.len();
                match pieces.last_mut() {
                    Some(last)
                        if last.source == owned.rank
                            && last.row == run.row
                            && last.local.end == owned.local.start =>
                    {
                        last.local.end = owned.local.end;
                    }
                    _ => pieces.push(KvPiece {
                        source: owned.rank,
                        row: run.row,
                        local: owned.local,
                        at,
                    }),
                }
                at += num;
            }
        }
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
