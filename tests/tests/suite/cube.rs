//! CubeCL backends, as they are and fused: the collectives and attention of the CPU's tests, ranks as threads on one device.
//!
//! A machine without the device declares each test skipped; `BURN_CP_DEVICE=wgpu` asks for it, and then its absence
//! is a failure.

use std::panic::catch_unwind;

use burn::{
    backend::Autodiff,
    tensor::{
        DType, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_cp::{
    attention::{AttentionOptions, ContextParallelBackend, InnerAttention},
    layout::{Documents, LayoutPolicy},
    plan::ExchangeStrategy,
};
use burn_cp_tests::{Form, Problem, Random, floats, relative_error};

use crate::{
    attention::{Case, check, run},
    collectives::{floats_arrive_as_planned, integers_and_booleans_arrive_as_planned},
};

/// Whether the backend's default device is there. Its absence is said, or fails the test if the device was asked for.
fn device_exists<B: Backend>(name: &str) -> bool {
    let probe = || floats(&Tensor::<B, 1>::ones([4], &B::Device::default())) == [1.0; 4];
    let exists = catch_unwind(probe).unwrap_or(false);
    let asked = std::env::var("BURN_CP_DEVICE").is_ok_and(|device| device == name);
    assert!(
        exists || !asked,
        "no {name} device, and BURN_CP_DEVICE asks for one"
    );
    if !exists {
        eprintln!("skipped: no {name} device");
    }
    exists
}

/// Head sizes that fused kernels take.
fn case(seed: u64) -> (Case, Random) {
    let mut random = Random::new(seed);
    let mut case = Case::random(&mut random);
    case.problem.head_dim = random.one_of(&[32, 40, 64]);
    case.problem.v_head_dim = random.one_of(&[32, 48, 64]);
    (case, random)
}

/// The forward pass of several ranks on one device is that of one rank to the bit, and gradients agree.
fn several_ranks_equal_one<B>()
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: InnerAttention + ContextParallelBackend,
{
    let mut random = Random::new(17);
    let lengths = [vec![130, 1, 65, 40]];
    let documents = Documents::from_padded_lengths(&lengths, &[vec![132, 1, 65, 42]], 240);
    let one = Case {
        documents: documents.expect("lengths that fit"),
        form: Form::Table,
        placed: None,
        layout: LayoutPolicy::Identity,
        exchange: ExchangeStrategy::AllGather,
        world_size: 1,
        options: AttentionOptions::causal().with_window(70),
        problem: Problem {
            batch: 1,
            num_heads: 4,
            num_kv_heads: 2,
            tokens: 240,
            head_dim: 32,
            v_head_dim: 48,
            scale: None,
        },
    };
    for options in [one.options, AttentionOptions::causal()] {
        let one = Case {
            options,
            ..one.clone()
        };
        let inputs = one.inputs(&mut random);
        let want = run::<B>(&one, &inputs, DType::F32).0;
        for (world_size, layout, exchange) in [
            (2, LayoutPolicy::HeadTail, ExchangeStrategy::AllGather),
            (
                3,
                LayoutPolicy::Contiguous { multiple: 1 },
                ExchangeStrategy::NeededOnly,
            ),
        ] {
            let many = Case {
                layout,
                exchange,
                world_size,
                ..one.clone()
            };
            let got = run::<B>(&many, &inputs, DType::F32).0;
            let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&got.out) == bits(&want.out), "{many:?}");
            assert!(bits(&got.lse) == bits(&want.lse), "{many:?}");
            for (got, want) in [(got.dq, &want.dq), (got.dk, &want.dk), (got.dv, &want.dv)] {
                assert!(relative_error(&got, want) < 1e-5, "{many:?}");
            }
        }
    }
}

macro_rules! cube_tests {
    ($name:ident, $plain:ty, $fused:ty, $num_cases:literal) => {
        mod $name {
            use super::*;

            type Plain = $plain;
            type Fused = $fused;

            fn exists() -> bool {
                device_exists::<Plain>(stringify!($name))
            }

            #[test]
            fn collectives_arrive_as_planned() {
                if exists() {
                    floats_arrive_as_planned::<Plain>(DType::F32);
                    floats_arrive_as_planned::<Autodiff<Plain>>(DType::F32);
                    integers_and_booleans_arrive_as_planned::<Plain>();
                }
            }

            #[test]
            fn collectives_arrive_as_planned_on_fused_tensors() {
                if exists() {
                    floats_arrive_as_planned::<Fused>(DType::F32);
                    floats_arrive_as_planned::<Autodiff<Fused>>(DType::F32);
                    integers_and_booleans_arrive_as_planned::<Fused>();
                }
            }

            #[test]
            fn several_ranks_equal_one() {
                if exists() {
                    super::several_ranks_equal_one::<Autodiff<Plain>>();
                    super::several_ranks_equal_one::<Autodiff<Fused>>();
                }
            }

            #[test]
            fn attention_is_as_accurate_as_the_textbook_on_random_cases() {
                for seed in (0..$num_cases).filter(|_| exists()) {
                    let (case, mut random) = case(7000 + seed);
                    eprintln!("{seed}: {case:?}");
                    check::<Autodiff<Plain>>(&case, &mut random, DType::F32);
                }
            }

            #[test]
            fn attention_of_fused_tensors_is_as_accurate_as_the_textbook() {
                for seed in (0..$num_cases).filter(|_| exists()) {
                    let (case, mut random) = case(8000 + seed);
                    eprintln!("{seed}: {case:?}");
                    check::<Autodiff<Fused>>(&case, &mut random, DType::F32);
                }
            }
        }
    };
}

cube_tests!(
    wgpu,
    burn::backend::wgpu::CubeBackend<burn::backend::wgpu::WgpuRuntime, f32, i32, u32>,
    burn::backend::Wgpu<f32, i32, u32>,
    12
);
