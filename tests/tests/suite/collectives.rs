//! Every collective against its meaning on host arrays, and against its adjoint.

use burn::{
    backend::{
        Autodiff, NdArray,
        autodiff::checkpoint::strategy::{
            BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
        },
    },
    tensor::{Bool, DType, Int, Tensor},
};
use burn_cp::{
    collectives::{self, Call, Collective, CollectiveBackend, CollectiveElement, Payload},
    comm::ProcessGroup,
};
use burn_cp_tests::{
    DEADLINE, DTYPES, Host, Random, TestBackend, backward, bools_as_ints, device, floats,
    on_groups, on_ranks, to_bits, with_deadline,
};
use proptest::prelude::*;
use std::time::{Duration, Instant};

use crate::operations::{KINDS, Kind, MOVING, Operation};

/// Values are small integers, so that sums are exact in every dtype and the results can be compared exactly.
fn floats_arrive_as_planned<B: CollectiveBackend>(dtype: DType) {
    let mut random = Random::new(1);
    for world_size in 1..=5 {
        for kind in KINDS.into_iter().flat_map(|kind| [kind; 4]) {
            let op = Operation::random(kind, world_size, &mut random);
            let inputs = op.inputs(|len| random.small_ints(len));
            let got = on_ranks(world_size, |group| {
                let result = op.on_tensor(inputs[group.rank()].tensor::<B>(dtype), &group);
                assert_eq!(result.dtype(), dtype, "{op:?}");
                Host::of(&result)
            });
            assert_eq!(got, op.on_host(&inputs), "{dtype:?} {op:?} of {inputs:?}");
        }
    }
}

#[test]
fn floats_arrive_as_planned_in_every_dtype() {
    for &dtype in DTYPES {
        floats_arrive_as_planned::<TestBackend>(dtype);
    }
}

#[test]
fn floats_arrive_as_planned_on_ndarray() {
    // Burn keeps one default dtype per device and process, so that `NdArray<f32>` and `NdArray<f64>` must not meet in one.
    floats_arrive_as_planned::<NdArray<f64>>(DType::F32);
    floats_arrive_as_planned::<NdArray<f64>>(DType::F64);
}

#[test]
fn floats_arrive_as_planned_under_autodiff() {
    floats_arrive_as_planned::<Autodiff<TestBackend>>(DType::F32);
    floats_arrive_as_planned::<Autodiff<NdArray<f64>, BalancedCheckpointing>>(DType::F64);
}

fn integers_and_booleans_arrive_as_planned<B: CollectiveBackend>() {
    let mut random = Random::new(2);
    for world_size in 1..=5 {
        for kind in KINDS.into_iter().flat_map(|kind| [kind; 2]) {
            let op = Operation::random(kind, world_size, &mut random);
            let inputs = op.inputs(|len| random.small_ints(len));
            let got = on_ranks(world_size, |group| {
                Host::of::<B, Int>(&op.on_tensor(inputs[group.rank()].int_tensor(), &group))
            });
            assert_eq!(got, op.on_host(&inputs), "{op:?}");
        }
        for kind in MOVING {
            let op = Operation::random(kind, world_size, &mut random);
            let inputs = op.inputs(|len| {
                random
                    .small_ints(len)
                    .iter()
                    .map(|x| f64::from(*x > 0.0))
                    .collect()
            });
            let got = on_ranks(world_size, |group| {
                let mask: Tensor<B, 3, Bool> = inputs[group.rank()].bool_tensor();
                Host::of::<B, Int>(&bools_as_ints(op.moving(mask, &group)))
            });
            assert_eq!(got, op.on_host(&inputs), "{op:?}");
        }
    }
}

#[test]
fn integers_and_booleans_arrive_as_planned_on_every_backend() {
    integers_and_booleans_arrive_as_planned::<TestBackend>();
    integers_and_booleans_arrive_as_planned::<NdArray<f64>>();
    integers_and_booleans_arrive_as_planned::<Autodiff<TestBackend>>();
}

/// Sums start from rank 0 and go up, in the dtype, or in `f32` where the dtype is a half; to the bit.
#[test]
fn sums_run_in_rank_order() {
    let mut random = Random::new(3);
    for &dtype in DTYPES {
        for world_size in 2..=5 {
            let inputs: Vec<Host> = (0..world_size)
                .map(|_| Host {
                    shape: [2, 5, 3],
                    values: random.floats(30),
                })
                .collect();
            let tensors: Vec<Tensor<TestBackend, 3>> =
                inputs.iter().map(|input| input.tensor(dtype)).collect();
            let wide = if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            };
            let sum = tensors[1..]
                .iter()
                .fold(tensors[0].clone().cast(wide), |sum, next| {
                    sum + next.clone().cast(wide)
                })
                .cast(dtype);
            let sizes: Vec<usize> = (0..world_size)
                .map(|r| if r == 1 { 6 - world_size } else { 1 })
                .collect();
            let got = on_ranks(world_size, |group| {
                let mine = tensors[group.rank()].clone();
                let all = collectives::all_reduce(mine.clone(), &group);
                let part = collectives::reduce_scatter(mine, 1, &sizes, &group);
                (
                    to_bits(&all),
                    to_bits(&collectives::all_gather_sized(part, 1, &sizes, &group)),
                )
            });
            for (all, parts) in got {
                assert_eq!(
                    all,
                    to_bits(&sum),
                    "all_reduce of {world_size} ranks in {dtype:?}"
                );
                assert_eq!(
                    parts,
                    to_bits(&sum),
                    "reduce_scatter of {world_size} ranks in {dtype:?}"
                );
            }
        }
    }
}

/// `<A x, y> = <x, Aᵀ y>` over all ranks, with `Aᵀ y` from the backward pass; `A` is linear, so that one gradient serves any `x`.
fn adjoint_is_the_transpose<C: CheckpointStrategy>(op: &Operation, random: &mut Random) {
    type Inner = NdArray<f64>;
    let world_size = op.on_host(&op.inputs(|len| vec![0.0; len])).len();
    let inputs = op.inputs(|len| random.floats(len));
    let outputs = op.on_host(&inputs);
    let weights: Vec<Host> = outputs
        .iter()
        .map(|out| Host {
            shape: out.shape,
            values: random.floats(out.values.len()),
        })
        .collect();
    let gradients = on_ranks(world_size, |group| {
        let x = inputs[group.rank()]
            .tensor::<Autodiff<Inner, C>>(DType::F64)
            .require_grad();
        let out = op.on_tensor(x.clone(), &group);
        let loss = (out * weights[group.rank()].tensor(DType::F64)).sum();
        let gradients = backward(&loss, &group);
        Host::of(&x.grad(&gradients).expect("the input is a leaf of the loss"))
    });
    for _ in 0..3 {
        let x = op.inputs(|len| random.floats(len));
        let dot = |a: &[Host], b: &[Host]| a.iter().zip(b).map(|(a, b)| a.dot(b)).sum::<f64>();
        let (left, right) = (dot(&op.on_host(&x), &weights), dot(&x, &gradients));
        assert!(
            (left - right).abs() <= 1e-12 * left.abs().max(1.0),
            "{op:?}: {left} against {right}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_adjoint_is_the_transpose(seed in any::<u64>(), world_size in 1_usize..=5, kind in 0..KINDS.len()) {
        let mut random = Random::new(seed);
        let op = Operation::random(KINDS[kind], world_size, &mut random);
        adjoint_is_the_transpose::<NoCheckpointing>(&op, &mut random);
        adjoint_is_the_transpose::<BalancedCheckpointing>(&op, &mut random);
    }
}

#[test]
fn every_kind_has_its_adjoint() {
    let mut random = Random::new(4);
    for kind in KINDS {
        for world_size in [2, 3] {
            let op = Operation::random(kind, world_size, &mut random);
            adjoint_is_the_transpose::<NoCheckpointing>(&op, &mut random);
            adjoint_is_the_transpose::<BalancedCheckpointing>(&op, &mut random);
        }
    }
}

/// Rows that went to several ranks get the sum of what all of them have for it, rows that went nowhere get 0.
#[test]
fn gradients_of_rows_that_several_ranks_took_are_summed() {
    use burn_cp::collectives::{ExchangePlan, Piece};
    let take = |source, range| Piece { source, range };
    let pieces = [
        vec![take(0, 1..3)],
        vec![take(0, 0..2), take(1, 0..1)],
        vec![take(0, 1..2), take(0, 1..2)],
    ];
    let gradients = on_ranks(3, |group| {
        let plan = ExchangePlan::new(&[4, 2, 1], &pieces, group.rank()).unwrap();
        let x =
            Tensor::<Autodiff<TestBackend>, 1>::zeros([plan.input_len()], &device()).require_grad();
        let out = collectives::exchange(x.clone(), 0, &plan.into(), &group);
        let loss = out
            .mul_scalar(10_f64.powi(i32::try_from(group.rank()).unwrap()))
            .sum();
        x.grad(&backward(&loss, &group))
            .unwrap()
            .to_data()
            .to_vec::<f32>()
            .unwrap()
    });
    assert_eq!(
        gradients,
        [vec![10.0, 211.0, 1.0, 0.0], vec![10.0, 0.0], vec![0.0]]
    );
}

/// Groups along different axes of one mesh do not hear each other, also when their operations overlap.
#[test]
fn several_groups_of_one_world_work_at_the_same_time() {
    let sums = on_groups(&[("dp", 2), ("cp", 3)], |groups| {
        let [dp, cp, both] =
            [&["dp"][..], &["cp"], &["dp", "cp"]].map(|axes| groups.along(axes).unwrap());
        let mut all = Vec::new();
        for round in 0..20_u16 {
            let value = f32::from(round) + f32::from(1_u16 << groups.global_rank());
            let mine = Tensor::<TestBackend, 1>::full([1], value, &device());
            let sum = |group| collectives::all_reduce(mine.clone(), group).into_scalar();
            // The two rows of the mesh take their groups in different orders.
            let (a, b) = if groups
                .mesh()
                .coordinate(groups.global_rank(), "dp")
                .unwrap()
                == 0
            {
                let a = sum(&cp);
                (
                    a,
                    collectives::all_gather(mine.clone(), 0, &cp)
                        .into_data()
                        .to_vec::<f32>()
                        .unwrap(),
                )
            } else {
                let b = collectives::all_gather(mine.clone(), 0, &cp)
                    .into_data()
                    .to_vec::<f32>()
                    .unwrap();
                // A lone reduction of a group of one's own number.
                (b.iter().sum(), b)
            };
            if groups
                .mesh()
                .coordinate(groups.global_rank(), "dp")
                .unwrap()
                == 1
            {
                assert_eq!(sum(&cp), a);
            }
            assert_eq!(b.len(), 3);
            all.push([a, sum(&dp), sum(&both)]);
        }
        all
    });
    for (rank, rounds) in sums.iter().enumerate() {
        for (round, got) in rounds.iter().enumerate() {
            let value = |rank: usize| (round + (1 << rank)) as f32;
            let row = rank / 3 * 3;
            let want = [
                (row..row + 3).map(value).sum::<f32>(),
                value(rank) + value((rank + 3) % 6),
                (0..6).map(value).sum(),
            ];
            assert_eq!(*got, want, "rank {rank}, round {round}");
        }
    }
}

#[test]
fn one_rank_alone_keeps_what_it_has() {
    let mut random = Random::new(5);
    for kind in KINDS
        .into_iter()
        .filter(|kind| !matches!(kind, Kind::Exchange | Kind::ExchangeReverse))
    {
        let op = Operation::random(kind, 1, &mut random);
        let inputs = op.inputs(|len| random.floats(len));
        let group = burn_cp::comm::ProcessGroup::solo();
        assert_eq!(
            Host::of(&op.on_tensor(inputs[0].tensor::<TestBackend>(DType::F64), &group)),
            inputs[0]
        );
    }
}

fn payload(len: usize, value: f64) -> Payload<TestBackend> {
    burn::tensor::Float::into_payload(Tensor::<TestBackend, 1>::full([len], value, &device()))
}

fn start(len: usize, value: f64, group: &ProcessGroup) -> collectives::Pending<TestBackend> {
    let call = Call::forward(group, "test");
    TestBackend::collective_start(payload(len, value), &Collective::AllReduce, group, call)
}

fn values(payload: Payload<TestBackend>) -> Vec<f64> {
    floats(&burn::tensor::Float::from_payload::<1>(payload))
}

#[test]
fn collectives_that_are_under_way_together_may_be_finished_in_any_order() {
    for world_size in 1..=4 {
        on_ranks(world_size, |group| {
            let sums: f64 = (1..=world_size).map(|rank| rank as f64).sum();
            for round in 0..3 {
                let own = 1.0 + group.rank() as f64;
                let mut started: Vec<_> = (1..=4)
                    .map(|len| (len, start(len, own * len as f64, &group)))
                    .collect();
                // Each rank finishes them in another order.
                started.rotate_left((group.rank() + round) % 4);
                if group.rank() % 2 == 1 {
                    started.reverse();
                }
                for (len, pending) in started {
                    assert_eq!(values(pending.finish()), vec![sums * len as f64; len]);
                }
            }
        });
    }
}

#[test]
fn a_collective_that_a_rank_does_not_finish_holds_up_nobody() {
    on_ranks(3, |group| {
        for round in 0..5 {
            let pending = start(2, 1.0, &group);
            if (group.rank() + round) % 3 == 0 {
                drop(pending);
            } else {
                assert_eq!(values(pending.finish()), [3.0; 2]);
            }
        }
        assert_eq!(values(start(1, 2.0, &group).finish()), [6.0]);
    });
}

/// What a world of two says where rank 1 does something else than finish what it has started.
fn failure(deadline: Duration, rank_1: impl Fn(&ProcessGroup) + Sync) -> (String, Duration) {
    let begin = Instant::now();
    let world = with_deadline(&[("cp", 2)], deadline, |groups| {
        let group = groups.along(&["cp"]).unwrap();
        if group.rank() == 1 {
            rank_1(&group);
        } else {
            let pending = start(2, 1.0, &group);
            drop(pending.finish());
            drop(start(2, 1.0, &group).finish());
        }
    });
    (world.unwrap_err().to_string(), begin.elapsed())
}

#[test]
fn faults_between_start_and_finish_end_every_rank() {
    let long = Duration::from_secs(60);
    let (message, waited) = failure(long, |group| {
        let pending = start(2, 1.0, group);
        assert!(group.size() < 2, "the fault");
        drop(pending.finish());
    });
    assert!(message.contains("the fault"), "{message}");
    assert!(waited < long / 2);
    let (message, waited) = failure(long, |group| drop(start(3, 1.0, group).finish()));
    assert!(
        message.contains("[2]") && message.contains("[3]"),
        "{message}"
    );
    assert!(waited < long / 2);
    let (message, waited) = failure(long, |group| drop(start(2, 1.0, group)));
    assert!(
        message.contains("rank 1 ended without arriving"),
        "{message}"
    );
    assert!(waited < long / 2);
    // Longer than GPUs take to join.
    let short = DEADLINE / 10;
    let (message, _) = failure(short, |group| {
        drop(start(2, 1.0, group));
        std::thread::sleep(short * 4);
    });
    assert!(message.contains("[1] had not arrived"), "{message}");
}
