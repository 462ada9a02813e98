//! Schedules of the backward pass: tiles of keys, and whose turn it is to add to `dq`.

use std::{cmp::Reverse, ops::Range};

use super::{Record, Run, backward_keys, backward_queries, first_where, record, runs};
use crate::definition::{AttentionProblem, Segments};

/// Tiles of keys per group at most.
const MAX_SPAN: usize = 16;

/// The tables of the backward pass.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BackwardPlan {
    pub(crate) items: Vec<Record>,
    pub(crate) visits: Vec<Record>,
    /// `[row, token, number of rows, 0]` of each tile of queries.
    pub(crate) q_tiles: Vec<[i32; 4]>,
}

/// Cuts keys into tiles and orders them; see the head of this file.
pub(crate) fn backward(
    segments: &Segments,
    problem: &AttentionProblem,
    num_blocks: usize,
) -> BackwardPlan {
    let dim = problem.head_dim;
    let sizes = [backward_queries(dim), backward_keys(dim)];
    backward_of(segments, problem, num_blocks, sizes)
}

/// The same for tiles of so many queries and keys.
pub(crate) fn backward_of(
    segments: &Segments,
    problem: &AttentionProblem,
    num_blocks: usize,
    [queries, keys]: [usize; 2],
) -> BackwardPlan {
    let queries = queries as i64;
    let runs = runs(segments);
    let (mut q_tiles, mut first_tile) = (Vec::new(), Vec::new());
    for run in &runs {
        first_tile.push(q_tiles.len() as i64);
        for t in (0..run.num_q()).step_by(queries as usize) {
            let rows = queries.min(run.num_q() - t);
            q_tiles.push([run.q_row as i32, (run.q.start + t) as i32, rows as i32, 0]);
        }
    }
    let (batch, tokens) = segments.k_shape();
    let span = (num_blocks / problem.num_kv_heads).clamp(1, MAX_SPAN);
    let mut maker = Maker {
        runs: &runs,
        first_tile: &first_tile,
        problem,
        queries,
        keys: keys as i64,
        span,
        visits: Vec::new(),
    };
    let mut chunks = Vec::new();
    for (index, keys) in key_runs(&runs, batch, tokens as i64, maker.keys)
        .iter()
        .enumerate()
    {
        // Never more than that of an earlier chunk: the order of a run's chunks is fixed.
        let mut key = i64::MAX;
        for (group, chunk) in maker.groups(keys).into_iter().enumerate() {
            key = key.min(chunk.iter().map(|item| item[5].into()).max().unwrap_or(0));
            chunks.push(((Reverse(key), index, group), chunk));
        }
    }
    chunks.sort_by_key(|(key, _)| *key);
    let directed = chunks
        .into_iter()
        .enumerate()
        .map(|(n, (_, chunk))| match n % 2 {
            0 => chunk,
            _ => rising(chunk),
        });
    let items = directed.flatten().collect();
    let mut visits = maker.visits;
    if visits.is_empty() {
        visits.push([0; 16]);
    }
    BackwardPlan {
        items,
        visits,
        q_tiles,
    }
}

/// A chunk from its first tile to its last. Chunks that are walked one after the other in opposite directions keep
/// blocks in step, so that one of them finds in cache what the other has read.
fn rising(mut chunk: Vec<Record>) -> Vec<Record> {
    chunk.iter_mut().for_each(|item| item[10] = 1);
    chunk.sort_by_key(|item| item[1]);
    chunk
}

/// Keys that are cut into tiles together: overlapping segments, or a gap between them.
struct KeyRun {
    row: i64,
    tokens: Range<i64>,
    /// Indices of the segments, in their order.
    members: Vec<usize>,
    phase: i64,
}

impl KeyRun {
    /// Token at which the tile of the first key starts; may lie before the buffer.
    fn origin(&self) -> i64 {
        self.tokens.start - self.phase
    }

    fn num_tiles(&self, keys: i64) -> i64 {
        (self.tokens.end - self.origin() + keys - 1) / keys
    }
}

fn key_runs(runs: &[Run], batch: usize, tokens: i64, keys: i64) -> Vec<KeyRun> {
    let gap = |row: usize, tokens: Range<i64>| KeyRun {
        row: row as i64,
        tokens,
        members: Vec::new(),
        phase: 0,
    };
    let mut all: Vec<KeyRun> = Vec::new();
    for row in 0..batch {
        let here = |index: &usize| runs[*index].k_row == row as i64 && runs[*index].num_k() > 0;
        let mut order: Vec<usize> = (0..runs.len()).filter(here).collect();
        order.sort_by_key(|&index| (runs[index].k.start, index));
        let (mut end, mut open) = (0, false);
        for index in order {
            let run = &runs[index];
            match all.last_mut() {
                Some(last) if open && run.k.start < last.tokens.end => {
                    last.tokens.end = last.tokens.end.max(run.k.end);
                    last.members.push(index);
                }
                _ => {
                    if run.k.start > end {
                        all.push(gap(row, end..run.k.start));
                    }
                    all.push(KeyRun {
                        members: vec![index],
                        phase: run.position % keys,
                        ..gap(row, run.k.clone())
                    });
                    open = true;
                }
            }
            end = end.max(run.k.end);
        }
        if end < tokens {
            all.push(gap(row, end..tokens));
        }
    }
    all.iter_mut().for_each(|run| run.members.sort_unstable());
    all
}

struct Maker<'a> {
    runs: &'a [Run],
    first_tile: &'a [i64],
    problem: &'a AttentionProblem,
    queries: i64,
    keys: i64,
    span: usize,
    visits: Vec<Record>,
}

impl Maker<'_> {
    /// The items of a run of keys, group by group, from the last tile to the first.
    fn groups(&mut self, keys: &KeyRun) -> Vec<Vec<Record>> {
        let (num_tiles, span) = (keys.num_tiles(self.keys), self.span as i64);
        let mut groups = Vec::new();
        for first in (0..num_tiles).step_by(self.span) {
            let last = num_tiles.min(first + span);
            let mut chunk = Vec::new();
            for tile in (first..last).rev() {
                let [visit, end, count] = self.visit(keys, tile);
                let token = keys.origin() + tile * self.keys;
                for kv_head in 0..self.problem.num_kv_heads as i64 {
                    chunk.push(record(&[
                        keys.row,
                        token,
                        (keys.tokens.start - token).max(0),
                        (keys.tokens.end - token).min(self.keys),
                        kv_head,
                        self.problem.group() as i64 * count,
                        visit,
                        end,
                        first - tile,
                        last - 1 - tile,
                    ]));
                }
            }
            groups.push(chunk);
        }
        groups
    }

    /// Adds the visits of a tile: the first one, the end, and the number of tiles of queries.
    fn visit(&mut self, keys: &KeyRun, tile: i64) -> [i64; 3] {
        let start = self.visits.len() as i64;
        let mut count = 0;
        for &index in &keys.members {
            let run = &self.runs[index];
            // The tile's first key, counted within the segment.
            let key = keys.origin() + tile * self.keys - run.k.start;
            let tiles = (run.num_q() + self.queries - 1) / self.queries;
            let seen = |n: i64| {
                let t = n * self.queries;
                run.seen(t, self.queries.min(run.num_q() - t))
            };
            let first = first_where(tiles, |n| seen(n).end > key.max(0));
            let last = first_where(tiles, |n| seen(n).start >= key + self.keys);
            if key >= run.num_k() || key + self.keys <= 0 || first >= last {
                continue;
            }
            let t = first * self.queries;
            count += last - first;
            self.visits.push(record(&[
                run.q_row,
                run.q.start + t,
                last - first,
                run.num_q() - t,
                run.own() + t - key,
                -key,
                -key + run.num_k(),
                run.left,
                run.right,
                self.first_tile[index] + first,
            ]));
        }
        [start, self.visits.len() as i64, count]
    }
}
