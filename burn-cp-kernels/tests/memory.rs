//! What a call allocates grows with the number of tokens, not with its square.
//!
//! A test binary of its own, since it counts what the whole process allocates.

// Clippy takes the helpers of tests for library code.
#![allow(clippy::unwrap_used)]

use burn::tensor::{Distribution, Tensor, backend::AutodiffBackend};
use burn_cp_kernels::{
    AttentionOptions, Segment, Segments, VarlenAttentionBackend, varlen_attention,
};

const HEAD_DIM: usize = 32;

/// Forward and backward of one causal document by one head.
fn run<B: AutodiffBackend + VarlenAttentionBackend>(tokens: usize, device: &B::Device) {
    let document = Segment {
        q_row: 0,
        q: 0..tokens,
        k_row: 0,
        k: 0..tokens,
        k_position: 0,
        causal: true,
        window: None,
    };
    let segments = Segments::new(vec![document], (1, tokens), (1, tokens)).unwrap();
    let random = || {
        Tensor::<B, 4>::random([1, 1, tokens, HEAD_DIM], Distribution::Default, device)
            .require_grad()
    };
    let [q, k, v] = [random(), random(), random()];
    let options = AttentionOptions::new();
    let out = varlen_attention(q.clone(), k.clone(), v.clone(), &segments, &options);
    let grads = out.sum().backward();
    for leaf in [q, k, v] {
        let grad = leaf.grad(&grads).unwrap().into_data();
        assert!(grad.iter::<f32>().all(f32::is_finite));
    }
}

/// `bytes(tokens)` at most doubles, within a tenth, where tokens do, and is below a matrix of scores.
fn grows_with_tokens(bytes: impl Fn(usize) -> usize) {
    let sizes = [2048, 4096];
    let [small, large] = sizes.map(&bytes);
    println!("{small} and {large} bytes for {sizes:?} tokens");
    assert!(small > 0 && large * 10 <= small * 22, "{small}, {large}");
    assert!(large < sizes[1] * sizes[1] * size_of::<f32>(), "{large}");
}

#[cfg(feature = "flex")]
mod host {
    use burn::backend::{Autodiff, Flex};
    use peak_alloc::PeakAlloc;

    use super::{grows_with_tokens, run};

    #[global_allocator]
    static HEAP: PeakAlloc = PeakAlloc;

    #[test]
    fn the_heap_of_the_composed_routine() {
        // Threads and tables of the first call stay.
        run::<Autodiff<Flex>>(256, &Default::default());
        grows_with_tokens(|tokens| {
            let before = HEAP.current_usage();
            HEAP.reset_peak_usage();
            run::<Autodiff<Flex>>(tokens, &Default::default());
            HEAP.peak_usage().saturating_sub(before)
        });
    }
}

#[cfg(feature = "wgpu")]
mod device {
    use std::panic::catch_unwind;

    use burn::backend::{
        Autodiff,
        wgpu::{CubeBackend, WgpuDevice, WgpuRuntime},
    };
    use cubecl::{
        MemoryConfiguration, Runtime,
        wgpu::{AutoGraphicsApi, RuntimeOptions, init_device, init_setup},
    };

    use super::{grows_with_tokens, run};

    type Cube = CubeBackend<WgpuRuntime, f32, i32, u32>;

    #[test]
    fn the_buffers_of_the_portable_routine() {
        let setup = catch_unwind(|| {
            init_setup::<AutoGraphicsApi>(&WgpuDevice::Cpu, RuntimeOptions::default())
        });
        let asked = std::env::var("BURN_CP_DEVICE").is_ok_and(|device| device == "wgpu");
        let Ok(setup) = setup else {
            assert!(
                !asked,
                "no Vulkan device of kind Cpu, and BURN_CP_DEVICE asks for one"
            );
            eprintln!("skipped: no Vulkan device of kind Cpu (Debian: mesa-vulkan-drivers)");
            return;
        };
        grows_with_tokens(|tokens| {
            // A buffer per tensor and none given back, on a device of its own.
            let options = RuntimeOptions {
                memory_config: MemoryConfiguration::ExclusivePages,
                ..RuntimeOptions::default()
            };
            let device = init_device(setup.clone(), options);
            run::<Autodiff<Cube>>(tokens, &device);
            let usage = WgpuRuntime::client(&device).memory_usage().unwrap();
            usage.bytes_reserved as usize
        });
    }
}
