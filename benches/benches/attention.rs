//! Varlen attention on one device beside Burn's own attention over the same documents, one call per document.

#![allow(
    missing_docs,
    reason = "criterion_group makes an undocumented function"
)]

use std::hint::black_box;

use burn::tensor::{Distribution, Tensor, module::attention};
use burn_cp_kernels::{AttentionBackend, AttentionOptions, Segment, Segments, attention_forward};
use criterion::{Criterion, criterion_group, criterion_main};

/// One row of packed documents.
struct Pack {
    lengths: &'static [usize],
    num_heads: usize,
    head_dim: usize,
}

const SHORT: Pack = Pack {
    lengths: &[17, 64, 128, 200, 300, 315],
    num_heads: 4,
    head_dim: 32,
};
const LONG: Pack = Pack {
    lengths: &[700, 1300, 2096],
    num_heads: 8,
    head_dim: 64,
};

fn on_flex(c: &mut Criterion) {
    varlen::<burn::backend::Flex>(c, "Flex", &SHORT, &Default::default());
    varlen::<burn::backend::Flex>(c, "Flex", &LONG, &Default::default());
}

/// On the device that Burn takes; `CUBECL_WGPU_DEFAULT_DEVICE=Cpu` asks for software Vulkan.
#[cfg(feature = "wgpu")]
fn on_wgpu(c: &mut Criterion) {
    varlen::<burn::backend::Wgpu<f32, i32, u32>>(c, "Wgpu", &SHORT, &Default::default());
}

fn varlen<B: AttentionBackend>(c: &mut Criterion, backend: &str, pack: &Pack, device: &B::Device) {
    let wait = || B::sync(device).expect("a device without errors");
    let Pack {
        lengths,
        num_heads,
        head_dim,
    } = *pack;
    let tokens: usize = lengths.iter().sum();
    let random = || {
        Tensor::<B, 4>::random(
            [1, num_heads, tokens, head_dim],
            Distribution::Default,
            device,
        )
    };
    let (q, k, v) = (random(), random(), random());
    let mut ranges = Vec::new();
    let mut start = 0;
    for &len in lengths {
        ranges.push(start..start + len);
        start += len;
    }
    let segments = ranges
        .iter()
        .map(|tokens| Segment {
            q_row: 0,
            q: tokens.clone(),
            k_row: 0,
            k: tokens.clone(),
            k_position: 0,
            causal: true,
            window: None,
        })
        .collect();
    let segments =
        Segments::new(segments, (1, tokens), (1, tokens)).expect("documents that fill their row");
    let options = AttentionOptions::new();
    let mut group = c.benchmark_group(format!(
        "forward, {tokens} tokens in {} documents, {num_heads} heads of {head_dim}, {backend} f32",
        lengths.len()
    ));
    group.sample_size(if tokens > 1024 { 10 } else { 100 });
    group.bench_function("burn-cp varlen", |b| {
        b.iter(|| {
            black_box(attention_forward(
                q.clone(),
                k.clone(),
                v.clone(),
                &segments,
                &options,
            ));
            wait();
        });
    });
    group.bench_function("burn attention per document", |b| {
        b.iter(|| {
            for range in &ranges {
                let part = |x: &Tensor<B, 4>| {
                    x.clone()
                        .slice([0..1, 0..num_heads, range.clone(), 0..head_dim])
                };
                let options = burn::tensor::ops::AttentionModuleOptions {
                    is_causal: true,
                    ..Default::default()
                };
                black_box(attention(part(&q), part(&k), part(&v), None, None, options));
            }
            wait();
        });
    });
    group.finish();
}

#[cfg(not(feature = "wgpu"))]
criterion_group!(benches, on_flex);
#[cfg(feature = "wgpu")]
criterion_group!(benches, on_flex, on_wgpu);
criterion_main!(benches);
