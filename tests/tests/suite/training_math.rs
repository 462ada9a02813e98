//! Losses and gradients of several ranks against one: plain sums on the host are the reference.

use std::time::Duration;

use burn::{
    backend::{Autodiff, Flex, NdArray},
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{Tensor, TensorData, backend::Backend},
};
use burn_cp::{
    batch::SequenceBatch,
    collectives,
    comm::Groups,
    layout::LayoutPolicy,
    loss::NumLabels,
    nn::{ParameterError, check_parameters},
    optim::{GradientSync, broadcast_parameters, clip_by_global_norm, sync_gradients},
    sharder::{ContextParallelConfig, CpStep},
};
use burn_cp_tests::{Random, floats, on_groups, relative_error, sharder, to_bits, with_deadline};

type Inner = NdArray<f64>;
type B = Autodiff<Inner>;

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
    cp.shard(batch, &Default::default()).unwrap()
}

fn leaf(values: &[f64], shape: [usize; 3]) -> Tensor<B, 3> {
    Tensor::<B, 3>::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
        .require_grad()
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
                    .cross_entropy(step.shard_tokens(whole.clone(), 1, Some(9.0)))
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
            let row = step.shard_tokens(local.clone().slice_assign([0..1, 0..1], shared), 1, None);
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
            .cross_entropy(step.shard_tokens(whole.clone(), 1, None))
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
                .cross_entropy_over(step.shard_tokens(whole.clone(), 1, Some(0.0)), count)
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

/// Parameters of several shapes, one of them frozen and one that stands at two places.
#[derive(Module, Debug)]
struct Parameters<B: Backend> {
    matrix: Param<Tensor<B, 2>>,
    frozen: Param<Tensor<B, 1>>,
    vector: Param<Tensor<B, 1>>,
    cube: Param<Tensor<B, 3>>,
    again: Param<Tensor<B, 2>>,
}

fn parameters<B: Backend>(seed: u64) -> Parameters<B> {
    let device = B::Device::default();
    let mut random = Random::new(seed);
    let mut draw =
        |shape: &[usize]| TensorData::new(random.floats(shape.iter().product()), shape.to_vec());
    let matrix = Param::from_tensor(Tensor::<B, 2>::from_data(draw(&[3, 4]), &device));
    Parameters {
        again: matrix.clone(),
        matrix,
        frozen: Param::from_tensor(Tensor::<B, 1>::from_data(draw(&[6]), &device)).no_grad(),
        vector: Param::from_tensor(Tensor::<B, 1>::from_data(draw(&[5]), &device)),
        cube: Param::from_tensor(Tensor::<B, 3>::from_data(draw(&[2, 2, 2]), &device)),
    }
}

/// Gradients of rank `rank`: the vector's everywhere, the matrix's but on rank 1, the cube's on none.
fn gradients<I: Backend, B: burn::tensor::backend::AutodiffBackend<InnerBackend = I>>(
    module: &Parameters<B>,
    rank: usize,
) -> GradientsParams {
    let mut grads = GradientsParams::new();
    let full = |rank: usize| rank as f64 + 1.0;
    if rank != 1 {
        let values: Vec<f64> = (0..12).map(|i| full(rank) * f64::from(i)).collect();
        let tensor =
            Tensor::<I, 2>::from_data(TensorData::new(values, [3, 4]), &Default::default());
        grads.register(module.matrix.id, tensor);
    }
    grads.register(
        module.vector.id,
        Tensor::<I, 1>::full([5], full(rank), &Default::default()),
    );
    grads
}

fn synced_over<B>(
    sync: GradientSync,
    axes: &[&str],
) -> Vec<(Vec<f64>, Vec<f64>, Vec<f64>, bool, usize)>
where
    B: burn::tensor::backend::AutodiffBackend,
    B::InnerBackend: burn_cp::collectives::CollectiveBackend,
{
    type I<B> = <B as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    on_groups(&[("dp", 2), ("cp", 2)], |groups| {
        let module = parameters::<B>(5);
        let grads = gradients(&module, groups.global_rank());
        let grads = sync.sync::<B, _>(grads, &module, &groups.along(axes).unwrap());
        (
            floats(&grads.get::<I<B>, 2>(module.matrix.id).unwrap()),
            floats(&grads.get::<I<B>, 1>(module.vector.id).unwrap()),
            floats(&grads.get::<I<B>, 3>(module.cube.id).unwrap()),
            grads.get::<I<B>, 1>(module.frozen.id).is_some(),
            grads.len(),
        )
    })
}

fn check_sync<B>()
where
    B: burn::tensor::backend::AutodiffBackend,
    B::InnerBackend: burn_cp::collectives::CollectiveBackend,
{
    let ramp = |factor: f64| (0..12).map(|i| factor * f64::from(i)).collect::<Vec<_>>();
    // Smaller than one parameter, one or two parameters, all of them.
    for bucket_elements in [1, 5, 17, 1 << 20] {
        let sync = GradientSync { bucket_elements };
        for synced in synced_over::<B>(sync, &["dp", "cp"]) {
            // Rank 1 has no gradient of the matrix: 1 + 3 + 4.
            assert_eq!(
                synced,
                (ramp(8.0), vec![10.0; 5], vec![0.0; 8], false, 3),
                "{bucket_elements}"
            );
        }
        let over_cp = synced_over::<B>(sync, &["cp"]);
        let expected = [(1.0, 3.0), (1.0, 3.0), (7.0, 7.0), (7.0, 7.0)];
        for (synced, (matrix, vector)) in over_cp.into_iter().zip(expected) {
            assert_eq!(
                synced,
                (ramp(matrix), vec![vector; 5], vec![0.0; 8], false, 3),
                "{bucket_elements}"
            );
        }
    }
}

#[test]
fn gradients_are_summed_whatever_the_buckets_and_missing_ones_count_as_zero() {
    check_sync::<Autodiff<NdArray<f64>>>();
    check_sync::<Autodiff<NdArray<f32>>>();
    check_sync::<Autodiff<Flex>>();
}

#[test]
fn synchronising_over_an_unknown_axis_is_refused() {
    let results = on_groups(&[("dp", 1), ("cp", 2)], |groups| {
        let module = parameters::<B>(5);
        sync_gradients::<B, _>(gradients(&module, 0), &module, &groups, &["tp"])
            .map(|_| ())
            .unwrap_err()
            .to_string()
    });
    assert!(
        results.iter().all(|error| error.contains("tp")),
        "{results:?}"
    );
}

#[test]
fn clipping_scales_all_gradients_by_one_factor() {
    let module = parameters::<B>(6);
    let grads = || gradients(&module, 2);
    // 3² · (0² + .. + 11²) and 5 · 3².
    let norm = (9.0_f64 * 506.0 + 45.0).sqrt();
    let values = |grads: &GradientsParams| {
        let matrix = floats(&grads.get::<Inner, 2>(module.matrix.id).unwrap());
        [
            matrix,
            floats(&grads.get::<Inner, 1>(module.vector.id).unwrap()),
        ]
        .concat()
    };
    let before = values(&grads());

    let (clipped, found) = clip_by_global_norm::<B, _>(grads(), &module, 2.0);
    assert!((found - norm).abs() < 1e-12 * norm);
    let wanted: Vec<f64> = before.iter().map(|value| value * 2.0 / norm).collect();
    assert!(relative_error(&values(&clipped), &wanted) < 1e-14);

    let (kept, _) = clip_by_global_norm::<B, _>(grads(), &module, norm + 1.0);
    assert_eq!(values(&kept), before);

    let mut broken = grads();
    broken.remove::<Inner, 1>(module.vector.id);
    broken.register(
        module.vector.id,
        Tensor::<Inner, 1>::full([5], f64::NAN, &Default::default()),
    );
    let (kept, found) = clip_by_global_norm::<B, _>(broken, &module, 1.0);
    assert!(found.is_nan());
    assert_eq!(values(&kept)[..12], before[..12]);
}

#[test]
fn broadcast_gives_every_rank_the_roots_parameters_as_leaves_of_its_own() {
    let shared = parameters::<B>(70);
    let results = on_groups(&[("cp", 3)], |groups| {
        let group = groups.world().unwrap();
        // Rank 2 is the root; the others start elsewhere, two of them on one leaf.
        let module = if group.rank() == 2 {
            parameters::<B>(72)
        } else {
            shared.clone()
        };
        let module = broadcast_parameters(module, 2, &group);
        let checked = check_parameters(&module, &group);
        let trained = [
            module.matrix.is_require_grad(),
            module.frozen.is_require_grad(),
        ];
        (
            checked.is_ok(),
            trained,
            floats(&module.matrix.val()),
            floats(&module.frozen.val()),
        )
    });
    let root = parameters::<B>(72);
    for result in results {
        assert_eq!(
            result,
            (
                true,
                [true, false],
                floats(&root.matrix.val()),
                floats(&root.frozen.val())
            )
        );
    }
}

/// What every rank says of the start, given each rank's module.
fn checked(module: impl Fn(usize) -> Parameters<B> + Sync) -> Vec<Result<(), ParameterError>> {
    let results = std::sync::Mutex::new(vec![None; 3]);
    let failure = with_deadline(&[("cp", 3)], Duration::from_secs(20), |groups| {
        let group = groups.world().unwrap();
        results.lock().unwrap()[group.rank()] =
            Some(check_parameters(&module(group.rank()), &group));
    });
    let results: Vec<_> = results
        .into_inner()
        .unwrap()
        .into_iter()
        .flatten()
        .collect();
    assert_eq!(
        failure.is_ok(),
        results.iter().all(Result::is_ok),
        "the launcher knows too"
    );
    results
}

#[test]
fn a_rank_that_starts_elsewhere_is_named_on_every_rank() {
    assert!(checked(|_| parameters(8)).iter().all(Result::is_ok));
    for odd in 0..3 {
        for result in checked(|rank| parameters(if rank == odd { 9 } else { 8 })) {
            match result {
                Err(ParameterError::Differ {
                    rank,
                    path,
                    expected,
                    got,
                }) => {
                    assert_eq!((rank, path.as_str()), (odd, "matrix"));
                    assert!(
                        expected != got && expected.contains("[3, 4]"),
                        "{expected} {got}"
                    );
                }
                other => panic!("not a difference: {other:?}"),
            }
        }
    }
}

#[test]
fn the_first_parameter_that_differs_is_named_frozen_or_not() {
    let changed = |rank: usize| {
        let mut module = parameters::<B>(8);
        if rank == 1 {
            module.frozen = module.frozen.map(|tensor| tensor.add_scalar(1e-15));
        }
        module
    };
    for result in checked(changed) {
        assert!(
            matches!(result, Err(ParameterError::Differ { rank: 1, path, .. }) if path == "frozen")
        );
    }
}

#[test]
fn ranks_that_share_a_leaf_are_named_on_every_rank() {
    let shared = parameters::<B>(8);
    for result in checked(|rank| {
        if rank == 1 {
            parameters(8)
        } else {
            shared.clone()
        }
    }) {
        match result {
            Err(ParameterError::SharedLeaf {
                first,
                second,
                path,
            }) => {
                assert_eq!((first, second, path.as_str()), (0, 2, "matrix"));
            }
            other => panic!("not a shared leaf: {other:?}"),
        }
    }
    assert!(
        checked(|_| shared.clone().fork(&Default::default()))
            .iter()
            .all(Result::is_ok)
    );
}
