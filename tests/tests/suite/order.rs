//! Adjoints run in one order on every rank, whatever the depth of its graph.

use burn::{
    backend::{
        Autodiff, NdArray,
        autodiff::checkpoint::strategy::{
            BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
        },
    },
    tensor::Tensor,
};
use burn_cp::{
    collectives,
    comm::{ProcessGroup, ProgramOrder},
};
use burn_cp_tests::{TestBackend, backward, device, floats, on_ranks};

type B<C = NoCheckpointing> = Autodiff<NdArray<f64>, C>;

fn leaf<C: CheckpointStrategy>(value: f64) -> Tensor<B<C>, 1> {
    Tensor::full([2], value, &device()).require_grad()
}

/// Twice the tensor, `depth + 1` operations deep; `depth` is even.
fn deepened<C: CheckpointStrategy>(x: Tensor<B<C>, 1>, depth: usize) -> Tensor<B<C>, 1> {
    (0..depth).fold(x.mul_scalar(2.0), |x, i| {
        x.mul_scalar(if i % 2 == 0 { 4.0 } else { 0.25 })
    })
}

/// `[2 · world_size]` weights, different on every rank and for every exchange.
fn weights<C: CheckpointStrategy>(group: &ProcessGroup, exchange: usize) -> Tensor<B<C>, 1> {
    let values = (0..2 * group.size())
        .map(|i| weight(exchange, group.rank(), i))
        .collect::<Vec<_>>();
    Tensor::from_floats(values.as_slice(), &device())
}

#[allow(clippy::cast_precision_loss)]
fn weight(exchange: usize, rank: usize, index: usize) -> f64 {
    (1 + index + 10 * rank + 100 * exchange) as f64
}

/// Gradient of `rank`'s leaf, which all ranks gathered in this exchange and weighted; `factor` is what the leaf was multiplied by.
fn wanted(exchange: usize, rank: usize, world_size: usize, factor: f64) -> Vec<f64> {
    (0..2)
        .map(|i| {
            factor
                * (0..world_size)
                    .map(|taker| weight(exchange, taker, 2 * rank + i))
                    .sum::<f64>()
        })
        .collect()
}

/// Two exchanges of equal shape, independent of each other until the loss; rank 0's graph is deep before the first, rank 1's before
/// the second. By depth alone rank 0 would run the first one's adjoint first and rank 1 the second one's. Without the order that
/// `leave` in `backends/autodiff.rs` keeps, they meet in different adjoints: the fingerprints differ and the world fails with
/// `Mismatch`; without fingerprints too, the two gradients would be swapped between the ranks.
fn independent_exchanges<C: CheckpointStrategy>() {
    for world_size in [2, 3] {
        let gradients = on_ranks(world_size, |group| {
            let (a, b) = (leaf::<C>(1.0), leaf::<C>(2.0));
            let depth = |deep_rank| if group.rank() == deep_rank { 6 } else { 0 };
            let all_a = collectives::all_gather(deepened(a.clone(), depth(0)), 0, &group);
            let all_b = collectives::all_gather(deepened(b.clone(), depth(1)), 0, &group);
            let loss = (all_a * weights(&group, 0)).sum() + (all_b * weights(&group, 1)).sum();
            let gradients = backward(&loss, &group);
            [a, b].map(|leaf| floats(&leaf.grad(&gradients).unwrap()))
        });
        for (rank, [a, b]) in gradients.into_iter().enumerate() {
            assert_eq!(
                a,
                wanted(0, rank, world_size, 2.0),
                "first exchange, rank {rank}"
            );
            assert_eq!(
                b,
                wanted(1, rank, world_size, 2.0),
                "second exchange, rank {rank}"
            );
        }
    }
}

#[test]
fn independent_exchanges_on_graphs_of_different_depth_keep_their_gradients() {
    independent_exchanges::<NoCheckpointing>();
    independent_exchanges::<BalancedCheckpointing>();
}

/// The same over two groups of one mesh: ranks that waited for each other in two groups in different orders would never end.
#[test]
fn exchanges_of_different_groups_keep_one_order() {
    let gradients = burn_cp_tests::on_groups(&[("dp", 2), ("cp", 2)], |groups| {
        let (dp, cp) = (
            groups.along(&["dp"]).unwrap(),
            groups.along(&["cp"]).unwrap(),
        );
        let (a, b) = (leaf::<NoCheckpointing>(1.0), leaf::<NoCheckpointing>(2.0));
        let odd = groups.global_rank() % 3 == 0;
        let all_a = collectives::all_gather(deepened(a.clone(), if odd { 6 } else { 0 }), 0, &dp);
        let all_b = collectives::all_gather(deepened(b.clone(), if odd { 0 } else { 6 }), 0, &cp);
        let loss = (all_a * weights(&dp, 0)).sum() + (all_b * weights(&cp, 1)).sum();
        let gradients = backward(&loss, &groups.world().unwrap());
        let [a, b] = [a, b].map(|leaf| floats(&leaf.grad(&gradients).unwrap()));
        assert_eq!(a, wanted(0, dp.rank(), 2, 2.0));
        assert_eq!(b, wanted(1, cp.rank(), 2, 2.0));
    });
    assert_eq!(gradients.len(), 4);
}

fn gathered_loss(
    x: &Tensor<B, 1>,
    exchange: usize,
    depth: usize,
    group: &ProcessGroup,
) -> Tensor<B, 1> {
    let all = collectives::all_gather(deepened(x.clone(), depth), 0, group);
    (all * weights(group, exchange)).sum()
}

#[test]
fn a_forward_pass_without_backward_does_not_disturb_the_next_step() {
    let gradients = on_ranks(2, |group| {
        let x = leaf::<NoCheckpointing>(1.0);
        let mut kept = Vec::new();
        let mut gradients = Vec::new();
        for round in 0..4 {
            // Evaluation by mistake on the autodiff backend: tracked, and one rank keeps the result for its log.
            let eval = gathered_loss(&x, 7, 4 * group.rank(), &group);
            if group.rank() == 0 {
                kept.push(eval);
            }
            let untracked = collectives::all_gather(x.clone().detach(), 0, &group);
            assert_eq!(untracked.dims(), [4]);
            let loss = gathered_loss(&x, round, 4 * (1 - group.rank()), &group);
            gradients.push(floats(&x.grad(&backward(&loss, &group)).unwrap()));
        }
        gradients
    });
    for (rank, rounds) in gradients.into_iter().enumerate() {
        for (round, got) in rounds.into_iter().enumerate() {
            assert_eq!(
                got,
                wanted(round, rank, 2, 2.0),
                "rank {rank}, round {round}"
            );
        }
    }
}

#[test]
fn steps_with_orders_of_their_own_may_overlap() {
    for reversed in [false, true] {
        let gradients = on_ranks(3, |group| {
            let x = leaf::<NoCheckpointing>(1.0);
            let own = |group: &ProcessGroup| group.with_order(ProgramOrder::new());
            let (first, second) = (own(&group), own(&group));
            let a = gathered_loss(&x, 0, 4 * group.rank(), &first);
            let b = gathered_loss(&x, 1, 4 * (2 - group.rank()), &second);
            let grad = |loss: &Tensor<B, 1>| floats(&x.grad(&backward(loss, &group)).unwrap());
            if reversed {
                let b = grad(&b);
                [grad(&a), b]
            } else {
                [grad(&a), grad(&b)]
            }
        });
        for (rank, got) in gradients.into_iter().enumerate() {
            assert_eq!(
                got,
                [0, 1].map(|exchange| wanted(exchange, rank, 3, 2.0)),
                "rank {rank}, reversed {reversed}"
            );
        }
    }
}

/// A rank that has no use for what it gathered still takes part in the adjoint, through the exchange that comes next.
#[test]
fn an_exchange_whose_result_a_rank_drops_still_runs_its_adjoint() {
    let gradients = on_ranks(3, |group| {
        let (a, b) = (leaf::<NoCheckpointing>(1.0), leaf::<NoCheckpointing>(2.0));
        let all_a = collectives::all_gather(deepened(a.clone(), 0), 0, &group);
        // Only rank 0 uses the first exchange.
        let used = (group.rank() == 0).then(|| (all_a * weights(&group, 0)).sum());
        let all_b = collectives::all_gather(deepened(b.clone(), 4 * group.rank()), 0, &group);
        let loss = (all_b * weights(&group, 1)).sum();
        let loss = match used {
            Some(used) => loss + used,
            None => loss,
        };
        let gradients = backward(&loss, &group);
        [a, b].map(|leaf| floats(&leaf.grad(&gradients).unwrap()))
    });
    for (rank, [a, b]) in gradients.into_iter().enumerate() {
        let rank_0_alone: Vec<f64> = (0..2).map(|i| 2.0 * weight(0, 0, 2 * rank + i)).collect();
        assert_eq!(a, rank_0_alone, "rank {rank}");
        assert_eq!(b, wanted(1, rank, 3, 2.0), "rank {rank}");
    }
}

/// A result that only one rank still holds when its graph is cleaned up must not tie the next step to it on that rank alone.
#[test]
fn what_one_rank_keeps_of_an_evaluation_does_not_matter() {
    let gradients = on_ranks(2, |group| {
        let x = leaf::<NoCheckpointing>(1.0);
        let eval = gathered_loss(&x, 7, 0, &group);
        let kept = (group.rank() == 0).then_some(eval);
        // A step with an order of its own: its backward pass cleans up what nobody holds.
        let own = group.with_order(ProgramOrder::new());
        let first = floats(
            &x.grad(&backward(&gathered_loss(&x, 0, 0, &own), &group))
                .unwrap(),
        );
        let second = floats(
            &x.grad(&backward(&gathered_loss(&x, 1, 0, &group), &group))
                .unwrap(),
        );
        drop(kept);
        [first, second]
    });
    for (rank, got) in gradients.into_iter().enumerate() {
        assert_eq!(
            got,
            [0, 1].map(|exchange| wanted(exchange, rank, 2, 2.0)),
            "rank {rank}"
        );
    }
}

/// A chain through one tensor: each exchange works on the result of the one before it.
#[test]
fn exchanges_of_exchanges_have_the_product_of_their_gradients() {
    let gradients = on_ranks(2, |group| {
        let x = Tensor::<Autodiff<TestBackend>, 1>::full([2], 1.0, &device()).require_grad();
        let once = collectives::all_reduce(x.clone(), &group);
        let twice = collectives::all_reduce(once.clone() * once, &group);
        x.grad(&backward(&twice.sum(), &group))
            .unwrap()
            .to_data()
            .to_vec::<f32>()
            .unwrap()
    });
    // Both ranks' losses are Σ 2 (x0 + x1)², with x0 = x1 = 1: each leaf gets 2 · 2 · 2 (x0 + x1).
    assert_eq!(gradients, [[16.0, 16.0], [16.0, 16.0]]);
}
