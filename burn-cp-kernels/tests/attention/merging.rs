//! Results over disjoint sets of keys, merged, are the result over all of them.

use burn::{
    backend::{Flex, NdArray},
    tensor::{DType, FloatDType, Tensor},
};
use burn_cp_kernels::{
    AttentionOptions, AttentionOutput, Segment, Segments, attention_forward, merge_attention,
};

use crate::support::{Case, Heads, Tested, causal, full, relative, values};

const HEADS: Heads = Heads {
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 32,
    v_head_dim: 24,
};

fn seen(q: std::ops::Range<usize>, k: std::ops::Range<usize>) -> Segment {
    full(causal(q, k, 0))
}

/// Queries 0..4 see no key, 4..9 only the first of three sets, 9..20 all of them. With heads before tokens in memory and the other
/// way round.
pub(crate) fn check<B: Tested>() {
    let sets = [
        vec![seen(4..20, 0..7)],
        vec![seen(9..20, 7..20)],
        vec![seen(9..20, 20..33)],
    ];
    let whole = vec![seen(4..9, 0..7), seen(9..20, 0..33)];
    let case = Case::new(whole, (1, 20), (1, 33), HEADS).rounded(DType::F32);
    let expected = case.expected();
    let at_once = case.actual::<B>(DType::F32);
    let [q, k, v] = case.qkv::<B>(DType::F32);
    let by_token = (q.clone().swap_dims(1, 2) * 1.0).swap_dims(1, 2);
    for q in [q, by_token] {
        let parts = sets.clone().map(|segments| {
            let segments = Segments::new(segments, (1, 20), (1, 33)).expect("legal segments");
            let options = AttentionOptions::default();
            attention_forward(q.clone(), k.clone(), v.clone(), &segments, &options)
        });
        let merged = parts
            .into_iter()
            .reduce(|merged, part| merge_attention(merged, part, FloatDType::F32))
            .expect("three parts");
        let (out, lse) = (values(&merged.out), values(&merged.lse));
        for (got, at_once, expected) in [
            (&out, &at_once.out, &expected.out),
            (&lse, &at_once.lse, &expected.lse),
        ] {
            let limit = 2.0 * relative(at_once, expected) + f64::from(f32::EPSILON);
            assert!(relative(got, expected) <= limit);
        }
        // `[heads, tokens]` and `[heads, tokens, dim]`.
        for head in 0..HEADS.num_heads {
            assert!(
                lse[head * 20..head * 20 + 4]
                    .iter()
                    .all(|x| *x == f64::NEG_INFINITY)
            );
            assert!(
                lse[head * 20 + 4..(head + 1) * 20]
                    .iter()
                    .all(|x| x.is_finite())
            );
            let blind = head * 20 * HEADS.v_head_dim..(head * 20 + 4) * HEADS.v_head_dim;
            assert!(out[blind].iter().all(|x| *x == 0.0));
        }
    }
}

#[test]
fn results_over_disjoint_keys_merge_on_cpu_backends() {
    check::<Flex>();
    check::<NdArray>();
}

#[test]
#[should_panic(expected = "the second out")]
fn results_of_other_queries_do_not_merge() {
    let part = |tokens| {
        let size = [1, 2, tokens, 8];
        let out = Tensor::<Flex, 4>::zeros(size, &Default::default());
        let lse = Tensor::<Flex, 3>::zeros([1, 2, tokens], &Default::default());
        AttentionOutput::new(out, lse)
    };
    merge_attention(part(3), part(4), FloatDType::F32);
}
