//! The part of a rank's attention that some of its keys account for: its queries over the keys of its own shard, or over those of
//! another rank's. Host data.
//!
//! The keys of a buffer are ordered by document and position, and so are any of them taken out. A query sees a run of the buffer,
//! hence a run of what was taken out, whose ends move by one or not at all from a query to the next. Where that changes, a segment
//! ends; each of the resulting segments is again one run of queries and one run of keys with a mask that kernels know. No query is
//! named twice, so that one kernel call serves all of them, whatever the layout.

use std::ops::Range;

use burn_cp_kernels::{AttentionError, Segment, Segments, Window};

use super::prepared::dropout_places;
use crate::{
    collectives::Piece,
    plan::{self, AttentionPlan},
};

/// Keys of a rank's buffer that come from some ranks, and the rank's segments over them alone.
#[derive(Debug)]
pub(super) struct KeySubset {
    /// Over keys of shape `(1, len)`, or one row that no segment names where `len` is 0.
    pub(super) segments: Segments,
    /// Number of keys.
    pub(super) len: usize,
    /// Where they are in the shards of their ranks, in buffer order.
    pub(super) pieces: Vec<Piece>,
}

impl KeySubset {
    /// The keys of `rank` whose source fits.
    pub(super) fn new(
        plan: &AttentionPlan,
        rank: usize,
        fits: impl Fn(usize) -> bool,
    ) -> Result<Self, AttentionError> {
        let mut taken = Taken::default();
        let mut pieces = Vec::new();
        for piece in plan
            .rank(rank)
            .pieces
            .iter()
            .filter(|piece| fits(piece.source))
        {
            taken.push(piece.at..piece.at + piece.local.len());
            pieces.push(flat(plan, piece));
        }
        let mut list = Vec::new();
        for segment in &plan.rank(rank).segments {
            taken.restrict(segment, &mut list);
        }
        let q_shape = (plan.documents().batch_size(), plan.layout().local_len(rank));
        let segments = Segments::new(list, q_shape, (1, taken.len.max(1)))?;
        let places = dropout_places(&segments, plan, rank);
        Ok(Self {
            segments: segments.with_dropout_places(places)?,
            len: taken.len,
            pieces,
        })
    }
}

/// A piece of a buffer as rows of its source's shard, whose batch rows stand one behind the other.
pub(super) fn flat(plan: &AttentionPlan, piece: &plan::KvPiece) -> Piece {
    let start = piece.row * plan.layout().local_len(piece.source);
    Piece {
        source: piece.source,
        range: start + piece.local.start..start + piece.local.end,
    }
}

/// Keys taken out of a buffer: ascending runs, none of which touches the next.
#[derive(Debug, Default)]
struct Taken {
    runs: Vec<Range<usize>>,
    /// Number of keys in the runs before each.
    before: Vec<usize>,
    len: usize,
}

impl Taken {
    fn push(&mut self, run: Range<usize>) {
        let num = run.len();
        match self.runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => {
                self.runs.push(run);
                self.before.push(self.len);
            }
        }
        self.len += num;
    }

    /// Number of taken keys before a place of the buffer.
    fn num_before(&self, place: usize) -> usize {
        let next = self.runs.partition_point(|run| run.start < place);
        match next.checked_sub(1) {
            None => 0,
            Some(run) => self.before[run] + self.runs[run].len().min(place - self.runs[run].start),
        }
    }

    /// Appends what becomes of a segment of the buffer.
    fn restrict(&self, segment: &plan::Segment, into: &mut Vec<Segment>) {
        let cuts = self.cuts(segment);
        for pair in cuts.windows(2) {
            let (first, last) = (
                self.visible(segment, pair[0]),
                self.visible(segment, pair[1] - 1),
            );
            if last.is_empty() {
                continue;
            }
            let (moving_start, moving_end) = (last.start > first.start, last.end > first.end);
            into.push(Segment {
                q_row: segment.q_row,
                q: segment.q.start + pair[0]..segment.q.start + pair[1],
                k_row: 0,
                k: first.start..last.end,
                k_position: first.start,
                causal: moving_end,
                // The last query's own key is the last one.
                window: moving_start.then(|| Window::left(last.len() - 1)),
            });
        }
    }

    /// The taken keys that query `t` of a segment sees.
    fn visible(&self, segment: &plan::Segment, t: usize) -> Range<usize> {
        let (num_q, num_k) = (segment.q.len(), segment.k.len());
        // Keys up to the query's own one.
        let seen = (num_k + t + 1).saturating_sub(num_q);
        let end = if segment.causal { seen } else { num_k };
        let start = (segment.window).map_or(0, |window| {
            (num_k + t).saturating_sub(num_q.saturating_add(window))
        });
        let place = |key: usize| self.num_before(segment.k.start + key);
        place(start.min(num_k))..place(end.min(num_k)).max(place(start.min(num_k)))
    }

    /// Queries at which an end of the visible keys starts or stops to move, with the first one and the number of queries.
    fn cuts(&self, segment: &plan::Segment) -> Vec<usize> {
        let (num_q, num_k) = (segment.q.len(), segment.k.len());
        let mut cuts = vec![0, num_q];
        let first = self.runs.partition_point(|run| run.end <= segment.k.start);
        let within = self.runs[first..]
            .iter()
            .take_while(|run| run.start < segment.k.end);
        for run in within {
            let places = [run.start.max(segment.k.start), run.end.min(segment.k.end)];
            for place in places {
                // The query whose own key is at the place, and the one whose window begins there.
                let own = (place - segment.k.start + num_q).checked_sub(num_k);
                let reach = segment.window.and_then(|window| {
                    (place - segment.k.start + num_q)
                        .checked_add(window)?
                        .checked_sub(num_k)
                });
                let of_end = own.filter(|_| segment.causal);
                cuts.extend([of_end, reach].into_iter().flatten().filter(|t| *t < num_q));
            }
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every query of every segment, by brute force, over all subsets of a few keys.
    #[test]
    fn each_query_sees_the_taken_keys_that_it_saw_before() {
        let mut num_checked = 0;
        for (num_q, num_k) in [(1, 1), (1, 6), (4, 4), (3, 7), (7, 7), (5, 2), (8, 8)] {
            for causal in [true, false] {
                for window in [None, Some(0), Some(1), Some(2), Some(3), Some(usize::MAX)] {
                    for offset in [0, 3] {
                        let segment = plan::Segment {
                            q_row: 1,
                            q: 5..5 + num_q,
                            k_row: 0,
                            k: offset..offset + num_k,
                            k_position: 0,
                            causal,
                            window,
                        };
                        for mask in 0..1_u32 << num_k {
                            // A key before and one behind the segment's own are taken too.
                            let is_taken = |key: usize| {
                                (offset..offset + num_k).contains(&key)
                                    && mask >> (key - offset) & 1 == 1
                                    || key + 1 == offset
                                    || key == offset + num_k
                            };
                            check(&segment, &is_taken, offset + num_k + 1);
                            num_checked += 1;
                        }
                    }
                }
            }
        }
        assert!(num_checked > 10_000);
    }

    fn check(segment: &plan::Segment, is_taken: &dyn Fn(usize) -> bool, len: usize) {
        let keys: Vec<usize> = (0..len).filter(|key| is_taken(*key)).collect();
        let mut taken = Taken::default();
        keys.iter().for_each(|&key| taken.push(key..key + 1));
        let mut list = Vec::new();
        taken.restrict(segment, &mut list);
        let whole = Segment {
            q_row: 0,
            q: segment.q.clone(),
            k_row: 0,
            k: segment.k.clone(),
            k_position: 0,
            causal: segment.causal,
            window: segment.window.map(Window::left),
        };
        Segments::new(list.clone(), (2, 20), (1, keys.len().max(1))).expect("legal segments");
        for t in 0..segment.q.len() {
            let sees = whole.visible_keys(t);
            let want: Vec<usize> = sees
                .map(|key| segment.k.start + key)
                .filter(|key| is_taken(*key))
                .collect();
            let at = segment.q.start + t;
            let of = list.iter().find(|part| part.q.contains(&at));
            let got: Vec<usize> = of.map_or_else(Vec::new, |part| {
                let visible = part.visible_keys(at - part.q.start);
                visible.map(|key| keys[part.k.start + key]).collect()
            });
            assert_eq!(
                got, want,
                "query {t} of {segment:?} over {keys:?}: {list:?}"
            );
        }
    }
}
