//! Collectives between ranks: time, bus bandwidth, and what a call costs the host. One JSON object a line, from rank 0.
//!
//! `cargo bench -p burn-cp-benches --bench collectives -- --device cpu --ranks 2 --mib 1,8`

use std::{
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

use burn::tensor::{DType, Tensor, backend::Backend};
use burn_cp::{
    collectives::{Call, Collective, CollectiveBackend, ExchangePlan, Payload, Piece},
    comm::{self, ProcessGroup, RankContext},
    launch::RankDevice,
    mesh::DeviceMesh,
};
use burn_cp_benches::{Device, Launch, launched};
use clap::Parser;
use serde_json::json;

/// Times collectives of burn-cp.
#[derive(Debug, Clone, Parser)]
struct Args {
    /// Number of ranks where they are threads
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// How ranks are started
    #[arg(long, value_enum, default_value_t)]
    launch: Launch,
    /// Where ranks compute
    #[arg(long, value_enum, default_value_t)]
    device: Device,
    /// MiB of each rank
    #[arg(long, value_delimiter = ',', default_value = "1,8,64,256,1024")]
    mib: Vec<usize>,
    /// Timed calls
    #[arg(long, default_value_t = 20)]
    repeats: u32,
    /// With --device cuda: tensors of Burn's fused backend, which hands a tensor over when its thread has caught up, as a call waits for
    #[arg(long)]
    fused: bool,
    /// Set by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

type Failure = Box<dyn Error + Send + Sync>;

/// The collectives that are timed: their name, this rank's view, rows that go in, and the share of a rank's rows that crosses the wire.
fn operations(
    rank: usize,
    size: usize,
    num_rows: usize,
) -> Vec<(&'static str, Collective, usize, f64)> {
    let sizes: Arc<[usize]> = vec![num_rows; size].into();
    let part = num_rows / size;
    // What an all-to-all moves, as a planned exchange.
    let pieces: Vec<Vec<Piece>> = (0..size)
        .map(|to| {
            let piece = |source| Piece {
                source,
                range: to * part..(to + 1) * part,
            };
            (0..size).map(piece).collect()
        })
        .collect();
    let plan = ExchangePlan::new(&vec![num_rows; size], &pieces, rank);
    let plan = Arc::new(plan.expect("pieces lie within their sources"));
    let others = size as f64 - 1.0;
    let gather = Collective::AllGather { dim: 0, sizes };
    vec![
        ("all_gather", gather.clone(), num_rows, others),
        ("reduce_scatter", gather.adjoint(), num_rows * size, others),
        (
            "all_to_all",
            Collective::Exchange { dim: 0, plan },
            num_rows,
            others / size as f64,
        ),
    ]
}

fn wait<B: Backend>(device: &B::Device, group: &ProcessGroup) -> Result<(), Failure> {
    B::sync(device)?;
    Ok(group.barrier()?)
}

fn rank<B>(context: &RankContext, args: &Args) -> Result<(), Failure>
where
    B: CollectiveBackend,
    B::Device: RankDevice,
{
    let mesh = DeviceMesh::new([("cp", context.world_size())])?;
    let group = comm::bind(&mesh, context)?.along(&["cp"])?;
    let device = B::Device::of_rank(context)?;
    const WIDTH: usize = 1024;
    for &mib in &args.mib {
        let num_rows = (mib << 20) / 2 / WIDTH;
        for (name, op, rows, share) in operations(group.rank(), group.size(), num_rows) {
            let x = Tensor::<B, 2>::ones([rows, WIDTH], (&device, DType::BF16));
            let x = x.into_primitive().tensor();
            let run = || {
                let call = Call::forward(&group, name);
                drop(B::collective(Payload::Float(x.clone()), &op, &group, call));
            };
            // The first calls make memory, too.
            (0..20).for_each(|_| run());
            wait::<B>(&device, &group)?;
            let start = Instant::now();
            (0..args.repeats).for_each(|_| run());
            let host = start.elapsed() / args.repeats;
            B::sync(&device)?;
            let time = start.elapsed() / args.repeats;
            group.barrier()?;
            say(
                (context, args),
                (name, mib),
                [time, host],
                (mib << 20) as f64 * share,
            );
        }
    }
    Ok(())
}

fn say(
    (context, args): (&RankContext, &Args),
    (op, mib): (&str, usize),
    [time, host]: [Duration; 2],
    num_bytes: f64,
) {
    if context.rank() != 0 {
        return;
    }
    let us = |time: Duration| (time.as_secs_f64() * 1e7).round() / 10.0;
    let bandwidth = num_bytes / time.as_secs_f64().max(1e-9) / 1e9;
    println!(
        "{}",
        json!({
            "ours": "burn-cp", "op": op, "mib_per_rank": mib, "world": context.world_size(), "fused": args.fused, "us": us(time), "host_us": us(host),
            "busbw_gbs": (bandwidth * 10.0).round() / 10.0,
        })
    );
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if args.fused && args.device == Device::Cpu {
        return Err("--fused is for --device cuda".into());
    }
    match args.device {
        Device::Cpu => launched(args.launch, args.device, args.ranks, |context| {
            rank::<burn::backend::Flex>(&context, &args)
        }),
        #[cfg(feature = "cuda")]
        Device::Cuda => launched(args.launch, args.device, args.ranks, |context| {
            if args.fused {
                rank::<burn::backend::Cuda<f32, i32>>(&context, &args)
            } else {
                rank::<burn_cubecl::CubeBackend<cubecl::cuda::CudaRuntime, f32, i32, u8>>(
                    &context, &args,
                )
            }
        }),
    }
}
