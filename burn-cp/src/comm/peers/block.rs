//! Where rows of a tensor are in a device's memory, and the copies that move them. Host data.

/// Rows of one dim of a tensor: for each index of the dims before, a run of contiguous bytes a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    /// Of the first run, on the device of who names it.
    pub(crate) address: u64,
    /// Bytes of a run.
    pub(crate) num_bytes: usize,
    pub(crate) rows: Steps,
    /// Of the dims before that of the rows.
    pub(crate) outer: Steps,
}

/// So many places, equally far from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Steps {
    pub(crate) count: usize,
    /// Bytes from one to the next.
    pub(crate) stride: usize,
}

/// A copy of equally long runs, which are equally far from each other at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rectangle {
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Bytes of a run.
    pub(crate) num_bytes: usize,
    /// Number of runs.
    pub(crate) count: usize,
    pub(crate) from_pitch: usize,
    pub(crate) to_pitch: usize,
}

impl Block {
    /// One run.
    pub(crate) fn one(address: u64, num_bytes: usize) -> Self {
        let once = Steps {
            count: 1,
            stride: num_bytes,
        };
        Self {
            address,
            num_bytes,
            rows: once,
            outer: once,
        }
    }

    /// Whether another one can be copied to this one, run by run.
    pub(super) fn fits(&self, other: &Self) -> bool {
        let sizes = |block: &Self| (block.num_bytes, block.rows.count, block.outer.count);
        sizes(self) == sizes(other)
    }

    /// Its longest runs, one by one: where each starts, and its bytes.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (u64, usize)> {
        let rectangles = copies(self, self).into_iter();
        rectangles.flat_map(|of| {
            (0..of.count).map(move |run| (of.from + (run * of.from_pitch) as u64, of.num_bytes))
        })
    }
}

/// The longest pitch that drivers take (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const LONGEST_PITCH: usize = i32::MAX as usize;

/// The copies to `to` of what is at `from`, which fits it: few where both ends have what is next to each other in the same order.
pub(super) fn copies(from: &Block, to: &Block) -> Vec<Rectangle> {
    let Block {
        num_bytes,
        rows,
        outer,
        ..
    } = *from;
    let both =
        |step: fn(&Block) -> Steps| step(from).stride == num_bytes && step(to).stride == num_bytes;
    // Runs of all of `inner`, one of them behind the other, for each of `others`.
    let joined = |inner: Steps, others: fn(&Block) -> Steps| {
        let whole = Rectangle::new(
            [from.address, to.address],
            inner.count * num_bytes,
            others(from).count,
            [others(from).stride, others(to).stride],
        );
        whole.with_legal_pitch()
    };
    if both(|block| block.rows) {
        joined(rows, |block| block.outer)
    } else if both(|block| block.outer) {
        joined(outer, |block| block.rows)
    } else {
        let at = |block: &Block, index: usize| block.address + (index * block.outer.stride) as u64;
        (0..outer.count)
            .flat_map(|index| {
                let ends = [at(from, index), at(to, index)];
                let strides = [rows.stride, to.rows.stride];
                Rectangle::new(ends, num_bytes, rows.count, strides).with_legal_pitch()
            })
            .collect()
    }
}

impl Rectangle {
    fn new(
        [from, to]: [u64; 2],
        num_bytes: usize,
        count: usize,
        [from_pitch, to_pitch]: [usize; 2],
    ) -> Self {
        // One run, where each ends at the beginning of the next.
        if from_pitch == num_bytes && to_pitch == num_bytes && count > 1 {
            let whole = num_bytes * count;
            return Self::new([from, to], whole, 1, [whole; 2]);
        }
        Self {
            from,
            to,
            num_bytes,
            count,
            from_pitch,
            to_pitch,
        }
    }

    /// Itself, or its runs one by one.
    fn with_legal_pitch(self) -> Vec<Self> {
        if self.count == 1 || self.from_pitch.max(self.to_pitch) <= LONGEST_PITCH {
            return vec![self];
        }
        let run = |index: usize| {
            let at = |start: u64, pitch: usize| start + (index * pitch) as u64;
            let ends = [at(self.from, self.from_pitch), at(self.to, self.to_pitch)];
            Self::new(ends, self.num_bytes, 1, [self.num_bytes; 2])
        };
        (0..self.count).map(run).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `[outer, rows, width]` in memory, in that order or with rows first, with bytes between.
    fn block(sizes: [usize; 3], rows_first: bool, gaps: [usize; 2]) -> Block {
        let [outer, rows, num_bytes] = sizes;
        let inner = num_bytes + gaps[0];
        let steps = |count, stride| Steps { count, stride };
        let (rows, outer) = if rows_first {
            (steps(rows, inner * outer + gaps[1]), steps(outer, inner))
        } else {
            (steps(rows, inner), steps(outer, inner * rows + gaps[1]))
        };
        Block {
            address: 5,
            num_bytes,
            rows,
            outer,
        }
    }

    /// All places of a block's bytes, in the order of outer indices, rows and bytes.
    fn places(block: &Block) -> Vec<u64> {
        let mut places = Vec::new();
        for outer in 0..block.outer.count {
            for row in 0..block.rows.count {
                let start = outer * block.outer.stride + row * block.rows.stride;
                places.extend((0..block.num_bytes).map(|at| block.address + (start + at) as u64));
            }
        }
        places
    }

    proptest! {
        #[test]
        fn copies_move_each_byte_to_its_place(
            sizes in prop::array::uniform3(1usize..5),
            orders in any::<[bool; 2]>(),
            gaps in prop::array::uniform4(0usize..3),
        ) {
            let from = block(sizes, orders[0], [gaps[0], gaps[1]]);
            let to = block(sizes, orders[1], [gaps[2], gaps[3]]);
            prop_assert!(to.fits(&from));
            let mut moved: Vec<(u64, u64)> = Vec::new();
            for of in copies(&from, &to) {
                for run in 0..of.count {
                    let (there, here) = (of.from + (run * of.from_pitch) as u64, of.to + (run * of.to_pitch) as u64);
                    moved.extend((0..of.num_bytes as u64).map(|at| (there + at, here + at)));
                }
            }
            let mut want: Vec<_> = places(&from).into_iter().zip(places(&to)).collect();
            want.sort_unstable();
            moved.sort_unstable();
            prop_assert_eq!(moved, want);
            let runs: Vec<u64> = from.runs().flat_map(|(at, num)| at..at + num as u64).collect();
            prop_assert_eq!(sorted(runs), sorted(places(&from)));
        }
    }

    fn sorted(mut places: Vec<u64>) -> Vec<u64> {
        places.sort_unstable();
        places
    }

    #[test]
    fn runs_further_apart_than_drivers_take_are_copies_of_their_own() {
        for (stride, num_copies) in [(LONGEST_PITCH, 1), (LONGEST_PITCH + 1, 3)] {
            let steps = |count, stride| Steps { count, stride };
            let far = Block {
                address: 7,
                num_bytes: 16,
                rows: steps(2, 16),
                outer: steps(3, stride),
            };
            let near = Block {
                outer: steps(3, 40),
                ..far
            };
            for (from, to) in [(&far, &near), (&near, &far)] {
                let copies = copies(from, to);
                assert_eq!(copies.len(), num_copies);
                if let [.., last] = &copies[..]
                    && num_copies > 1
                {
                    let ends = [from, to].map(|block| 7 + 2 * block.outer.stride as u64);
                    assert_eq!(*last, Rectangle::new(ends, 32, 1, [32; 2]));
                }
            }
        }
    }

    #[test]
    fn what_is_in_one_order_at_both_ends_is_one_copy() {
        for rows_first in [false, true] {
            let dense = block([3, 4, 2], rows_first, [0, 0]);
            let apart = block([3, 4, 2], rows_first, [0, 7]);
            assert_eq!(
                copies(&dense, &dense)[..],
                [Rectangle::new([5, 5], 24, 1, [24, 24])]
            );
            assert_eq!(copies(&dense, &apart).len(), 1);
        }
        let other = block([3, 4, 2], true, [0, 0]);
        assert_eq!(copies(&block([3, 4, 2], false, [0, 0]), &other).len(), 3);
    }
}
