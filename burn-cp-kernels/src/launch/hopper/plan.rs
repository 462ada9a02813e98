//! Schedules of the hopper kernels: tables of i32, as their sources read them.
//!
//! The forward pass runs a fixed number of blocks, each with a list of items (64 or 128 query rows of one
//! or two heads). The backward pass runs over tiles of keys, whose shares of `dq` are added in an order
//! that the schedule fixes; see the sources for how blocks take turns.

mod backward;

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

use crate::{
    definition::{AttentionProblem, Segments},
    launch::schedule::{FAR, gaps, reach},
};

pub(crate) use backward::{BackwardPlan, backward, backward_of};

/// A record of a table.
pub(crate) type Record = [i32; 16];

/// Query rows that one warpgroup of the forward pass computes.
const GROUP_ROWS: i64 = 64;

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

/// Bytes of keys and values that blocks may walk at about the same time: half the second-level cache of an H100 or H200, whose two halves
/// may both hold them.
const CACHE_BYTES: i64 = 24 << 20;

/// Heads of keys that are walked at a time, so that what one block reads is in cache for the others. With all 16 heads at once instead of 2,
/// documents of 16K to 64K tokens took 3 to 15 % longer on an H200.
fn heads_at_a_time(run: &Run, problem: &AttentionProblem) -> usize {
    let elements = (problem.head_dim + problem.v_head_dim) as i64;
    let head = run.num_k().max(1).saturating_mul(2 * elements);
    let fit = usize::try_from(CACHE_BYTES / head)
        .unwrap_or(usize::MAX)
        .max(2);
    // Equally many each time.
    let times = problem.num_kv_heads.div_ceil(fit);
    problem.num_kv_heads.div_ceil(times.max(1)).max(1)
}

/// Deals the work out to `num_blocks` blocks: tiles of one document and of few heads next to each other, so that
/// their keys stay in cache, each to the block with the least to do so far.
pub(crate) fn forward(
    segments: &Segments,
    problem: &AttentionProblem,
    num_blocks: usize,
) -> ForwardPlan {
    let groups = forward_groups(problem.head_dim, problem.v_head_dim);
    let mut entries = Vec::new();
    for (index, run) in runs(segments).iter().enumerate() {
        let at_a_time = heads_at_a_time(run, problem);
        for t in (0..run.num_q()).step_by(groups * GROUP_ROWS as usize) {
            forward_items(run, t, problem, |head, tiles, item| {
                let size = run.num_q() * run.num_k().max(1);
                let heads = head / problem.group() / at_a_time;
                entries.push(((Reverse(size), index, heads, Reverse(tiles), head), item));
            });
        }
    }
    entries.sort_by_key(|(key, _)| *key);
    let mut loads: BinaryHeap<_> = (0..num_blocks).map(|block| Reverse((0, block))).collect();
    let mut lists = vec![Vec::new(); num_blocks];
    for ((.., Reverse(tiles), _), item) in entries {
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
