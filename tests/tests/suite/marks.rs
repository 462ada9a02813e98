//! What a batch says for masks to ask: how it is given, what of it is refused, and by whom.

#![allow(
    clippy::single_range_in_vec_init,
    reason = "lists of one token range are what these tests are about"
)]

use burn::tensor::{Tensor, TensorData};
use burn_cp::{
    attention::AttentionOptions,
    batch::{BatchError, Media, SequenceBatch},
    layout::{Documents, LayoutError, MarkError, Placement},
    plan::{MaskKind, PlanError},
    sharder::{
        ContextParallel, ContextParallelConfig, CpStep, ModelCapabilities, StepError, Violation,
    },
};
use burn_cp_tests::{DEADLINE, device, head_dim, on_groups, sharder, span_tokens, with_deadline};

use crate::{
    bad_input::{B, ids, refused},
    verbs::panic_of,
};

/// Of two rows of 12 tokens: an image of one token, one of four, a video of two frames of two tokens.
fn media() -> [Media<B>; 2] {
    let device = device();
    let media = |name: &str, grids: Vec<[usize; 3]>, tokens: &[usize]| Media {
        name: name.into(),
        pixels: Tensor::zeros(
            [
                grids
                    .iter()
                    .map(|grid| grid.iter().product::<usize>())
                    .sum(),
                3,
            ],
            &device,
        ),
        grids,
        spatial_merge_size: 2,
        placeholders: TensorData::new(
            (0..24).map(|i| tokens.contains(&i)).collect::<Vec<_>>(),
            [2, 12],
        ),
    };
    [
        media("image", vec![[1, 2, 2], [1, 4, 4]], &[3, 4, 5, 6, 7]),
        media("video", vec![[2, 4, 2]], &[13, 14, 17, 18]),
    ]
}

fn row_of_12() -> SequenceBatch<B> {
    SequenceBatch::from_ids(TensorData::zeros::<i64, _>([2, 12]))
}

fn solo(batch: SequenceBatch<B>) -> CpStep<B> {
    ContextParallel::solo(ContextParallelConfig::default())
        .shard(batch, &device())
        .unwrap()
}

#[test]
fn every_frame_of_the_media_is_a_span_beside_those_that_were_given() {
    let with_media = || {
        let [images, video] = media();
        row_of_12().with_media(video).with_media(images)
    };
    let documents = Documents::from_lengths(&[vec![8, 4], vec![12]], 12).unwrap();
    let batch = with_media()
        .with_documents(documents.clone())
        .with_media_spans()
        .with_spans(vec![vec![9..11], vec![7..9]]);
    let step = solo(batch);
    // Images that touch stay two.
    assert_eq!(step.documents().spans(0, 0), [3..4, 4..8]);
    assert_eq!(step.documents().spans(0, 1), [1..3]);
    assert_eq!(step.documents().spans(1, 0), [1..3, 5..7, 7..9]);
    // Documents aligned and put in one row keep them.
    let aligned = documents.aligned(8).unwrap().flattened();
    let step = solo(
        with_media()
            .with_aligned_documents(aligned)
            .with_media_spans(),
    );
    let expected = [vec![3..4, 4..8], vec![], vec![1..3, 5..7]];
    for (document, spans) in expected.into_iter().enumerate() {
        assert_eq!(step.documents().spans(0, document), spans);
    }
    // No media, no spans.
    let step = solo(row_of_12().with_media_spans());
    assert!(step.documents().has_spans() && step.documents().spans(0, 0).is_empty());
    step.plan(MaskKind::CAUSAL_WITH_SPANS).unwrap();
}

#[test]
fn media_that_are_no_spans_are_refused_by_frame() {
    let scattered = |tokens: &'static [usize]| {
        refused(move || {
            let [mut images, _] = media();
            images.placeholders = TensorData::new(
                (0..24).map(|i| tokens.contains(&i)).collect::<Vec<_>>(),
                [2, 12],
            );
            row_of_12().with_media(images).with_media_spans()
        })
    };
    let frame = |row, token| BatchError::FrameTokens {
        what: "image".into(),
        frame: 1,
        row,
        token,
    };
    assert_eq!(scattered(&[3, 5, 6, 8, 9]), frame(0, 6));
    assert_eq!(scattered(&[3, 10, 11, 12, 13]), frame(0, 11));
    let crossing = refused(|| {
        let [images, _] = media();
        let documents = Documents::from_lengths(&[vec![6, 6], vec![12]], 12).unwrap();
        row_of_12()
            .with_documents(documents)
            .with_media(images)
            .with_media_spans()
    });
    assert!(
        matches!(
            crossing,
            BatchError::Layout(LayoutError::Mark(MarkError::SpanCrosses { span: 1, .. }))
        ),
        "{crossing}"
    );
}

fn two_rows() -> Documents {
    Documents::from_lengths(&[vec![2, 4], vec![5]], 6).expect("documents that fit")
}

fn is_mark(error: BatchError, expected: fn(&MarkError) -> bool) {
    match &error {
        BatchError::Layout(LayoutError::Mark(mark)) if expected(mark) => {}
        other => panic!("{other}"),
    }
}

#[test]
fn spans_that_do_not_fit_are_refused_by_all_ranks() {
    let documents = two_rows;
    let spans = |spans: Vec<Vec<std::ops::Range<usize>>>| {
        refused(|| ids().with_documents(documents()).with_spans(spans.clone()))
    };
    is_mark(spans(vec![vec![1..3], vec![]]), |mark| {
        matches!(
            mark,
            MarkError::SpanCrosses {
                documents: [0, 1],
                ..
            }
        )
    });
    is_mark(spans(vec![vec![2..4, 3..5], vec![]]), |mark| {
        matches!(mark, MarkError::SpanOrder { span: 1, .. })
    });
    is_mark(spans(vec![vec![], vec![4..7]]), |mark| {
        matches!(mark, MarkError::SpanOrder { row: 1, .. })
    });
    is_mark(spans(vec![vec![], vec![5..6]]), |mark| {
        matches!(mark, MarkError::SpanEmpty { row: 1, .. })
    });
    assert!(matches!(
        spans(vec![vec![]]),
        BatchError::Layout(LayoutError::NumRows { what: "spans", .. })
    ));
    // Tokens 1 and 2 of the first row are put apart, with token 3 between them.
    let apart = refused(|| {
        let row = [0, 1, 3, 2, 4, 5].map(Some).to_vec();
        let placement = Placement::from_rows(&[row.clone(), row], 6).unwrap();
        ids()
            .with_documents(documents())
            .with_placement(placement)
            .with_spans(vec![vec![1..3], vec![]])
    });
    assert_eq!(
        apart,
        BatchError::SpanPlaced {
            row: 0,
            tokens: 1..3
        }
    );
}

#[test]
fn prefixes_and_masks_that_do_not_fit_are_refused_by_all_ranks() {
    let documents = two_rows;
    let prefixes = |prefixes: Vec<Vec<usize>>| {
        refused(|| {
            ids()
                .with_documents(documents())
                .with_prefixes(prefixes.clone())
        })
    };
    is_mark(prefixes(vec![vec![2, 4], vec![6]]), |mark| {
        matches!(
            mark,
            MarkError::PrefixLen {
                expected: 5,
                got: 6,
                ..
            }
        )
    });
    assert!(matches!(
        prefixes(vec![vec![2], vec![5]]),
        BatchError::Layout(LayoutError::RowLen {
            what: "prefixes",
            ..
        })
    ));
    let twice = refused(|| {
        let documents = documents().with_masks(vec![vec![MaskKind::Full; 2], vec![MaskKind::Full]]);
        ids()
            .with_documents(documents.unwrap())
            .with_masks(vec![vec![MaskKind::CAUSAL; 2], vec![MaskKind::Full]])
    });
    assert_eq!(twice, BatchError::MarkedTwice { what: "masks" });
}

/// No rank waits: what cannot be planned is known before anything travels.
#[test]
fn masks_that_cannot_be_planned_are_errors_that_name_the_pair_on_every_rank() {
    let spans = AttentionOptions::causal_with_spans();
    let pair = |first, second| PlanError::Pair { first, second };
    let refusals = [
        (
            spans.with_window(2),
            pair("bidirectional spans", "a window"),
        ),
        (
            AttentionOptions::prefix().with_window(2),
            pair("a prefix", "a window"),
        ),
        (
            AttentionOptions {
                mask: MaskKind::CausalWithSpans {
                    window: None,
                    prefix: true,
                },
                ..spans
            },
            pair("bidirectional spans", "a prefix"),
        ),
        (
            AttentionOptions::prefix(),
            PlanError::Unmarked {
                mask: "prefix",
                what: "prefixes",
            },
        ),
        (
            AttentionOptions::per_document(),
            PlanError::Unmarked {
                mask: "per-document",
                what: "masks",
            },
        ),
    ];
    on_groups(&[("cp", 2)], |groups| {
        let cp = sharder(&groups, ContextParallelConfig::default());
        let batch = ids().with_spans(vec![vec![1..5], vec![]]);
        let step = cp.shard(batch, &device()).unwrap();
        for (options, expected) in &refusals {
            match step.plan(options.mask) {
                Err(StepError::Plan(error)) => assert_eq!(error, *expected),
                other => panic!("{other:?}"),
            }
            let x = Tensor::zeros([2, 1, step.local_len(), head_dim(4)], &device());
            let message = panic_of(|| drop(step.attention(x.clone(), x.clone(), x, options)));
            assert!(message.contains(&expected.to_string()), "{message}");
        }
        let x = Tensor::zeros([2, 1, step.local_len(), head_dim(4)], &device());
        drop(step.attention(x.clone(), x.clone(), x, &spans));
    });
}

#[test]
fn ranks_whose_batches_differ_in_spans_alone_do_not_agree() {
    let result = with_deadline(&[("cp", 3)], DEADLINE, |groups| {
        let rank = groups.world().unwrap().rank();
        let cp = sharder(&groups, ContextParallelConfig::default());
        let spans = std::iter::once(1..3 + rank / 2).collect();
        let batch = ids().with_spans(vec![spans, vec![]]);
        drop(cp.shard(batch, &device()));
    });
    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("disagree on the plan of the step") && error.contains("rank 2"),
        "{error}"
    );
}

#[test]
fn a_model_that_asks_for_none_is_not_given_spans_prefixes_or_masks() {
    let violations = |batch: SequenceBatch<B>| {
        let error = ModelCapabilities::text().check_step(&solo(batch)).err();
        error.map_or(vec![], |error| error.violations)
    };
    let refused = |what| vec![Violation::DocumentMasks { what }];
    let spans = || row_of_12().with_spans(vec![vec![1..3], vec![]]);
    assert_eq!(violations(spans()), refused("bidirectional spans"));
    let prefixes = row_of_12().with_prefixes(vec![vec![0], vec![4]]);
    assert_eq!(violations(prefixes), refused("prefixes"));
    let masks = row_of_12().with_masks(vec![vec![MaskKind::Full]; 2]);
    assert_eq!(violations(masks), refused("masks of documents"));
    let nothing = row_of_12()
        .with_spans(vec![vec![], vec![]])
        .with_prefixes(vec![vec![0], vec![0]]);
    assert!(violations(nothing).is_empty());
    let asks = ModelCapabilities::text().with_document_masks();
    asks.check_step(&solo(spans())).unwrap();
}

#[test]
fn a_batch_that_one_rank_has_read_brings_its_spans_prefixes_and_masks() {
    on_groups(&[("cp", 2)], |groups| {
        let cp = sharder(&groups, ContextParallelConfig::default());
        let batch = (cp.group().rank() == 1).then(|| {
            let [images, _] = media();
            row_of_12()
                .with_media(images)
                .with_media_spans()
                .with_spans(vec![vec![0..2], vec![]])
                .with_prefixes(vec![vec![5], vec![0]])
                .with_masks(vec![vec![MaskKind::Full], vec![MaskKind::CAUSAL]])
        });
        let batch = cp.broadcast_batch(batch, 1, &device()).unwrap();
        let step = cp.shard(batch, &device()).unwrap();
        let documents = step.documents();
        assert_eq!(span_tokens(documents), [vec![0..2, 3..4, 4..8], vec![]]);
        assert_eq!((documents.prefix(0, 0), documents.prefix(1, 0)), (5, 0));
        assert_eq!(documents.mask(0, 0), Some(MaskKind::Full));
    });
}
