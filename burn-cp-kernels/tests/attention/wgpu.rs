//! The portable routine on software Vulkan, by the same rule and tables as the CPU backends.
//!
//! A machine without Vulkan declares each test skipped; `BURN_CP_DEVICE=wgpu` asks for the device, and then
//! its absence is a failure.

use std::{ops::Range, sync::OnceLock};

use burn::{
    backend::{
        Autodiff,
        wgpu::{CubeBackend, WgpuDevice, WgpuRuntime},
    },
    tensor::{DType, Tensor, backend::Backend},
};
use burn_cp_kernels::{
    AttentionError, AttentionOptions, Routine, Segment, Segments, Window, attention_forward,
    describe, varlen_attention,
};
use proptest::prelude::*;

use crate::{
    accuracy::segments,
    behaviour,
    support::{Case, Heads, Results, Tested, causal, document, full, packed, values, window},
};

type Cube = CubeBackend<WgpuRuntime, f32, i32, u32>;
type Fused = burn::backend::Wgpu<f32, i32, u32>;

impl Tested for Cube {
    fn test_device() -> WgpuDevice {
        WgpuDevice::Cpu
    }
}

impl Tested for Fused {
    fn test_device() -> WgpuDevice {
        WgpuDevice::Cpu
    }
}

const EPS32: f64 = f32::EPSILON as f64;

const HEADS: Heads = Heads {
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 32,
    v_head_dim: 32,
};

/// Whether there is a device. Its absence is said, or fails the test if the device was asked for.
fn device_exists() -> bool {
    static EXISTS: OnceLock<bool> = OnceLock::new();
    let exists = *EXISTS.get_or_init(|| {
        let probe = || {
            let ones = Tensor::<Cube, 1>::ones([4], &WgpuDevice::Cpu);
            values(&ones) == [1.0; 4]
        };
        std::panic::catch_unwind(probe).unwrap_or(false)
    });
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

fn check(case: Case) {
    case.rounded(DType::F32)
        .check_accuracy::<Cube>(DType::F32, EPS32);
}

#[test]
fn packed_documents() {
    if !device_exists() {
        return;
    }
    check(Case::packed(&[3, 0, 1, 2, 7, 64, 65, 1, 131], HEADS));
    check(Case::packed(&[500], HEADS));
}

#[test]
fn grouped_heads_and_dims() {
    if !device_exists() {
        return;
    }
    let dims = [(40, 32), (64, 72), (128, 64), (96, 256), (256, 40), (8, 16)];
    let groups = [(1, 1), (4, 4), (2, 1), (8, 1), (6, 3), (2, 2)];
    for ((head_dim, v_head_dim), (num_heads, num_kv_heads)) in dims.into_iter().zip(groups) {
        let heads = Heads {
            num_heads,
            num_kv_heads,
            head_dim,
            v_head_dim,
        };
        check(Case::packed(&[5, 70, 1, 12], heads));
    }
}

#[test]
fn results_over_disjoint_keys_merge() {
    if !device_exists() {
        return;
    }
    crate::merging::check::<Cube>();
    crate::merging::check::<Fused>();
}

#[test]
fn windows_and_masks() {
    if !device_exists() {
        return;
    }
    for left in [0, 5, 64, 200, usize::MAX] {
        let segments = packed(&[9, 150, 66], 0);
        let segments = segments.into_iter().map(|s| window(s, left)).collect();
        check(Case::new(segments, (1, 225), (1, 225), HEADS));
    }
    let both = |segment: Segment, left, right| Segment {
        window: Some(Window::new(left, right)),
        ..full(segment)
    };
    let segments = vec![
        both(causal(0..100, 0..100, 0), 10, 20),
        full(causal(100..103, 100..230, 9)),
        both(causal(103..173, 200..260, 100), 70, 3),
        both(causal(173..174, 260..390, 0), 30, usize::MAX),
        causal(174..184, 390..395, 3),
    ];
    check(Case::new(segments, (1, 190), (1, 400), HEADS));
}

#[test]
fn shared_keys_and_other_lengths() {
    if !device_exists() {
        return;
    }
    let segments = vec![
        causal(20..40, 0..110, 0),
        causal(60..100, 0..170, 0),
        full(causal(0..7, 33..71, 5)),
        window(causal(40..45, 100..150, 100), 8),
        causal(45..60, 180..180, 0),
    ];
    check(Case::new(segments, (1, 100), (1, 180), HEADS));
    let row = |q_row, k_row, segment| Segment {
        q_row,
        k_row,
        ..segment
    };
    let segments = vec![
        row(1, 0, causal(3..20, 10..40, 0)),
        row(0, 1, causal(0..20, 40..60, 0)),
        row(2, 0, full(causal(0..5, 0..10, 0))),
    ];
    check(Case::new(segments, (3, 20), (2, 60), HEADS));
}

#[test]
fn softcap_sinks_and_dropout() {
    if !device_exists() {
        return;
    }
    let mut segments = packed(&[3, 90, 1], 0);
    segments.push(causal(94..104, 94..97, 0));
    segments.push(window(causal(105..170, 97..170, 30), 20));
    let case = Case::new(segments, (1, 172), (1, 170), HEADS);
    check(case.clone().with_softcap(0.9));
    // Which hardly changes a score: digits of small ratios count.
    check(case.clone().with_softcap(1e6));
    check(case.clone().with_sinks());
    check(case.clone().with_dropout(0.4));
    check(case.with_softcap(2.0).with_sinks().with_dropout(0.2));
}

#[test]
fn half_precision_is_computed_in_f32() {
    if !device_exists() {
        return;
    }
    for (dtype, eps) in [(DType::F16, 2f64.powi(-10)), (DType::BF16, 2f64.powi(-7))] {
        if !Cube::supports_dtype(&WgpuDevice::Cpu, dtype) {
            eprintln!("skipped: the device has no {dtype:?}");
            continue;
        }
        let case = Case::packed(&[5, 100, 30], HEADS).rounded(dtype);
        case.check_accuracy::<Cube>(dtype, eps);
    }
}

#[test]
fn no_segments_and_empty_buffers() {
    if !device_exists() {
        return;
    }
    let results = Case::new(vec![], (2, 5), (1, 3), HEADS).actual::<Cube>(DType::F32);
    assert!(results.lse.iter().all(|x| *x == f64::NEG_INFINITY));
    for values in [&results.out, &results.dq, &results.dk, &results.dv] {
        assert!(values.iter().all(|x| *x == 0.0));
    }
    let blind = Case::new(vec![causal(0..3, 0..0, 0)], (1, 3), (1, 1), HEADS);
    let results = blind.with_sinks().actual::<Cube>(DType::F32);
    let zeros = [&results.out, &results.dq, &results.dk, &results.dsinks];
    assert!(zeros.into_iter().flatten().all(|x| *x == 0.0));
}

#[test]
fn sinks_at_their_limits() {
    if !device_exists() {
        return;
    }
    behaviour::a_sink_of_minus_infinity_is_none::<Cube>();
    behaviour::the_gradient_of_sinks_is_the_whole_where_a_part_sees_nothing::<Cube>();
}

#[test]
fn poison_does_not_leak() {
    if !device_exists() {
        return;
    }
    // Keys 0..20 and 60..70 are seen by nobody: named by no segment, or left behind by a window.
    // Queries 0..5 are named by no segment, queries 5..8 see no key.
    let segments = vec![
        causal(5..28, 20..40, 0),
        window(causal(28..30, 60..80, 0), 4),
        full(causal(30..40, 40..60, 0)),
    ];
    let clean = Case::new(segments, (1, 50), (1, 90), HEADS).with_sinks();
    for poison in [f64::NAN, f64::INFINITY] {
        let mut dirty = clean.clone();
        let dim = HEADS.head_dim;
        for key in (0..20).chain(60..70).chain(80..90) {
            for head in 0..HEADS.num_kv_heads {
                let at = (head * 90 + key) * dim;
                dirty.k[at..at + dim].fill(poison);
                dirty.v[at..at + dim].fill(poison);
            }
        }
        for query in (0..8).chain(40..50) {
            for head in 0..HEADS.num_heads {
                let at = (head * 50 + query) * dim;
                dirty.q[at..at + dim].fill(poison);
                dirty.dout[at..at + dim].fill(poison);
            }
        }
        assert_eq!(
            dirty.actual::<Cube>(DType::F32),
            clean.actual::<Cube>(DType::F32)
        );
    }
}

#[test]
fn a_document_does_not_see_its_neighbours() {
    if !device_exists() {
        return;
    }
    let clean = Case::packed(&[30, 40, 50], HEADS);
    let mut dirty = clean.clone();
    let dim = HEADS.head_dim;
    let inputs = [
        (&mut dirty.q, 4),
        (&mut dirty.dout, 4),
        (&mut dirty.k, 2),
        (&mut dirty.v, 2),
    ];
    for (values, heads) in inputs {
        for head in 0..heads {
            values[(head * 120 + 30) * dim..(head * 120 + 70) * dim].fill(f64::NAN);
        }
    }
    let (clean, dirty) = (
        clean.actual::<Cube>(DType::F32),
        dirty.actual::<Cube>(DType::F32),
    );
    let kept = |values: &[f64]| -> Vec<f64> {
        let of_others = |index: &usize| !(30..70).contains(&((index / dim) % 120));
        (0..values.len())
            .filter(of_others)
            .map(|index| values[index])
            .collect()
    };
    assert!(dirty.out[40 * dim].is_nan());
    for (clean, dirty) in [
        (&clean.out, &dirty.out),
        (&clean.dq, &dirty.dq),
        (&clean.dk, &dirty.dk),
        (&clean.dv, &dirty.dv),
    ] {
        assert_eq!(kept(clean), kept(dirty));
    }
}

#[test]
fn repeats_are_equal_to_the_bit() {
    if !device_exists() {
        return;
    }
    let case = Case::packed(&[100, 7, 80], HEADS)
        .with_sinks()
        .with_dropout(0.1);
    let first = case.actual::<Cube>(DType::F32);
    for _ in 0..20 {
        assert_eq!(case.actual::<Cube>(DType::F32), first);
    }
}

/// Output and log-sum-exp of `queries` of a document of `tokens` in one row, given the keys `keys` of it, in
/// a buffer that other tokens precede; by head.
fn piece(case: &Case, queries: Range<usize>, keys: Range<usize>) -> Vec<Vec<f64>> {
    let problem = case.problem;
    let tokens = problem.q_tokens;
    let window = case.segments.as_slice()[0].window;
    let segment = Segment {
        window,
        ..causal(queries.clone(), keys.clone(), keys.start)
    };
    let segments = Segments::new(vec![segment], (1, tokens), (1, tokens)).expect("a legal segment");
    let [q, k, v] = case.qkv::<Cube>(DType::F32);
    let output = attention_forward(q, k, v, &segments, &case.options);
    let rows = |values: Vec<f64>, dim: usize| -> Vec<Vec<f64>> {
        let heads = values.chunks(dim * tokens);
        heads
            .map(|head| head[queries.start * dim..queries.end * dim].to_vec())
            .collect()
    };
    let mut all = rows(values(&output.out), problem.v_head_dim);
    all.extend(rows(values(&output.lse), 1));
    all
}

#[test]
fn forward_does_not_depend_on_how_a_document_is_cut() {
    if !device_exists() {
        return;
    }
    for (left, dropout) in [(None, 0.0), (Some(50usize), 0.3)] {
        let segment = Segment {
            window: left.map(Window::left),
            ..document(0..300)
        };
        let case = Case::new(vec![segment], (1, 300), (1, 300), HEADS).with_dropout(dropout);
        let whole = piece(&case, 0..300, 0..300);
        for queries in [0..1usize, 17..64, 64..65, 65..200, 200..300] {
            let first = left.map_or(0, |left| queries.start.saturating_sub(left));
            let part = piece(&case, queries.clone(), first..queries.end);
            for (whole, part) in whole.iter().zip(&part) {
                let dim = whole.len() / 300;
                assert_eq!(whole[queries.start * dim..queries.end * dim], part[..]);
            }
        }
    }
}

#[test]
fn views_are_accepted_like_contiguous_tensors() {
    if !device_exists() {
        return;
    }
    let case = Case::packed(&[30, 5, 70], HEADS);
    let [q, k, v] = case.qkv::<Cube>(DType::F32);
    let (s, o) = (&case.segments, &case.options);
    let plain = attention_forward(q.clone(), k.clone(), v.clone(), s, o);
    let token_major = |t: Tensor<Cube, 4>| (t.swap_dims(1, 2) * 1.0).swap_dims(1, 2);
    let [batch, heads, tokens, dim] = k.dims();
    let wide = Tensor::cat(vec![k.clone(), k.clone()], 3);
    let half = wide.slice([0..batch, 0..heads, 0..tokens, dim..2 * dim]);
    let spread = (v.clone().swap_dims(2, 3) * 1.0).swap_dims(2, 3);
    let viewed = attention_forward(token_major(q), half, spread, s, o);
    assert_eq!(values(&plain.out), values(&viewed.out));
    // One number between rows: no load of four fits.
    let odd = Tensor::cat(
        vec![k.clone(), k.slice([0..batch, 0..heads, 0..tokens, 0..1])],
        3,
    );
    let odd = odd.slice([0..batch, 0..heads, 0..tokens, 0..dim]);
    let [q, _, v] = case.qkv::<Cube>(DType::F32);
    let viewed = attention_forward(q, odd, token_major(v), s, o);
    assert_eq!(values(&plain.out), values(&viewed.out));
}

/// Forward and gradients by autodiff.
fn by_autodiff<B: Tested>(case: &Case) -> Results {
    let device = B::test_device();
    let leaves = case
        .qkv_on::<Autodiff<B>>(DType::F32, &device)
        .map(Tensor::require_grad);
    let [q, k, v] = leaves.each_ref().map(|leaf| leaf.clone().neg().neg());
    let out = varlen_attention(q, k, v, &case.segments, &case.options);
    let loss = (out.clone() * case.dout_on(DType::F32, &device)).sum();
    let grads = loss.backward();
    let [dq, dk, dv] = leaves.map(|leaf| values(&leaf.grad(&grads).expect("a gradient")));
    Results {
        out: values(&out),
        lse: vec![],
        dq,
        dk,
        dv,
        dsinks: vec![],
    }
}

#[test]
fn fused_and_unfused_backends_agree() {
    if !device_exists() {
        return;
    }
    let case = Case::packed(&[30, 1, 100], HEADS).rounded(DType::F32);
    let direct = case.actual::<Cube>(DType::F32);
    assert_eq!(case.actual::<Fused>(DType::F32), direct);
    let expected = Results {
        lse: vec![],
        ..direct
    };
    assert_eq!(by_autodiff::<Cube>(&case), expected);
    assert_eq!(by_autodiff::<Fused>(&case), expected);
}

#[test]
fn routines_are_described_and_refused() {
    if !device_exists() {
        return;
    }
    let case = Case::packed(&[3, 4], HEADS);
    let [q, k, v] = case.qkv::<Fused>(DType::F32);
    let choice = |options: AttentionOptions| describe(&q, &k, &v, &case.segments, &options);
    let options = AttentionOptions::new;
    assert_eq!(choice(options()).unwrap().routine, Routine::Portable);
    let composed = choice(options().with_routine(Routine::Composed)).unwrap();
    assert_eq!(
        (composed.routine, &composed.reason[..]),
        (Routine::Composed, "forced")
    );
    // Those of CUDA devices.
    for routine in [Routine::TensorCore, Routine::Hopper] {
        let error = choice(options().with_routine(routine)).unwrap_err();
        assert!(matches!(
            error,
            AttentionError::Routine { routine: of, .. } if of == routine
        ));
    }
    let narrow = Case::packed(
        &[3, 4],
        Heads {
            head_dim: 12,
            ..HEADS
        },
    );
    let [q, k, v] = narrow.qkv::<Cube>(DType::F32);
    let error = describe(&q, &k, &v, &narrow.segments, &options()).unwrap_err();
    assert!(matches!(
        error,
        AttentionError::HeadDim {
            what: "head_dim",
            got: 12,
            ..
        }
    ));
}

#[test]
fn the_composed_routine_can_be_forced() {
    if !device_exists() {
        return;
    }
    let mut case = Case::packed(&[3, 70], HEADS).rounded(DType::F32);
    case.options = case.options.with_routine(Routine::Composed);
    case.check_accuracy::<Cube>(DType::F32, EPS32);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn random_segments((segments, q, k) in segments(), group in 1..4usize, kv in 1..3usize) {
        if device_exists() {
            let heads = Heads { num_heads: group * kv, num_kv_heads: kv, head_dim: 32, v_head_dim: 40 };
            check(Case::new(segments, (1, q), (1, k), heads));
        }
    }
}
