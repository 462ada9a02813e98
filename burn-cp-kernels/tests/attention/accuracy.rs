//! The accuracy rule on a table of cases and on random ones.

use burn::{
    backend::{Flex, NdArray},
    tensor::DType,
};
use burn_cp_kernels::{Segment, Window};
use proptest::prelude::*;

use crate::support::{Case, Heads, SMALL, causal, document, full, packed, relative, window};

const EPS32: f64 = f32::EPSILON as f64;

fn check(case: &Case) {
    case.clone()
        .rounded(DType::F32)
        .check_accuracy::<Flex>(DType::F32, EPS32);
    case.clone()
        .rounded(DType::F32)
        .check_accuracy::<NdArray>(DType::F32, EPS32);
    case.check_accuracy::<NdArray<f64>>(DType::F64, f64::EPSILON);
}

#[test]
fn packed_documents_of_all_lengths() {
    check(&Case::packed(&[3, 0, 1, 2, 7, 64, 65, 1, 131], SMALL));
}

#[test]
fn one_long_document() {
    check(&Case::packed(&[500], SMALL));
}

#[test]
fn grouped_heads_and_dims() {
    for (num_heads, num_kv_heads) in [(1, 1), (4, 2), (4, 1), (8, 1), (6, 3)] {
        let heads = Heads {
            num_heads,
            num_kv_heads,
            head_dim: 24,
            v_head_dim: 40,
        };
        check(&Case::packed(&[5, 70, 1, 12], heads));
    }
    let odd = Heads {
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 1,
        v_head_dim: 3,
    };
    check(&Case::packed(&[5, 70, 2], odd));
}

#[test]
fn windows() {
    for left in [0, 1, 5, 63, 64, 65, 200, usize::MAX] {
        let lengths = [9, 150, 66];
        let segments = packed(&lengths, 0)
            .into_iter()
            .map(|segment| window(segment, left))
            .collect();
        check(&Case::new(segments, (1, 225), (1, 225), SMALL));
    }
}

#[test]
fn full_attention() {
    let segments = packed(&[4, 100, 1], 0).into_iter().map(full).collect();
    check(&Case::new(segments, (1, 105), (1, 105), SMALL));
    let cross = vec![full(causal(0..3, 0..90, 0)), full(causal(3..80, 90..92, 5))];
    check(&Case::new(cross, (1, 80), (1, 92), SMALL));
}

#[test]
fn more_or_fewer_keys_than_queries() {
    let segments = vec![
        causal(0..10, 0..200, 0),
        causal(10..90, 200..230, 17),
        causal(90..91, 230..360, 3),
        causal(91..95, 360..360, 0),
        window(causal(95..170, 360..430, 100), 20),
        window(causal(170..240, 430..600, 33), 40),
    ];
    check(&Case::new(segments, (1, 250), (1, 610), SMALL));
}

#[test]
fn shared_keys() {
    // A document's middle and end, over one buffer of keys, as ranks with gathered keys see it;
    // and other readers with other tile boundaries.
    let segments = vec![
        causal(20..40, 0..110, 0),
        causal(60..100, 0..170, 0),
        full(causal(0..7, 33..71, 5)),
        window(causal(40..45, 100..150, 100), 8),
    ];
    check(&Case::new(segments, (1, 100), (1, 180), SMALL));
}

#[test]
fn batches_of_queries_over_one_row_of_keys() {
    let row = |q_row, segment| Segment { q_row, ..segment };
    let segments = vec![
        row(1, causal(3..20, 10..40, 0)),
        row(0, causal(0..20, 40..60, 0)),
        row(2, causal(0..5, 0..10, 0)),
    ];
    check(&Case::new(segments, (3, 20), (1, 60), SMALL));
    let both = |row: usize, tokens| Segment {
        q_row: row,
        k_row: 1 - row,
        ..document(tokens)
    };
    let segments = vec![both(0, 0..9), both(1, 0..4), both(1, 4..9)];
    check(&Case::new(segments, (2, 9), (2, 9), SMALL));
}

#[test]
fn half_precision_is_accumulated_in_f32() {
    for (dtype, eps) in [(DType::F16, 2f64.powi(-10)), (DType::BF16, 2f64.powi(-7))] {
        let heads = Heads {
            num_heads: 4,
            num_kv_heads: 2,
            ..SMALL
        };
        let case = Case::packed(&[5, 100, 30], heads).rounded(dtype);
        case.check_accuracy::<Flex>(dtype, eps);
        // The sums do not run in the small dtype: textbook attention is off by far more here.
        let (actual, expected) = (case.actual::<Flex>(dtype), case.expected());
        assert!(relative(&actual.lse, &expected.lse) < 1e-6);
    }
}

#[test]
fn saturated_softmax_is_finite_and_right() {
    let mut case = Case::packed(&[40, 90], SMALL).rounded(DType::F32);
    case.options = case.options.with_scale(300.0);
    let (actual, expected) = (case.actual::<Flex>(DType::F32), case.expected());
    assert!(relative(&actual.out, &expected.out) < 1e-3);
    assert!(relative(&actual.lse, &expected.lse) < 1e-6);
    let grads = [&actual.dq, &actual.dk, &actual.dv];
    assert!(grads.into_iter().flatten().all(|x| x.is_finite()));
}

fn windows_of(reach: std::ops::Range<usize>) -> impl Strategy<Value = Window> {
    let reach = proptest::option::of(reach);
    (reach.clone(), reach).prop_map(|(left, right)| Window { left, right })
}

pub(crate) fn segments() -> impl Strategy<Value = (Vec<Segment>, usize, usize)> {
    let length = prop_oneof![Just(0usize), Just(1), Just(2), 3..40usize, 60..140usize];
    let segment = (
        (length.clone(), length, 0..150usize),
        (any::<bool>(), proptest::option::of(windows_of(0..80))),
        (0..3usize, any::<bool>()),
    );
    proptest::collection::vec(segment, 0..5).prop_map(|list| {
        let (mut q, mut k) = (0, 0);
        let mut segments = Vec::new();
        for ((num_q, num_k, k_position), (causal, window), (gap, share)) in list {
            let start = if share { k / 2 } else { k };
            segments.push(Segment {
                q_row: 0,
                q: q + gap..q + gap + num_q,
                k_row: 0,
                k: start..start + num_k,
                k_position,
                causal,
                window,
            });
            q += gap + num_q;
            k = k.max(start + num_k) + gap;
        }
        (segments, q + 1, k + 1)
    })
}

#[test]
fn windows_on_both_sides() {
    let both = |segment: Segment, left, right| Segment {
        window: Some(Window::new(left, right)),
        ..full(segment)
    };
    let segments = vec![
        both(causal(0..100, 0..100, 0), 10, 20),
        both(causal(100..190, 100..230, 9), 70, 0),
        both(causal(190..260, 230..270, 0), 0, 5),
        both(causal(260..261, 270..400, 0), 30, usize::MAX),
    ];
    check(&Case::new(segments, (1, 261), (1, 400), SMALL));
}

#[test]
fn softcap_sinks_and_dropout() {
    let heads = Heads {
        num_heads: 4,
        num_kv_heads: 2,
        ..SMALL
    };
    let mut segments = packed(&[3, 90, 1], 0);
    segments.push(causal(94..104, 94..97, 0));
    segments.push(window(causal(105..170, 97..170, 30), 20));
    let case = Case::new(segments, (1, 172), (1, 170), heads);
    check(&case.clone().with_softcap(0.9));
    // Which hardly changes a score: digits of small ratios count.
    check(&case.clone().with_softcap(1e6));
    check(&case.clone().with_sinks());
    check(&case.clone().with_dropout(0.4));
    check(&case.with_softcap(2.0).with_sinks().with_dropout(0.2));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn random_segments((segments, q, k) in segments(), group in 1..4usize, kv in 1..3usize) {
        let heads = Heads { num_heads: group * kv, num_kv_heads: kv, head_dim: 8, v_head_dim: 12 };
        check(&Case::new(segments, (1, q), (1, k), heads));
    }
}
