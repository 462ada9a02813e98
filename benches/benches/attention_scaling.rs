//! Attention over sequences sharded over ranks, forward and backward: one rank against many under every exchange strategy.
//!
//! `cargo bench -p burn-cp-benches --bench attention_scaling -- --ranks 4 --tokens 2048`; with `--features cuda`, `--device cuda`: ranks
//! are threads, each with a GPU of its own where there are enough, else they share one and exchange through the host, as those of
//! `--features wgpu`, `--device wgpu` always do. Prints a line
//! per strategy with the time of the slowest rank, its ratio to one rank, what all ranks together receive in a forward pass, and of a step
//! the time until the slowest rank's thread has submitted it, and how often it waited for a device. A star marks what `auto` takes.

use std::{error::Error, time::Instant};

use burn::{
    backend::Autodiff,
    tensor::{
        DType, Distribution, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_cp::{
    attention::{AttentionOptions, ContextParallelBackend},
    batch::SequenceBatch,
    collectives::num_host_reads,
    comm::{self, Groups, ProgramOrder, RankContext},
    launch::{self, RankDevice},
    layout::{Documents, LayoutPolicy, Visibility},
    mesh::DeviceMesh,
    plan::{CostShape, ExchangeStrategy},
    sharder::{ContextParallel, ContextParallelConfig},
};
use burn_cp_benches::log_normal_lengths;
use clap::{Parser, ValueEnum};

type AnyError = Box<dyn Error + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    Cpu,
    Wgpu,
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Layout {
    Contiguous,
    HeadTail,
    DualChunkSwap,
    Balanced,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Strategy {
    AllGather,
    NeededOnly,
    LeftHalo,
    Ring,
    HeadAllToAll,
    Auto,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Overlap {
    Off,
    On,
    Both,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Element {
    F32,
    F16,
    Bf16,
}

/// What is measured.
#[derive(Debug, Clone, Parser)]
struct Args {
    /// Where it runs.
    #[arg(long, value_enum, default_value = "cpu")]
    device: Device,
    /// Number of ranks.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Lengths of single documents.
    #[arg(long, value_delimiter = ',', default_value = "256,512")]
    tokens: Vec<usize>,
    /// Medians of the lengths of packed documents, as many as fill the longest of `tokens`.
    #[arg(long, value_delimiter = ',', default_value = "64")]
    medians: Vec<usize>,
    /// Heads of queries.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Heads of keys and values; as many as of queries if not given.
    #[arg(long)]
    kv_heads: Option<usize>,
    /// Elements of a head.
    #[arg(long, default_value_t = 32)]
    head_dim: usize,
    /// Type of elements.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Element,
    /// Which rank owns which tokens.
    #[arg(long, value_enum, default_value = "head-tail")]
    layout: Layout,
    /// Exchange strategies; one that cannot serve a case says so.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "all-gather,needed-only,ring,head-all-to-all,auto"
    )]
    strategies: Vec<Strategy>,
    /// Whether exchange and computation overlap, where the strategy leaves a choice.
    #[arg(long, value_enum, default_value = "both")]
    overlap: Overlap,
    /// Keep the keys and values of other ranks for the backward pass.
    #[arg(long)]
    keep_keys: bool,
    /// Multiprocessors that the forward pass leaves free while keys and values travel.
    #[arg(long, default_value_t = 0)]
    sm_margin: usize,
    /// Steps that are timed together, one behind the other as in training.
    #[arg(long, default_value_t = 8)]
    iterations: usize,
    /// Steps before them, which make kernels and connections.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Of a step, in seconds.
#[derive(Clone, Copy)]
struct Time {
    whole: f64,
    /// Until the rank's thread has submitted it.
    host: f64,
    /// How often it waited for a device meanwhile.
    waits: f64,
}

/// What one rank, or all of some, measured.
struct Measured {
    time: Time,
    received_bytes: usize,
    taken: ExchangeStrategy,
}

impl Measured {
    fn with(self, rank: &Self) -> Self {
        Self {
            time: Time {
                whole: self.time.whole.max(rank.time.whole),
                host: self.time.host.max(rank.time.host),
                waits: self.time.waits.max(rank.time.waits),
            },
            received_bytes: self.received_bytes + rank.received_bytes,
            taken: self.taken,
        }
    }
}

impl Args {
    fn shape(&self) -> CostShape {
        CostShape {
            num_heads: self.heads,
            num_kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.head_dim,
            v_head_dim: self.head_dim,
            bytes_per_element: self.dtype().size(),
        }
    }

    fn dtype(&self) -> DType {
        match self.dtype {
            Element::F32 => DType::F32,
            Element::F16 => DType::F16,
            Element::Bf16 => DType::BF16,
        }
    }

    fn config(&self, exchange: ExchangeStrategy, overlap: bool) -> ContextParallelConfig {
        ContextParallelConfig {
            loss_axes: vec!["cp".to_owned()],
            layout: match self.layout {
                Layout::Contiguous => LayoutPolicy::Contiguous { multiple: 1 },
                Layout::HeadTail => LayoutPolicy::HeadTail,
                Layout::DualChunkSwap => LayoutPolicy::DualChunkSwap,
                Layout::Balanced => LayoutPolicy::Balanced {
                    visibility: Visibility::default(),
                },
            },
            exchange,
            overlap,
            keep_keys: self.keep_keys,
            sm_margin: self.sm_margin,
            ..ContextParallelConfig::default()
        }
    }

    /// Strategies with and without overlap, as asked for.
    fn exchanges(&self) -> Vec<(ExchangeStrategy, bool)> {
        let overlaps: &[bool] = match self.overlap {
            Overlap::Off => &[false],
            Overlap::On => &[true],
            Overlap::Both => &[false, true],
        };
        let mut all = Vec::new();
        for strategy in &self.strategies {
            let (strategy, choice) = match strategy {
                Strategy::AllGather => (ExchangeStrategy::AllGather, overlaps),
                Strategy::NeededOnly => (ExchangeStrategy::NeededOnly, overlaps),
                Strategy::LeftHalo => (ExchangeStrategy::LeftHalo, overlaps),
                Strategy::Ring => (ExchangeStrategy::Ring, &[true][..]),
                Strategy::HeadAllToAll => (ExchangeStrategy::HeadAllToAll, &[false][..]),
                Strategy::Auto => (ExchangeStrategy::Auto, overlaps),
            };
            all.extend(choice.iter().map(|&overlap| (strategy, overlap)));
        }
        all
    }
}

/// One rank's step under one configuration, or why there is none: that is refused before anything moves, on every rank alike. Whatever
/// fails later ends the world.
fn measure_on<B>(
    args: &Args,
    documents: &Documents,
    (rank, groups): (&RankContext, &Groups),
    config: &ContextParallelConfig,
) -> Result<Result<Measured, String>, AnyError>
where
    B: AutodiffBackend + ContextParallelBackend,
    B::Device: RankDevice,
{
    let cp = ContextParallel::new(groups, config.clone())?;
    let device = B::Device::of_rank(rank)?;
    let (shape, options) = (args.shape(), AttentionOptions::causal());
    let ids = TensorData::zeros::<i64, _>([1, documents.seq_len()]);
    let batch = SequenceBatch::<B>::from_ids(ids).with_documents(documents.clone());
    let step = cp.shard_in_order(batch, &device, ProgramOrder::new())?;
    let taken = match step.exchange(&shape, &options) {
        Ok(taken) => taken,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let received_bytes =
        step.attention_call(&options).elements_received(&shape)? * shape.bytes_per_element;
    let random = |heads: usize| {
        let size = [1, heads, step.local_len(), shape.head_dim];
        let tensor = Tensor::<B, 4>::random(
            size,
            Distribution::Normal(0.0, 1.0),
            (&device, args.dtype()),
        );
        tensor.require_grad()
    };
    let [q, k, v] = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads].map(random);
    let run = |iterations: usize| -> Result<Time, AnyError> {
        B::sync(&device)?;
        step.group().barrier()?;
        let (start, waits) = (Instant::now(), num_host_reads());
        for _ in 0..iterations {
            let out = step.attention(q.clone(), k.clone(), v.clone(), &options);
            // With a gradient of ones, as of a sum, which takes time of its own.
            drop(out.backward());
        }
        let host = start.elapsed();
        B::sync(&device)?;
        let whole = start.elapsed();
        step.group().barrier()?;
        let per_step = |sum: f64| sum / iterations.max(1) as f64;
        Ok(Time {
            whole: per_step(whole.as_secs_f64()),
            host: per_step(host.as_secs_f64()),
            waits: per_step((num_host_reads() - waits) as f64),
        })
    };
    run(args.warmup)?;
    let time = run(args.iterations.max(1))?;
    drop((q, k, v, step));
    // Every strategy starts without the memory of the one before.
    B::memory_cleanup(&device);
    Ok(Ok(Measured {
        time,
        received_bytes,
        taken,
    }))
}

/// For each configuration the slowest rank's mean step and what all ranks received in a forward pass, or why it cannot be done. All
/// by the same threads: each has pools of its own on the device and on the host, which nobody uses when it is gone.
fn measure<B>(
    args: &Args,
    documents: &Documents,
    world_size: usize,
    configs: &[ContextParallelConfig],
) -> Result<Vec<Result<Measured, String>>, AnyError>
where
    B: AutodiffBackend + ContextParallelBackend,
    B::Device: RankDevice,
{
    let mesh = DeviceMesh::new([("cp", world_size)])?;
    let ranks = launch::threads(world_size, |rank| -> Result<_, AnyError> {
        let groups = comm::bind(&mesh, &rank)?;
        let one = |config| measure_on::<B>(args, documents, (&rank, &groups), config);
        configs.iter().map(one).collect::<Result<Vec<_>, _>>()
    })?;
    let mut ranks = ranks.into_iter();
    let first = ranks.next().ok_or("no rank")?;
    Ok(ranks.fold(first, |all, rank| {
        let pairs = all.into_iter().zip(rank);
        pairs.map(|(all, rank)| Ok(all?.with(&rank?))).collect()
    }))
}

fn compare<B>(args: &Args, name: &str, documents: &Documents) -> Result<(), AnyError>
where
    B: AutodiffBackend + ContextParallelBackend,
    B::Device: RankDevice,
{
    let alone = args.config(ExchangeStrategy::NeededOnly, false);
    let mut one = measure::<B>(args, documents, 1, &[alone])?;
    let one = one.swap_remove(0)?;
    println!("{name}: one rank {:.2} ms", one.time.whole * 1e3);
    println!("  strategy         overlap        ms  ratio  MB received  host ms  waits");
    let exchanges = args.exchanges();
    let configs: Vec<_> = [(ExchangeStrategy::Auto, false)]
        .iter()
        .chain(&exchanges)
        .map(|(strategy, overlap)| args.config(*strategy, *overlap))
        .collect();
    let mut all = measure::<B>(args, documents, args.ranks, &configs)?.into_iter();
    let auto = all.next().ok_or("no configuration")??.taken;
    for ((strategy, overlap), measured) in exchanges.into_iter().zip(all) {
        let label = format!("{strategy:?}");
        let on = if overlap { "on" } else { "off" };
        match measured {
            Ok(many) => {
                let star = if strategy == auto { "*" } else { " " };
                println!(
                    "{star} {label:16} {on:7} {:9.2} {:6.2} {:12.3} {:8.2} {:6.1}",
                    many.time.whole * 1e3,
                    one.time.whole / many.time.whole,
                    many.received_bytes as f64 / 1e6,
                    many.time.host * 1e3,
                    many.time.waits,
                );
            }
            Err(error) => println!("  {label:16} {on:7} {error}"),
        }
    }
    Ok(())
}

fn run<B>(args: &Args) -> Result<(), AnyError>
where
    B: Backend + ContextParallelBackend,
    B::Device: RankDevice,
    Autodiff<B>: AutodiffBackend<Device = B::Device> + ContextParallelBackend,
{
    println!(
        "{} ranks, {} heads, {} of keys, head_dim {}, {:?}, layout {:?}",
        args.ranks,
        args.heads,
        args.shape().num_kv_heads,
        args.head_dim,
        args.dtype(),
        args.layout
    );
    for &tokens in &args.tokens {
        let documents = Documents::from_lengths(&[vec![tokens]], tokens)?;
        compare::<Autodiff<B>>(args, &format!("one document of {tokens}"), &documents)?;
    }
    let longest = args.tokens.iter().copied().max().unwrap_or(1);
    for &median in &args.medians {
        let lengths = log_normal_lengths(1, median as f64, longest);
        let documents = Documents::from_lengths(&[lengths], longest)?;
        let name = format!("{longest} tokens in documents of median {median}");
        compare::<Autodiff<B>>(args, &name, &documents)?;
    }
    Ok(())
}

fn main() -> Result<(), AnyError> {
    let args = Args::parse();
    match args.device {
        Device::Cpu => run::<burn::backend::Flex>(&args),
        #[cfg(feature = "wgpu")]
        Device::Wgpu => run::<burn::backend::Wgpu<f32, i32>>(&args),
        #[cfg(not(feature = "wgpu"))]
        Device::Wgpu => Err("built without the feature `wgpu`".into()),
        #[cfg(feature = "cuda")]
        Device::Cuda => {
            run::<burn_cubecl::CubeBackend<cubecl::cuda::CudaRuntime, f32, i32, u8>>(&args)
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => Err("built without the feature `cuda`".into()),
    }
}
