//! What the interface promises besides accuracy.

use burn::{
    backend::{Flex, NdArray},
    tensor::{DType, Int, Tensor, module, ops::AttentionModuleOptions},
};
use burn_cp_kernels::{
    AttentionBackwardInput, AttentionError, AttentionInput, AttentionOptions, Segment, Segments,
    Window, attention_backward, attention_forward, attention_forward_with_sinks, check,
    varlen_attention,
};

use crate::support::{
    Case, Heads, Results, SMALL, Tested, causal, document, full, norm, relative, values,
};

fn on_both(test: impl Fn(&dyn Fn(&Case) -> Results)) {
    test(&|case| case.actual::<Flex>(DType::F32));
    test(&|case| case.actual::<NdArray>(DType::F32));
}

#[test]
fn no_segments_give_zeros() {
    on_both(|run| {
        let results = run(&Case::new(vec![], (2, 5), (1, 3), SMALL));
        assert!(results.lse.iter().all(|x| *x == f64::NEG_INFINITY));
        for values in [&results.out, &results.dq, &results.dk, &results.dv] {
            assert!(values.iter().all(|x| *x == 0.0));
        }
    });
}

#[test]
fn empty_buffers_are_legal() {
    on_both(|run| {
        let results = run(&Case::new(
            vec![causal(0..3, 0..0, 0)],
            (1, 3),
            (1, 0),
            SMALL,
        ));
        assert!(results.out.iter().chain(&results.dq).all(|x| *x == 0.0));
        assert!(results.dk.is_empty());
        let results = run(&Case::new(
            vec![causal(0..0, 0..3, 0)],
            (1, 0),
            (1, 3),
            SMALL,
        ));
        assert!(results.dv.iter().all(|x| *x == 0.0));
        assert!(results.out.is_empty());
    });
}

#[test]
fn poison_in_rows_that_no_segment_reaches_does_not_leak() {
    // Keys 0..20 and 60..70 are seen by nobody: named by no segment, or left behind by a window.
    // Queries 0..5 are named by no segment, queries 5..8 see no key.
    let mut segments = vec![
        causal(5..28, 20..40, 0),
        Segment {
            window: Some(Window::left(4)),
            ..causal(28..30, 60..80, 0)
        },
    ];
    segments.push(full(causal(30..40, 40..60, 0)));
    let clean = Case::new(segments, (1, 50), (1, 90), SMALL);
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut dirty = clean.clone();
        let dims = 16;
        for head in 0..2 {
            for key in (0..20).chain(60..70).chain(80..90) {
                let at = (head * 90 + key) * dims;
                dirty.k[at..at + dims].fill(poison);
                dirty.v[at..at + dims].fill(poison);
            }
            for query in (0..8).chain(40..50) {
                let at = (head * 50 + query) * dims;
                dirty.q[at..at + dims].fill(poison);
                dirty.dout[at..at + dims].fill(poison);
            }
        }
        on_both(|run| assert_eq!(run(&dirty), run(&clean)));
    }
}

#[test]
fn a_document_does_not_see_its_neighbours() {
    let clean = Case::packed(&[30, 40, 50], SMALL);
    let mut dirty = clean.clone();
    for head in 0..2 {
        for token in 30..70 {
            let at = (head * 120 + token) * 16;
            for values in [&mut dirty.q, &mut dirty.k, &mut dirty.v, &mut dirty.dout] {
                values[at..at + 16].fill(f64::NAN);
            }
        }
    }
    on_both(|run| {
        let (clean, dirty) = (run(&clean), run(&dirty));
        let kept = |values: &[f64]| -> Vec<f64> {
            let token = |index: &usize| (index / 16) % 120;
            (0..values.len())
                .filter(|index| !(30..70).contains(&token(index)))
                .map(|index| values[index])
                .collect()
        };
        assert_eq!(kept(&clean.out), kept(&dirty.out));
        assert_eq!(kept(&clean.dq), kept(&dirty.dq));
        assert_eq!(kept(&clean.dk), kept(&dirty.dk));
        assert_eq!(kept(&clean.dv), kept(&dirty.dv));
        assert!(dirty.out[40 * 16].is_nan());
    });
}

#[test]
fn repeats_are_equal_to_the_bit() {
    let heads = Heads {
        num_heads: 4,
        num_kv_heads: 2,
        ..SMALL
    };
    let case = Case::packed(&[100, 7, 80], heads);
    on_both(|run| assert_eq!(run(&case), run(&case)));
}

/// Output, log-sum-exp and gradients of queries whose keys are split in two, the results merged.
fn merged_halves<B: Tested>(case: &Case, halves: [Segments; 2]) -> Results {
    let [q, k, v] = case.qkv::<B>(DType::F64);
    let dout = case.dout::<B>(DType::F64);
    let parts = halves
        .each_ref()
        .map(|half| attention_forward(q.clone(), k.clone(), v.clone(), half, &case.options));
    let lse = (parts[0].lse.clone().exp() + parts[1].lse.clone().exp()).log();
    let weighted = |index: usize| {
        let part: &burn_cp_kernels::AttentionOutput<Tensor<B, 4>, Tensor<B, 3>> = &parts[index];
        part.out.clone() * (part.lse.clone() - lse.clone()).exp().unsqueeze_dim(3)
    };
    let out = weighted(0) + weighted(1);
    let grads = halves.each_ref().map(|half| {
        let input = AttentionBackwardInput::new(
            q.clone(),
            k.clone(),
            v.clone(),
            out.clone(),
            lse.clone(),
            dout.clone(),
        );
        attention_backward(input, half, &case.options)
    });
    let [first, second] = grads;
    Results {
        out: values(&out),
        lse: values(&lse),
        dq: values(&(first.dq + second.dq)),
        dk: values(&(first.dk + second.dk)),
        dv: values(&(first.dv + second.dv)),
        dsinks: vec![],
    }
}

#[test]
fn backward_accepts_merged_output_and_lse() {
    let case = Case::new(vec![causal(0..30, 0..100, 0)], (1, 30), (1, 100), SMALL);
    let half = |segment| Segments::new(vec![segment], (1, 30), (1, 100)).unwrap();
    let halves = [
        half(full(causal(0..30, 0..70, 0))),
        half(causal(0..30, 70..100, 70)),
    ];
    let (actual, expected) = (
        merged_halves::<NdArray<f64>>(&case, halves),
        case.expected(),
    );
    for (actual, expected) in [
        (&actual.out, &expected.out),
        (&actual.lse, &expected.lse),
        (&actual.dq, &expected.dq),
        (&actual.dk, &expected.dk),
        (&actual.dv, &expected.dv),
    ] {
        assert!(relative(actual, expected) < 1e-13);
        assert!(norm(expected) > 1.0);
    }
}

/// A sink of -inf is none, also where a row sees no key, whose log-sum-exp is -inf too.
pub(crate) fn a_sink_of_minus_infinity_is_none<B: Tested>() {
    let new = || Case::new(vec![causal(0..5, 0..2, 0)], (1, 5), (1, 2), SMALL);
    let with = |sink| {
        let mut case = new();
        case.sinks = Some(vec![sink; 2]);
        case.actual::<B>(DType::F32)
    };
    let (got, want) = (with(f64::NEG_INFINITY), new().actual::<B>(DType::F32));
    for (got, want) in [
        (&got.out, &want.out),
        (&got.dq, &want.dq),
        (&got.dk, &want.dk),
        (&got.dv, &want.dv),
    ] {
        assert!(relative(got, want) < 1e-6, "{got:?}, wanted {want:?}");
    }
    assert!(got.out[..3 * 16].iter().all(|x| *x == 0.0));
    assert!(got.dsinks.iter().all(|x| *x == 0.0), "{:?}", got.dsinks);
}

/// Of a call over some of the keys, given output and log-sum-exp over all.
pub(crate) fn the_gradient_of_sinks_is_the_whole_where_a_part_sees_nothing<B: Tested>() {
    let case = Case::new(vec![causal(0..6, 0..9, 0)], (1, 6), (1, 9), SMALL).with_sinks();
    let want = case.actual::<B>(DType::F32).dsinks;
    assert!(norm(&want) > 0.1);
    let sinks = || case.sinks_on::<B>(DType::F32, &B::test_device());
    let [q, k, v] = case.qkv::<B>(DType::F32);
    let input = AttentionInput::new(q.clone(), k.clone(), v.clone()).with_sinks(sinks());
    let output = attention_forward_with_sinks(input, &case.segments, &case.options);
    for num_keys in [9, 0] {
        let nothing = Segments::new(vec![], (1, 6), (1, num_keys)).expect("no segments");
        let [k, v] = [&k, &v].map(|whole| whole.clone().slice([0..1, 0..2, 0..num_keys, 0..16]));
        let (out, lse) = (output.out.clone(), output.lse.clone());
        let dout = case.dout::<B>(DType::F32);
        let input = AttentionBackwardInput::new(q.clone(), k, v, out, lse, dout);
        let grads = attention_backward(input.with_sinks(sinks()), &nothing, &case.options);
        assert!(values(&grads.dq).iter().all(|x| *x == 0.0));
        let dsinks = grads.dsinks.expect("sinks were given");
        assert!(relative(&values(&dsinks), &want) < 1e-6);
    }
}

#[test]
fn sinks_at_their_limits() {
    a_sink_of_minus_infinity_is_none::<Flex>();
    a_sink_of_minus_infinity_is_none::<NdArray>();
    the_gradient_of_sinks_is_the_whole_where_a_part_sees_nothing::<Flex>();
    the_gradient_of_sinks_is_the_whole_where_a_part_sees_nothing::<NdArray>();
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let device = Default::default();
    let segments = Segments::new(vec![document(0..4)], (1, 4), (1, 4)).unwrap();
    let zeros = |shape: [usize; 4]| Tensor::<Flex, 4>::zeros(shape, &device);
    let error =
        |q, k, v, options: &AttentionOptions| check(&q, &k, &v, &segments, options).unwrap_err();
    let (q, k, v) = (
        zeros([1, 4, 4, 8]),
        zeros([1, 2, 4, 8]),
        zeros([1, 2, 4, 6]),
    );
    let defaults = AttentionOptions::new();
    assert!(check(&q, &k, &v, &segments, &defaults).is_ok());
    let heads = error(zeros([1, 3, 4, 8]), k.clone(), v.clone(), &defaults);
    assert!(matches!(heads, AttentionError::HeadGroups { .. }));
    let shape = error(q.clone(), k.clone(), zeros([1, 2, 5, 6]), &defaults);
    assert!(matches!(shape, AttentionError::Shape { what: "v", .. }));
    let dtype = error(q.clone(), k.clone().cast(DType::F64), v.clone(), &defaults);
    assert!(matches!(dtype, AttentionError::DType { what: "k", .. }));
    let scale = error(q, k, v, &AttentionOptions::new().with_scale(f64::NAN));
    assert!(matches!(
        scale,
        AttentionError::Option { what: "scale", .. }
    ));
}

#[test]
#[should_panic(expected = "num_heads: expected a multiple of num_kv_heads = 2, got 3")]
fn a_broken_contract_panics_with_the_error() {
    let device = <Flex as burn::tensor::backend::BackendTypes>::Device::default();
    let zeros = |heads| Tensor::<Flex, 4>::zeros([1, heads, 4, 8], &device);
    let segments = Segments::new(vec![document(0..4)], (1, 4), (1, 4)).unwrap();
    varlen_attention(
        zeros(3),
        zeros(2),
        zeros(2),
        &segments,
        &AttentionOptions::new(),
    );
}

#[test]
fn views_are_accepted_like_contiguous_tensors() {
    fn run<B: Tested>(case: &Case) {
        let [q, k, v] = case.qkv::<B>(DType::F32);
        let plain = attention_forward(
            q.clone(),
            k.clone(),
            v.clone(),
            &case.segments,
            &case.options,
        );
        // Token-major in memory, and a slice of something wider.
        let view = |t: Tensor<B, 4>| (t.swap_dims(1, 2) * 1.0).swap_dims(1, 2);
        let [batch, heads, tokens, dim] = k.dims();
        let wide = Tensor::cat(vec![k.clone(), k.clone()], 3);
        let k = wide.slice([0..batch, 0..heads, 0..tokens, dim..2 * dim]);
        let viewed = attention_forward(view(q), k, view(v), &case.segments, &case.options);
        assert_eq!(values(&plain.out), values(&viewed.out));
    }
    let case = Case::packed(&[30, 5, 70], SMALL);
    run::<Flex>(&case);
    run::<NdArray>(&case);
}

/// Burn's function with the same arguments; a mask, a bias and causal calls of unequal lengths are left to it.
#[test]
fn the_function_with_burns_signature_gives_what_burns_does() {
    let device = Default::default();
    let tensor = |heads, tokens, dim, shift: f32| {
        let values = Tensor::<Flex, 1, Int>::arange(0..(2 * heads * tokens * dim) as i64, &device);
        let values = values.float().mul_scalar(0.7).add_scalar(shift).sin();
        values.reshape([2, heads, tokens, dim])
    };
    let (q, k, v) = (
        tensor(4, 9, 8, 0.1),
        tensor(4, 9, 8, 0.5),
        tensor(4, 9, 6, 0.9),
    );
    let (long_k, long_v) = (tensor(4, 13, 8, 0.2), tensor(4, 13, 6, 0.3));
    let mask = q.clone().matmul(k.clone().transpose()).greater_elem(0.5);
    let bias = q.clone().matmul(k.clone().transpose());
    let options = |is_causal, scale| AttentionModuleOptions {
        is_causal,
        scale,
        ..Default::default()
    };
    for (k, v, mask, bias, options) in [
        (&k, &v, None, None, options(false, None)),
        (&k, &v, None, None, options(true, None)),
        (&k, &v, None, None, options(true, Some(0.3))),
        (&long_k, &long_v, None, None, options(false, None)),
        (&long_k, &long_v, None, None, options(true, None)),
        (&k, &v, Some(mask), None, options(false, None)),
        (&k, &v, None, Some(bias), options(true, None)),
    ] {
        let run = |attention: fn(_, _, _, _, _, _) -> Tensor<Flex, 4>| {
            let (mask, bias) = (mask.clone(), bias.clone());
            values(&attention(
                q.clone(),
                k.clone(),
                v.clone(),
                mask,
                bias,
                options,
            ))
        };
        let (got, want) = (run(burn_cp_kernels::attention), run(module::attention));
        let error = relative(&got, &want);
        assert!(
            error <= 16.0 * f64::from(f32::EPSILON),
            "{error} with {options:?}"
        );
    }
    // Fewer heads of keys and values are those heads repeated.
    let (few_k, few_v) = (k.clone().narrow(1, 0, 2), v.clone().narrow(1, 0, 2));
    let repeat = |x: Tensor<Flex, 4>| {
        let [batch, heads, tokens, dim] = x.dims();
        let x = x.unsqueeze_dim::<5>(2).repeat_dim(2, 2);
        x.reshape([batch, 2 * heads, tokens, dim])
    };
    let causal = options(true, None);
    let got =
        burn_cp_kernels::attention(q.clone(), few_k.clone(), few_v.clone(), None, None, causal);
    let want = module::attention(q, repeat(few_k), repeat(few_v), None, None, causal);
    let error = relative(&values(&got), &values(&want));
    assert!(error <= 16.0 * f64::from(f32::EPSILON), "{error}");
}
