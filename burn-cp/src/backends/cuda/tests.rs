//! NCCL in a world of one, on a GPU, and between ranks with a GPU each, on several. `BURN_CP_SKIP_MISSING_DEVICES=1` lets a machine
//! with fewer pass, and says so.

use std::{sync::Arc, time::Duration};

use burn::tensor::{
    Bool, Distribution, Int, Tensor as Api, TensorData, TensorPrimitive, backend::AutodiffBackend,
};

use super::device::num_devices;
use super::*;
use crate::{
    collectives::{self, CollectiveBackend, ExchangePlan, Piece, num_host_reads},
    comm,
    launch::{self, RankDevice},
    mesh::DeviceMesh,
};

type Float = Api<Plain, 2>;

fn device_exists() -> bool {
    devices_exist(1)
}

fn devices_exist(wanted: usize) -> bool {
    let skip = std::env::var("BURN_CP_SKIP_MISSING_DEVICES").is_ok_and(|skip| skip == "1");
    match num_devices() {
        Ok(found) if found >= wanted => true,
        found if skip => {
            eprintln!("skipped: expected {wanted} GPUs, got {found:?}");
            false
        }
        found => {
            panic!("expected {wanted} GPUs, got {found:?}; BURN_CP_SKIP_MISSING_DEVICES=1 skips")
        }
    }
}

fn alone() -> Communicator {
    let id = UniqueId::new().unwrap();
    Communicator::new(&id, [0, 1, 0], None, Duration::from_secs(30)).unwrap()
}

fn run<'a>(group: &'a ProcessGroup, communicator: &'a Communicator) -> Run<'a> {
    Run {
        group,
        observer: None,
        communicator,
        number: 0,
        what: "test",
    }
}

fn floats(payload: &Payload<Plain>) -> Vec<f32> {
    let Payload::Float(tensor) = payload.clone() else {
        panic!("a float");
    };
    let tensor = Api::<Plain, 2>::from_primitive(TensorPrimitive::Float(tensor));
    tensor.into_data().iter::<f32>().collect()
}

fn operations(num_rows: usize) -> Vec<Collective> {
    let sizes: Arc<[usize]> = [num_rows].into();
    let plan = Arc::new(ExchangePlan::all_to_all_v(&[vec![num_rows]], 0));
    vec![
        Collective::AllGather {
            dim: 0,
            sizes: sizes.clone(),
        },
        Collective::ReduceScatter { dim: 0, sizes },
        Collective::AllReduce,
        Collective::Exchange { dim: 0, plan },
        Collective::Broadcast { root: 0 },
        Collective::Reduce { root: 0 },
    ]
}

#[test]
fn every_collective_and_its_adjoint_are_the_identity_in_a_world_of_one() {
    if !device_exists() {
        return;
    }
    let (group, communicator) = (ProcessGroup::solo(), alone());
    let run = run(&group, &communicator);
    let device = Default::default();
    for op in operations(6) {
        let forth_and_back = [op.adjoint(), op];
        let reads = num_host_reads();
        for op in &forth_and_back {
            let x = Float::ones([6, 5], &device).into_primitive().tensor();
            drop(run.collective(Payload::Float(x), op).unwrap());
        }
        assert_eq!(num_host_reads(), reads, "nothing waits for the device");
        for op in forth_and_back {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let x = Float::random([6, 5], Distribution::Default, &device).cast(dtype);
                let x = Payload::Float(x.into_primitive().tensor());
                let want = floats(&x);
                assert_eq!(
                    floats(&run.collective(x, &op).unwrap()),
                    want,
                    "{op:?} {dtype:?}"
                );
            }
            let ints: Api<Plain, 2, Int> =
                Api::<Plain, 1, Int>::arange(0..30, &device).reshape([6, 5]);
            let bools: Api<Plain, 2, Bool> = ints.clone().greater_elem(11);
            let Payload::Int(got) = run
                .collective(Payload::Int(ints.clone().into_primitive()), &op)
                .unwrap()
            else {
                panic!("the kind that was given");
            };
            assert_eq!(
                Api::<Plain, 2, Int>::from_primitive(got).into_data(),
                ints.into_data(),
                "{op:?}"
            );
            if !matches!(
                op,
                Collective::AllReduce
                    | Collective::ReduceScatter { .. }
                    | Collective::Reduce { .. }
                    | Collective::ExchangeReverse { .. }
            ) {
                let Payload::Bool(got) = run
                    .collective(Payload::Bool(bools.clone().into_primitive()), &op)
                    .unwrap()
                else {
                    panic!("the kind that was given");
                };
                assert_eq!(
                    Api::<Plain, 2, Bool>::from_primitive(got).into_data(),
                    bools.into_data(),
                    "{op:?}"
                );
            }
        }
    }
}

/// Long kernels before and behind an operation, and buffers that are let go and used again at once.
#[test]
fn operations_are_ordered_among_kernels_whatever_becomes_of_their_buffers() {
    if !device_exists() {
        return;
    }
    let (group, communicator) = (ProcessGroup::solo(), alone());
    let run = run(&group, &communicator);
    let device = Default::default();
    let n = 1024;
    let half = Float::full([n, n], 0.5 / n as f32, &device);
    for round in 0..50 {
        let rows = n - round % 7;
        let mut x = Float::full([rows, n], 1.0 + round as f32, &device);
        for _ in 0..6 {
            // Halves every element.
            x = x.matmul(half.clone());
        }
        let op = [
            Collective::AllGather {
                dim: 0,
                sizes: [rows].into(),
            },
            Collective::AllReduce,
            Collective::Broadcast { root: 0 },
        ];
        let sent = Payload::Float((x * 64.0).into_primitive().tensor());
        let got = run.collective(sent, &op[round % 3]).unwrap();
        // The sent buffer is free now: whoever writes to it next must not be early.
        let overwritten = Float::full([rows, n], -1.0, &device) * 2.0;
        let Payload::Float(got) = got else {
            panic!("a float");
        };
        let mut y = Float::from_primitive(TensorPrimitive::Float(got));
        for _ in 0..3 {
            y = y.matmul(half.clone());
        }
        let y: Vec<f32> = y.into_data().iter::<f32>().collect();
        let want = (1.0 + round as f32) / 8.0;
        assert!(
            y.iter().all(|y| (y - want).abs() <= 1e-4 * want),
            "round {round}: {} for {want}",
            y[0]
        );
        drop(overwritten);
    }
}

/// Rows to itself and back, started before and completed behind other work.
#[test]
fn an_operation_is_started_and_completed_apart() {
    if !device_exists() {
        return;
    }
    let communicator = alone();
    let device = Default::default();
    let from = Float::random([64, 32], Distribution::Default, &device)
        .into_primitive()
        .tensor();
    let to = empty(&from, from.shape());
    let resources =
        [&from, &to].map(|tensor| tensor.client.get_resource(tensor.handle.clone()).unwrap());
    let [source, target] = resources.each_ref().map(|resource| resource.resource().ptr);
    let num_bytes = 64 * 32 * 4;
    let ticket = communicator
        .start(0, |queue| {
            queue.grouped(|| {
                queue.send(0, source, num_bytes)?;
                queue.receive(0, target, num_bytes)
            })
        })
        .unwrap();
    let other = Float::ones([64, 64], &device)
        .matmul(Float::ones([64, 64], &device))
        .sum();
    assert_eq!(other.into_scalar(), 64.0 * 64.0 * 64.0);
    ticket.order_before_later_work().unwrap();
    drop(resources);
    let [from, to] = [from, to].map(|tensor| floats(&Payload::Float(tensor)));
    assert_eq!(from, to);
}

#[test]
fn an_aborted_communicator_refuses() {
    if !device_exists() {
        return;
    }
    let group = ProcessGroup::solo();
    let communicator = alone();
    let x = Payload::Float(
        Float::ones([3, 2], &Default::default())
            .into_primitive()
            .tensor(),
    );
    let sum = run(&group, &communicator)
        .collective(x.clone(), &Collective::AllReduce)
        .unwrap();
    assert_eq!(floats(&sum), [1.0; 6]);
    communicator.abort();
    let error = run(&group, &communicator)
        .collective(x, &Collective::AllReduce)
        .unwrap_err();
    assert!(error.to_string().contains("aborted"), "{error}");
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
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    })
    .unwrap();
}

#[test]
fn gradients_arrive_through_nccl() {
    if !devices_exist(2) {
        return;
    }
    gradients_arrive::<burn::backend::Autodiff<Plain>>();
    gradients_arrive::<burn::backend::Autodiff<burn::backend::Cuda<f32, i32>>>();
}

#[test]
fn a_rank_that_leaves_others_waiting_in_nccl_is_named_at_the_deadline() {
    if !devices_exist(2) {
        return;
    }
    let mesh = DeviceMesh::new([("cp", 2)]).unwrap();
    let start = std::time::Instant::now();
    let options = launch::ThreadsOptions {
        deadline: Duration::from_secs(5),
        ..Default::default()
    };
    let world = launch::threads_with(2, options, |rank| {
        let group = comm::bind(&mesh, &rank)?.along(&["cp"])?;
        let device = <Plain as burn::tensor::backend::BackendTypes>::Device::of_rank(&rank)?;
        let x = || Api::<Plain, 1>::ones([8], &device);
        let sum: f32 = collectives::all_reduce(x(), &group).sum().into_scalar();
        assert_eq!(sum, 16.0);
        if rank.rank() == 0 {
            // Nobody comes.
            drop(collectives::all_reduce(x(), &group).into_data());
            drop(collectives::all_reduce(x(), &group));
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    });
    let message = world.unwrap_err().to_string();
    assert!(
        message.contains("rank 1") || message.contains("[1]"),
        "{message}"
    );
    assert!(
        start.elapsed() < Duration::from_secs(40),
        "{:?}",
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
