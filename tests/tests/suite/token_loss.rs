//! Losses of several ranks against the sum over all labels, written out on the host.

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{DType, Tensor, TensorData},
};
use burn_cp::{
    batch::SequenceBatch,
    collectives,
    comm::Groups,
    layout::LayoutPolicy,
    loss::NumLabels,
    sharder::{ContextParallelConfig, Coordinates, CpStep},
};
use burn_cp_tests::{Random, device, floats, on_groups, relative_error, sharder, to_bits};

type B = Autodiff<NdArray<f64>>;

const VOCAB: usize = 5;
const IGNORED: i64 = -100;

/// The mean cross entropy over all labels and its gradient by the logits, written out on the host.
fn reference(logits: &[f64], labels: &[i64], num_labels: usize) -> (f64, Vec<f64>) {
    let (mut loss, mut grad) = (0.0, vec![0.0; logits.len()]);
    for (row, &label) in labels
        .iter()
        .enumerate()
        .filter(|(_, label)| **label != IGNORED)
    {
        let row = row * VOCAB..(row + 1) * VOCAB;
        let total: f64 = logits[row.clone()].iter().map(|logit| logit.exp()).sum();
        let label = usize::try_from(label).unwrap();
        for (class, i) in row.enumerate() {
            let probability = logits[i].exp() / total;
            let wanted = f64::from(u8::from(class == label));
            grad[i] = (probability - wanted) / num_labels as f64;
            if class == label {
                loss -= probability.ln() / num_labels as f64;
            }
        }
    }
    (loss, grad)
}

fn num_labels(labels: &[i64]) -> usize {
    labels.iter().filter(|label| **label != IGNORED).count()
}

/// Labels `[batch, seq]`, of which `keep` says which rows of the batch and tokens have one.
fn labels(batch: usize, seq: usize, keep: impl Fn(usize, usize) -> bool) -> Vec<i64> {
    let label = |i: usize| {
        if keep(i / seq, i % seq) {
            (i * 3 % VOCAB) as i64
        } else {
            IGNORED
        }
    };
    (0..batch * seq).map(label).collect()
}

fn step(
    groups: &Groups,
    layout: LayoutPolicy,
    labels: &[i64],
    [batch, seq]: [usize; 2],
) -> CpStep<B> {
    let cp = sharder(
        groups,
        ContextParallelConfig {
            layout,
            ..Default::default()
        },
    );
    let ids = TensorData::new(vec![1_i64; batch * seq], [batch, seq]);
    let batch =
        SequenceBatch::from_ids(ids).with_labels(TensorData::new(labels.to_vec(), [batch, seq]));
    cp.shard(batch, &device()).unwrap()
}

fn leaf(values: &[f64], shape: [usize; 3]) -> Tensor<B, 3> {
    Tensor::<B, 3>::from_data(TensorData::new(values.to_vec(), shape), &device()).require_grad()
}

fn sum(parts: impl IntoIterator<Item = Vec<f64>>) -> Vec<f64> {
    let add =
        |total: Vec<f64>, part: Vec<f64>| total.iter().zip(part).map(|(a, b)| a + b).collect();
    parts.into_iter().reduce(add).unwrap()
}

fn layouts() -> [LayoutPolicy; 2] {
    [
        LayoutPolicy::Contiguous { multiple: 1 },
        LayoutPolicy::HeadTail,
    ]
}

#[test]
fn shares_of_the_loss_add_up_to_that_of_one_device() {
    let (batch, seq) = (2, 11);
    let logits = Random::new(1).floats(batch * seq * VOCAB);
    // Uneven over ranks: the second row has labels at its end only.
    let labels = labels(batch, seq, |row, token| {
        if row == 0 { token % 3 != 1 } else { token > 8 }
    });
    let (want, want_grad) = reference(&logits, &labels, num_labels(&labels));
    for world_size in [1, 2, 3, 4] {
        for layout in layouts() {
            let ranks = on_groups(&[("cp", world_size)], |groups| {
                let step = step(&groups, layout.clone(), &labels, [batch, seq]);
                let whole = leaf(&logits, [batch, seq, VOCAB]);
                let loss = step
                    .cross_entropy(step.shard_tokens(
                        whole.clone(),
                        1,
                        Coordinates::Input,
                        Some(9.0),
                    ))
                    .unwrap();
                let grads = loss.backward();
                let grad = whole.grad(&grads).unwrap();
                (
                    loss.global_value(),
                    floats(&loss.local),
                    to_bits(&loss.global),
                    floats(&grad),
                )
            });
            for (global, _, bits, _) in &ranks {
                assert!(
                    (global - want).abs() < 1e-12 * want,
                    "{world_size} {layout:?}: {global} {want}"
                );
                assert_eq!(bits, &ranks[0].2, "the same number on every rank");
            }
            let local = sum(ranks.iter().map(|rank| rank.1.clone()));
            assert!(
                (local[0] - want).abs() < 1e-12 * want,
                "{world_size} {layout:?}: {local:?} {want}"
            );
            assert!(relative_error(&sum(ranks.into_iter().map(|rank| rank.3)), &want_grad) < 1e-12);
        }
    }
}

#[test]
fn what_stands_at_ignored_positions_does_not_matter() {
    let (batch, seq) = (1, 16);
    // The second of two ranks has no label, the first has some.
    let labels = labels(batch, seq, |_, token| token < 6);
    let clean = Random::new(2).floats(seq * VOCAB);
    let (want, want_grad) = reference(&clean, &labels, 6);
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut logits = clean.clone();
        logits[6 * VOCAB..].fill(poison);
        let ranks = on_groups(&[("cp", 2)], |groups| {
            let step = step(
                &groups,
                LayoutPolicy::Contiguous { multiple: 1 },
                &labels,
                [batch, seq],
            );
            let local = leaf(&logits, [batch, seq, VOCAB]);
            // A collective between parameters and logits: its adjoint needs both ranks.
            let shared = collectives::all_reduce(
                local.clone().slice([0..1, 0..1]).mul_scalar(0.5),
                step.group(),
            );
            let row = step.shard_tokens(
                local.clone().slice_assign([0..1, 0..1], shared),
                1,
                Coordinates::Padded,
                None,
            );
            let loss = step.cross_entropy(row).unwrap();
            let grads = loss.backward();
            (
                loss.global_value(),
                floats(&loss.local)[0],
                floats(&local.grad(&grads).unwrap()),
            )
        });
        assert!(
            (ranks[0].0 - want).abs() < 1e-12 && ranks[0].0 == ranks[1].0,
            "{poison}: {} {want}",
            ranks[0].0
        );
        assert_eq!(
            ranks[1].1, 0.0,
            "{poison}: a rank without labels has no share"
        );
        let grad = sum(ranks.iter().map(|rank| rank.2.clone()));
        assert!(
            relative_error(&grad, &want_grad) < 1e-12,
            "{poison}: {grad:?}"
        );
        assert!(
            ranks[1].2[VOCAB..].iter().all(|value| *value == 0.0),
            "{poison}: {:?}",
            ranks[1].2
        );
        // Half of the gradient of the first token came through the other rank.
        let through_the_other = relative_error(&ranks[1].2[..VOCAB], &halves(&want_grad[..VOCAB]));
        assert!(through_the_other < 1e-12, "{poison}: {:?}", ranks[1].2);
    }
}

fn halves(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| value * 0.5).collect()
}

#[test]
fn without_any_label_loss_and_gradients_are_zero() {
    let seq = 8;
    let labels = vec![IGNORED; seq];
    let ranks = on_groups(&[("cp", 2)], |groups| {
        let step = step(&groups, LayoutPolicy::HeadTail, &labels, [1, seq]);
        let whole = leaf(&vec![f64::NAN; seq * VOCAB], [1, seq, VOCAB]);
        let loss = step
            .cross_entropy(step.shard_tokens(whole.clone(), 1, Coordinates::Padded, None))
            .unwrap();
        let grads = loss.backward();
        (
            loss.global_value(),
            floats(&loss.local)[0],
            floats(&whole.grad(&grads).unwrap()),
        )
    });
    for (global, local, grad) in ranks {
        assert_eq!((global, local), (0.0, 0.0));
        assert!(grad.iter().all(|value| *value == 0.0), "{grad:?}");
    }
}

#[test]
fn microbatches_add_up_to_one_large_batch() {
    let seq = 10;
    let logits = [
        Random::new(3).floats(seq * VOCAB),
        Random::new(4).floats(seq * VOCAB),
    ];
    // One label in the first microbatch, many in the second.
    let labels = [
        labels(1, seq, |_, token| token == 7),
        labels(1, seq, |_, token| token != 7),
    ];
    let total = num_labels(&labels[0]) + num_labels(&labels[1]);
    let wanted: Vec<_> = logits
        .iter()
        .zip(&labels)
        .map(|(logits, labels)| reference(logits, labels, total))
        .collect();
    let ranks = on_groups(&[("cp", 3)], |groups| {
        let steps: Vec<_> = labels
            .iter()
            .map(|labels| step(&groups, LayoutPolicy::HeadTail, labels, [1, seq]))
            .collect();
        let counts = steps.iter().map(|step| step.num_labels().unwrap().global);
        let count = NumLabels {
            global: counts.sum(),
        };
        assert_eq!(count.global, total as u64);
        let parts = steps.iter().zip(&logits).map(|(step, logits)| {
            let whole = leaf(logits, [1, seq, VOCAB]);
            let loss = step
                .cross_entropy_over(
                    step.shard_tokens(whole.clone(), 1, Coordinates::Input, Some(0.0)),
                    count,
                )
                .unwrap();
            let grads = loss.backward();
            (loss.global_value(), floats(&whole.grad(&grads).unwrap()))
        });
        parts.collect::<Vec<_>>()
    });
    for (i, (loss, grad)) in wanted.iter().enumerate() {
        assert!((ranks[0][i].0 - loss).abs() < 1e-12 * loss);
        assert!(relative_error(&sum(ranks.iter().map(|rank| rank[i].1.clone())), grad) < 1e-12);
    }
    // Dividing each microbatch by its own labels would give another loss.
    let alone = reference(&logits[0], &labels[0], 1).0;
    assert!((ranks[0][0].0 - alone).abs() > 0.1 * alone);
}

/// 72 of 128 ranks have no label: they contribute 0 and a gradient of 0, and the others' gradients are those of one device.
#[test]
fn ranks_without_labels_in_a_large_world_change_nothing() {
    let (world_size, with_labels) = (128, 56);
    let seq = 2 * world_size;
    let logits = Random::new(5).floats(seq * VOCAB);
    let labels = labels(1, seq, |_, token| token < 2 * with_labels && token % 5 != 0);
    let (want, want_grad) = reference(&logits, &labels, num_labels(&labels));
    let ranks = on_groups(&[("cp", world_size)], |groups| {
        let layout = LayoutPolicy::Contiguous { multiple: 1 };
        let step = step(&groups, layout, &labels, [1, seq]);
        let whole = leaf(&logits, [1, seq, VOCAB]);
        let local = step.shard_tokens(whole.clone(), 1, Coordinates::Input, None);
        let loss = step.cross_entropy(local).unwrap();
        let grads = loss.backward();
        let grad = whole.grad(&grads).expect("every rank is on the graph");
        (loss.global_value(), floats(&loss.local)[0], floats(&grad))
    });
    for (rank, (global, local, grad)) in ranks.iter().enumerate() {
        assert!((global - want).abs() < 1e-12, "{global} {want}");
        assert!(grad.iter().all(|value| value.is_finite()), "rank {rank}");
        if rank >= with_labels {
            assert_eq!(*local, 0.0, "rank {rank}");
            assert!(grad.iter().all(|value| *value == 0.0), "rank {rank}");
        }
    }
    let grad = sum(ranks.into_iter().map(|(_, _, grad)| grad));
    assert!(relative_error(&grad, &want_grad) < 1e-14);
}

/// Half a float has no place for the sum of many labels' losses.
#[test]
fn the_loss_of_logits_in_half_is_computed_in_f32() {
    type Half = Autodiff<burn::backend::Flex>;
    let (tokens, vocab) = (4096, 8);
    let labels = TensorData::new(vec![1_i64; tokens], [1, tokens]);
    let want = (7.0 + 20.0_f64.exp()).ln();
    for dtype in [DType::F16, DType::BF16] {
        for world_size in [1, 2] {
            let results = on_groups(&[("cp", world_size)], |groups| {
                let cp = sharder(&groups, ContextParallelConfig::default());
                let ids = TensorData::zeros::<i64, _>([1, tokens]);
                let batch = SequenceBatch::<Half>::from_ids(ids).with_labels(labels.clone());
                let step = cp.shard(batch, &device()).unwrap();
                let logits = Tensor::<Half, 3>::zeros([1, step.local_len(), vocab], &device());
                let first = logits.clone().slice([0..1, 0..step.local_len(), 0..1]);
                let logits = logits
                    .slice_assign([0..1, 0..step.local_len(), 0..1], first + 20.0)
                    .cast(dtype)
                    .require_grad();
                let loss = step.cross_entropy(logits.clone()).unwrap();
                let grads = loss.backward();
                let grad = logits.grad(&grads).unwrap();
                assert_eq!(grad.dtype(), dtype);
                (loss.global_value(), floats(&grad)[..2].to_vec())
            });
            for (loss, grad) in results {
                assert!((loss - want).abs() < 1e-5 * want, "{dtype:?}: {loss}");
                let share = 1.0 / tokens as f64;
                assert!(relative_error(&grad, &[share, -share]) < 1e-2, "{grad:?}");
            }
        }
    }
}
