//! Chunks, masks and refusals of one rank; what happens between ranks is tested across ranks.

mod cutting;
mod refusals;

use burn::{
    backend::Flex,
    tensor::{Tensor, TensorData},
};

use super::*;
use crate::{
    batch::{PadRule, StreamDeclaration},
    sharder::ContextParallelConfig,
};

type B = Flex;

fn solo(config: ThdConfig) -> ThdSharder {
    let layout = LayoutPolicy::DualChunkSwap;
    let cp = ContextParallelConfig {
        layout,
        streams: vec![StreamDeclaration {
            name: "gates".into(),
            dim: 2,
            pad: PadRule::Value(0.0),
        }],
        ..ContextParallelConfig::default()
    };
    ThdSharder::new(ContextParallel::solo(cp), config).unwrap()
}

fn config(num_chunks: usize) -> ThdConfig {
    ThdConfig {
        num_chunks,
        image_token_id: Some(91),
        video_token_id: Some(92),
    }
}

fn ints<const D: usize>(values: &[i64], shape: [usize; D]) -> TensorData {
    TensorData::new(values.to_vec(), shape)
}

/// Rows of full documents.
fn packed(ids: &[i64], shape: [usize; 2]) -> SequenceBatch<B> {
    let lengths = vec![i64::try_from(shape[1]).unwrap(); shape[0]];
    SequenceBatch::from_ids(ints(ids, shape))
        .with_seq_lens(&ints(&lengths, [shape[0], 1]), None)
        .unwrap()
}

/// `num_tokens` tokens' worth of patches of one entry.
fn entries(num_tokens: usize) -> MediaEntries<B> {
    MediaEntries {
        pixels: Tensor::ones([num_tokens, 2], &Default::default()),
        grids: vec![[1, 1, num_tokens]],
        spatial_merge_size: 1,
    }
}

fn images(num_tokens: usize) -> MediaSlot<B> {
    MediaSlot {
        images: Some(entries(num_tokens)),
        videos: None,
    }
}

/// A range as floats.
trait Floats {
    fn floats(range: std::ops::Range<i64>) -> Self;
}

impl Floats for Tensor<B, 1> {
    fn floats(range: std::ops::Range<i64>) -> Self {
        Tensor::<B, 1, burn::tensor::Int>::arange(range, &Default::default()).float()
    }
}
