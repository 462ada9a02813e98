//! Costs of strategies.

use super::{ids, plan};
use crate::plan::*;

const SHAPE: CostShape = CostShape {
    num_heads: 8,
    num_kv_heads: 4,
    head_dim: 64,
    v_head_dim: 32,
    bytes_per_element: 2,
};

const STRATEGIES: [ExchangeStrategy; 5] = [
    ExchangeStrategy::AllGather,
    ExchangeStrategy::NeededOnly,
    ExchangeStrategy::LeftHalo,
    ExchangeStrategy::Ring,
    ExchangeStrategy::HeadAllToAll,
];

#[test]
fn what_all_ranks_receive_is_what_all_send() {
    for (lengths, padding, world_size) in [
        (&[16][..], 0, 4),
        (&[6, 5], 1, 3),
        (&[2, 9, 3], 2, 4),
        (&[5], 11, 4),
        (&[8], 0, 1),
    ] {
        let plan = plan(&ids(lengths, padding), world_size, MaskKind::CAUSAL);
        for strategy in STRATEGIES {
            let bytes: Vec<_> = (0..world_size)
                .map(|rank| plan.exchange_bytes(strategy, &SHAPE, rank))
                .collect();
            let received: u64 = bytes.iter().map(|bytes| bytes.received).sum();
            let sent: u64 = bytes.iter().map(|bytes| bytes.sent).sum();
            assert_eq!(received, sent, "{strategy:?} {lengths:?}");
        }
    }
}

#[test]
fn heads_are_traded_for_tokens_and_back() {
    // Two ranks of four tokens: half of the heads of the other's four come in, half of its own four's outputs come back.
    let plan = plan(&ids(&[8], 0), 2, MaskKind::CAUSAL);
    let inputs = SHAPE.q_bytes_per_token() + SHAPE.kv_bytes_per_token();
    let half = 4 * (inputs + SHAPE.out_bytes_per_token()) / 2;
    let bytes = plan.exchange_bytes(ExchangeStrategy::HeadAllToAll, &SHAPE, 0);
    assert_eq!(
        bytes,
        ExchangeBytes {
            received: half,
            sent: half
        }
    );
    assert_eq!(SHAPE.kv_bytes_per_token(), 4 * (64 + 32) * 2);
    assert_eq!(SHAPE.q_bytes_per_token(), 8 * 64 * 2);
    assert_eq!(SHAPE.out_bytes_per_token(), 8 * 32 * 2);
}

#[test]
fn strategies_that_cannot_serve_a_plan_are_refused() {
    let hardware = Hardware::default();
    let spread = plan(&ids(&[16], 0), 4, MaskKind::CAUSAL);
    assert_eq!(
        spread
            .predict(ExchangeStrategy::LeftHalo, &SHAPE, &hardware)
            .unwrap_err(),
        PlanError::NotLeftNeighbour {
            rank: 2,
            expected: Some(1),
            got: 0
        }
    );
    let neighbours = plan(&ids(&[6, 6, 4], 0), 4, MaskKind::CAUSAL);
    assert!(
        neighbours
            .check_strategy(ExchangeStrategy::LeftHalo, &SHAPE)
            .is_ok()
    );
    // Under a full mask the first rank needs its right neighbour.
    let full = plan(&ids(&[16], 0), 2, MaskKind::Full);
    assert_eq!(
        full.check_strategy(ExchangeStrategy::LeftHalo, &SHAPE)
            .unwrap_err(),
        PlanError::NotLeftNeighbour {
            rank: 0,
            expected: None,
            got: 1
        }
    );
    let odd = CostShape {
        num_heads: 6,
        num_kv_heads: 2,
        ..SHAPE
    };
    assert_eq!(
        spread
            .check_strategy(ExchangeStrategy::HeadAllToAll, &odd)
            .unwrap_err(),
        PlanError::HeadDivisibility {
            what: "heads",
            expected: 4,
            got: 6
        }
    );
    let few = CostShape {
        num_kv_heads: 2,
        ..SHAPE
    };
    assert_eq!(
        spread
            .check_strategy(ExchangeStrategy::HeadAllToAll, &few)
            .unwrap_err(),
        PlanError::HeadDivisibility {
            what: "K/V heads",
            expected: 4,
            got: 2
        }
    );
}

#[test]
fn the_fastest_that_can_serve_a_plan_is_chosen() {
    let hardware = Hardware::default();
    let plans = [
        plan(&ids(&[16], 0), 4, MaskKind::CAUSAL),
        plan(&ids(&[6, 6, 4], 0), 4, MaskKind::CAUSAL),
        plan(&ids(&[16], 0), 2, MaskKind::Full),
    ];
    let odd = CostShape {
        num_heads: 6,
        num_kv_heads: 2,
        ..SHAPE
    };
    let few = CostShape {
        num_kv_heads: 2,
        ..SHAPE
    };
    for shape in [SHAPE, odd, few] {
        for link_gbs in [0.001, 1.0, 1e6] {
            for tflops in [1e-6, 1.0, 1e6] {
                let hardware = Hardware {
                    link_gbs,
                    tflops,
                    ..hardware
                };
                for plan in &plans {
                    let chosen = plan.choose(&shape, &hardware);
                    assert!(!matches!(
                        chosen,
                        ExchangeStrategy::Auto | ExchangeStrategy::LeftHalo
                    ));
                    let best = plan.predict(chosen, &shape, &hardware).unwrap();
                    for strategy in STRATEGIES {
                        let Ok(cost) = plan.predict(strategy, &shape, &hardware) else {
                            continue;
                        };
                        let far = strategy == ExchangeStrategy::LeftHalo
                            || best.predicted_ms <= cost.predicted_ms;
                        assert!(far, "{chosen:?} over {strategy:?}");
                    }
                    assert_eq!(
                        plan.predict(ExchangeStrategy::Auto, &shape, &hardware)
                            .unwrap(),
                        best
                    );
                }
            }
        }
    }
}

#[test]
fn the_slow_part_decides() {
    // One long document in four consecutive parts: heads are even work, shards are not.
    let plan = plan(&ids(&[4096], 0), 4, MaskKind::CAUSAL);
    let slow = |link_gbs, tflops| Hardware {
        link_gbs,
        tflops,
        latency_us: 0.0,
        copy_gbs: 1e9,
        overlap: true,
    };
    assert_eq!(
        plan.choose(&SHAPE, &slow(1e9, 1e-3)),
        ExchangeStrategy::HeadAllToAll
    );
    // Two documents need half of what passes round, and a few K/V heads are less than all heads of everything.
    let plan = super::plan(&ids(&[2048, 2048], 0), 4, MaskKind::CAUSAL);
    let few = CostShape {
        num_heads: 64,
        num_kv_heads: 4,
        ..SHAPE
    };
    assert_eq!(
        plan.choose(&few, &slow(1e-3, 1e9)),
        ExchangeStrategy::NeededOnly
    );
    let local = super::plan(&ids(&[4, 4], 0), 2, MaskKind::CAUSAL);
    assert_eq!(
        local.choose(&SHAPE, &slow(1.0, 1.0)),
        ExchangeStrategy::NeededOnly
    );
    assert_eq!(
        local
            .predict(ExchangeStrategy::AllGather, &SHAPE, &slow(1.0, 1.0))
            .unwrap()
            .ranks[0]
            .transfer_ms,
        0.0
    );
}

#[test]
fn time_is_work_and_bytes_at_their_rates() {
    let plan = plan(&ids(&[2], 0), 1, MaskKind::CAUSAL);
    let hardware = Hardware {
        link_gbs: 1.0,
        tflops: 1.0,
        latency_us: 10.0,
        copy_gbs: 2.0,
        overlap: false,
    };
    let cost = plan
        .predict(ExchangeStrategy::NeededOnly, &SHAPE, &hardware)
        .unwrap();
    // Three pairs, eight heads; two products forward, five backward.
    let operations = 3.0 * 8.0 * (8.0 * 64.0 + 6.0 * 32.0);
    assert!((cost.predicted_ms - operations / 1e9).abs() < 1e-12);
    assert_eq!(cost.ranks[0].transfer_ms, 0.0);

    let plan = super::plan(&ids(&[4], 0), 2, MaskKind::CAUSAL);
    let cost = plan
        .predict(ExchangeStrategy::NeededOnly, &SHAPE, &hardware)
        .unwrap();
    let once = 2.0 * SHAPE.kv_bytes_per_token() as f64 / 1e6 + 0.01;
    // Keys and values in forward and again in backward, where their gradients return.
    assert!((cost.ranks[1].transfer_ms - 3.0 * once).abs() < 1e-12);
    let copies = 4.5 * 2.0 * SHAPE.kv_bytes_per_token() as f64 / 2e6;
    assert!((cost.ranks[1].copy_ms - copies).abs() < 1e-12);
    let sum = cost.ranks[1].compute_ms + 3.0 * once + copies;
    assert!((cost.ranks[1].predicted_ms - sum).abs() < 1e-12);
    let overlapped = plan
        .predict(
            ExchangeStrategy::NeededOnly,
            &SHAPE,
            &Hardware {
                overlap: true,
                ..hardware
            },
        )
        .unwrap();
    assert!(overlapped.ranks[1].predicted_ms < cost.ranks[1].predicted_ms);
    assert!(overlapped.ranks[1].predicted_ms >= cost.ranks[1].compute_ms.max(3.0 * once));
}

#[test]
fn a_ring_overlaps_whatever_is_asked_for() {
    let plan = plan(&ids(&[4096], 0), 4, MaskKind::CAUSAL);
    let cost = |strategy, overlap| {
        let hardware = Hardware {
            overlap,
            ..Hardware::default()
        };
        plan.predict(strategy, &SHAPE, &hardware)
            .unwrap()
            .predicted_ms
    };
    let ring = ExchangeStrategy::Ring;
    assert_eq!(cost(ring, false), cost(ring, true));
    let needed = ExchangeStrategy::NeededOnly;
    assert!(cost(needed, false) > cost(needed, true));
}

#[test]
fn the_fraction_of_keys_received_is_one_where_a_rank_needs_all() {
    assert_eq!(plan(&ids(&[16], 0), 4, MaskKind::CAUSAL).kv_fraction(), 1.0);
    assert_eq!(
        plan(&ids(&[4; 4], 0), 4, MaskKind::CAUSAL).kv_fraction(),
        0.0
    );
    assert_eq!(plan(&ids(&[16], 0), 1, MaskKind::CAUSAL).kv_fraction(), 0.0);
}

#[test]
fn exchanges_that_are_hidden_cost_nothing_so_that_the_one_that_moves_least_is_chosen() {
    let overlapped = Hardware {
        overlap: true,
        ..Hardware::default()
    };
    for tflops in 1..=50 {
        let hardware = Hardware {
            tflops: tflops.into(),
            ..overlapped
        };
        let plan = plan(&ids(&[1900, 300, 1896], 0), 2, MaskKind::CAUSAL);
        let cost = |strategy| plan.predict(strategy, &SHAPE, &hardware).unwrap();
        let (needed, all) = (
            cost(ExchangeStrategy::NeededOnly),
            cost(ExchangeStrategy::AllGather),
        );
        assert_eq!(needed.predicted_ms, all.predicted_ms);
        let chosen = plan.choose(&SHAPE, &hardware);
        assert_eq!(chosen, ExchangeStrategy::NeededOnly, "at {tflops} TFLOP/s");
    }
}
