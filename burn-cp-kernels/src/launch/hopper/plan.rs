//! Schedules of the hopper kernels: tables of i32, as their sources read them.
//!
//! The forward pass runs a fixed number of blocks, each with a list of items (64 or 128 query rows of one
//! or two heads). The backward pass runs over tiles of keys, whose shares of `dq` are added in an order
//! that the schedule fixes; see the sources for how blocks take turns.

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

use crate::{
    definition::{AttentionProblem, Segments},
    launch::schedule::{FAR, gaps, reach},
};

/// A record of a table.
pub(crate) type Record = [i32; 16];

/// Query rows that one warpgroup of the forward pass computes.
const GROUP_ROWS: i64 = 64;
/// Tiles of keys per group at most.
const MAX_SPAN: usize = 16;

/// Largest number of keys per tile; the others divide it.
const MAX_KEYS: usize = 128;

/// Keys per tile of the forward pass.
pub(super) fn forward_keys(head_dim: usize) -> usize {
    if head_dim > 192 { 64 } else { 128 }
}

/// Warpgroups of the forward pass that compute; a tile of queries has 64 rows for each.
pub(super) fn forward_groups(head_dim: usize, v_head_dim: usize) -> usize {
    if (head_dim, v_head_dim) == (64, 64) {
        3
    } else {
        2
    }
}

/// Keys per tile of the backward pass.
pub(super) fn backward_keys(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 64 }
}

/// Queries per tile of the backward pass.
pub(super) fn backward_queries(head_dim: usize) -> usize {
    if head_dim == 64 { 128 } else { 64 }
}

/// What a segment is to the kernels; also a run of queries without keys.
struct Run {
    q_row: i64,
    q: Range<i64>,
    k_row: i64,
    k: Range<i64>,
    position: i64,
    left: i64,
    right: i64,
}

impl Run {
    fn num_q(&self) -> i64 {
        self.q.end - self.q.start
    }

    fn num_k(&self) -> i64 {
        self.k.end - self.k.start
    }

    /// Own key of the first query.
    fn own(&self) -> i64 {
        self.num_k() - self.num_q()
    }

    /// Keys that some of the queries `t..t + rows` sees; may run backwards.
    fn seen(&self, t: i64, rows: i64) -> Range<i64> {
        let first = self.own() + t;
        let last = first + rows + self.right;
        (first - self.left).max(0)..last.min(self.num_k())
    }
}

/// The segments, and the runs of query rows that none of them names.
fn runs(segments: &Segments) -> Vec<Run> {
    let named = segments.iter().map(|segment| {
        let (left, right) = reach(segment);
        Run {
            q_row: segment.q_row as i64,
            q: segment.q.start as i64..segment.q.end as i64,
            k_row: segment.k_row as i64,
            k: segment.k.start as i64..segment.k.end as i64,
            // Only its place in a tile matters.
            position: (segment.k_position % MAX_KEYS) as i64,
            left: left.into(),
            right: right.into(),
        }
    });
    let (batch, tokens) = segments.q_shape();
    let unnamed = gaps(segments, batch, tokens);
    let unnamed = unnamed.into_iter().map(|(row, gap)| Run {
        q_row: row as i64,
        q: gap.start as i64..gap.end as i64,
        k_row: 0,
        k: 0..0,
        position: 0,
        left: FAR.into(),
        right: 0,
    });
    named.chain(unnamed).collect()
}

/// A record of these numbers, filled up with 0. They fit: tokens are fewer than 2^30.
fn record(numbers: &[i64]) -> Record {
    let mut record = [0; 16];
    for (to, number) in record.iter_mut().zip(numbers) {
        *to = *number as i32;
    }
    record
}

/// The tables of the forward pass.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ForwardPlan {
    /// In the order of blocks.
    pub(crate) items: Vec<Record>,
    /// First item of each block, and the number of items.
    pub(crate) lists: Vec<i32>,
}

/// Deals the work out to `num_blocks` blocks: tiles of one document and head next to each other, so that
/// its keys stay in cache, each to the block with the least to do so far.
pub(crate) fn forward(
    segments: &Segments,
    problem: &AttentionProblem,
    num_blocks: usize,
) -> ForwardPlan {
    let groups = forward_groups(problem.head_dim, problem.v_head_dim);
    let mut entries = Vec::new();
    for (index, run) in runs(segments).iter().enumerate() {
        for t in (0..run.num_q()).step_by(groups * GROUP_ROWS as usize) {
            forward_items(run, t, problem, |head, tiles, item| {
                let size = run.num_q() * run.num_k().max(1);
                entries.push(((Reverse(size), index, Reverse(tiles), head), item));
            });
        }
    }
    entries.sort_by_key(|(key, _)| *key);
    let mut loads: BinaryHeap<_> = (0..num_blocks).map(|block| Reverse((0, block))).collect();
    let mut lists = vec![Vec::new(); num_blocks];
    for ((_, _, Reverse(tiles), _), item) in entries {
        if let Some(Reverse((load, block))) = loads.pop() {
            lists[block].push(item);
            loads.push(Reverse((load + tiles + 1, block)));
        }
    }
    let mut starts = vec![0];
    for list in &lists {
        starts.push(starts[starts.len() - 1] + list.len() as i32);
    }
    ForwardPlan {
        items: lists.concat(),
        lists: starts,
    }
}

/// The items of one tile of queries: one per head, or one per two heads where the tile is short.
fn forward_items(
    run: &Run,
    t: i64,
    problem: &AttentionProblem,
    mut add: impl FnMut(usize, i64, Record),
) {
    let keys = forward_keys(problem.head_dim) as i64;
    let groups = forward_groups(problem.head_dim, problem.v_head_dim) as i64;
    let rows = (groups * GROUP_ROWS).min(run.num_q() - t);
    let seen = run.seen(t, rows);
    let phase = run.position % keys;
    let (first, tiles) = if seen.start < seen.end {
        let first = (phase + seen.start) / keys;
        (first, (phase + seen.end + keys - 1) / keys - first)
    } else {
        (0, 0)
    };
    let shift = phase - first * keys;
    let paired = rows <= GROUP_ROWS && problem.group().is_multiple_of(2);
    for head in (0..problem.num_heads).step_by(if paired { 2 } else { 1 }) {
        let (token, h) = (run.q.start + t, head as i64);
        let kv_head = (head / problem.group()) as i64;
        let groups = if paired {
            [h, h + 1, token, token, rows, rows]
        } else {
            // A third warpgroup goes on from the second's rows.
            let rest = (rows - GROUP_ROWS).max(0);
            [h, h, token, token + GROUP_ROWS, rows.min(GROUP_ROWS), rest]
        };
        let base = [
            run.q_row,
            run.k_row,
            kv_head,
            run.k.start - shift,
            tiles,
            shift,
            shift + run.num_k(),
            shift + run.own() + t,
            run.left,
            run.right,
        ];
        add(head, tiles, record(&[&base[..], &groups[..]].concat()));
    }
}

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

/// The first of `0..count` from which on a condition holds.
fn first_where(count: i64, holds: impl Fn(i64) -> bool) -> i64 {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        match holds(middle) {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    low
}

#[cfg(test)]
mod tests;
