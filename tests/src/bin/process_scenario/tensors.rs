//! What processes compute together is what threads compute together, to the last bit.

use std::{thread, time::Duration};

use burn::{
    backend::{Autodiff, Flex, NdArray},
    tensor::{DType, Int, Tensor, TensorData, backend::AutodiffBackend},
};
use burn_cp::{
    batch::SequenceBatch,
    collectives::{self, CollectiveBackend},
    comm::{ProcessGroup, RankContext},
    layout::Documents,
    sharder::{ContextParallel, ContextParallelConfig},
};
use burn_cp_examples::train::Device;
use burn_cp_tests::{
    DEVICE, DTYPES, Host, Random, TestBackend, backward, bools_as_ints, device, on_ranks, to_bits,
};

use crate::{
    AnyError, groups,
    operations::{KINDS, MOVING, Operation},
};

/// What a rank gets, and what it gets on threads.
fn check<T: PartialEq + Send + std::fmt::Debug>(
    what: &str,
    group: &ProcessGroup,
    here: impl Fn(&ProcessGroup) -> T,
    on_threads: impl Fn(&ProcessGroup) -> T + Sync,
) {
    let here = here(group);
    let threads = on_ranks(group.size(), |group| on_threads(&group));
    assert_eq!(here, threads[group.rank()], "{what}, rank {}", group.rank());
}

type Bits = ([usize; 3], DType, Vec<u64>);

fn bits<B: CollectiveBackend>(out: &Tensor<B, 3>) -> Bits {
    // Devices cannot read what has no elements.
    let bits = if out.dims().contains(&0) {
        Vec::new()
    } else {
        to_bits(out)
    };
    (out.dims(), out.dtype(), bits)
}

/// `B` is the processes' backend, `T` that of the threads.
fn floats<B: CollectiveBackend, T: CollectiveBackend>(
    group: &ProcessGroup,
    dtype: DType,
    random: &mut Random,
) {
    for kind in KINDS.into_iter().flat_map(|kind| [kind; 3]) {
        let op = Operation::random(kind, group.size(), random);
        let inputs = op.inputs(|len| random.floats(len));
        check(
            &format!("{dtype:?} {op:?}"),
            group,
            |group| bits(&op.on_tensor(inputs[group.rank()].tensor::<B>(dtype), group)),
            |group| bits(&op.on_tensor(inputs[group.rank()].tensor::<T>(dtype), group)),
        );
    }
}

/// The gradient of the sum of an operation's results, each times its weight.
fn gradient<B: AutodiffBackend + CollectiveBackend>(
    op: &Operation,
    inputs: &[Host],
    weights: &[Host],
    group: &ProcessGroup,
) -> Bits {
    let x = inputs[group.rank()].tensor::<B>(DType::F32).require_grad();
    let out = op.on_tensor(x.clone(), group);
    let loss = (out * weights[group.rank()].tensor(DType::F32)).sum();
    let gradients = backward(&loss, group);
    let grad = x.grad(&gradients).expect("the input is a leaf of the loss");
    (grad.dims(), grad.dtype(), to_bits(&grad))
}

fn adjoints(group: &ProcessGroup, random: &mut Random) {
    for kind in KINDS.into_iter().flat_map(|kind| [kind; 3]) {
        let op = Operation::random(kind, group.size(), random);
        let inputs = op.inputs(|len| random.floats(len));
        let outputs = op.on_host(&inputs);
        let empty = inputs
            .iter()
            .chain(&outputs)
            .any(|host| host.values.is_empty());
        if DEVICE != Device::Cpu && empty {
            // Burn's arithmetic on devices fails on tensors without elements.
            continue;
        }
        let weights: Vec<Host> = outputs
            .iter()
            .map(|out| Host {
                shape: out.shape,
                values: random.floats(out.values.len()),
            })
            .collect();
        check(
            &format!("gradient of {op:?}"),
            group,
            |group| gradient::<Autodiff<TestBackend>>(&op, &inputs, &weights, group),
            |group| gradient::<Autodiff<Flex>>(&op, &inputs, &weights, group),
        );
    }
}

fn integers_and_booleans(group: &ProcessGroup, random: &mut Random) {
    fn ints<B: CollectiveBackend>(op: &Operation, inputs: &[Host], group: &ProcessGroup) -> Host {
        let mine = inputs[group.rank()].int_tensor::<B>();
        Host::of::<B, Int>(&op.on_tensor(mine, group))
    }
    fn bools<B: CollectiveBackend>(op: &Operation, inputs: &[Host], group: &ProcessGroup) -> Host {
        let mine = inputs[group.rank()].bool_tensor::<B>();
        Host::of::<B, Int>(&bools_as_ints(op.moving(mine, group)))
    }
    for kind in KINDS {
        let op = Operation::random(kind, group.size(), random);
        let inputs = op.inputs(|len| random.small_ints(len));
        check(
            &format!("integers: {op:?}"),
            group,
            |group| ints::<TestBackend>(&op, &inputs, group),
            |group| ints::<Flex>(&op, &inputs, group),
        );
    }
    for kind in MOVING {
        let op = Operation::random(kind, group.size(), random);
        let inputs = op.inputs(|len| random.small_ints(len));
        check(
            &format!("booleans: {op:?}"),
            group,
            |group| bools::<TestBackend>(&op, &inputs, group),
            |group| bools::<Flex>(&op, &inputs, group),
        );
    }
}

/// Sums and messages of more bytes than MPI sends at once, and of which each rank adds up a part.
fn large(group: &ProcessGroup, random: &mut Random) {
    fn sum_and_all<B: CollectiveBackend>(
        mine: Tensor<B, 3>,
        group: &ProcessGroup,
    ) -> [Vec<u64>; 2] {
        let sum = collectives::all_reduce(mine.clone(), group);
        let all = collectives::all_gather(mine, 1, group);
        [to_bits(&sum), to_bits(&all)]
    }
    let values: Vec<Vec<f64>> = (0..group.size()).map(|_| random.floats(100_003)).collect();
    let host = |rank: usize| Host {
        shape: [1, 100_003, 1],
        values: values[rank].clone(),
    };
    for dtype in [DType::F32, DType::BF16] {
        if !DTYPES.contains(&dtype) {
            continue;
        }
        check(
            &format!("a large sum in {dtype:?}"),
            group,
            |group| sum_and_all(host(group.rank()).tensor::<TestBackend>(dtype), group),
            |group| sum_and_all(host(group.rank()).tensor::<Flex>(dtype), group),
        );
    }
}

/// Every collective in every dtype, its adjoint, and groups along one axis of two.
pub(crate) fn collectives(context: &RankContext) -> Result<(), AnyError> {
    let world = groups(context, 1)?.world()?;
    let along_dp = groups(context, context.world_size() / 2)?;
    for group in [world, along_dp.along(&["cp"])?, along_dp.along(&["dp"])?] {
        let random = &mut Random::new(7);
        for dtype in DTYPES {
            floats::<TestBackend, Flex>(&group, *dtype, random);
        }
        if DEVICE == Device::Cpu {
            floats::<NdArray<f64>, NdArray<f64>>(&group, DType::F64, random);
        }
        floats::<Autodiff<TestBackend>, Autodiff<Flex>>(&group, DType::F32, random);
        integers_and_booleans(&group, random);
        adjoints(&group, random);
        large(&group, random);
    }
    Ok(())
}

/// Exchanges until somebody ends it. Rank 1 says when it has begun.
pub(crate) fn endless(context: &RankContext) -> Result<(), AnyError> {
    let group = groups(context, 1)?.world()?;
    let x = Tensor::<TestBackend, 1>::ones([1 << 20], &device());
    for round in 0_u64.. {
        let sum = collectives::all_reduce(x.clone(), &group);
        if round.is_multiple_of(16) {
            let sum: f32 = sum.narrow(0, 0, 1).into_data().iter::<f32>().sum();
            assert_eq!(sum, group.size() as f32);
        }
        if round == 64 && context.rank() == 1 {
            crate::say(&format!("ready {}", std::process::id()));
        }
    }
    Ok(())
}

/// Exchanges a few times. Between two of them rank 1 stops for a while, and may say that it does.
pub(crate) fn stops(context: &RankContext, pause: Duration, says_so: bool) -> Result<(), AnyError> {
    let group = groups(context, 1)?.world()?;
    let x = Tensor::<TestBackend, 1>::ones([1 << 20], &device());
    for round in 0..16 {
        let sum = collectives::all_reduce(x.clone(), &group);
        let sum: f32 = sum.narrow(0, 0, 1).into_data().iter::<f32>().sum();
        assert_eq!(sum, group.size() as f32);
        if round == 8 && context.rank() == 1 {
            if says_so {
                crate::say(&format!("ready {}", std::process::id()));
            }
            thread::sleep(pause);
        }
    }
    Ok(())
}

/// A batch that rank 1 has read reaches every rank.
pub(crate) fn broadcast(context: &RankContext) -> Result<(), AnyError> {
    let config = ContextParallelConfig::default();
    let cp = ContextParallel::new(&groups(context, 1)?, config)?;
    let device = device();
    // The last two tokens belong to no document.
    let labels: Vec<i64> = (0..16).map(|i| if i < 14 { i } else { -100 }).collect();
    let batch = || {
        let values: Vec<f32> = (0_u16..64).map(f32::from).collect();
        let embeddings =
            Tensor::<TestBackend, 3>::from_data(TensorData::new(values, [1, 16, 4]), &device);
        Ok::<_, AnyError>(
            SequenceBatch::from_embeddings(embeddings)
                .with_labels(TensorData::new(labels.clone(), [1, 16]))
                .with_aligned_documents(Documents::from_lengths(&[vec![5, 9]], 16)?.aligned(8)?),
        )
    };
    let own = (context.rank() == 1).then(batch).transpose()?;
    let received = cp.shard(cp.broadcast_batch(own, 1, &device)?, &device)?;
    let expected = cp.shard(batch()?, &device)?;
    assert_eq!(received.documents(), expected.documents());
    assert_eq!(received.labels(), expected.labels());
    assert_eq!(
        to_bits(&received.embeddings()?),
        to_bits(&expected.embeddings()?)
    );
    Ok(())
}
