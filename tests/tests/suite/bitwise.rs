//! What is equal to the last bit: the forward pass of any world and that of one rank, and one run and the next.

use burn::{backend::Autodiff, tensor::DType};
use burn_cp::{
    attention::AttentionOptions,
    layout::{Documents, LayoutPolicy},
    plan::{ExchangeStrategy, MaskKind},
};
use burn_cp_tests::{Attention, Form, Problem, Random, TestBackend, head_dim, random_layout};

use crate::attention::{Case, run};

pub(crate) const EXCHANGES: [ExchangeStrategy; 2] =
    [ExchangeStrategy::AllGather, ExchangeStrategy::NeededOnly];
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

pub(crate) fn case(documents: Documents, mask: MaskKind, num_heads: usize) -> Case {
    let problem = Problem {
        batch: documents.batch_size(),
        num_heads,
        num_kv_heads: 2,
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
        world_size: 1,
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
    let mut layouts_seen = 0;
    for (row, mask) in MASKS.into_iter().enumerate() {
        let one = case(documents(row), mask, [4, 2, 8][row]);
        let inputs = one.inputs(&mut random);
        let want = attention(&one, &inputs);
        for world_size in 2..=5 {
            let layouts = [
                LayoutPolicy::Contiguous { multiple: 1 },
                LayoutPolicy::HeadTail,
                random_layout(&mut random, world_size, one.problem.tokens),
            ];
            for layout in layouts {
                for exchange in EXCHANGES {
                    let many = Case {
                        layout: layout.clone(),
                        exchange,
                        world_size,
                        ..one.clone()
                    };
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
                    layouts_seen += 1;
                }
            }
        }
    }
    assert_eq!(layouts_seen, 3 * 4 * 3 * 2);
}

#[test]
fn forward_and_backward_repeat_to_the_bit() {
    let mut random = Random::new(12);
    for (row, mask) in MASKS.into_iter().enumerate() {
        for exchange in EXCHANGES {
            let many = Case {
                layout: LayoutPolicy::HeadTail,
                exchange,
                world_size: 4,
                ..case(documents(row), mask, 4)
            };
            let inputs = many.inputs(&mut random);
            let all = |a: Attention| [a.out, a.lse, a.dq, a.dk, a.dv].map(|values| bits(&values));
            let first = all(attention(&many, &inputs));
            for _ in 0..3 {
                assert!(first == all(attention(&many, &inputs)), "{many:?}");
            }
        }
    }
}
