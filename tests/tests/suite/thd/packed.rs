//! Packed batches on the host, and their media.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_cp::{
    batch::SequenceBatch,
    sharder::{MediaEntries, MediaSlot},
};
use burn_cp_tests::{Random, device};

use super::{IMAGE, VIDEO};

/// A packed batch with placeholders in it, on the host.
#[derive(Debug, Clone)]
pub(crate) struct Packed {
    pub(crate) size: [usize; 2],
    pub(crate) ids: Vec<i64>,
    pub(crate) labels: Vec<i64>,
    /// `[3, batch, seq]`.
    pub(crate) positions: Vec<i64>,
    /// Real and padded lengths by row.
    pub(crate) lengths: Vec<Vec<[usize; 2]>>,
}

impl Packed {
    /// Random documents, each padded to a multiple of `multiple` tokens; empty ones and ones of padding among them.
    pub(crate) fn random(random: &mut Random, rows: usize, multiple: usize) -> Self {
        let seq = multiple * random.int(1..=6);
        let lengths: Vec<Vec<[usize; 2]>> = (0..rows)
            .map(|_| {
                let (mut row, mut left) = (Vec::new(), seq / multiple);
                while left > 0 {
                    let padded = random.int(0..=left);
                    left -= padded;
                    let least = if random.once_in(6) {
                        0
                    } else {
                        padded * multiple / 2
                    };
                    row.push([random.int(least..=padded * multiple), padded * multiple]);
                }
                row
            })
            .collect();
        let mut batch = Self {
            size: [rows, seq],
            ids: Vec::new(),
            labels: Vec::new(),
            positions: (0..3 * rows * seq)
                .map(|_| i64::try_from(random.int(0..=99)).unwrap())
                .collect(),
            lengths,
        };
        for [real, padded] in batch.lengths.concat() {
            for token in 0..padded {
                let text = i64::try_from(random.int(1..=20)).unwrap();
                let counts = token < real && !random.once_in(4);
                batch.labels.push(if counts { text } else { -100 });
                let id = random.one_of(&[text, text, IMAGE, VIDEO]);
                batch.ids.push(if token < real { id } else { 0 });
            }
        }
        batch
    }

    fn table(&self, which: usize) -> TensorData {
        let len = self.lengths.iter().map(Vec::len).max().unwrap();
        let rows = self.lengths.iter().flat_map(|row| {
            let mut row: Vec<i64> = row.iter().map(|lengths| lengths[which] as i64).collect();
            row.resize(len, -1000);
            row
        });
        TensorData::new(rows.collect::<Vec<i64>>(), [self.size[0], len])
    }

    pub(crate) fn batch<B: Backend>(&self) -> SequenceBatch<B> {
        let [rows, seq] = self.size;
        SequenceBatch::from_ids(TensorData::new(self.ids.clone(), self.size))
            .with_labels(TensorData::new(self.labels.clone(), self.size))
            .with_positions(TensorData::new(self.positions.clone(), [3, rows, seq]))
            .with_seq_lens(&self.table(0), Some(&self.table(1)))
            .unwrap()
    }

    /// Of `range` of all tokens, those that wait for this kind.
    pub(crate) fn count(&self, range: Range<usize>, placeholder: i64) -> usize {
        self.ids[range]
            .iter()
            .filter(|id| **id == placeholder)
            .count()
    }

    /// Tokens of a chunk's stream.
    pub(crate) fn stream(&self, num_chunks: usize, chunk: usize) -> Range<usize> {
        let len = self.ids.len() / num_chunks;
        chunk * len..(chunk + 1) * len
    }

    /// The media of each chunk: one image and one video of as many patches and frames as tokens wait, if any do. A patch's
    /// values are those of its number among all of its kind.
    pub(crate) fn slots<B: Backend>(&self, num_chunks: usize) -> Vec<MediaSlot<B>> {
        let of = |chunk: usize| {
            let stream = self.stream(num_chunks, chunk);
            let of_kind = |placeholder, grid: fn(usize) -> [usize; 3]| {
                let from = self.count(0..stream.start, placeholder);
                let num = self.count(stream.clone(), placeholder);
                (num > 0).then(|| MediaEntries {
                    pixels: patches(from..from + num, placeholder),
                    grids: vec![grid(num)],
                    spatial_merge_size: 1,
                })
            };
            MediaSlot {
                images: of_kind(IMAGE, |num| [1, 1, num]),
                videos: of_kind(VIDEO, |num| [num, 1, 1]),
            }
        };
        (0..num_chunks).map(of).collect()
    }
}

/// Patches `[rows, 2]` of these numbers.
pub(crate) fn patches<B: Backend>(numbers: Range<usize>, kind: i64) -> Tensor<B, 2> {
    let len = numbers.len();
    let values: Vec<f64> = numbers
        .flat_map(|number| {
            let angle = number as f64 * 0.37 + kind as f64;
            [angle.sin(), angle.cos()]
        })
        .collect();
    Tensor::from_data(TensorData::new(values, [len, 2]), &device())
}
