//! Between two ranks that are threads with a GPU each.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;
use cubecl::cuda::CudaDevice;

use super::*;
use crate::{
    batch::SequenceBatch,
    sharder::{ContextParallel, ContextParallelConfig},
};

mod another_dim;

/// Ranks of one world alone have the GPUs: those of another would go through the host.
fn gpus() -> MutexGuard<'static, ()> {
    static GPUS: Mutex<()> = Mutex::new(());
    GPUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fails where the group's tensors go through the host.
fn assert_joined(group: &ProcessGroup) {
    let joined = group.device_transport::<Option<Communicator>>(|| panic!("not looked for yet"));
    assert!(joined.unwrap().is_some(), "through the host");
}

/// Uneven shares, rows for several ranks, and none for some.
fn between_two(rank: usize) -> Vec<(Collective, usize)> {
    let sizes: Arc<[usize]> = [5, 2].into();
    let even: Arc<[usize]> = [3, 3].into();
    let plan = Arc::new(ExchangePlan::all_to_all_v(&[vec![1, 4], vec![0, 3]], rank));
    let (input, output) = (plan.input_len(), plan.output_len());
    let piece = |source, range| Piece { source, range };
    // Several runs from one rank to another, rows that go to both, and rows that go nowhere.
    let pieces = [
        vec![piece(1, 0..1), piece(0, 1..3), piece(1, 2..4)],
        vec![piece(0, 2..3), piece(0, 0..1)],
    ];
    let runs = Arc::new(ExchangePlan::new(&[3, 5], &pieces, rank).unwrap());
    vec![
        (
            Collective::AllGather {
                dim: 0,
                sizes: [0, 4].into(),
            },
            [0, 4][rank],
        ),
        (
            Collective::Exchange {
                dim: 0,
                plan: runs.clone(),
            },
            runs.input_len(),
        ),
        (
            Collective::AllGather {
                dim: 0,
                sizes: sizes.clone(),
            },
            sizes[rank],
        ),
        (
            Collective::AllGather {
                dim: 0,
                sizes: even.clone(),
            },
            3,
        ),
        (Collective::ReduceScatter { dim: 0, sizes }, 7),
        (
            Collective::ReduceScatter {
                dim: 0,
                sizes: even,
            },
            6,
        ),
        (Collective::AllReduce, 4),
        (
            Collective::Exchange {
                dim: 0,
                plan: plan.clone(),
            },
            input,
        ),
        (Collective::ExchangeReverse { dim: 0, plan }, output),
        (Collective::Broadcast { root: 1 }, 4),
        (Collective::Reduce { root: 1 }, 4),
    ]
}

/// The results of all collectives on every rank of two.
fn results<B>(dtype: DType) -> Vec<Vec<Vec<f64>>>
where
    B: CollectiveBackend,
    B::Device: RankDevice,
{
    let mesh = DeviceMesh::new([("cp", 2)]).unwrap();
    let _gpus = gpus();
    launch::threads(2, |rank| {
        let group = comm::bind(&mesh, &rank)?.along(&["cp"])?;
        let device = B::Device::of_rank(&rank)?;
        let run = |(op, num_rows): (Collective, usize)| {
            let values: Vec<f64> = (0..num_rows * 3)
                .map(|i| (i + 20 * rank.rank()) as f64)
                .collect();
            let options = (&device, dtype);
            let x = match num_rows {
                // The runtime cannot be given what has no elements.
                0 => Api::<B, 2>::empty([0, 3], options),
                _ => Api::<B, 2>::from_data(TensorData::new(values, [num_rows, 3]), options),
            };
            let call = Call::forward(&group, "test");
            let Payload::Float(got) = B::collective(
                Payload::Float(x.into_primitive().tensor()),
                &op,
                &group,
                call,
            ) else {
                panic!("a float");
            };
            let got = Api::<B, 2>::from_primitive(TensorPrimitive::Float(got));
            assert_eq!(got.dtype(), dtype);
            if got.dims()[0] == 0 {
                vec![]
            } else {
                got.into_data().iter::<f64>().collect()
            }
        };
        let all = between_two(rank.rank())
            .into_iter()
            .map(run)
            .collect::<Vec<_>>();
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(all)
    })
    .unwrap()
}

#[test]
fn ranks_with_a_gpu_each_get_what_ranks_on_the_cpu_get() {
    if !devices_exist(2) {
        return;
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let want = results::<burn::backend::Flex>(dtype);
        assert_eq!(results::<Plain>(dtype), want, "{dtype:?}");
        assert_eq!(
            results::<burn::backend::Cuda<f32, i32>>(dtype),
            want,
            "fused, {dtype:?}"
        );
    }
}

/// Gradients through a gather, of many sizes one after the other, so that buffers are used again.
fn gradients_arrive<B>()
where
    B: AutodiffBackend + CollectiveBackend,
    B::Device: RankDevice,
{
    let mesh = DeviceMesh::new([("cp", 2)]).unwrap();
    let _gpus = gpus();
    launch::threads(2, |rank| {
        let group = comm::bind(&mesh, &rank)?.along(&["cp"])?;
        let device = B::Device::of_rank(&rank)?;
        for round in 0..30 {
            let len = 1 << (6 + round % 10);
            let group = group.with_order(comm::ProgramOrder::new());
            let x = Api::<B, 1>::full([len], 1.0 + rank.rank() as f32, &device).require_grad();
            let all = collectives::all_gather_sized(x.clone() * 3.0, 0, &[len, len], &group);
            let weight = Api::<B, 1>::full([2 * len], 1.0 + rank.rank() as f32, &device);
            let grads = (all.clone() * weight).sum().backward();
            let grad: Vec<f32> = x
                .grad(&grads)
                .ok_or("a gradient")?
                .into_data()
                .iter::<f32>()
                .collect();
            assert!(
                grad.iter().all(|grad| *grad == 9.0),
                "round {round}: {}",
                grad[0]
            );
            let all: Vec<f32> = all.into_data().iter::<f32>().collect();
            assert!(all[..len].iter().all(|x| *x == 3.0) && all[len..].iter().all(|x| *x == 6.0));
        }
        assert_joined(&group);
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    })
    .unwrap();
}

#[test]
fn gradients_arrive_between_gpus() {
    if !devices_exist(2) {
        return;
    }
    gradients_arrive::<burn::backend::Autodiff<Plain>>();
    gradients_arrive::<burn::backend::Autodiff<burn::backend::Cuda<f32, i32>>>();
}

/// Devices that are out of step by turns, operations that are under way together, and buffers that are used again at once.
#[test]
fn operations_are_ordered_among_kernels_of_both_devices() {
    if !devices_exist(2) {
        return;
    }
    let mesh = DeviceMesh::new([("cp", 2)]).unwrap();
    let n = 1024;
    let _gpus = gpus();
    launch::threads(2, |rank| {
        let (group, me) = (comm::bind(&mesh, &rank)?.along(&["cp"])?, rank.rank());
        let device = <Plain as burn::tensor::backend::BackendTypes>::Device::of_rank(&rank)?;
        // Halves every element.
        let half = Float::full([n, n], 0.5 / n as f32, &device);
        let start = |rows: usize, value: f32, steps: i32| {
            let mut x = Float::full([rows, n], value * 2f32.powi(steps), &device);
            for _ in 0..steps {
                x = x.matmul(half.clone());
            }
            let op = Collective::AllGather {
                dim: 0,
                sizes: [rows, rows].into(),
            };
            let x = Payload::Float(x.into_primitive().tensor());
            let pending = Plain::collective_start(x, &op, &group, Call::forward(&group, "test"));
            // The rows are free as soon as the operation is over: whoever writes to them next must not be early.
            let overwritten = Float::full([rows, n], -1.0, &device) * 2.0;
            (pending, overwritten)
        };
        for round in 0..60 {
            let slow = (round + me) % 2 == 0;
            let values = |rank: usize| [1.0, 2.0].map(|x| x + (rank * 100 + round) as f32);
            let rows = [n - round % 7, 8 + round % 3];
            let steps = [if slow { 12 } else { 1 }, 2];
            let mine = values(me);
            let started = [0, 1].map(|i| start(rows[i], mine[i], steps[i]));
            let mut used = Float::ones([n, n], &device);
            for _ in 0..steps[0] {
                used = used.matmul(half.clone());
            }
            for (i, (pending, overwritten)) in started.into_iter().enumerate() {
                let Payload::Float(all) = pending.finish() else {
                    panic!("a float");
                };
                let all = Float::from_primitive(TensorPrimitive::Float(all));
                let sums: Vec<f32> = (all.sum_dim(1) / n as f32)
                    .into_data()
                    .iter::<f32>()
                    .collect();
                for (of, parts) in sums.chunks(rows[i]).enumerate() {
                    let want = values(of)[i];
                    let right = parts.iter().all(|got| (got - want).abs() <= 1e-3 * want);
                    assert!(
                        right,
                        "round {round}, operation {i}, rank {of}: {parts:?} for {want}"
                    );
                }
                drop(overwritten);
            }
        }
        assert_joined(&group);
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    })
    .unwrap();
}

#[test]
fn a_rank_that_leaves_others_waiting_is_named_at_the_deadline() {
    if !devices_exist(2) {
        return;
    }
    // NCCL's own, and copies.
    for op in [
        Collective::AllReduce,
        Collective::AllGather {
            dim: 0,
            sizes: [8, 8].into(),
        },
    ] {
        is_named_at_the_deadline(&op);
    }
}

fn is_named_at_the_deadline(op: &Collective) {
    let mesh = DeviceMesh::new([("cp", 2)]).unwrap();
    let start = std::time::Instant::now();
    let options = launch::ThreadsOptions {
        deadline: Duration::from_secs(5),
        ..Default::default()
    };
    let _gpus = gpus();
    let world = launch::threads_with(2, options, |rank| {
        let group = comm::bind(&mesh, &rank)?.along(&["cp"])?;
        let device = <Plain as burn::tensor::backend::BackendTypes>::Device::of_rank(&rank)?;
        let run = || {
            let x = Payload::Float(Float::ones([8, 2], &device).into_primitive().tensor());
            Plain::collective(x, op, &group, Call::forward(&group, "test"))
        };
        let sum: f32 = floats(&run()).iter().sum();
        assert_eq!(sum, 32.0);
        assert_joined(&group);
        if rank.rank() == 0 {
            // Nobody comes.
            floats(&run());
            drop(run());
        } else {
            // Not gone, which would be known at once.
            std::thread::sleep(Duration::from_secs(8));
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    });
    let message = world.unwrap_err().to_string();
    assert!(
        message.contains("rank 1") || message.contains("[1]"),
        "{op:?}: {message}"
    );
    assert!(
        start.elapsed() < Duration::from_secs(40),
        "{op:?}: {:?}",
        start.elapsed()
    );
}

/// The gate that counts waits sees none in a layer, forward and backward.
fn no_waits<B>()
where
    B: AutodiffBackend + crate::attention::ContextParallelBackend,
    B::Device: RankDevice,
{
    use crate::{
        attention::AttentionOptions,
        batch::SequenceBatch,
        layout::Documents,
        sharder::{ContextParallel, ContextParallelConfig},
    };
    let mesh = DeviceMesh::new([("dp", 1), ("cp", 2)]).unwrap();
    let _gpus = gpus();
    launch::threads(2, |rank| {
        let groups = comm::bind(&mesh, &rank)?;
        let device = B::Device::of_rank(&rank)?;
        let cp = ContextParallel::new(&groups, ContextParallelConfig::default())?;
        let batch = SequenceBatch::<B>::from_ids(TensorData::zeros::<i64, _>([1, 256]))
            .with_documents(Documents::from_lengths(&[vec![100, 150]], 256)?);
        let step = cp.shard(batch, &device)?;
        let tokens = step.local_len();
        let random = || {
            Api::<B, 4>::random([1, 2, tokens, 64], Distribution::Default, &device).require_grad()
        };
        let (q, k, v) = (random(), random(), random());
        let reads = num_host_reads();
        let mut x = q.clone();
        for _ in 0..3 {
            x = step.attention(x, k.clone(), v.clone(), &AttentionOptions::causal());
        }
        let grads = x.sum().backward();
        assert_eq!(num_host_reads(), reads);
        assert_joined(step.group());
        let grad = q.grad(&grads).ok_or("a gradient")?;
        assert!(grad.sum().into_data().iter::<f32>().all(f32::is_finite));
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    })
    .unwrap();
}

#[test]
fn layers_between_gpus_wait_for_nothing() {
    if !devices_exist(2) {
        return;
    }
    no_waits::<burn::backend::Autodiff<Plain>>();
    no_waits::<burn::backend::Autodiff<burn::backend::Cuda<f32, i32>>>();
}

#[test]
fn a_batch_on_another_gpu_than_its_step_is_refused() {
    if !devices_exist(2) {
        return;
    }
    let _gpus = gpus();
    let embeddings = Tensor::<Plain, 3>::ones([1, 8, 4], &CudaDevice::new(1));
    let cp = ContextParallel::solo(ContextParallelConfig::default());
    let batch = SequenceBatch::from_embeddings(embeddings);
    let refused = cp.shard(batch.clone(), &CudaDevice::new(0)).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("device of the batch's tensors"),
        "{refused}"
    );
    cp.shard(batch, &CudaDevice::new(1)).unwrap();
}
