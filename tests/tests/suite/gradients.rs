//! Gradients and parameters over ranks: sums, clipping, broadcast, and the check of the start.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use burn::{
    backend::{Autodiff, NdArray},
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{
        Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_cp::{
    collectives::CollectiveBackend,
    comm::ProcessGroup,
    launch::LaunchError,
    nn::{ParameterError, check_parameters},
    optim::{GradientSync, broadcast_parameters, clip_by_global_norm, sync_gradients},
};
use burn_cp_tests::{
    DEADLINE, Random, TestBackend, device, floats, on_groups, relative_error, with_deadline,
};

type Inner = NdArray<f64>;
type B = Autodiff<Inner>;

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
    let device: B::Device = device();
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

/// Burn's own concatenation fails this within a few rounds.
#[test]
fn a_concatenation_keeps_its_gradients_beside_backward_passes_of_other_threads() {
    let ones = |rows: usize| Tensor::<B, 2>::ones([rows, 500], &device());
    let (done, weight) = (AtomicBool::new(false), ones(1).require_grad());
    let wrong = std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let other = ones(1).require_grad();
                    other.clone().sum().backward();
                }
            });
        }
        // From the second round on, the graph of a round knows the parameter by name only.
        let round = |_: &u32| {
            let rows = weight.clone().expand([200, 500]) * 2.0;
            let joined = burn_cp::cat(vec![rows, ones(1)], 0);
            let grads = joined.sum().backward();
            let grad = weight.grad(&grads).map(|grad| floats(&grad));
            grad != Some(vec![400.0; 500])
        };
        let rounds = threads.spawn(move || (0..100).find(round));
        let wrong = rounds.join();
        done.store(true, Ordering::Relaxed);
        wrong.unwrap()
    });
    assert_eq!(wrong, None, "the round whose gradient was lost");
}

/// Gradients of rank `rank`: the vector's everywhere, the matrix's but on rank 1, the cube's on none.
fn gradients<I: Backend, B: AutodiffBackend<InnerBackend = I>>(
    module: &Parameters<B>,
    rank: usize,
) -> GradientsParams {
    let mut grads = GradientsParams::new();
    let full = |rank: usize| rank as f64 + 1.0;
    if rank != 1 {
        let values: Vec<f64> = (0..12).map(|i| full(rank) * f64::from(i)).collect();
        let tensor = Tensor::<I, 2>::from_data(TensorData::new(values, [3, 4]), &device());
        grads.register(module.matrix.id, tensor);
    }
    grads.register(
        module.vector.id,
        Tensor::<I, 1>::full([5], full(rank), &device()),
    );
    grads
}

#[allow(clippy::type_complexity)]
fn synced_over<B>(
    sync: GradientSync,
    axes: &[&str],
) -> Vec<(Vec<f64>, Vec<f64>, Vec<f64>, bool, usize)>
where
    B: AutodiffBackend,
    B::InnerBackend: CollectiveBackend,
{
    type I<B> = <B as AutodiffBackend>::InnerBackend;
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
    B: AutodiffBackend,
    B::InnerBackend: CollectiveBackend,
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
    check_sync::<Autodiff<TestBackend>>();
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

    let clip = |grads, max_norm| {
        clip_by_global_norm::<B, _>(grads, &module, max_norm, &ProcessGroup::solo()).unwrap()
    };
    let (clipped, found) = clip(grads(), 2.0);
    assert!((found - norm).abs() < 1e-12 * norm);
    let wanted: Vec<f64> = before.iter().map(|value| value * 2.0 / norm).collect();
    assert!(relative_error(&values(&clipped), &wanted) < 1e-14);

    let (kept, _) = clip(grads(), norm + 1.0);
    assert_eq!(values(&kept), before);

    let mut broken = grads();
    broken.remove::<Inner, 1>(module.vector.id);
    broken.register(
        module.vector.id,
        Tensor::<Inner, 1>::full([5], f64::NAN, &device()),
    );
    let (kept, found) = clip(broken, 1.0);
    assert!(found.is_nan());
    assert_eq!(values(&kept)[..12], before[..12]);
}

/// On the group's ranks, gradients of 1 and their multiples: the norm that each takes, and the first number of its clipped gradients.
fn clipped(of_rank: impl Fn(usize) -> f64 + Sync) -> Result<Vec<(f64, f64)>, LaunchError> {
    with_deadline(&[("cp", 3)], DEADLINE, |groups| {
        let group = groups.world().unwrap();
        let module = parameters::<B>(6);
        let mut grads = GradientsParams::new();
        let values = Tensor::<Inner, 1>::full([5], of_rank(group.rank()), &device());
        grads.register(module.vector.id, values);
        let (grads, norm) = clip_by_global_norm::<B, _>(grads, &module, 1.0, &group)
            .unwrap_or_else(|error| error.raise());
        let values = grads.get::<Inner, 1>(module.vector.id).unwrap();
        (norm, floats(&values)[0])
    })
}

/// A device may add up in another order each time.
#[test]
fn ranks_whose_norms_differ_in_the_last_bits_clip_by_one_factor() {
    let norm = 5.0_f64.sqrt();
    let last_bits = |rank: usize| 1.0 + 1e-9 * rank as f64;
    for (rank, (found, value)) in clipped(last_bits).unwrap().into_iter().enumerate() {
        assert_eq!(found, clipped(last_bits).unwrap()[0].0);
        assert!((found - norm).abs() < 1e-12, "{found}");
        assert!((value - last_bits(rank) / norm).abs() < 1e-12, "{value}");
    }
    let ends = clipped(|rank| if rank == 2 { f64::NAN } else { f64::INFINITY }).unwrap();
    assert!(ends.iter().all(|(norm, _)| norm.is_infinite()), "{ends:?}");
}

#[test]
fn gradients_that_were_not_synchronised_are_not_clipped() {
    for odd in [1.01, f64::NAN] {
        let error = clipped(|rank| if rank == 1 { odd } else { 1.0 }).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("the norm of the gradients") && error.contains("rank 1"),
            "{error}"
        );
    }
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
        checked(|_| shared.clone().fork(&device()))
            .iter()
            .all(Result::is_ok)
    );
}
