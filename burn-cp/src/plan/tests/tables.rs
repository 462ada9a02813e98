//! Plans in contiguous layouts, checked by hand.

use std::ops::Range;

use super::{ids, plan};
use crate::plan::{AttentionPlan, CostShape, ExchangeStrategy, MaskKind, RankPlan};

/// Of one rank: lengths of queries and of keys of its segments, tokens sent to each rank, tokens received
/// from each rank, local indices in the order in which they are sent.
type RankRow<'a> = (
    &'a [usize],
    &'a [usize],
    &'a [usize],
    &'a [usize],
    &'a [Range<usize>],
);

fn check_contiguous(lengths: &[usize], padding: usize, moved: usize, ranks: &[RankRow<'_>]) {
    let plan = plan(&ids(lengths, padding), ranks.len(), MaskKind::CAUSAL);
    let world = || 0..ranks.len();
    for (rank, &(q, k, sent, received, spans)) in ranks.iter().enumerate() {
        let segments = &plan.rank(rank).segments;
        assert_eq!(segments.iter().map(|s| s.q.len()).collect::<Vec<_>>(), q);
        assert_eq!(segments.iter().map(|s| s.k.len()).collect::<Vec<_>>(), k);
        assert_eq!(
            world()
                .map(|to| plan.num_transferred(rank, to))
                .collect::<Vec<_>>(),
            sent
        );
        assert_eq!(
            world()
                .map(|from| plan.num_transferred(from, rank))
                .collect::<Vec<_>>(),
            received
        );
        let all = world().flat_map(|to| plan.transfers(rank, to).iter().map(|s| s.local.clone()));
        assert_eq!(all.collect::<Vec<_>>(), spans);
    }
    let received: usize = plan
        .ranks()
        .iter()
        .map(|rank| rank.kv_tokens_received)
        .sum();
    let sent: usize = plan.ranks().iter().map(|rank| rank.kv_tokens_sent).sum();
    assert_eq!((received, sent), (moved, moved));
    assert_eq!(plan.moves_tokens(), moved > 0);
}

#[test]
fn a_contiguous_layout_moves_exactly_what_straddling_documents_need() {
    check_contiguous(
        &[3, 3],
        2,
        1,
        &[
            (&[3, 1], &[3, 1], &[4, 1], &[4, 0], &[0..4, 3..4]),
            (&[2], &[3], &[0, 2], &[1, 2], &[0..2]),
        ],
    );
    check_contiguous(
        &[6, 5],
        1,
        6,
        &[
            (&[4], &[4], &[4, 4, 0], &[4, 0, 0], &[0..4, 0..4]),
            (&[2, 2], &[6, 2], &[0, 4, 2], &[4, 4, 0], &[0..4, 2..4]),
            (&[3], &[5], &[0, 0, 3], &[0, 2, 3], &[0..3]),
        ],
    );
    check_contiguous(
        &[6, 6, 4],
        0,
        6,
        &[
            (&[4], &[4], &[4, 4, 0, 0], &[4, 0, 0, 0], &[0..4, 0..4]),
            (
                &[2, 2],
                &[6, 2],
                &[0, 4, 2, 0],
                &[4, 4, 0, 0],
                &[0..4, 2..4],
            ),
            (&[4], &[6], &[0, 0, 4, 0], &[0, 2, 4, 0], &[0..4]),
            (&[4], &[4], &[0, 0, 0, 4], &[0, 0, 0, 4], &[0..4]),
        ],
    );
}

#[test]
fn a_document_over_many_ranks_moves_every_prefix() {
    check_contiguous(
        &[16],
        0,
        24,
        &[
            (
                &[4],
                &[4],
                &[4, 4, 4, 4],
                &[4, 0, 0, 0],
                &[0..4, 0..4, 0..4, 0..4],
            ),
            (
                &[4],
                &[8],
                &[0, 4, 4, 4],
                &[4, 4, 0, 0],
                &[0..4, 0..4, 0..4],
            ),
            (&[4], &[12], &[0, 0, 4, 4], &[4, 4, 4, 0], &[0..4, 0..4]),
            (&[4], &[16], &[0, 0, 0, 4], &[4, 4, 4, 4], &[0..4]),
        ],
    );
    check_contiguous(
        &[2, 9, 3],
        2,
        9,
        &[
            (
                &[2, 2],
                &[2, 2],
                &[4, 2, 2, 0],
                &[4, 0, 0, 0],
                &[0..4, 2..4, 2..4],
            ),
            (&[4], &[6], &[0, 4, 4, 0], &[2, 4, 0, 0], &[0..4, 0..4]),
            (
                &[3, 1],
                &[9, 1],
                &[0, 0, 4, 1],
                &[2, 4, 4, 0],
                &[0..4, 3..4],
            ),
            (&[2], &[3], &[0, 0, 0, 2], &[0, 0, 1, 2], &[0..2]),
        ],
    );
    check_contiguous(
        &[2, 8, 2],
        0,
        8,
        &[
            (
                &[2, 2],
                &[2, 2],
                &[4, 2, 2],
                &[4, 0, 0],
                &[0..4, 2..4, 2..4],
            ),
            (&[4], &[6], &[0, 4, 4], &[2, 4, 0], &[0..4, 0..4]),
            (&[2, 2], &[8, 2], &[0, 0, 4], &[2, 4, 4], &[0..4]),
        ],
    );
}

#[test]
fn padding_only_ranks_and_aligned_documents_move_nothing() {
    check_contiguous(
        &[5],
        11,
        4,
        &[
            (&[4], &[4], &[4, 4, 0, 0], &[4, 0, 0, 0], &[0..4, 0..4]),
            (&[1], &[5], &[0, 1, 0, 0], &[4, 1, 0, 0], &[0..1]),
            (&[], &[], &[0, 0, 0, 0], &[0, 0, 0, 0], &[]),
            (&[], &[], &[0, 0, 0, 0], &[0, 0, 0, 0], &[]),
        ],
    );
    check_contiguous(
        &[4, 4, 4, 4],
        0,
        0,
        &[
            (&[4], &[4], &[4, 0, 0, 0], &[4, 0, 0, 0], &[0..4]),
            (&[4], &[4], &[0, 4, 0, 0], &[0, 4, 0, 0], &[0..4]),
            (&[4], &[4], &[0, 0, 4, 0], &[0, 0, 4, 0], &[0..4]),
            (&[4], &[4], &[0, 0, 0, 4], &[0, 0, 0, 4], &[0..4]),
        ],
    );
    check_contiguous(
        &[1; 8],
        0,
        0,
        &[
            (&[1; 4], &[1; 4], &[4, 0], &[4, 0], &[0..4]),
            (&[1; 4], &[1; 4], &[0, 4], &[0, 4], &[0..4]),
        ],
    );
}

/// Attention with zero queries: every visible key has the same weight, and the value of token `j` is
/// `j + 1`. Returns the outputs, and what each rank has for the gradient of the values, for a gradient of 1 of every output.
fn uniform_attention(plan: &AttentionPlan) -> (Vec<f64>, Vec<Vec<f64>>) {
    let seq_len = plan.layout().seq_len();
    let mut out = vec![0.0; seq_len];
    let mut gradients = vec![vec![0.0; seq_len]; plan.world_size()];
    for (rank, rank_plan) in plan.ranks().iter().enumerate() {
        let own = plan.layout().indices(rank);
        let buffer: Vec<usize> = (rank_plan.pieces.iter())
            .flat_map(|piece| plan.layout().indices(piece.source)[piece.local.clone()].to_vec())
            .collect();
        for segment in &rank_plan.segments {
            for (t, q) in segment.q.clone().enumerate() {
                let end = segment.k.end - segment.q.len() + t + 1;
                let keys = &buffer[segment.k.start..end];
                for &key in keys {
                    out[own[q]] += (key as f64 + 1.0) / keys.len() as f64;
                    gradients[rank][key] += 1.0 / keys.len() as f64;
                }
            }
        }
    }
    (out, gradients)
}

fn assert_close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() < 1e-12, "{got} is not {expected}");
    }
}

/// Each rank contributes these values from a token on, and 0 elsewhere.
fn assert_contributions(gradients: &[Vec<f64>], expected: &[(usize, &[f64])]) {
    assert_eq!(gradients.len(), expected.len());
    for (gradient, (start, values)) in gradients.iter().zip(expected) {
        let mut whole = vec![0.0; gradient.len()];
        whole[*start..start + values.len()].copy_from_slice(values);
        assert_close(gradient, &whole);
    }
}

/// A row goes to every rank whose queries see it, the owner among them, or with an all-gather to every rank. Its gradient is the
/// sum over as many.
#[test]
fn rows_travel_to_as_many_ranks_as_see_them() {
    let plan = plan(&ids(&[2, 9, 3], 2), 4, MaskKind::CAUSAL);
    let mut num_takers = vec![0; 16];
    for rank in plan.ranks() {
        for piece in &rank.pieces {
            let tokens = &plan.layout().indices(piece.source)[piece.local.clone()];
            tokens.iter().for_each(|token| num_takers[*token] += 1);
        }
    }
    assert_eq!(num_takers, [1, 1, 3, 3, 2, 2, 2, 2, 1, 1, 1, 2, 1, 1, 0, 0]);
}

/// Tokens that all ranks receive together when everything is gathered: each shard goes to all others.
#[test]
fn an_all_gather_moves_every_shard_to_all_other_ranks() {
    let token = CostShape {
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 1,
        v_head_dim: 1,
        bytes_per_element: 1,
    };
    for (lengths, padding, world_size, moved) in [
        (&[3, 3][..], 2, 2, 8),
        (&[6, 5], 1, 3, 24),
        (&[6, 6, 4], 0, 4, 48),
        (&[16], 0, 4, 48),
        (&[2, 9, 3], 2, 4, 48),
        (&[5], 11, 4, 48),
        (&[4, 4, 4, 4], 0, 4, 48),
        (&[1; 8], 0, 2, 8),
        (&[2, 8, 2], 0, 3, 24),
    ] {
        let plan = plan(&ids(lengths, padding), world_size, MaskKind::CAUSAL);
        let received = (0..world_size).map(|rank| {
            let bytes = plan.exchange_bytes(ExchangeStrategy::AllGather, &token, rank);
            bytes.received / token.kv_bytes_per_token()
        });
        assert_eq!(received.sum::<u64>(), moved, "{lengths:?}");
    }
}

#[test]
fn uniform_attention_and_its_gradient_match_the_analytic_values() {
    let (out, gradients) = uniform_attention(&plan(&ids(&[2, 9, 3], 2), 4, MaskKind::CAUSAL));
    assert_close(
        &out,
        &[
            1.0, 1.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 12.0, 12.5, 13.0, 0.0, 0.0,
        ],
    );
    let expected: [(usize, &[f64]); 4] = [
        (0, &[1.5, 0.5, 1.5, 0.5]),
        (2, &[0.95, 0.95, 0.95, 37.0 / 60.0, 11.0 / 30.0, 1.0 / 6.0]),
        (
            2,
            &[
                191.0 / 504.0,
                191.0 / 504.0,
                191.0 / 504.0,
                191.0 / 504.0,
                191.0 / 504.0,
                191.0 / 504.0,
                191.0 / 504.0,
                17.0 / 72.0,
                1.0 / 9.0,
                1.0,
            ],
        ),
        (11, &[5.0 / 6.0, 5.0 / 6.0, 1.0 / 3.0]),
    ];
    assert_contributions(&gradients, &expected);
    let (out, gradients) = uniform_attention(&plan(&ids(&[6, 5], 1), 3, MaskKind::CAUSAL));
    assert_close(
        &out,
        &[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 7.0, 7.5, 8.0, 8.5, 9.0, 0.0],
    );
    let straddling = [11.0 / 30.0; 5];
    let expected: [(usize, &[f64]); 3] = [
        (0, &[25.0 / 12.0, 13.0 / 12.0, 7.0 / 12.0, 0.25]),
        (0, &[&straddling[..], &[1.0 / 6.0, 1.5, 0.5]].concat()),
        (6, &[47.0 / 60.0, 47.0 / 60.0, 47.0 / 60.0, 0.45, 0.2]),
    ];
    assert_contributions(&gradients, &expected);
}

#[test]
fn padding_ahead_of_and_between_documents_moves_no_query() {
    let segments = |ids: &[i64]| -> Vec<Vec<(Range<usize>, usize)>> {
        let plan = plan(ids, 2, MaskKind::CAUSAL);
        let of = |rank: &RankPlan| {
            rank.segments
                .iter()
                .map(|s| (s.q.clone(), s.k.len()))
                .collect()
        };
        plan.ranks().iter().map(of).collect()
    };
    assert_eq!(
        segments(&[0, 0, 1, 1, 1, 1, 2, 2]),
        [vec![(2..4, 2)], vec![(0..2, 4), (2..4, 2)]]
    );
    assert_eq!(
        segments(&[1, 1, 0, 2, 2, 2, 2, 0]),
        [vec![(0..2, 2), (3..4, 1)], vec![(0..3, 4)]]
    );
    // The id of the first document comes back as a document of its own.
    assert_eq!(
        segments(&[1, 1, 2, 2, 1, 1, 1, 0]),
        [vec![(0..2, 2), (2..4, 2)], vec![(0..3, 3)]]
    );
}
