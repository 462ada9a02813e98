//! What a picture of a plan shows: shards in runs, and what moves between them.

use std::{collections::BTreeMap, ops::Range};

use burn_cp::plan::AttentionPlan;

/// A run of a rank's shard within one document, or of padding.
pub(super) struct Bar {
    pub(super) document: Option<usize>,
    pub(super) local: Range<usize>,
    /// Document position of the first token.
    pub(super) position: usize,
}

/// Keys and values of one document from one rank to another.
pub(super) struct Arrow {
    pub(super) document: usize,
    pub(super) source: usize,
    pub(super) destination: usize,
    pub(super) local: Range<usize>,
    pub(super) num_tokens: usize,
}

/// What moves, the widest first. `shards` are the bars of each rank.
pub(super) fn arrows(plan: &AttentionPlan, shards: &[Vec<Bar>]) -> Vec<Arrow> {
    let mut arrows: BTreeMap<(usize, usize, usize), Arrow> = BTreeMap::new();
    for (destination, needed) in plan.ranks().iter().enumerate() {
        for piece in needed
            .pieces
            .iter()
            .filter(|piece| piece.source != destination)
        {
            for bar in &shards[piece.source] {
                let (start, end) = (
                    bar.local.start.max(piece.local.start),
                    bar.local.end.min(piece.local.end),
                );
                let Some(document) = bar.document.filter(|_| start < end) else {
                    continue;
                };
                let arrow = arrows
                    .entry((document, destination, piece.source))
                    .or_insert(Arrow {
                        document,
                        source: piece.source,
                        destination,
                        local: start..end,
                        num_tokens: 0,
                    });
                arrow.num_tokens += end - start;
                // It starts at the longest run.
                if end - start > arrow.local.len() {
                    arrow.local = start..end;
                }
            }
        }
    }
    let mut arrows: Vec<Arrow> = arrows.into_values().collect();
    arrows.sort_by_key(|arrow| std::cmp::Reverse(arrow.num_tokens));
    arrows
}

/// What stands in a rank's shard, in local order.
pub(super) fn bars(plan: &AttentionPlan, rank: usize) -> Vec<Bar> {
    let row = plan.documents().row(0);
    let mut bars: Vec<Bar> = Vec::new();
    let mut push = |bar: Bar| match bars.last_mut() {
        Some(last)
            if last.document == bar.document
                && (bar.document.is_none() || last.position + last.local.len() == bar.position) =>
        {
            last.local.end = bar.local.end;
        }
        _ => bars.push(bar),
    };
    let mut local = 0;
    for owned in plan.layout().ranges(rank) {
        let mut at = owned.start;
        let padding = |from: usize, to: usize| Bar {
            document: None,
            local: local + from - owned.start..local + to - owned.start,
            position: 0,
        };
        let first = row.partition_point(|document| document.extent.end <= owned.start);
        for (document, table) in row.iter().enumerate().skip(first) {
            if table.extent.start >= owned.end {
                break;
            }
            let mut position = 0;
            for run in &table.runs {
                let (from, to) = (run.start.max(owned.start), run.end.min(owned.end));
                if from < to {
                    if at < from {
                        push(padding(at, from));
                    }
                    push(Bar {
                        document: Some(document),
                        local: local + from - owned.start..local + to - owned.start,
                        position: position + from - run.start,
                    });
                    at = to;
                }
                position += run.len();
            }
        }
        if at < owned.end {
            push(padding(at, owned.end));
        }
        local += owned.len();
    }
    bars
}
