//! Ranks that share one device through a CubeCL runtime: sharded attention equals that of one rank, forward to the bit.
//!
//! On software Vulkan with the feature `wgpu`; `BURN_CP_DEVICE=wgpu` makes a missing device a failure instead of a declared skip.

use burn::{
    backend::{
        Autodiff,
        wgpu::{CubeBackend, WgpuDevice, WgpuRuntime},
    },
    tensor::{Tensor, TensorData, backend::AutodiffBackend},
};
use burn_cp::{
    attention::{AttentionOptions, ContextParallelBackend},
    batch::SequenceBatch,
    layout::{Documents, LayoutPolicy},
    plan::ExchangeStrategy,
    sharder::{ContextParallelConfig, Extent},
};
use burn_cp_tests::{Random, backward, floats, on_groups, relative_error, sharder, to_bits};

type Cube = CubeBackend<WgpuRuntime, f32, i32, u32>;
type Fused = burn::backend::Wgpu<f32, i32, u32>;

const HEADS: [usize; 2] = [4, 2];
const HEAD_DIM: usize = 32;
const TOKENS: usize = 240;

fn device_exists() -> bool {
    let probe = || floats(&Tensor::<Cube, 1>::ones([4], &WgpuDevice::Cpu)) == [1.0; 4];
    let exists = std::panic::catch_unwind(probe).unwrap_or(false);
    let asked = std::env::var("BURN_CP_DEVICE").is_ok_and(|device| device == "wgpu");
    assert!(
        exists || !asked,
        "no Vulkan device of kind Cpu, and BURN_CP_DEVICE asks for one"
    );
    if !exists {
        eprintln!("skipped: no Vulkan device of kind Cpu (Debian: mesa-vulkan-drivers)");
    }
    exists
}

fn documents() -> Documents {
    Documents::from_padded_lengths(&[vec![130, 1, 65, 40]], &[vec![132, 1, 65, 42]], TOKENS)
        .expect("legal lengths")
}

/// Bits of the output, and the gradients of q, k and v summed over ranks.
fn run<B>(
    world_size: usize,
    config: &ContextParallelConfig,
    options: &AttentionOptions,
) -> (Vec<u64>, [Vec<f64>; 3])
where
    B: AutodiffBackend<Device = WgpuDevice> + ContextParallelBackend,
{
    let results = on_groups(&[("cp", world_size)], |groups| {
        let device = WgpuDevice::Cpu;
        let cp = sharder(&groups, config.clone());
        let mut random = Random::new(5);
        let mut tensor = |heads: usize| {
            let shape = [1, heads, TOKENS, HEAD_DIM];
            let values = random.floats(shape.iter().product());
            Tensor::<B, 4>::from_data(TensorData::new(values, shape), &device)
        };
        let (leaves, dout) = (
            [HEADS[0], HEADS[1], HEADS[1]].map(|heads| tensor(heads).require_grad()),
            tensor(HEADS[0]),
        );
        let ids = TensorData::new(vec![1_i64; TOKENS], [1, TOKENS]);
        let batch = SequenceBatch::from_ids(ids).with_documents(documents());
        let step = cp.shard(batch, &device).expect("a legal batch");
        let [q, k, v] = leaves
            .clone()
            .map(|leaf| step.shard_tokens(leaf, 2, Some(0.0)));
        let out = step.attention(q, k, v, options);
        let loss = (out.clone() * step.shard_tokens(dout, 2, Some(0.0))).sum();
        let grads = backward(&loss, &groups.world().expect("a world"));
        let out = to_bits(&step.gather_tokens(out.detach(), 2, Extent::Input));
        (
            out,
            leaves.map(|leaf| floats(&leaf.grad(&grads).expect("a gradient"))),
        )
    });
    let mut results = results.into_iter();
    let (out, mut gradients) = results.next().expect("a rank");
    for (other, more) in results {
        assert!(other == out, "ranks gather the same rows");
        for (sum, part) in gradients.iter_mut().zip(more) {
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
    }
    (out, gradients)
}

fn check<B>()
where
    B: AutodiffBackend<Device = WgpuDevice> + ContextParallelBackend,
{
    if !device_exists() {
        return;
    }
    for options in [
        AttentionOptions::causal(),
        AttentionOptions::causal().with_window(70),
    ] {
        let config = |layout, exchange| ContextParallelConfig {
            layout,
            exchange,
            ..ContextParallelConfig::default()
        };
        let alone = config(LayoutPolicy::Identity, ExchangeStrategy::AllGather);
        let one = run::<B>(1, &alone, &options);
        for (world_size, layout, exchange) in [
            (2, LayoutPolicy::HeadTail, ExchangeStrategy::AllGather),
            (
                3,
                LayoutPolicy::Contiguous { multiple: 1 },
                ExchangeStrategy::NeededOnly,
            ),
        ] {
            let many = run::<B>(world_size, &config(layout, exchange), &options);
            assert!(many.0 == one.0, "the forward pass of {world_size} ranks");
            for (many, one) in many.1.iter().zip(&one.1) {
                assert!(relative_error(many, one) < 1e-5);
            }
        }
    }
}

#[test]
fn ranks_on_one_device_equal_one_rank() {
    check::<Autodiff<Cube>>();
}

#[test]
fn ranks_on_one_device_equal_one_rank_under_fusion() {
    check::<Autodiff<Fused>>();
}
