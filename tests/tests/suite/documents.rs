//! Documents and padding from what data loaders give.

use burn::tensor::TensorData;
use burn_cp::{
    batch::{BatchError, SequenceBatch},
    layout::{Documents, LayoutError, LayoutPolicy, SelfOnly},
    sharder::{ContextParallel, StepError},
};
use burn_cp_tests::{TestBackend, device, ints, on_groups, sharder};

use crate::{bad_input::refused, steps::config};

type B = TestBackend;

fn ids() -> SequenceBatch<B> {
    SequenceBatch::from_ids(TensorData::zeros::<i64, _>([1, 5]))
}

/// Of the batch as one rank sees it: `padding_mask`, positions.
fn padding_and_positions(batch: SequenceBatch<B>) -> (Vec<i64>, Vec<i64>) {
    let cp = ContextParallel::solo(config(&LayoutPolicy::Identity));
    let step = cp.shard(batch, &device()).unwrap();
    (ints(&step.padding_mask().int()), ints(&step.positions()))
}

/// Tokens of one row see themselves and earlier ones of their document.
fn square(ids: [u8; 5], padding_sees_itself: bool) -> Vec<bool> {
    let sees = |q: usize, k: usize| {
        (ids[q] == ids[k] && ids[q] > 0 && q >= k) || (padding_sees_itself && q == k)
    };
    (0..25).map(|i| sees(i / 5, i % 5)).collect()
}

#[test]
fn every_mask_gives_the_padding_mask_that_it_says() {
    let [real, padded] = [vec![0, 0, 0, 0, 1], vec![0, 1, 2, 3, 4]];
    let bools = [true, true, true, true, false];
    let dense = square([1, 1, 1, 1, 0], false);
    let additive = |masked: f32| {
        let values = dense.iter().map(|sees| if *sees { 0.0 } else { masked });
        TensorData::new(values.collect::<Vec<f32>>(), [1, 1, 5, 5])
    };
    for (what, mask) in [
        ("2-D bool", TensorData::new(bools.to_vec(), [1, 5])),
        ("2-D int", TensorData::new(vec![1_i64, 1, 1, 1, 0], [1, 5])),
        ("2-D u8", TensorData::new(vec![1_u8, 1, 1, 1, 0], [1, 5])),
        ("4-D bool", TensorData::new(dense.clone(), [1, 1, 5, 5])),
        ("4-D additive, infinite", additive(f32::NEG_INFINITY)),
        ("4-D additive, lowest", additive(f32::MIN)),
        ("4-D additive, large", additive(-10_000.0)),
    ] {
        let batch = ids().with_attention_mask(&mask).unwrap();
        assert_eq!(
            padding_and_positions(batch),
            (real.clone(), padded.clone()),
            "{what}"
        );
    }
    // Documents by index: a new one restarts positions, and padding is still padding.
    let indexed = TensorData::new(vec![1_i64, 2, 2, 3, 0], [1, 5]);
    let batch = ids().with_attention_mask(&indexed).unwrap();
    assert_eq!(
        padding_and_positions(batch),
        (real.clone(), vec![0, 0, 1, 0, 1])
    );
    let batch = ids().with_document_ids(&indexed).unwrap();
    assert_eq!(
        padding_and_positions(batch),
        (real.clone(), vec![0, 0, 1, 0, 1])
    );
    // Padding that was given itself as key, as is done to keep its softmax finite.
    let kept = TensorData::new(square([1, 1, 1, 1, 0], true), [1, 1, 5, 5]);
    let batch = ids().with_dense_mask(&kept, SelfOnly::Padding).unwrap();
    assert_eq!(padding_and_positions(batch), (real, padded));
    let batch = ids().with_dense_mask(&kept, SelfOnly::Document).unwrap();
    assert_eq!(padding_and_positions(batch).0, [0; 5]);
}

#[test]
fn documents_of_a_dense_mask_stay_apart() {
    let mask = TensorData::new(square([1, 1, 2, 2, 0], false), [1, 1, 5, 5]);
    let batch = ids().with_attention_mask(&mask).unwrap();
    let cp = ContextParallel::solo(config(&LayoutPolicy::Identity));
    let step = cp.shard(batch, &device()).unwrap();
    let want = Documents::from_lengths(&[vec![2, 2]], 5).unwrap();
    assert_eq!(*step.documents(), want);
}

#[test]
fn a_padding_mask_wins_over_documents() {
    let marked = TensorData::new(vec![false, true, false, false, true], [1, 5]);
    let alone = ids().with_padding_mask(marked.clone());
    assert_eq!(padding_and_positions(alone).0, [0, 1, 0, 0, 1]);
    let with_mask = ids()
        .with_attention_mask(&TensorData::new(vec![1_i64, 1, 1, 1, 0], [1, 5]))
        .unwrap()
        .with_padding_mask(TensorData::new(vec![0_i64, 1, 0, 0, 1], [1, 5]));
    assert_eq!(padding_and_positions(with_mask).0, [0, 1, 0, 0, 1]);
    let contradiction = refused(|| {
        let none = TensorData::new(vec![false; 12], [2, 6]);
        let table = Documents::from_lengths(&[vec![6], vec![4]], 6).unwrap();
        crate::bad_input::ids()
            .with_documents(table)
            .with_padding_mask(none)
    });
    let homeless = LayoutError::Homeless { row: 1, token: 4 };
    assert_eq!(contradiction, BatchError::Layout(homeless));
}

#[test]
fn added_tokens_are_padding_whether_or_not_a_mask_was_given() {
    for with_mask in [false, true] {
        for layout in [
            LayoutPolicy::Contiguous { multiple: 1 },
            LayoutPolicy::HeadTail,
        ] {
            let masks = on_groups(&[("cp", 2)], |groups| {
                let mut batch = ids();
                if with_mask {
                    let ones = TensorData::new(vec![true; 5], [1, 5]);
                    batch = batch.with_attention_mask(&ones).unwrap();
                }
                let step = sharder(&groups, config(&layout))
                    .shard(batch, &device())
                    .unwrap();
                let indices = step.layout().indices(step.group().rank());
                (indices, ints(&step.padding_mask().int()))
            });
            for (indices, mask) in masks {
                let want: Vec<i64> = indices.iter().map(|token| i64::from(*token >= 5)).collect();
                assert_eq!(mask, want, "{layout:?}");
            }
        }
    }
}

#[test]
fn masks_that_cannot_be_said_in_documents_are_refused() {
    let message = |result: Result<SequenceBatch<B>, BatchError>| result.unwrap_err().to_string();
    let dense = |values: Vec<i64>| TensorData::new(values, [1, 1, 5, 5]);
    let got = message(ids().with_attention_mask(&dense(vec![1; 25])));
    assert!(got.contains("expected bool or float elements"), "{got}");
    let full = TensorData::new(vec![true; 25], [1, 1, 5, 5]);
    let got = message(ids().with_attention_mask(&full));
    assert!(got.contains("tokens see later ones"), "{got}");
    let bias = TensorData::new(vec![-0.5_f32; 25], [1, 1, 5, 5]);
    let got = message(ids().with_attention_mask(&bias));
    assert!(got.contains("-0.5"), "{got}");
    let floats = TensorData::new(vec![1.0_f32; 5], [1, 5]);
    let got = message(ids().with_attention_mask(&floats));
    assert!(got.contains("expected integer elements"), "{got}");
    let flat = TensorData::new(vec![true; 5], [5]);
    let got = message(ids().with_attention_mask(&flat));
    assert!(got.contains("expected shape [batch, seq]"), "{got}");
    let negative = TensorData::new(vec![1_i64, -1, 1, 1, 1], [1, 5]);
    let got = message(ids().with_document_ids(&negative));
    assert!(got.contains("got -1"), "{got}");
    let three = TensorData::new(vec![true; 5], [1, 1, 5]);
    let got = message(ids().with_dense_mask(&three, SelfOnly::Padding));
    assert!(got.contains("[batch, 1, seq, seq]"), "{got}");
    let other = refused(|| crate::bad_input::ids().with_documents(Documents::full(2, 5).unwrap()));
    assert!(matches!(other, BatchError::Documents { .. }), "{other}");
    let mask = refused(|| {
        crate::bad_input::ids().with_padding_mask(TensorData::new(vec![true; 10], [2, 5]))
    });
    assert!(matches!(mask, BatchError::Shape { .. }), "{mask}");
}

#[test]
fn packed_lengths_become_documents_and_one_stream() {
    let lengths = |values: Vec<i64>| TensorData::new(values, [2, 2]);
    let batch = SequenceBatch::<B>::from_ids(TensorData::zeros::<i64, _>([2, 6]))
        .with_seq_lens(
            &lengths(vec![3, 2, 6, -1000]),
            Some(&lengths(vec![4, 2, 6, -1000])),
        )
        .unwrap();
    let cp = ContextParallel::solo(config(&LayoutPolicy::Identity));
    let step = cp.shard(batch, &device()).unwrap();
    let metadata = step.documents().thd_metadata().unwrap();
    assert_eq!(metadata.cu_seqlens, [0, 3, 5, 11]);
    assert_eq!(metadata.cu_seqlens_padded, Some(vec![0, 4, 6, 12]));
    assert_eq!((metadata.max_seqlen, metadata.padding), (6, vec![3]));
    let error = SequenceBatch::<B>::from_ids(TensorData::zeros::<i64, _>([2, 6]))
        .with_seq_lens(&lengths(vec![3, 2, 7, -1000]), None)
        .unwrap_err();
    assert!(error.to_string().contains("got an end at 7"), "{error}");
}

/// A length table with another number of rows than the batch is found when the batch is sharded.
#[test]
fn a_table_of_other_rows_is_refused_when_it_is_sharded() {
    let batch = ids()
        .with_seq_lens(&TensorData::new(vec![1_i64, 2], [2, 1]), None)
        .unwrap();
    let cp = ContextParallel::solo(config(&LayoutPolicy::Identity));
    let error = cp.shard(batch, &device()).unwrap_err();
    let (expected, got) = ([1, 5], [2, 5]);
    match error {
        StepError::Batch(error) => assert_eq!(error, BatchError::Documents { expected, got }),
        other => panic!("{other}"),
    }
}
