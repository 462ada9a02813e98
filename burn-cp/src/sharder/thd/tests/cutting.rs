//! What each chunk holds, and which features its tokens take.

use burn::{
    backend::{Autodiff, Flex},
    tensor::{Int, Tensor, TensorData},
};

use super::*;
use crate::{
    batch::Stream,
    layout::MaskKind,
    sharder::{Coordinates, IGNORED_LABEL},
};

#[test]
fn a_mask_of_the_whole_stream_gives_the_feature_rows_of_any_shard() {
    // (ids, boundaries; of each rank its tokens, image rows and video rows), images wait at 62, videos at 63.
    type Shares = &'static [[&'static [usize]; 3]];
    let table: &[(&[i64], &[i64], Shares)] = &[
        (
            &[62, 63, 7, 62, 8, 63, 63, 62],
            &[0, 8],
            &[
                [&[0, 1, 6, 7], &[0, 2], &[0, 2]],
                [&[2, 3, 4, 5], &[1], &[1]],
            ],
        ),
        (
            &[62, 1, 62, 3, 62, 62, 6, 7, 62, 9, 63, 63, 12, 13, 62, 15],
            &[0, 8, 16],
            &[
                [&[0, 1, 6, 7, 8, 9, 14, 15], &[0, 4, 5], &[]],
                [&[2, 3, 4, 5, 10, 11, 12, 13], &[1, 2, 3], &[0, 1]],
            ],
        ),
    ];
    for (ids, boundaries, shares) in table {
        let documents = Documents::from_cu_seqlens(&[boundaries.to_vec()], ids.len()).unwrap();
        let layout = LayoutPolicy::DualChunkSwap.layout(&documents, shares.len());
        let layout = layout.unwrap();
        let image_mask = MediaMask::from_ids(MediaKind::Image, ids, 62);
        let video_mask = MediaMask::from_ids(MediaKind::Video, ids, 63);
        for (rank, [tokens, image_rows, video_rows]) in shares.iter().enumerate() {
            assert_eq!(layout.indices(rank), *tokens, "{ids:?}, rank {rank}");
            assert_eq!(
                image_mask.rows(tokens).unwrap(),
                *image_rows,
                "{ids:?}, rank {rank}"
            );
            assert_eq!(
                video_mask.rows(tokens).unwrap(),
                *video_rows,
                "{ids:?}, rank {rank}"
            );
        }
    }
}

#[test]
fn chunks_of_one_rank_are_whole_streams_with_masks_of_their_own() {
    let ids = [0, 91, 2, 3, 4, 5, 92, 7];
    let mut videos = MediaSlot::none();
    videos.videos = Some(entries(1));
    let step = solo(config(2))
        .shard(
            packed(&ids, [2, 4]),
            vec![images(1), videos],
            &Default::default(),
        )
        .unwrap();
    assert_eq!(
        (step.num_chunks(), step.stream_len(), step.local_len()),
        (2, 4, 4)
    );
    let waits = |chunk, kind| step.media_mask(chunk, kind).unwrap().waits().to_vec();
    assert_eq!(waits(0, MediaKind::Image), [false, true, false, false]);
    assert_eq!(waits(1, MediaKind::Image), [false; 4]);
    assert_eq!(waits(0, MediaKind::Video), [false; 4]);
    assert_eq!(waits(1, MediaKind::Video), [false, false, true, false]);
    for (chunk, of_chunk) in step.steps().iter().enumerate() {
        assert_eq!(of_chunk.layout().indices(0), [0, 1, 2, 3]);
        let got: Vec<i64> = of_chunk.ids().unwrap().into_data().iter().collect();
        assert_eq!(got, ids[chunk * 4..chunk * 4 + 4]);
    }
    // Other implementations know no layout of chunks, and so have no verbs for them.
    let whole = Tensor::<B, 1>::floats(0..8);
    let whole = whole.reshape([2, 4]);
    let shard = step.shard_tokens(whole.clone(), 1, Coordinates::Input);
    assert_eq!(shard.clone().into_data(), whole.clone().into_data());
    let again = step.gather_tokens(shard, 1, Coordinates::Input);
    assert_eq!(again.into_data(), whole.into_data());
}

#[test]
fn tables_of_chunks_are_filled_up_to_one_length() {
    let lengths = ints(&[3, 3, 6, -1000], [2, 2]);
    let batch = SequenceBatch::<B>::from_ids(ints(&[1; 12], [2, 6]));
    let batch = batch.with_seq_lens(&lengths, Some(&lengths)).unwrap();
    let step = solo(config(2)).shard(batch, vec![], &Default::default());
    let tables = step.unwrap().tables().unwrap();
    assert_eq!(tables.cu_seqlens, [[0, 3, 6], [0, 6, -1000]]);
    assert_eq!(tables.cu_seqlens_padded, None);
    assert_eq!(tables.max_seqlen, [3, 6]);
}

#[test]
fn features_are_selected_with_gradients_for_those_that_are_taken() {
    type A = Autodiff<Flex>;
    let mask = MediaMask::from_ids(MediaKind::Video, &[63, 1, 63, 63, 1], 63);
    let leaf = || {
        Tensor::<A, 2>::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &Default::default())
            .require_grad()
    };
    let grad = |tokens: &[usize]| {
        let leaf = leaf();
        let chosen = mask.select(leaf.clone(), tokens).unwrap();
        let grads = (chosen.clone() * chosen.clone()).sum().backward();
        let values: Vec<f32> = chosen.into_data().iter().collect();
        let grad = leaf.grad(&grads).expect("the features stay on the graph");
        (values, grad.into_data().iter::<f32>().collect::<Vec<_>>())
    };
    let (values, grads) = grad(&[3, 1, 0]);
    assert_eq!(values, [5.0, 6.0, 1.0, 2.0]);
    assert_eq!(grads, [2.0, 4.0, 0.0, 0.0, 10.0, 12.0]);
    // A shard without a placeholder: a row of zeros, and gradients of zero.
    assert_eq!(grad(&[1, 4]), (vec![0.0; 2], vec![0.0; 6]));
    assert!(matches!(
        mask.select(leaf(), &[5]),
        Err(ThdError::PastMask {
            expected: 5,
            got: 5
        })
    ));
    let few = leaf().narrow(0, 0, 2);
    assert!(matches!(
        mask.select(few, &[0]),
        Err(ThdError::FeatureRows {
            kind: MediaKind::Video,
            expected: 3,
            got: 2
        })
    ));
}

/// Four rows of 3 tokens, the first and third of two documents.
fn four_rows() -> SequenceBatch<B> {
    let lengths = ints(&[2, 1, 3, -1000, 1, 2, 3, -1000], [4, 2]);
    SequenceBatch::from_ids(ints(&(0..12).collect::<Vec<_>>(), [4, 3]))
        .with_seq_lens(&lengths, Some(&lengths))
        .unwrap()
}

/// The steps of two chunks of two rows.
fn halves(batch: SequenceBatch<B>) -> [CpStep<B>; 2] {
    let step = solo(config(2)).shard(batch, vec![], &Default::default());
    step.unwrap().steps().to_vec().try_into().unwrap()
}

fn floats<const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().iter().collect()
}

#[test]
fn all_that_a_batch_carries_is_cut_by_rows() {
    let shape = [4, 3];
    let ids: Vec<i64> = (0..12).collect();
    let positions: Vec<i64> = (0..24).collect();
    let padding: Vec<bool> = ids.iter().map(|id| *id == 11).collect();
    let gates = Tensor::<B, 1>::floats(0..24).reshape([2, 4, 3]);
    let mask: Vec<bool> = ids.iter().map(|id| id % 5 == 0).collect();
    let layer = Tensor::<B, 1>::floats(1..4).reshape([3, 1]);
    let batch = four_rows()
        .with_labels(ints(&ids, shape))
        .with_positions(ints(&positions, [2, 4, 3]))
        .with_padding_mask(TensorData::new(padding, shape))
        .with_stream("gates", Stream::new(gates))
        .with_deepstack(TensorData::new(mask, shape), vec![layer])
        .with_dropout_seed(5)
        .with_loss_mask(&ints(&[1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0], shape))
        .unwrap();
    let [first, second] = halves(batch);
    assert_eq!(first.labels().unwrap(), [0, 1, 2, IGNORED_LABEL, 4, 5]);
    assert_eq!(second.labels().unwrap(), [6, 7, 8, 9, 10, IGNORED_LABEL]);
    let positions: Tensor<B, 3, Int> = second.positions();
    let of_axis = |from: usize| (from..from + 6).map(|value| value as f32);
    let both: Vec<f32> = of_axis(6).chain(of_axis(18)).collect();
    assert_eq!(floats(positions.float()), both);
    let padding: Vec<bool> = second.padding_mask().into_data().iter().collect();
    assert_eq!(padding, [false, false, false, false, false, true]);
    let gates: Tensor<B, 3> = second.stream("gates").unwrap();
    assert_eq!(gates.dims(), [2, 1, 6]);
    assert_eq!(floats(gates), both);
    let deep = |step: &CpStep<B>| floats(step.deepstack()[0].clone());
    assert_eq!(deep(&first), [1.0, 0.0, 0.0, 0.0, 0.0, 2.0]);
    assert_eq!(deep(&second), [0.0, 0.0, 0.0, 0.0, 3.0, 0.0]);
    assert_eq!(first.dropout_seed(), Some(5));
    assert_ne!(second.dropout_seed(), Some(5));
}

#[test]
fn documents_keep_what_is_said_of_them_in_their_chunk() {
    let batch = four_rows()
        .with_spans(vec![vec![0..2], vec![], vec![1..3], vec![]])
        .with_prefixes(vec![vec![1, 0], vec![2], vec![1, 2], vec![0]])
        .with_masks(vec![
            vec![MaskKind::Full; 2],
            vec![MaskKind::PREFIX],
            vec![MaskKind::CAUSAL; 2],
            vec![MaskKind::PREFIX],
        ]);
    let [first, second] = halves(batch.clone());
    let span = || std::iter::once(0..2).collect::<Vec<_>>();
    let of = |step: &CpStep<B>, document: usize| {
        let documents = step.documents();
        let extent = documents.row(0)[document].extent.clone();
        let spans = documents.spans(0, document).to_vec();
        (
            extent,
            spans,
            documents.prefix(0, document),
            documents.mask(0, document).unwrap(),
        )
    };
    assert_eq!(of(&first, 0), (0..2, span(), 1, MaskKind::Full));
    assert_eq!(of(&first, 2), (3..6, vec![], 2, MaskKind::PREFIX));
    assert_eq!(of(&second, 1), (1..3, span(), 2, MaskKind::CAUSAL));
    assert_eq!(of(&second, 2), (3..6, vec![], 0, MaskKind::PREFIX));
    // A prefix too few in one row and one too many in the next one are not made up for by each other.
    let moved = batch.with_prefixes(vec![vec![1], vec![0, 2], vec![1, 2], vec![0]]);
    let error = solo(config(2)).shard(moved, vec![], &Default::default());
    let message = error.unwrap_err().to_string();
    assert!(
        message.contains("prefixes, row 0: expected 2 entries, got 1"),
        "{message}"
    );
}
