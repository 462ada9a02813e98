//! Exchange strategies: what each refuses and how, what is chosen, and what each rank adds to the gradients of others' tokens.

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{DType, Tensor, TensorData},
};
use burn_cp::{
    attention::{AttentionOptions, Dropout},
    batch::SequenceBatch,
    layout::{Documents, LayoutPolicy},
    plan::{CostShape, ExchangeStrategy, MaskKind, PlanError},
    sharder::{ContextParallelConfig, Coordinates, CpStep, StepError},
};
use burn_cp_tests::{TestBackend, backward, device, floats, head_dim, on_groups, sharder};

use crate::{steps::config, verbs::panic_of};

/// Every way of exchanging that serves any layout, and whether it overlaps.
pub(crate) const EXCHANGES: [(ExchangeStrategy, bool); 7] = [
    (ExchangeStrategy::AllGather, false),
    (ExchangeStrategy::AllGather, true),
    (ExchangeStrategy::NeededOnly, false),
    (ExchangeStrategy::NeededOnly, true),
    (ExchangeStrategy::Ring, false),
    (ExchangeStrategy::HeadAllToAll, false),
    (ExchangeStrategy::Auto, true),
];

fn shape(num_heads: usize, num_kv_heads: usize) -> CostShape {
    CostShape {
        num_heads,
        num_kv_heads,
        head_dim: head_dim(4),
        v_head_dim: head_dim(4),
        bytes_per_element: 4,
    }
}

fn attend(step: &CpStep<TestBackend>, shape: &CostShape, options: &AttentionOptions) {
    let x = |heads: usize| {
        let size = [1, heads, step.local_len(), shape.head_dim];
        Tensor::<TestBackend, 4>::ones(size, &device())
    };
    let (q, kv) = (x(shape.num_heads), x(shape.num_kv_heads));
    drop(step.attention(q, kv.clone(), kv, options));
}

/// What every rank says, at plan time and when it is asked to attend all the same; the ranks go on afterwards.
fn refused(
    lengths: &[usize],
    world_size: usize,
    exchange: ExchangeStrategy,
    (shape, options): (CostShape, AttentionOptions),
) -> Vec<PlanError> {
    on_groups(&[("cp", world_size)], |groups| {
        let config = ContextParallelConfig {
            exchange,
            ..config(&LayoutPolicy::Contiguous { multiple: 1 })
        };
        let seq_len = lengths.iter().sum();
        let documents = Documents::from_lengths(&[lengths.to_vec()], seq_len).unwrap();
        let ids = TensorData::zeros::<i64, _>([1, seq_len]);
        let batch = SequenceBatch::<TestBackend>::from_ids(ids).with_documents(documents);
        let step = sharder(&groups, config).shard(batch, &device()).unwrap();
        let error = match step.exchange(&shape, &options) {
            Err(StepError::Plan(error)) => error,
            other => panic!("{exchange:?} must be refused, got {other:?}"),
        };
        let message = panic_of(|| attend(&step, &shape, &options));
        assert!(message.contains(&error.to_string()), "{message}");
        step.group().barrier().unwrap();
        error
    })
}

#[test]
fn a_left_halo_that_reaches_beyond_the_neighbour_is_refused_on_every_rank() {
    let causal = AttentionOptions::causal();
    for error in refused(
        &[2, 12],
        3,
        ExchangeStrategy::LeftHalo,
        (shape(2, 1), causal),
    ) {
        let text = error.to_string();
        assert!(text.contains("left-halo"), "{text}");
        let PlanError::NotLeftNeighbour { rank, got, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((rank, got), (2, 0));
    }
    // A token sees later ones, so that rank 0 needs the right neighbour's.
    let full = AttentionOptions::full();
    for error in refused(&[6], 2, ExchangeStrategy::LeftHalo, (shape(2, 1), full)) {
        assert!(
            matches!(
                error,
                PlanError::NotLeftNeighbour {
                    rank: 0,
                    got: 1,
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn heads_that_cannot_be_dealt_out_are_refused_on_every_rank() {
    let causal = AttentionOptions::causal();
    for (shape, what, got) in [(shape(4, 2), "heads", 4), (shape(6, 2), "K/V heads", 2)] {
        for error in refused(&[5, 7], 3, ExchangeStrategy::HeadAllToAll, (shape, causal)) {
            assert_eq!(
                error,
                PlanError::HeadDivisibility {
                    what,
                    expected: 3,
                    got
                }
            );
        }
    }
}

#[test]
fn exchanges_that_do_not_know_heads_or_positions_refuse_dropout_on_every_rank() {
    let dropping = AttentionOptions::causal().with_dropout(Dropout::new(0.1, 1));
    for (strategy, exchange) in [
        (ExchangeStrategy::Ring, "ring"),
        (ExchangeStrategy::HeadAllToAll, "head-all-to-all"),
    ] {
        for error in refused(&[5, 7], 2, strategy, (shape(4, 2), dropping)) {
            assert_eq!(error, PlanError::Dropout { exchange });
        }
    }
}

#[test]
fn a_left_halo_serves_where_windows_and_documents_are_short() {
    let windowed = AttentionOptions::causal().with_window(3);
    let taken = on_groups(&[("cp", 4)], |groups| {
        let config = ContextParallelConfig {
            exchange: ExchangeStrategy::LeftHalo,
            ..config(&LayoutPolicy::Contiguous { multiple: 1 })
        };
        let ids = TensorData::zeros::<i64, _>([1, 16]);
        let batch = SequenceBatch::<TestBackend>::from_ids(ids);
        let step = sharder(&groups, config).shard(batch, &device()).unwrap();
        attend(&step, &shape(2, 1), &windowed);
        step.exchange(&shape(2, 1), &windowed).unwrap()
    });
    assert_eq!(taken, [ExchangeStrategy::LeftHalo; 4]);
}

#[test]
fn every_rank_chooses_the_same_strategy_and_says_which() {
    for (heads, world_size) in [((2, 1), 4), ((8, 4), 4), ((8, 8), 2)] {
        let chosen = on_groups(&[("cp", world_size)], |groups| {
            let config = ContextParallelConfig {
                exchange: ExchangeStrategy::Auto,
                ..config(&LayoutPolicy::HeadTail)
            };
            let ids = TensorData::zeros::<i64, _>([1, 64]);
            let batch = SequenceBatch::<TestBackend>::from_ids(ids);
            let step = sharder(&groups, config).shard(batch, &device()).unwrap();
            let shape = shape(heads.0, heads.1);
            attend(&step, &shape, &AttentionOptions::causal());
            step.exchange(&shape, &AttentionOptions::causal()).unwrap()
        });
        assert_ne!(chosen[0], ExchangeStrategy::Auto);
        assert!(chosen.iter().all(|other| *other == chosen[0]), "{chosen:?}");
    }
}

/// Gradients of values on every rank, with queries of 0, values 1, 2, 3, .., and outputs that count on rank `of` only.
fn gradients_of_values(
    (lengths, seq_len): (&[usize], usize),
    world_size: usize,
    (exchange, overlap): (ExchangeStrategy, bool),
    of: usize,
) -> Vec<Vec<f64>> {
    type B = Autodiff<NdArray<f64>>;
    on_groups(&[("cp", world_size)], |groups| {
        let config = ContextParallelConfig {
            exchange,
            overlap,
            ..config(&LayoutPolicy::Contiguous { multiple: 1 })
        };
        let documents = Documents::from_lengths(&[lengths.to_vec()], seq_len).unwrap();
        let ids = TensorData::zeros::<i64, _>([1, seq_len]);
        let batch = SequenceBatch::<B>::from_ids(ids).with_documents(documents);
        let device = device();
        let step = sharder(&groups, config).shard(batch, &device).unwrap();
        let q = Tensor::<B, 4>::zeros([1, world_size, seq_len, 1], (&device, DType::F64));
        let tokens: Vec<f64> = (0..seq_len).map(|token| token as f64 + 1.0).collect();
        let v = Tensor::<B, 1>::from_data(TensorData::from(&tokens[..]), (&device, DType::F64))
            .reshape([1, 1, seq_len, 1])
            .repeat_dim(1, world_size)
            .require_grad();
        let [q, local] =
            [q, v.clone()].map(|whole| step.shard_tokens(whole, 2, Coordinates::Input, None));
        let out = step.attention(q.clone(), q, local, &AttentionOptions::causal());
        let counts = f64::from(u8::from(step.group().rank() == of));
        let loss = (out * counts).sum();
        let grads = backward(&loss, step.group());
        floats(&v.grad(&grads).unwrap().narrow(1, 0, 1))
    })
}

/// With queries of 0 weights are uniform, and gradients of values are sums of fractions. What a rank adds to them is what is left
/// when only its own outputs count.
#[test]
fn each_rank_adds_its_own_queries_share_to_the_gradients_of_values() {
    let (a, b, c) = (191.0 / 504.0, 11.0 / 30.0, 47.0 / 60.0);
    // Documents, tokens, ranks, and of a rank: the first token and its contributions from there on.
    let (three, two): (&[usize], &[usize]) = (&[2, 9, 3], &[6, 5]);
    let table: [(&[usize], [usize; 4], &[f64]); 7] = [
        (three, [16, 4, 0, 0], &[1.5, 0.5, 1.5, 0.5]),
        (
            three,
            [16, 4, 1, 2],
            &[0.95, 0.95, 0.95, 37.0 / 60.0, b, 1.0 / 6.0],
        ),
        (
            three,
            [16, 4, 2, 2],
            &[a, a, a, a, a, a, a, 17.0 / 72.0, 1.0 / 9.0, 1.0],
        ),
        (three, [16, 4, 3, 11], &[5.0 / 6.0, 5.0 / 6.0, 1.0 / 3.0]),
        (
            two,
            [12, 3, 0, 0],
            &[25.0 / 12.0, 13.0 / 12.0, 7.0 / 12.0, 0.25],
        ),
        (two, [12, 3, 1, 0], &[b, b, b, b, b, 1.0 / 6.0, 1.5, 0.5]),
        (two, [12, 3, 2, 6], &[c, c, c, 0.45, 0.2]),
    ];
    for (lengths, [seq_len, world_size, of, first], values) in table {
        for exchange in EXCHANGES {
            let parts = gradients_of_values((lengths, seq_len), world_size, exchange, of);
            let mut want = vec![0.0; seq_len];
            want[first..first + values.len()].copy_from_slice(values);
            for (token, want) in want.iter().enumerate() {
                let got = parts.iter().map(|part| part[token]).sum::<f64>();
                assert!(
                    (got - want).abs() < 1e-14,
                    "{exchange:?} rank {of} token {token}: {got} {want}"
                );
            }
        }
    }
}

/// What a plan moves is known before any tensor is: tokens that `NeededOnly` sends, and those that gathering does.
#[test]
fn tokens_that_move_are_those_that_straddling_documents_need() {
    for (lengths, padding, world_size, needed) in [
        (&[3, 3][..], 2, 2, 1),
        (&[6, 5], 1, 3, 6),
        (&[6, 6, 4], 0, 4, 6),
        (&[16], 0, 4, 24),
        (&[2, 9, 3], 2, 4, 9),
        (&[5], 11, 4, 4),
        (&[4, 4, 4, 4], 0, 4, 0),
        (&[1; 8], 0, 2, 0),
        (&[2, 8, 2], 0, 3, 8),
    ] {
        let moved = on_groups(&[("cp", world_size)], |groups| {
            let seq_len = lengths.iter().sum::<usize>() + padding;
            let documents = Documents::from_lengths(&[lengths.to_vec()], seq_len).unwrap();
            let ids = TensorData::zeros::<i64, _>([1, seq_len]);
            let batch = SequenceBatch::<TestBackend>::from_ids(ids).with_documents(documents);
            let config = config(&LayoutPolicy::Contiguous { multiple: 1 });
            let step = sharder(&groups, config).shard(batch, &device()).unwrap();
            let plan = step.plan(MaskKind::CAUSAL).unwrap();
            plan.rank(step.group().rank()).kv_tokens_received
        });
        assert_eq!(moved.iter().sum::<usize>(), needed, "{lengths:?}");
    }
}

#[test]
fn dropout_of_nothing_is_none() {
    let nothing = AttentionOptions::causal().with_dropout(Dropout::new(0.0, 1));
    on_groups(&[("cp", 2)], |groups| {
        let config = ContextParallelConfig {
            exchange: ExchangeStrategy::Ring,
            ..config(&LayoutPolicy::HeadTail)
        };
        let batch = SequenceBatch::<TestBackend>::from_ids(TensorData::zeros::<i64, _>([1, 16]));
        let step = sharder(&groups, config).shard(batch, &device()).unwrap();
        attend(&step, &shape(2, 1), &nothing);
        let taken = step.exchange(&shape(2, 1), &nothing).unwrap();
        assert_eq!(taken, ExchangeStrategy::Ring);
    });
}

#[test]
fn ranks_may_leave_different_numbers_of_multiprocessors_free() {
    on_groups(&[("cp", 2)], |groups| {
        let config = ContextParallelConfig {
            sm_margin: 16 * groups.global_rank(),
            ..config(&LayoutPolicy::HeadTail)
        };
        let batch = SequenceBatch::<TestBackend>::from_ids(TensorData::zeros::<i64, _>([1, 16]));
        let step = sharder(&groups, config).shard(batch, &device()).unwrap();
        attend(&step, &shape(2, 1), &AttentionOptions::causal());
    });
}
