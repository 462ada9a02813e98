//! Spans, prefixes and masks of documents: what a plan makes of them, by hand.

use std::sync::Arc;

use crate::layout::{Document, Documents, MarkError, TokenLayout};
use crate::plan::*;

/// One row with these documents on `world_size` ranks, contiguous.
fn plan_of(documents: Documents, world_size: usize, mask: MaskKind) -> AttentionPlan {
    let layout = TokenLayout::contiguous(documents.seq_len(), world_size).unwrap();
    AttentionPlan::new(documents.into(), layout.into(), mask).unwrap()
}

fn documents(lengths: &[usize]) -> Documents {
    Documents::from_lengths(&[lengths.to_vec()], lengths.iter().sum()).unwrap()
}

/// Queries, keys in the buffer, whether causal.
fn found(segments: &[Segment]) -> Vec<(std::ops::Range<usize>, std::ops::Range<usize>, bool)> {
    let found = segments.iter();
    found
        .map(|s| (s.q.clone(), s.k.clone(), s.causal))
        .collect()
}

#[test]
fn a_span_is_a_segment_of_its_own_that_sees_to_its_end() {
    let documents = documents(&[9]).with_spans(&[vec![2..4, 4..7]]).unwrap();
    let plan = plan_of(documents, 1, MaskKind::CAUSAL_WITH_SPANS);
    let rank = plan.rank(0);
    let expected = [
        (0..2, 0..2, true),
        (2..4, 0..4, false),
        (4..7, 0..7, false),
        (7..9, 0..9, true),
    ];
    assert_eq!(found(&rank.segments), expected);
    assert_eq!(rank.area, 3 + 2 * 4 + 3 * 7 + 8 + 9);
    assert_eq!(rank.kv_source(), KvSource::Local);
}

#[test]
fn a_span_over_a_border_asks_for_its_rest_on_the_right_and_for_nothing_else() {
    // Tokens 3 to 5 see each other; ranks hold 4 tokens each, of a document of 12.
    let documents = documents(&[12]).with_spans(&[vec![3..6]]).unwrap();
    let plan = plan_of(documents.clone(), 3, MaskKind::CAUSAL_WITH_SPANS);
    assert_eq!(
        plan.transfers(1, 0),
        [TokenSpan {
            row: 0,
            local: 0..2
        }]
    );
    assert_eq!(plan.num_transferred(2, 0), 0);
    assert_eq!(plan.num_transferred(2, 1), 0);
    assert_eq!(plan.rank(0).kv_tokens_received, 2);
    assert_eq!(plan.rank(0).kv_source(), KvSource::Buffer);
    let expected = [(0..3, 0..3, true), (3..4, 0..6, false)];
    assert_eq!(found(&plan.rank(0).segments), expected);
    let expected = [(0..2, 0..6, false), (2..4, 0..8, true)];
    assert_eq!(found(&plan.rank(1).segments), expected);
    // The same documents under a mask that does not ask for spans move nothing to the left.
    let causal = plan_of(documents, 3, MaskKind::CAUSAL);
    assert_eq!(causal.num_transferred(1, 0), 0);
}

#[test]
fn a_prefix_sees_itself_and_is_otherwise_causal() {
    let documents = documents(&[6, 6]).with_prefixes(vec![vec![4, 0]]).unwrap();
    let plan = plan_of(documents, 4, MaskKind::PREFIX);
    let expected = [(0..3, 0..4, false)];
    assert_eq!(found(&plan.rank(0).segments), expected);
    let expected = [(0..1, 0..4, false), (1..3, 0..6, true)];
    assert_eq!(found(&plan.rank(1).segments), expected);
    assert_eq!(plan.num_transferred(1, 0), 1);
    assert_eq!(plan.num_transferred(3, 2), 0);
    assert_eq!(plan.total_area(), (4 * 4 + 5 + 6) + 21);
}

#[test]
fn documents_of_one_call_have_masks_of_their_own() {
    let documents = documents(&[3, 3, 3, 3])
        .with_spans(&[vec![0..2, 4..6, 10..11]])
        .unwrap()
        .with_prefixes(vec![vec![3, 0, 2, 0]])
        .unwrap()
        .with_masks(vec![vec![
            MaskKind::Full,
            MaskKind::CAUSAL_WITH_SPANS,
            MaskKind::PREFIX,
            MaskKind::Causal { window: Some(0) },
        ]])
        .unwrap();
    let plan = plan_of(documents, 1, MaskKind::PER_DOCUMENT);
    let expected = [
        (0..3, 0..3, false),
        (3..4, 3..4, true),
        (4..6, 3..6, false),
        (6..8, 6..8, false),
        (8..9, 6..9, true),
        (9..12, 9..12, true),
    ];
    assert_eq!(found(&plan.rank(0).segments), expected);
    assert_eq!(plan.rank(0).segments[5].window, Some(0));
    assert_eq!(plan.total_area(), 9 + (1 + 6) + (4 + 3) + 3);
}

#[test]
fn what_is_not_defined_together_is_refused_by_name() {
    let documents = documents(&[8])
        .with_spans(&[vec![1..3]])
        .unwrap()
        .with_prefixes(vec![vec![2]])
        .unwrap();
    let error = |documents: &Documents, mask| {
        let layout = TokenLayout::contiguous(8, 2).unwrap();
        AttentionPlan::new(documents.clone().into(), layout.into(), mask).unwrap_err()
    };
    let pair = |first, second| PlanError::Pair { first, second };
    let windowed = MaskKind::CAUSAL_WITH_SPANS.with_window(3);
    let with_prefix = MaskKind::CausalWithSpans {
        window: None,
        prefix: true,
    };
    let (spans, prefix, window) = ("bidirectional spans", "a prefix", "a window");
    assert_eq!(error(&documents, windowed), pair(spans, window));
    assert_eq!(error(&documents, with_prefix), pair(spans, prefix));
    let prefixed = MaskKind::PREFIX.with_window(3);
    assert_eq!(error(&documents, prefixed), pair(prefix, window));
    let own = documents.clone().with_masks(vec![vec![windowed]]).unwrap();
    assert_eq!(error(&own, MaskKind::PER_DOCUMENT), pair(spans, window));
    let windows = MaskKind::PER_DOCUMENT.with_window(3);
    assert_eq!(error(&own, windows), pair("masks of documents", window));
    let message = error(&documents, windowed).to_string();
    assert!(message.contains(spans) && message.contains(window));
}

#[test]
fn a_mask_that_asks_for_what_was_not_given_is_refused_and_an_empty_list_is_given() {
    let plain = Documents::from_lengths(&[vec![8]], 8).unwrap();
    let layout = Arc::new(TokenLayout::contiguous(8, 2).unwrap());
    for (mask, what) in [
        (MaskKind::CAUSAL_WITH_SPANS, "spans"),
        (MaskKind::PREFIX, "prefixes"),
        (MaskKind::PER_DOCUMENT, "masks"),
    ] {
        let error = AttentionPlan::new(plain.clone().into(), layout.clone(), mask).unwrap_err();
        assert!(matches!(error, PlanError::Unmarked { what: got, .. } if got == what));
    }
    let empty = plain.clone().with_spans(&[vec![]]).unwrap();
    let plan = plan_of(empty, 2, MaskKind::CAUSAL_WITH_SPANS);
    assert_eq!(plan.ranks(), plan_of(plain, 2, MaskKind::CAUSAL).ranks());
}

#[test]
fn spans_prefixes_and_masks_enter_the_hash() {
    let plain = || documents(&[6, 6]);
    let spans = |spans| plain().with_spans(&[spans]).unwrap();
    let prefixes = |prefixes| plain().with_prefixes(vec![prefixes]).unwrap();
    let masks = |masks| plain().with_masks(vec![masks]).unwrap();
    let plans = [
        plan_of(plain(), 2, MaskKind::CAUSAL),
        // Also where the mask does not ask for them.
        plan_of(spans(vec![]), 2, MaskKind::CAUSAL),
        plan_of(spans(vec![1..3]), 2, MaskKind::CAUSAL),
        plan_of(spans(vec![1..3]), 2, MaskKind::CAUSAL_WITH_SPANS),
        plan_of(spans(vec![1..2, 2..3]), 2, MaskKind::CAUSAL_WITH_SPANS),
        plan_of(spans(vec![7..9]), 2, MaskKind::CAUSAL_WITH_SPANS),
        plan_of(prefixes(vec![1, 3]), 2, MaskKind::CAUSAL),
        plan_of(prefixes(vec![1, 3]), 2, MaskKind::PREFIX),
        plan_of(prefixes(vec![3, 1]), 2, MaskKind::PREFIX),
        plan_of(masks(vec![MaskKind::Full; 2]), 2, MaskKind::PER_DOCUMENT),
        plan_of(masks(vec![MaskKind::CAUSAL; 2]), 2, MaskKind::PER_DOCUMENT),
    ];
    let mut hashes: Vec<_> = plans.iter().map(AttentionPlan::hash).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), plans.len());
}

#[test]
fn spans_count_real_tokens_and_stay_with_them() {
    // Padding at tokens 3 and 6 of a document of tokens 1 to 8.
    let document = Document {
        runs: vec![1..3, 4..6, 7..9],
        extent: 1..9,
    };
    let documents = Documents::from_runs(vec![vec![document]], 10)
        .unwrap()
        .with_spans(&[vec![0..2, 2..7, 8..10]])
        .unwrap()
        .with_prefixes(vec![vec![4]])
        .unwrap();
    assert_eq!(documents.spans(0, 0), [0..1, 1..4, 5..6]);
    let moved = documents.aligned(4).unwrap().flattened().documents;
    assert_eq!(moved.spans(0, 0), [0..1, 1..4, 5..6]);
    assert_eq!(moved.padded_to(30).unwrap().prefix(0, 0), 4);
    // Token 4 becomes padding: positions behind it count one less.
    let mut padding = documents.padding_mask(0);
    padding[4] = true;
    let fewer = documents.without_padding(&[padding.clone()]).unwrap();
    assert_eq!(fewer.spans(0, 0), [0..1, 1..3, 4..5]);
    assert_eq!(fewer.prefix(0, 0), 3);
    padding[8] = true;
    let error = documents.without_padding(&[padding]).unwrap_err();
    assert!(matches!(
        error,
        crate::layout::LayoutError::Mark(MarkError::SpanEmpty { span: 2, .. })
    ));
    let text = serde_json::to_string(&documents).unwrap();
    assert_eq!(serde_json::from_str::<Documents>(&text).unwrap(), documents);
    assert!(
        serde_json::from_str::<Documents>(&text.replace(r#""start":5"#, r#""start":3"#)).is_err()
    );
}

#[test]
fn rows_one_behind_the_other_keep_their_marks() {
    let documents = Documents::from_lengths(&[vec![4, 2], vec![3]], 6)
        .unwrap()
        .with_spans(&[vec![4..6], vec![0..2]])
        .unwrap()
        .with_prefixes(vec![vec![1, 2], vec![3]])
        .unwrap()
        .with_masks(vec![vec![MaskKind::Full; 2], vec![MaskKind::CAUSAL]])
        .unwrap();
    let flat = documents.flattened();
    assert_eq!(flat.spans(0, 1), [0..2]);
    assert_eq!(flat.spans(0, 2), [0..2]);
    assert_eq!((flat.prefix(0, 1), flat.prefix(0, 2)), (2, 3));
    assert_eq!(flat.mask(0, 2), Some(MaskKind::CAUSAL));
}

#[test]
fn marks_that_do_not_fit_their_documents_are_refused() {
    let two = || Documents::from_lengths(&[vec![4, 3]], 8).unwrap();
    let of_spans = |spans| match two().with_spans(&[spans]).unwrap_err() {
        crate::layout::LayoutError::Mark(error) => error,
        other => panic!("{other}"),
    };
    let order = |span, expected, got| MarkError::SpanOrder {
        row: 0,
        span,
        expected,
        got,
    };
    assert_eq!(of_spans(vec![0..3, 2..4]), order(1, 3..8, 2..4));
    assert_eq!(of_spans(vec![5..6, 0..2]), order(1, 6..8, 0..2));
    assert_eq!(of_spans(vec![6..9]), order(0, 0..8, 6..9));
    let reversed = std::ops::Range { start: 3, end: 1 };
    assert_eq!(of_spans(vec![reversed.clone()]), order(0, 0..8, reversed));
    assert!(matches!(
        of_spans(vec![0..2, 3..5]),
        MarkError::SpanCrosses {
            span: 1,
            documents: [0, 1],
            ..
        }
    ));
    for nothing in [2..2, 7..8] {
        assert!(matches!(
            of_spans(vec![nothing]),
            MarkError::SpanEmpty { span: 0, .. }
        ));
    }
    // Padding behind the last document is no token of another one.
    assert_eq!(two().with_spans(&[vec![5..8]]).unwrap().spans(0, 1), [1..3]);
    let error = two().with_prefixes(vec![vec![4, 4]]).unwrap_err();
    let expected = MarkError::PrefixLen {
        row: 0,
        document: 1,
        expected: 3,
        got: 4,
    };
    assert_eq!(error, expected.into());
    assert!(two().with_prefixes(vec![vec![1]]).is_err());
    assert!(two().with_spans(&[vec![], vec![]]).is_err());
    let nested = vec![vec![MaskKind::Full, MaskKind::PER_DOCUMENT]];
    assert!(matches!(
        two().with_masks(nested).unwrap_err(),
        crate::layout::LayoutError::Mark(MarkError::Nested { document: 1, .. })
    ));
}
