//! What is equal to the last bit: the forward pass of any world and that of one rank, and one run and the next.

use std::collections::HashMap;

use burn::{backend::Autodiff, tensor::DType};
use burn_cp::{
    attention::{AttentionOptions, Dropout},
    layout::{Documents, LayoutPolicy},
    plan::{ExchangeStrategy, MaskKind},
};
use burn_cp_tests::{
    Attention, Form, Problem, Random, TestBackend, head_dim, random_layout, relative_error,
};

use crate::{
    attention::{Case, run},
    strategies::EXCHANGES,
};

/// Strategies whose forward pass, without overlap, gives the bits of one rank.
pub(crate) const EXACT: [ExchangeStrategy; 4] = [
    ExchangeStrategy::AllGather,
    ExchangeStrategy::NeededOnly,
    ExchangeStrategy::LeftHalo,
    ExchangeStrategy::HeadAllToAll,
];
const MASKS: [MaskKind; 3] = [
    MaskKind::CAUSAL,
    MaskKind::Full,
    MaskKind::Causal { window: Some(70) },
];

/// Documents longer than a tile of the kernels and shorter ones, padding between them, and documents of one token.
pub(crate) fn documents(row: usize) -> Documents {
    let lengths = [
        &[5, 333, 1, 0, 29][..],
        &[64, 65, 127, 3],
        &[1, 1, 200, 2, 150],
    ][row % 3];
    let padded: Vec<usize> = lengths.iter().map(|len| len + row % 2).collect();
    Documents::from_padded_lengths(&[lengths.to_vec()], &[padded], 391).unwrap()
}

pub(crate) fn case(
    documents: Documents,
    mask: MaskKind,
    [num_heads, num_kv_heads]: [usize; 2],
) -> Case {
    let problem = Problem {
        batch: documents.batch_size(),
        num_heads,
        num_kv_heads,
        tokens: documents.seq_len(),
        head_dim: head_dim(16),
        v_head_dim: head_dim(8),
        scale: None,
    };
    Case {
        documents,
        form: Form::Table,
        placed: None,
        layout: LayoutPolicy::Identity,
        exchange: ExchangeStrategy::AllGather,
        overlap: false,
        world_size: 1,
        sinks: Some((0..num_heads).map(|head| head as f64 / 3.0 - 0.5).collect()),
        options: AttentionOptions {
            mask,
            ..Default::default()
        },
        problem,
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

pub(crate) fn attention(case: &Case, inputs: &[Vec<f64>; 4]) -> Attention {
    run::<Autodiff<TestBackend>>(case, inputs, DType::F32).0
}

/// Index and both values of the first few that differ.
pub(crate) fn differing(got: &[f64], want: &[f64]) -> Vec<(usize, f64, f64)> {
    let all = got.iter().zip(want).enumerate();
    all.filter(|(_, (got, want))| got.to_bits() != want.to_bits())
        .map(|(i, (got, want))| (i, *got, *want))
        .take(8)
        .collect()
}

#[test]
fn forward_of_any_world_equals_one_rank_to_the_bit() {
    let mut random = Random::new(11);
    let mut seen = HashMap::new();
    for (row, mask) in MASKS.into_iter().enumerate() {
        for world_size in 2..=5 {
            let num_kv_heads = [2, world_size][world_size % 2].max(2);
            let heads = [num_kv_heads * [2, 1, 4][row], num_kv_heads];
            let one = case(documents(row), mask, heads);
            let inputs = one.inputs(&mut random);
            let want = attention(&one, &inputs);
            let layouts = [
                LayoutPolicy::Contiguous { multiple: 1 },
                LayoutPolicy::HeadTail,
                random_layout(&mut random, world_size, one.problem.tokens),
            ];
            for layout in layouts {
                for exchange in EXACT {
                    let many = Case {
                        layout: layout.clone(),
                        exchange,
                        world_size,
                        ..one.clone()
                    };
                    if many.strategy().is_err() {
                        continue;
                    }
                    let got = attention(&many, &inputs);
                    for (what, got, want) in
                        [("out", &got.out, &want.out), ("lse", &got.lse, &want.lse)]
                    {
                        let differ = differing(got, want);
                        assert!(
                            differ.is_empty(),
                            "{what}: (index, got, wanted) {differ:?} in {many:?}"
                        );
                    }
                    *seen.entry(exchange).or_insert(0) += 1;
                }
            }
        }
    }
    assert_eq!(seen[&ExchangeStrategy::AllGather], 3 * 4 * 3);
    assert_eq!(seen[&ExchangeStrategy::NeededOnly], 3 * 4 * 3);
    // Two heads of keys go to two ranks, and as many as there are ranks to three and five; none to four.
    assert_eq!(seen[&ExchangeStrategy::HeadAllToAll], 3 * 3 * 3);
    assert!(seen[&ExchangeStrategy::LeftHalo] > 4, "{seen:?}");
}

/// One weight that is dropped otherwise would be off by far more.
#[test]
fn dropout_drops_the_same_weights_under_every_exchange_that_serves_it() {
    let mut random = Random::new(13);
    let refusing = [ExchangeStrategy::Ring, ExchangeStrategy::HeadAllToAll];
    for (row, mask) in MASKS.into_iter().enumerate() {
        let mut one = case(documents(row), mask, [4, 4]);
        one.options.dropout = Some(Dropout::new(0.4, 5));
        let inputs = one.inputs(&mut random);
        let want = attention(&one, &inputs);
        for (exchange, overlap) in EXCHANGES {
            for layout in [
                LayoutPolicy::Contiguous { multiple: 1 },
                LayoutPolicy::HeadTail,
            ] {
                let many = Case {
                    layout,
                    exchange,
                    overlap,
                    world_size: 4,
                    ..one.clone()
                };
                if refusing.contains(&exchange) {
                    continue;
                }
                let got = attention(&many, &inputs);
                for (what, got, want) in [
                    ("out", &got.out, &want.out),
                    ("dq", &got.dq, &want.dq),
                    ("dk", &got.dk, &want.dk),
                    ("dv", &got.dv, &want.dv),
                    ("dsinks", &got.dsinks, &want.dsinks),
                ] {
                    let error = relative_error(got, want);
                    assert!(error <= 1e-5, "{what} is off by {error:e} in {many:?}");
                }
            }
        }
    }
}

#[test]
fn forward_and_backward_repeat_to_the_bit() {
    let mut random = Random::new(12);
    for (row, mask) in MASKS.into_iter().enumerate() {
        for (exchange, overlap) in EXCHANGES {
            let many = Case {
                layout: LayoutPolicy::HeadTail,
                exchange,
                overlap,
                world_size: 4,
                ..case(documents(row), mask, [4, 4])
            };
            let inputs = many.inputs(&mut random);
            let all = |a: Attention| {
                [a.out, a.lse, a.dq, a.dk, a.dv, a.dsinks].map(|values| bits(&values))
            };
            let first = all(attention(&many, &inputs));
            for _ in 0..2 {
                assert!(first == all(attention(&many, &inputs)), "{many:?}");
            }
        }
    }
}
