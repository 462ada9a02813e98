//! Batches, slots and configurations that are refused, and what looks like them and is not.

use burn::tensor::{Tensor, TensorData};

use super::*;
use crate::{
    layout::{LayoutError, Placement},
    sharder::IGNORED_LABEL,
};

/// The error of a batch in so many chunks, as text.
fn refused(num_chunks: usize, batch: SequenceBatch<B>, media: Vec<MediaSlot<B>>) -> String {
    let step = solo(config(num_chunks)).shard(batch, media, &Default::default());
    step.expect_err("this batch must be refused").to_string()
}

#[test]
fn what_is_no_packed_batch_is_refused_with_what_was_expected() {
    let ids = |rows: usize| ints(&vec![1; rows * 4], [rows, 4]);
    let unpacked = SequenceBatch::<B>::from_ids(ids(2));
    let table = [
        (
            refused(2, packed(&[1; 20], [5, 4]), vec![]),
            "divides the 5 rows of the batch, got 2",
        ),
        (
            refused(2, packed(&[1; 12], [3, 4]), vec![]),
            "divides the 3 rows of the batch, got 2",
        ),
        (
            refused(1, unpacked.clone(), vec![]),
            "got one without documents",
        ),
        (
            refused(1, SequenceBatch::from_ids(ints(&[1; 8], [8])), vec![]),
            "ids: expected shape [batch, seq], got [8]",
        ),
        (
            refused(
                1,
                packed(&[1; 8], [2, 4]).with_placement(Placement::flat(2, 4).unwrap()),
                vec![],
            ),
            "expected a batch without a placement",
        ),
        (
            refused(
                1,
                unpacked.with_documents(Documents::full(1, 8).unwrap()),
                vec![],
            ),
            "documents: expected [2, 4]",
        ),
        (
            refused(2, packed(&[1; 8], [2, 4]).with_labels(ids(1)), vec![]),
            "labels: expected shape 2 rows in dim 0, got [1, 4]",
        ),
        (
            refused(
                2,
                packed(&[1; 8], [2, 4]).with_positions(ints(&[0; 8], [2, 1, 4])),
                vec![],
            ),
            "positions: expected shape 2 rows in dim 1, got [2, 1, 4]",
        ),
        // Chunks are named where there are several.
        (
            refused(
                2,
                packed(&[1; 8], [2, 4])
                    .with_labels(ints(&[1, 1, 1, 1, 1, 1, 9, 1], [2, 4]))
                    .with_vocab_size(5),
                vec![],
            ),
            "chunk 1: label 9 at row 0, token 2",
        ),
    ];
    for (message, expected) in table {
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}

#[test]
fn each_chunk_of_ids_consumes_one_slot_and_no_slot_is_left_over() {
    let ids = [91, 1, 1, 1, 91, 91, 1, 1];
    let batch = || packed(&ids, [2, 4]);
    let slots = |slots: &[MediaSlot<B>]| slots.to_vec();
    let (one, two, none) = (images(1), images(2), MediaSlot::none());
    let whole = slots(&[one.clone(), two.clone()]);
    let step = solo(config(2))
        .shard(batch(), whole, &Default::default())
        .unwrap();
    let counts: Vec<_> = step.steps().iter().map(CpStep::num_media).collect();
    assert_eq!(counts, [1, 1]);
    let table = [
        (refused(2, batch(), vec![]), "media slots: expected 2"),
        (refused(2, batch(), vec![one.clone()]), "got 1"),
        (
            refused(2, batch(), slots(&[one.clone(), two.clone(), none.clone()])),
            "got 3",
        ),
        (
            refused(2, batch(), slots(&[two.clone(), one.clone()])),
            "chunk 0: images: 1 placeholder tokens, but 2 embeddings",
        ),
        (
            refused(2, batch(), slots(&[one.clone(), none.clone()])),
            "chunk 1: images: 2 placeholder tokens, but 0 embeddings",
        ),
        // Media whose features no token waits for.
        (
            refused(
                2,
                packed(&[1; 8], [2, 4]),
                slots(&[none.clone(), one.clone()]),
            ),
            "chunk 1: images: 0 placeholder tokens, but 1 embeddings",
        ),
    ];
    for (message, expected) in table {
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}

#[test]
fn chunks_without_media_need_no_slot_and_embeddings_consume_none() {
    let (one, two, none) = (images(1), images(2), MediaSlot::none());
    let slots = |slots: &[MediaSlot<B>]| slots.to_vec();
    let blind = ThdConfig {
        image_token_id: None,
        ..config(1)
    };
    let error = solo(blind).shard(
        packed(&[1; 4], [1, 4]),
        vec![one.clone()],
        &Default::default(),
    );
    assert!(matches!(
        error,
        Err(StepError::Thd(ThdError::NoPlaceholderId {
            kind: MediaKind::Image
        }))
    ));
    // A chunk without media has a slot of nothing, and a batch without any needs none.
    for slots in [slots(&[none.clone(), none]), vec![]] {
        let step = solo(config(2)).shard(packed(&[1; 8], [2, 4]), slots, &Default::default());
        assert_eq!(step.unwrap().steps()[0].num_media(), 0);
    }
    // Embeddings come from a stage that has consumed them.
    let hidden = || {
        let hidden = Tensor::<B, 3>::ones([2, 4, 3], &Default::default());
        let documents = Documents::full(2, 4).unwrap();
        SequenceBatch::from_embeddings(hidden).with_documents(documents)
    };
    let step = solo(config(2))
        .shard(hidden(), vec![], &Default::default())
        .unwrap();
    assert_eq!(step.media_mask(0, MediaKind::Image), None);
    assert!(refused(2, hidden(), vec![one, two]).contains("media slots: expected 0"));
    assert!(
        step.select_media(
            0,
            MediaKind::Image,
            Tensor::ones([1, 2], &Default::default())
        )
        .is_err()
    );
}

#[test]
fn a_sharder_of_another_layout_without_chunks_or_with_one_placeholder_for_two_is_refused() {
    let new = |cp: ContextParallelConfig, thd| {
        let sharder = ThdSharder::new(ContextParallel::solo(cp), thd);
        sharder.map(|_| ()).unwrap_err().to_string()
    };
    let swap = || ContextParallelConfig {
        layout: LayoutPolicy::DualChunkSwap,
        ..ContextParallelConfig::default()
    };
    let same = ThdConfig {
        video_token_id: Some(91),
        ..config(1)
    };
    let table = [
        (
            new(ContextParallelConfig::default(), config(1)),
            "layout: expected \"dual-chunk-swap\"",
        ),
        (new(swap(), config(0)), "num_chunks: expected at least 1"),
        (new(swap(), same), "another id than image_token_id"),
    ];
    for (message, expected) in table {
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
    let read = |text| serde_json::from_str::<ThdConfig>(text);
    assert_eq!(read("{}").unwrap(), ThdConfig::default());
    assert_eq!(
        read(r#"{ "num_chunks": 2, "image_token_id": 91, "video_token_id": 92 }"#).unwrap(),
        config(2)
    );
    assert!(read(r#"{ "chunks": 2 }"#).is_err());
}

#[test]
fn a_loss_mask_needs_labels_of_its_shape_and_values_of_0_and_1() {
    let labelled = || packed(&[1; 4], [1, 4]).with_labels(ints(&[1; 4], [1, 4]));
    let masks = [
        TensorData::new(vec![true, false, true, true], [1, 4]),
        TensorData::new(vec![1.0_f32, 0.0, 1.0, 1.0], [1, 4]),
        ints(&[1, 0, 1, 1], [1, 4]),
    ];
    for mask in &masks {
        let batch = labelled().with_loss_mask(mask).unwrap();
        let step = solo(config(1))
            .shard(batch, vec![], &Default::default())
            .unwrap();
        assert_eq!(step.steps()[0].labels().unwrap(), [1, IGNORED_LABEL, 1, 1]);
    }
    let half = TensorData::new(vec![1.0_f32, 0.0, 0.5, 1.0], [1, 4]);
    assert_eq!(
        labelled().with_loss_mask(&half).unwrap_err(),
        BatchError::LossMask { token: 2, got: 0.5 }
    );
    assert_eq!(
        packed(&[1; 4], [1, 4])
            .with_loss_mask(&masks[0])
            .unwrap_err(),
        BatchError::NoLabels
    );
    assert!(labelled().with_loss_mask(&ints(&[1; 4], [4])).is_err());
}

/// Documents without a token, and a stream of padding, are no mistakes.
#[test]
fn a_chunk_of_padding_has_no_label_and_a_label_on_padding_is_refused() {
    let batch = |label: i64| {
        let batch = SequenceBatch::<B>::from_ids(ints(&[1; 8], [2, 4]));
        let (real, padded) = (ints(&[4, 0, 0, 0], [2, 2]), ints(&[4, 0, 4, 0], [2, 2]));
        let mut labels = vec![1; 4];
        labels.extend([label; 4]);
        batch
            .with_seq_lens(&real, Some(&padded))
            .unwrap()
            .with_labels(ints(&labels, [2, 4]))
    };
    let step = solo(config(2))
        .shard(batch(IGNORED_LABEL), vec![], &Default::default())
        .unwrap();
    let counts: Vec<_> = step.steps().iter().map(CpStep::num_local_labels).collect();
    assert_eq!(counts, [4, 0]);
    assert_eq!(step.num_labels().unwrap().global, 4);
    assert!(
        refused(2, batch(1), vec![])
            .contains("chunk 1: placement: expected a slot within a document")
    );
    let negative = ints(&[4, -1], [1, 2]);
    let error = SequenceBatch::<B>::from_ids(ints(&[1; 4], [1, 4])).with_seq_lens(&negative, None);
    assert!(matches!(
        error,
        Err(BatchError::Layout(LayoutError::Negative { .. }))
    ));
}
