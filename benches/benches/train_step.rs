//! A training step of Qwen3-VL over packed documents with an image each: forward, backward, sum of gradients, optimizer. One JSON object,
//! from rank 0.
//!
//! `cargo bench -p burn-cp-benches --bench train_step -- --device cpu --ranks 2 --shape tiny --tokens 1024`

use std::{error::Error, slice, time::Instant};

use burn::{
    backend::{Autodiff, autodiff::checkpoint::strategy::BalancedCheckpointing},
    module::{Module, ModuleMapper, Param},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{
        Int, Tensor, TensorData,
        backend::{Backend, DeviceOps},
    },
};
use burn_cp::{
    batch::{Media, SequenceBatch},
    collectives::{all_reduce, num_host_reads},
    comm::{self, RankContext},
    launch::RankDevice,
    layout::{Documents, LayoutPolicy},
    mesh::DeviceMesh,
    nn::{SequenceModel, SequenceSharded},
    optim::GradientSync,
    plan::ExchangeStrategy,
    sharder::{ContextParallel, ContextParallelConfig, CpStep},
    vision::{VisionDelivery, VisionShardingConfig},
};
use burn_cp_benches::{Device, Launch, launched, log_normal_lengths};
use burn_cp_examples::{
    finetune::linear_cross_entropy,
    models::qwen3_vl::{Qwen3Vl, Qwen3VlConfig, mrope_positions},
    train::{Checkpointing, TrainBackend},
};
use clap::{Parser, ValueEnum};
#[cfg(feature = "cuda")]
use cubecl::{Runtime, cuda::CudaRuntime};
use serde_json::json;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Shape {
    /// For a try on any machine.
    #[default]
    Tiny,
    /// The published model of two thousand million parameters.
    #[value(name = "2b")]
    TwoB,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Vision {
    /// Frames are split over ranks.
    #[default]
    Sharded,
    /// Every rank computes every frame.
    Replicated,
    /// Frames are split over ranks, and the rest of the model is left out of the step.
    Alone,
}

impl Vision {
    /// The model, of which no more is trained than the step computes.
    fn trained<B: Backend>(self, mut model: Qwen3Vl<B>) -> Qwen3Vl<B> {
        if self == Self::Alone {
            model.model.language_model = model.model.language_model.no_grad();
            model.lm_head = model.lm_head.map(Module::no_grad);
        }
        model
    }
}

/// Times a training step.
#[derive(Debug, Clone, Parser)]
struct Args {
    /// Number of ranks where they are threads
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// How ranks are started
    #[arg(long, value_enum, default_value_t)]
    launch: Launch,
    /// Where ranks compute
    #[arg(long, value_enum, default_value_t)]
    device: Device,
    /// Which model
    #[arg(long, value_enum, default_value_t)]
    shape: Shape,
    /// Tokens of the packed row
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Median length of a document, log-normal with sigma 1.2
    #[arg(long, default_value_t = 256)]
    median: usize,
    /// Side of a document's image, in patches; 0 for text only
    #[arg(long, default_value_t = 8)]
    image: usize,
    /// Which rank owns which tokens: contiguous, head-tail or balanced
    #[arg(long, default_value = "head-tail", value_parser = layout)]
    layout: LayoutPolicy,
    /// How keys and values travel
    #[arg(long, default_value = "needed-only", value_parser = exchange)]
    exchange: ExchangeStrategy,
    /// Where the vision tower runs
    #[arg(long, value_enum, default_value_t)]
    vision: Vision,
    /// Compute with a rank's own keys while others travel
    #[arg(long)]
    overlap: bool,
    /// Keep the keys of other ranks for the backward pass
    #[arg(long)]
    keep_keys: bool,
    /// Multiprocessors that a forward pass leaves free while keys and values travel
    #[arg(long, default_value_t = 0)]
    sm_margin: usize,
    /// Give image embeddings only to the ranks that own their tokens
    #[arg(long)]
    deliver: bool,
    /// What the backward pass computes again instead of keeping it
    #[arg(long, value_enum, default_value_t = Checkpointing::None)]
    checkpointing: Checkpointing,
    /// Logits of how many tokens exist at a time; 0: all
    #[arg(long, default_value_t = 0)]
    chunk: usize,
    /// Steps that are not timed: they compile and tune kernels, and make connections
    #[arg(long, default_value_t = 4)]
    warmup: u32,
    /// Timed steps
    #[arg(long, default_value_t = 3)]
    steps: u32,
    /// Set by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

type Failure = Box<dyn Error + Send + Sync>;

fn layout(name: &str) -> Result<LayoutPolicy, String> {
    let value = match name {
        "contiguous" => json!({ "contiguous": { "multiple": 1 } }),
        "balanced" => json!({ "balanced": {} }),
        name => json!(name),
    };
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn exchange(name: &str) -> Result<ExchangeStrategy, String> {
    serde_json::from_value(json!(name)).map_err(|error| error.to_string())
}

/// The fields of the published configurations that this architecture needs.
fn model(shape: Shape) -> Qwen3VlConfig {
    let [hidden, inner, layers, heads, kv_heads, head_dim, vocab] = match shape {
        Shape::Tiny => [64, 128, 2, 4, 2, 16, 512],
        Shape::TwoB => [2048, 6144, 28, 16, 8, 128, 151_936],
    };
    let [depth, width, tower_inner, tower_heads] = match shape {
        Shape::Tiny => [3, 32, 64, 2],
        Shape::TwoB => [24, 1024, 4096, 16],
    };
    let (sections, deepstack, ids) = match shape {
        Shape::Tiny => ([4, 2, 2], vec![0, 1], [500, 501, 502, 503]),
        Shape::TwoB => (
            [24, 20, 20],
            vec![5, 11, 17],
            [151_655, 151_656, 151_652, 151_653],
        ),
    };
    let config = json!({
        "text_config": {
            "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "rms_norm_eps": 1e-6,
            "rope_theta": 5e6, "rope_scaling": { "mrope_section": sections, "rope_type": "default", "mrope_interleaved": true },
        },
        "vision_config": {
            "depth": depth, "hidden_size": width, "intermediate_size": tower_inner, "num_heads": tower_heads, "in_channels": 3,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": deepstack,
        },
        "image_token_id": ids[0], "video_token_id": ids[1], "vision_start_token_id": ids[2], "vision_end_token_id": ids[3],
        "tie_word_embeddings": true,
    });
    serde_json::from_value(config).expect("a configuration")
}

/// One row of documents, each an image and its text.
fn batch<B: Backend>(
    args: &Args,
    config: &Qwen3VlConfig,
    device: &B::Device,
) -> Result<(SequenceBatch<B>, Vec<usize>), Failure> {
    let merge = config.vision_config.spatial_merge_size;
    let side = args.image.next_multiple_of(merge);
    let num_image_tokens = (side / merge).pow(2);
    let grid = [1, side, side];
    let lengths = log_normal_lengths(1, args.median as f64, args.tokens);
    let (mut ids, mut labels) = (Vec::new(), Vec::new());
    let mut positions: [Vec<i64>; 3] = Default::default();
    let mut grids = Vec::new();
    let num_text_ids = config.image_token_id.min(config.vision_start_token_id);
    for (d, &len) in lengths.iter().enumerate() {
        let has_image = num_image_tokens > 0 && len > num_image_tokens + 1;
        let image = if has_image { num_image_tokens } else { 0 };
        let id = |i: usize| match i < image {
            true => config.image_token_id,
            false => ((d * 7919 + i * 104_729) as i64) % num_text_ids,
        };
        let document: Vec<i64> = (0..len).map(id).collect();
        let mine: &[[usize; 3]] = if has_image { &[grid] } else { &[] };
        for (axis, more) in positions
            .iter_mut()
            .zip(mrope_positions(&document, mine, &[], config)?)
        {
            axis.extend(more);
        }
        grids.extend_from_slice(mine);
        labels.extend((0..len).map(|i| {
            if i + 1 < len && i + 1 >= image {
                document[i + 1]
            } else {
                -100
            }
        }));
        ids.extend(document);
    }
    let num_tokens = ids.len();
    let placeholders: Vec<bool> = ids.iter().map(|id| *id == config.image_token_id).collect();
    let row = [1, num_tokens];
    let mut batch = SequenceBatch::from_ids(TensorData::new(ids, row))
        .with_labels(TensorData::new(labels, row))
        .with_vocab_size(config.text_config.vocab_size)
        .with_positions(TensorData::new(positions.concat(), [3, 1, num_tokens]))
        .with_documents(Documents::from_lengths(
            slice::from_ref(&lengths),
            num_tokens,
        )?);
    if !grids.is_empty() {
        let rows = grids.len() * side * side;
        let width = config.vision_config.patch_dim();
        let pixel = |i: usize| ((i * 7919) % 509) as f32 / 254.0 - 1.0;
        let pixels = TensorData::new((0..rows * width).map(pixel).collect(), [rows, width]);
        batch = batch.with_media(Media {
            name: "image".to_owned(),
            pixels: Tensor::from_data(pixels, device),
            grids,
            spatial_merge_size: merge,
            placeholders: TensorData::new(placeholders, row),
        });
    }
    Ok((batch, lengths))
}

/// Fills parameters on the device: a host takes minutes for two thousand million normal numbers, and a step does not care.
struct OnDevice;

impl<B: Backend> ModuleMapper<B> for OnDevice {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let dims: [usize; D] = param.lazy_shape().dims();
        let (device, len) = (param.lazy_device(), dims.iter().product::<usize>());
        let value = if D == 1 {
            Tensor::ones(dims, &device)
        } else {
            // From a counter, between -0.03 and 0.03, the same on every rank.
            let at = Tensor::<B, 1, Int>::arange(0..len as i64, &device) % 65_521;
            let random = (at * 7919 % 65_521).float() / 32_760.0 - 1.0;
            (random * 0.03).reshape(dims)
        };
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, value.require_grad(), mapper)
    }
}

/// Of the mean of what the tower makes of all frames.
fn tower_gradients<B: TrainBackend>(
    model: &SequenceSharded<Qwen3Vl<B>>,
    step: &CpStep<B>,
) -> Result<(GradientsParams, Tensor<B::InnerBackend, 1>), Failure> {
    let features = step.encode_media(&model.inner().model.visual)?;
    let features =
        features.ok_or("expected images to encode, got none: see --image and --median")?;
    let all = [features.embeddings].into_iter().chain(features.deepstack);
    let mean = all.map(|part| part.mean()).reduce(|sum, part| sum + part);
    let mean = mean
        .expect("embeddings")
        .mul_scalar(1.0 / step.group().size() as f64);
    let value = mean.clone().inner();
    step.loss_group().barrier()?;
    let grads = GradientsParams::from_grads(mean.backward(), model);
    Ok((grads, all_reduce(value, step.loss_group())))
}

/// Gradients of this rank, and the loss of all ranks.
fn gradients<B: TrainBackend>(
    model: &SequenceSharded<Qwen3Vl<B>>,
    step: &CpStep<B>,
    chunk: usize,
) -> Result<(GradientsParams, Tensor<B::InnerBackend, 1>), Failure> {
    if chunk == 0 {
        let loss = step.cross_entropy(model.forward(step)?)?;
        let grads = GradientsParams::from_grads(loss.backward(), model);
        return Ok((grads, loss.global.inner()));
    }
    let num_labels = step.num_labels()?.global;
    let hidden = model.inner().model.forward(step)?;
    let head = model.inner().head();
    let loss = linear_cross_entropy(step, hidden, head, (num_labels, chunk), true);
    // As `TokenLoss::backward`: no rank runs ahead of a backward pass.
    step.loss_group().barrier()?;
    let grads = GradientsParams::from_grads(loss.local.backward(), model);
    #[allow(clippy::cast_precision_loss, reason = "a number of labels")]
    let part = loss.sum / num_labels.max(1) as f64;
    Ok((grads, all_reduce(part, step.loss_group())))
}

/// GiB that the pools of this rank's device hold. 0 on CPUs.
fn reserved<D: DeviceOps>(args: &Args, device: &D) -> Result<f64, Failure> {
    #[cfg(feature = "cuda")]
    if args.device == Device::Cuda {
        let device = burn::backend::cuda::CudaDevice::new(usize::from(device.id().index_id));
        let usage = CudaRuntime::client(&device).memory_usage()?;
        return Ok((usage.bytes_reserved as f64 / f64::from(1 << 30) * 10.0).round() / 10.0);
    }
    let _ = (args, device);
    Ok(0.0)
}

fn rank<B>(context: &RankContext, args: &Args) -> Result<(), Failure>
where
    B: TrainBackend,
    B::Device: RankDevice,
{
    let mesh = DeviceMesh::new([("dp", 1), ("cp", context.world_size())])?;
    let groups = comm::bind(&mesh, context)?;
    let device = B::Device::of_rank(context)?;
    let cp = ContextParallel::new(
        &groups,
        ContextParallelConfig {
            layout: args.layout.clone(),
            exchange: args.exchange,
            overlap: args.overlap,
            keep_keys: args.keep_keys,
            sm_margin: args.sm_margin,
            vision: match args.vision {
                Vision::Sharded | Vision::Alone => VisionShardingConfig::always(),
                Vision::Replicated => VisionShardingConfig::replicated(),
            }
            .with_delivery(if args.deliver {
                VisionDelivery::ToConsumers
            } else {
                VisionDelivery::Gathered
            }),
            ..ContextParallelConfig::default()
        },
    )?;
    let config = model(args.shape);
    let model: Qwen3Vl<B> = config.build(&device)?.map(&mut OnDevice);
    let mut model = SequenceSharded::new::<B>(args.vision.trained(model), &cp)?;
    let mut optimizer = AdamWConfig::new().init::<B, SequenceSharded<Qwen3Vl<B>>>();
    let (batch, lengths) = batch::<B>(args, &config, &device)?;
    let num_tokens: usize = lengths.iter().sum();
    let (mut loss_value, mut start, mut reads) = (0.0, Instant::now(), 0);
    for step in 0..args.warmup + args.steps {
        if step == args.warmup {
            B::sync(&device)?;
            groups.world()?.barrier()?;
            eprintln!("warm-up: {:.1} s", start.elapsed().as_secs_f64());
            (start, reads) = (Instant::now(), num_host_reads());
        }
        let sharded = cp.shard(batch.clone(), &device)?;
        let (grads, loss) = match args.vision {
            Vision::Alone => tower_gradients(&model, &sharded)?,
            _ => gradients(&model, &sharded, args.chunk)?,
        };
        let grads = GradientSync::default().sync::<B, _>(grads, &model, cp.loss_group());
        model = optimizer.step(1e-5, model, grads);
        if step + 1 == args.warmup + args.steps {
            reads = num_host_reads() - reads;
            B::sync(&device)?;
            loss_value = loss.into_data().iter::<f64>().sum();
            if !f64::is_finite(loss_value) {
                // Where a device has no memory left, the error is not always the first thing that is seen.
                return Err(format!("expected a finite loss, got {loss_value}").into());
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64() / f64::from(args.steps.max(1));
    let memory = groups
        .world()?
        .host_all_gather("memory", reserved(args, &device)?)?;
    if context.rank() == 0 {
        println!(
            "{}",
            json!({
                "ours": "burn-cp", "shape": format!("{:?}", args.shape), "vision": format!("{:?}", args.vision), "delivered": args.deliver, "world": context.world_size(), "tokens": num_tokens,
                "lengths": lengths, "gib_of_ranks": memory, "ms_per_step": (seconds * 1e4).round() / 10.0, "tokens_per_s": (num_tokens as f64 / seconds).round(),
                "loss": loss_value, "host_reads_per_step": reads as f64 / f64::from(args.steps.max(1)),
            })
        );
    }
    Ok(())
}

fn run<B>(args: &Args) -> Result<(), Box<dyn Error>>
where
    Autodiff<B>: TrainBackend<Device: RankDevice>,
    Autodiff<B, BalancedCheckpointing>: TrainBackend<Device: RankDevice>,
    B: Backend,
{
    launched(args.launch, args.device, args.ranks, |context| {
        match args.checkpointing {
            Checkpointing::None => rank::<Autodiff<B>>(&context, args),
            Checkpointing::Balanced => rank::<Autodiff<B, BalancedCheckpointing>>(&context, args),
        }
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    match args.device {
        Device::Cpu => run::<burn::backend::Flex>(&args),
        #[cfg(feature = "cuda")]
        Device::Cuda => run::<burn::backend::Cuda<burn::tensor::bf16, i32>>(&args),
    }
}
