//! Masks that ask the batch, bidirectional spans, prefixes and masks of documents: the same on any number of ranks, and exact.

#![allow(
    clippy::single_range_in_vec_init,
    reason = "lists of one token range are what these tests are about"
)]

use std::sync::Arc;

use burn::{
    backend::Autodiff,
    tensor::{DType, Distribution, Tensor, TensorData},
};
use burn_cp::{
    attention::AttentionOptions,
    batch::SequenceBatch,
    layout::{Document, Documents, LayoutPolicy},
    nn::ContextParallelAttentionConfig,
    plan::{CostShape, ExchangeStrategy, MaskKind},
    sharder::ContextParallelConfig,
};
use burn_cp_tests::{
    Form, Problem, Random, TestBackend, device, head_dim, on_groups, random_layout, random_marks,
    sharder, to_bits,
};

use crate::{
    attention::{Case, check},
    bad_input::B,
    bitwise::{self, EXACT, attention, differing},
    strategies::EXCHANGES,
};

const MASKS: [MaskKind; 3] = [
    MaskKind::CAUSAL_WITH_SPANS,
    MaskKind::PREFIX,
    MaskKind::PER_DOCUMENT,
];

/// Two rows with padding inside, between and behind documents; the spans lie over most borders of shards.
fn documents() -> Documents {
    let mask = |document: std::ops::Range<usize>, hole: usize| Document {
        runs: vec![document.start..hole, hole + 1..document.end],
        extent: document,
    };
    let whole = Document::contiguous;
    let rows = vec![
        vec![whole(0..17), mask(18..29, 24)],
        vec![mask(1..26, 9), whole(26..28)],
    ];
    Documents::from_runs(rows, 30)
        .unwrap()
        .with_spans(&[vec![2..9, 9..15, 16..17, 22..27], vec![1..4, 6..24, 26..28]])
        .unwrap()
        .with_prefixes(vec![vec![9, 0], vec![17, 2]])
        .unwrap()
        .with_masks(vec![
            vec![MaskKind::CAUSAL_WITH_SPANS, MaskKind::Full],
            vec![MaskKind::PREFIX, MaskKind::Causal { window: Some(1) }],
        ])
        .unwrap()
}

#[test]
fn every_mask_is_exact_in_every_layout_world_and_exchange() {
    let mut random = Random::new(31);
    let documents = documents();
    let (mut num_cases, mut num_moving) = (0, 0);
    for mask in MASKS {
        for world_size in 1..=5 {
            for layout in [
                LayoutPolicy::Contiguous { multiple: 1 },
                LayoutPolicy::HeadTail,
                random_layout(&mut random, world_size, documents.seq_len()),
            ] {
                for (exchange, overlap) in EXCHANGES {
                    let case = Case {
                        documents: documents.clone(),
                        form: [Form::Table, Form::PaddingMask][num_cases % 2],
                        placed: None,
                        layout: layout.clone(),
                        exchange,
                        overlap,
                        sinks: None,
                        world_size,
                        options: AttentionOptions {
                            mask,
                            ..AttentionOptions::causal()
                        },
                        problem: Problem {
                            batch: 2,
                            num_heads: 8,
                            num_kv_heads: 4,
                            tokens: documents.seq_len(),
                            head_dim: head_dim(8),
                            v_head_dim: head_dim(4),
                            scale: None,
                        },
                    };
                    if case.strategy().is_err() {
                        continue;
                    }
                    let (_, received) =
                        check::<Autodiff<TestBackend>>(&case, &mut random, DType::F32);
                    num_cases += 1;
                    num_moving += usize::from(received > 0);
                }
            }
        }
    }
    // Heads can be traded among one, two and four ranks.
    assert_eq!(num_cases, 3 * 3 * (5 * 6 + 3));
    assert!(num_moving > num_cases / 2, "{num_moving}");
}

#[test]
fn forward_under_every_mask_equals_one_rank_to_the_bit() {
    let mut random = Random::new(32);
    for (row, mask) in MASKS.into_iter().enumerate() {
        let documents = random_marks(&mut random, &bitwise::documents(row));
        let one = bitwise::case(documents, mask, [[4, 2], [2, 2], [8, 2]][row]);
        let inputs = one.inputs(&mut random);
        let want = attention(&one, &inputs);
        for world_size in [2, 3, 5] {
            for layout in [
                LayoutPolicy::Contiguous { multiple: 1 },
                LayoutPolicy::HeadTail,
                random_layout(&mut random, world_size, one.problem.tokens),
            ] {
                let many = Case {
                    layout,
                    exchange: random.one_of(&EXACT[..2]),
                    world_size,
                    ..one.clone()
                };
                let got = attention(&many, &inputs);
                for (what, got, want) in
                    [("out", &got.out, &want.out), ("lse", &got.lse, &want.lse)]
                {
                    let differ = differing(got, want);
                    assert!(differ.is_empty(), "{what}: {differ:?} in {many:?}");
                }
            }
        }
    }
}

#[test]
fn layers_mix_masks_within_a_step_and_each_moves_only_what_it_sees() {
    let documents = Documents::full(1, 32)
        .unwrap()
        .with_spans(&[vec![6..10]])
        .unwrap();
    let ids = TensorData::zeros::<i64, _>([1, 32]);
    let shape = CostShape {
        num_heads: 2,
        num_kv_heads: 2,
        head_dim: 8,
        v_head_dim: 8,
        bytes_per_element: 4,
    };
    on_groups(&[("cp", 4)], |groups| {
        let cp = sharder(&groups, ContextParallelConfig::default());
        let batch = SequenceBatch::<B>::from_ids(ids.clone()).with_documents(documents.clone());
        let step = cp.shard(batch, &device()).unwrap();
        let window = MaskKind::Causal { window: Some(3) };
        let received = |mask| {
            let plan = step.plan(mask).unwrap();
            assert!(Arc::ptr_eq(&plan, &step.plan(mask).unwrap()), "made once");
            let bytes = |rank| plan.exchange_bytes(ExchangeStrategy::NeededOnly, &shape, rank);
            (0..4)
                .map(|rank| bytes(rank).received / shape.kv_bytes_per_token())
                .collect::<Vec<_>>()
        };
        assert_eq!(received(MaskKind::CAUSAL), [0, 8, 16, 24]);
        assert_eq!(received(window), [0, 3, 3, 3]);
        assert_eq!(received(MaskKind::CAUSAL_WITH_SPANS), [2, 8, 16, 24]);
        assert_eq!(received(MaskKind::Full), [24; 4]);
        // In one step, in any order.
        let x = || Tensor::zeros([1, 2, step.local_len(), 8], &device());
        for options in [
            AttentionOptions::causal_with_spans(),
            AttentionOptions::causal().with_window(3),
            AttentionOptions::causal_with_spans(),
            AttentionOptions::full(),
        ] {
            drop(step.attention(x(), x(), x(), &options));
        }
    });
}

#[test]
fn a_layer_asks_for_the_mask_that_it_is_given() {
    on_groups(&[("cp", 3)], |groups| {
        let device = device();
        let cp = sharder(&groups, ContextParallelConfig::default());
        let batch = SequenceBatch::<B>::from_ids(TensorData::zeros::<i64, _>([2, 30]));
        let step = cp
            .shard(batch.with_documents(documents()), &device)
            .unwrap();
        let layer = ContextParallelAttentionConfig::new(12, 4, 2, head_dim(8))
            .init::<B>(&device)
            .unwrap();
        let x = Tensor::random([2, step.local_len(), 12], Distribution::Default, &device);
        // First of all: clones of a layer that has not run would draw weights of their own.
        let causal = to_bits(&layer.forward(x.clone(), &step));
        let of_mask = |mask| to_bits(&layer.clone().with_mask(mask).forward(x.clone(), &step));
        let heads = |tensor: Tensor<B, 3>| {
            let [batch, tokens, width] = tensor.dims();
            tensor
                .reshape([batch, tokens, width / head_dim(8), head_dim(8)])
                .swap_dims(1, 2)
        };
        let by_hand = |options| {
            let q = heads(layer.q_proj.forward(x.clone()));
            let k = heads(layer.k_proj.forward(x.clone()));
            let v = heads(layer.v_proj.forward(x.clone()));
            let out = step.attention(q, k, v, &options).swap_dims(1, 2);
            let out = out.reshape([2, step.local_len(), 4 * head_dim(8)]);
            to_bits(&layer.o_proj.forward(out))
        };
        let spans = of_mask(MaskKind::CAUSAL_WITH_SPANS);
        assert_eq!(spans, by_hand(AttentionOptions::causal_with_spans()));
        assert_eq!(
            of_mask(MaskKind::PREFIX),
            by_hand(AttentionOptions::prefix())
        );
        assert!(causal != spans, "spans change nothing");
        let full = layer.clone().with_mask(MaskKind::PREFIX).full();
        let full = to_bits(&full.forward(x.clone(), &step));
        assert_eq!(full, by_hand(AttentionOptions::full()));
    });
}
