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
    comm::{self, Place, UniqueId},
    launch::{self, RankDevice},
    mesh::DeviceMesh,
};

mod between;

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

/// Whose rows NCCL moves, and whose rows are copied.
fn both_alone() -> [Communicator; 2] {
    [alone(false), alone(true)]
}

fn alone(direct: bool) -> Communicator {
    let id = UniqueId::new().unwrap();
    let place = Place {
        rank: 0,
        size: 1,
        ordinal: 0,
        claim: None,
    };
    let flush = on_its_way::flush(0);
    Communicator::new(&id, place, direct, flush, None, Duration::from_secs(30)).unwrap()
}

fn run<'a>(group: &'a ProcessGroup, communicator: &'a Communicator) -> Run<'a> {
    Run {
        group,
        observer: None,
        communicator,
        large: true,
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
    if device_exists() {
        both_alone().iter().for_each(is_the_identity);
    }
}

fn is_the_identity(communicator: &Communicator) {
    let group = ProcessGroup::solo();
    let run = run(&group, communicator);
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
    if device_exists() {
        both_alone().iter().for_each(is_ordered_among_kernels);
    }
}

fn is_ordered_among_kernels(communicator: &Communicator) {
    let group = ProcessGroup::solo();
    let run = run(&group, communicator);
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
    if device_exists() {
        both_alone().iter().for_each(is_started_and_completed_apart);
    }
}

fn is_started_and_completed_apart(communicator: &Communicator) {
    let device = Default::default();
    let from = Float::random([64, 32], Distribution::Default, &device)
        .into_primitive()
        .tensor();
    let to = empty(&from, from.shape());
    let resources =
        [&from, &to].map(|tensor| tensor.client.get_resource(tensor.handle.clone()).unwrap());
    let [source, target] = resources.each_ref().map(|resource| resource.resource().ptr);
    let num_bytes = 64 * 32 * 4;
    let at = |address| Move {
        peer: 0,
        block: Block::one(address, num_bytes),
    };
    let moves = Moves {
        gives: vec![at(source)],
        takes: vec![at(target)],
    };
    let ticket = (communicator.announce()).exchange(0, moves, true).unwrap();
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
    let communicator = alone(false);
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
