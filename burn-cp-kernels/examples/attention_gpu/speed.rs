//! Timings: medians of synchronised runs. TFLOP/s count 4 · heads · head_dim · visible pairs forward
//! and 2.5 times that backward, with half the square of a document's length as its pairs.

use std::time::Instant;

use burn::{
    backend::Autodiff,
    tensor::{
        DType, Distribution, FloatDType, Tensor,
        backend::Backend,
        module,
        ops::{AttentionModuleOptions, FloatTensor, FloatTensorOps},
    },
};
use burn_cp_kernels::{
    AttentionBackend, AttentionBackwardInput, AttentionInput, AttentionOptions, AttentionProblem,
    Routine, Segments, varlen_attention,
};

use crate::{
    Device,
    cases::{documents, sync},
    wanted,
};

/// What a call takes, in seconds.
#[derive(Clone, Copy)]
struct Timing {
    /// On a device that has nothing else to do, as CUDA events around a synchronised call measure it.
    single: f64,
    /// Right behind another one: a device that is busy for longer lowers its clock.
    behind: f64,
}

/// Medians, without the host's launch and wait. A single call follows a fill that keeps the device busy while the host launches it, and
/// what the fill takes alone is taken off; calls behind one another are three less one, halved. The device rests in between.
fn median(call: impl Fn(), wait: impl Fn()) -> Timing {
    let device = Default::default();
    let fill = || {
        let shape = [1 << 27].into();
        drop(<Device as FloatTensorOps<Device>>::float_zeros(
            shape,
            &device,
            FloatDType::F32,
        ));
    };
    let seconds = |fills: usize, calls: usize| {
        wait();
        let start = Instant::now();
        (0..fills).for_each(|_| fill());
        (0..calls).for_each(|_| call());
        wait();
        start.elapsed().as_secs_f64()
    };
    let middle = |of: &dyn Fn() -> f64| {
        let mut times: Vec<f64> = (0..15).map(|_| of()).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    seconds(1, 3);
    Timing {
        single: middle(&|| seconds(1, 1) - seconds(1, 0)),
        behind: middle(&|| (seconds(0, 3) - seconds(0, 1)) / 2.0),
    }
}

/// Lengths as they come from packing documents whose lengths are exponentially distributed. Fixed lists, so
/// that every run and every peer has the same ones: beside the program `lengths_<total>_<mean>.txt` is a file of numbers, if given.
fn packed(total: usize, mean: usize) -> Vec<usize> {
    let file = format!("lengths_{total}_{mean}.txt");
    let beside = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.parent()?.join(&file)));
    if let Some(text) = beside.and_then(|path| std::fs::read_to_string(path).ok()) {
        return text
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
    }
    let mut state = 1u64;
    let (mut lengths, mut left) = (Vec::new(), total);
    while left > 0 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let uniform = ((state >> 11) as f64 + 1.0) / (1u64 << 53) as f64;
        let length = (-uniform.ln() * mean as f64) as usize;
        lengths.push(length.max(16).min(left));
        left -= lengths[lengths.len() - 1];
    }
    lengths
}

struct Work {
    name: String,
    lengths: Vec<usize>,
    heads: (usize, usize),
    head_dim: usize,
}

fn works() -> Vec<Work> {
    let one = |tokens: usize, heads, head_dim| Work {
        name: format!("one document of {tokens}, heads {heads:?}, head_dim {head_dim}"),
        lengths: vec![tokens],
        heads,
        head_dim,
    };
    let many = |total: usize, mean: usize| {
        let lengths = packed(total, mean);
        Work {
            name: format!(
                "{} documents in {total}, heads (16, 8), head_dim 128",
                lengths.len()
            ),
            lengths,
            heads: (16, 8),
            head_dim: 128,
        }
    };
    vec![
        one(8192, (16, 16), 128),
        one(16384, (16, 16), 128),
        one(8192, (32, 8), 128),
        one(8192, (32, 32), 64),
        many(32768, 2048),
        many(32768, 8192),
        many(65536, 4096),
        many(65536, 1024),
        many(65536, 64),
    ]
}

fn random(shape: [usize; 4], dtype: FloatDType) -> FloatTensor<Device> {
    let device = Default::default();
    let normal = Distribution::Normal(0.0, 1.0);
    // Token-major in memory, as projections give it.
    let [batch, heads, tokens, dim] = shape;
    let shape = [batch, tokens, heads, dim].into();
    let tensor = <Device as FloatTensorOps<Device>>::float_random(shape, normal, &device, dtype);
    <Device as FloatTensorOps<Device>>::float_swap_dims(tensor, 1, 2)
}

fn time(work: &Work, routine: Routine, dtype: FloatDType) {
    let segments: Segments = documents(&work.lengths);
    let (_, tokens) = segments.q_shape();
    let q = [1, work.heads.0, tokens, work.head_dim];
    let k = [1, work.heads.1, tokens, work.head_dim];
    let options = AttentionOptions::new().with_routine(routine);
    let problem = AttentionProblem::new(q, k, k, &segments).expect("shapes that fit");
    let device = Default::default();
    if let Err(error) = Device::attention_routine(&problem, DType::from(dtype), &device, &options) {
        println!("{routine} | {} | {error}", work.name);
        return;
    }
    let (dout, q) = (random(q, dtype), random(q, dtype));
    let (k, v) = (random(k, dtype), random(k, dtype));
    let input = AttentionInput::new(q.clone(), k.clone(), v.clone());
    let forward = || Device::attention_forward(input.clone(), &segments, &options);
    let forward_t = median(|| drop(forward()), sync);
    let output = forward();
    let input = AttentionBackwardInput::new(q, k, v, output.out, output.lse, dout);
    let backward = || Device::attention_backward(input.clone(), &segments, &options);
    let backward_t = median(|| drop(backward()), sync);
    let pairs: f64 = work
        .lengths
        .iter()
        .map(|len| (*len as f64).powi(2) / 2.0)
        .sum();
    let flops = 4.0 * (work.heads.0 * work.head_dim) as f64 * pairs / 1e12;
    let shown = |timing: Timing, flops: f64| {
        let [single, behind] = [timing.single, timing.behind];
        format!(
            "{:.3} ms, {:.1} TFLOP/s, behind another {:.3} ms, {:.1}",
            single * 1e3,
            flops / single,
            behind * 1e3,
            flops / behind
        )
    };
    println!(
        "{routine} {dtype:?} | {} | forward {} | backward {}",
        work.name,
        shown(forward_t, flops),
        shown(backward_t, 2.5 * flops)
    );
}

/// Every routine on every work; the portable one on those that end soon.
pub(crate) fn routines() {
    for work in works() {
        for routine in [Routine::Hopper, Routine::TensorCore] {
            if wanted(routine) {
                time(&work, routine, FloatDType::BF16);
            }
        }
    }
    if wanted(Routine::Portable) {
        portable();
    }
}

/// The portable routine on some works.
pub(crate) fn portable() {
    for index in [0, 3, 7, 8] {
        time(&works()[index], Routine::Portable, FloatDType::BF16);
    }
    time(&works()[0], Routine::Portable, FloatDType::F32);
}

type Fused = Autodiff<burn::backend::Cuda<f32, i32>>;

/// Burn's attention and ours on the same problems under autodiff, with fusion. Burn holds all scores at once and, with its `autotune`, tries
/// its kernels on them, which takes minutes.
pub(crate) fn against_burn(lengths: &[usize]) {
    for &tokens in lengths {
        for dtype in [DType::F32, DType::BF16] {
            against_burn_at(tokens, dtype);
        }
    }
}

fn against_burn_at(tokens: usize, dtype: DType) {
    let (heads, head_dim) = (16, 128);
    let problem = format!(
        "one document of {tokens}, heads {heads}, head_dim {head_dim}, {dtype:?}, causal, Autodiff<Cuda>"
    );
    let device = Default::default();
    let segments = documents(&[tokens]);
    let leaf = || {
        let normal = Distribution::Normal(0.0, 1.0);
        let shape = [1, heads, tokens, head_dim];
        Tensor::<Fused, 4>::random(shape, normal, (&device, dtype))
    };
    let [q, k, v] = [leaf(), leaf(), leaf()];
    let wait = || Fused::sync(&device).expect("a device without errors");
    let burn = |q, k, v| {
        let options = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        module::attention(q, k, v, None, None, options)
    };
    let ours = |routine: Option<Routine>| {
        let mut options = AttentionOptions::new();
        options.routine = routine;
        let segments = segments.clone();
        move |q, k, v| varlen_attention::<Fused, 4>(q, k, v, &segments, &options)
    };
    type Attention =
        Box<dyn Fn(Tensor<Fused, 4>, Tensor<Fused, 4>, Tensor<Fused, 4>) -> Tensor<Fused, 4>>;
    let all: [(&str, Attention); 3] = [
        ("ours, portable", Box::new(ours(Some(Routine::Portable)))),
        ("ours, chosen", Box::new(ours(None))),
        ("Burn's attention", Box::new(burn)),
    ];
    for (name, attention) in all {
        let out = attention(q.clone(), k.clone(), v.clone());
        assert_eq!(out.dtype(), dtype, "{name}");
        drop(out);
        let forward = median(|| drop(attention(q.clone(), k.clone(), v.clone())), wait);
        let leaves = || [&q, &k, &v].map(|leaf| leaf.clone().require_grad());
        let both = median(
            || {
                let [q, k, v] = leaves();
                let grads = attention(q.clone(), k.clone(), v.clone()).sum().backward();
                drop([q, k, v].map(|leaf| leaf.grad(&grads)));
            },
            wait,
        );
        println!(
            "{problem}, {name} | forward {:.2} ms | forward + backward {:.2} ms",
            forward.single * 1e3,
            both.single * 1e3
        );
    }
}
