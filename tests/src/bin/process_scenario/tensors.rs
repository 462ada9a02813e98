//! What processes compute together is what threads compute together, to the last bit.

use burn::{
    backend::{Autodiff, Flex, NdArray},
    tensor::{Bool, DType, Int, Tensor, TensorData},
};
use burn_cp::{
    batch::SequenceBatch,
    collectives::{self, CollectiveBackend},
    comm::{ProcessGroup, RankContext},
    layout::Documents,
    sharder::{ContextParallel, ContextParallelConfig},
};
use burn_cp_tests::{Host, Random, backward, on_ranks, to_bits};

use crate::{
    AnyError, groups,
    operations::{KINDS, MOVING, Operation},
};

/// What a rank gets, and what it is on threads.
fn check<T: PartialEq + Send + std::fmt::Debug>(
    what: &str,
    group: &ProcessGroup,
    f: impl Fn(&ProcessGroup) -> T + Sync,
) {
    let here = f(group);
    let threads = on_ranks(group.size(), |group| f(&group));
    assert_eq!(here, threads[group.rank()], "{what}, rank {}", group.rank());
}

fn floats<B: CollectiveBackend>(group: &ProcessGroup, dtype: DType, random: &mut Random) {
    for kind in KINDS.into_iter().flat_map(|kind| [kind; 3]) {
        let op = Operation::random(kind, group.size(), random);
        let inputs = op.inputs(|len| random.floats(len));
        check(&format!("{dtype:?} {op:?}"), group, |group| {
            let out = op.on_tensor(inputs[group.rank()].tensor::<B>(dtype), group);
            (out.dims(), out.dtype(), to_bits(&out))
        });
    }
}

fn adjoints(group: &ProcessGroup, random: &mut Random) {
    for kind in KINDS.into_iter().flat_map(|kind| [kind; 3]) {
        let op = Operation::random(kind, group.size(), random);
        let inputs = op.inputs(|len| random.floats(len));
        let outputs = op.on_host(&inputs);
        let weights: Vec<Host> = outputs
            .iter()
            .map(|out| Host {
                shape: out.shape,
                values: random.floats(out.values.len()),
            })
            .collect();
        check(&format!("gradient of {op:?}"), group, |group| {
            let x = inputs[group.rank()]
                .tensor::<Autodiff<Flex>>(DType::F32)
                .require_grad();
            let out = op.on_tensor(x.clone(), group);
            let loss = (out * weights[group.rank()].tensor(DType::F32)).sum();
            let gradients = backward(&loss, group);
            to_bits(&x.grad(&gradients).expect("the input is a leaf of the loss"))
        });
    }
}

fn integers_and_booleans(group: &ProcessGroup, random: &mut Random) {
    for kind in KINDS {
        let op = Operation::random(kind, group.size(), random);
        let inputs = op.inputs(|len| random.small_ints(len));
        check(&format!("integers: {op:?}"), group, |group| {
            Host::of::<Flex, Int>(&op.on_tensor(inputs[group.rank()].int_tensor(), group))
        });
    }
    for kind in MOVING {
        let op = Operation::random(kind, group.size(), random);
        let inputs = op.inputs(|len| random.small_ints(len));
        check(&format!("booleans: {op:?}"), group, |group| {
            let mask: Tensor<Flex, 3, Bool> = inputs[group.rank()].int_tensor::<Flex>().bool();
            Host::of::<Flex, Int>(&op.moving(mask, group).int())
        });
    }
}

/// Sums and messages of more bytes than MPI sends at once, and of which each rank adds up a part.
fn large(group: &ProcessGroup, random: &mut Random) {
    let values: Vec<Vec<f64>> = (0..group.size()).map(|_| random.floats(100_003)).collect();
    for dtype in [DType::F32, DType::BF16] {
        check(&format!("a large sum in {dtype:?}"), group, |group| {
            let host = Host {
                shape: [1, 100_003, 1],
                values: values[group.rank()].clone(),
            };
            let mine = host.tensor::<Flex>(dtype);
            let sum = collectives::all_reduce(mine.clone(), group);
            let all = collectives::all_gather(mine, 1, group);
            (to_bits(&sum), to_bits(&all))
        });
    }
}

/// Every collective in every dtype, its adjoint, and groups along one axis of two.
pub(crate) fn collectives(context: &RankContext) -> Result<(), AnyError> {
    let world = groups(context, 1)?.world()?;
    let along_dp = groups(context, context.world_size() / 2)?;
    for group in [world, along_dp.along(&["cp"])?, along_dp.along(&["dp"])?] {
        let random = &mut Random::new(7);
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            floats::<Flex>(&group, dtype, random);
        }
        floats::<NdArray<f64>>(&group, DType::F64, random);
        floats::<Autodiff<Flex>>(&group, DType::F32, random);
        integers_and_booleans(&group, random);
        adjoints(&group, random);
        large(&group, random);
    }
    Ok(())
}

/// A batch that rank 1 has read reaches every rank.
pub(crate) fn broadcast(context: &RankContext) -> Result<(), AnyError> {
    let config = ContextParallelConfig::default();
    let cp = ContextParallel::new(&groups(context, 1)?, config)?;
    let device = Default::default();
    // The last two tokens belong to no document.
    let labels: Vec<i64> = (0..16).map(|i| if i < 14 { i } else { -100 }).collect();
    let batch = || {
        let values: Vec<f32> = (0_u16..64).map(f32::from).collect();
        let embeddings = Tensor::<Flex, 3>::from_data(TensorData::new(values, [1, 16, 4]), &device);
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
