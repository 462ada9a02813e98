//! The autodiff op.

use burn::{
    backend::{Autodiff, Flex, NdArray},
    tensor::{DType, Tensor},
};
use burn_autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn_cp_kernels::{AttentionInput, varlen_attention, varlen_attention_with_sinks};

use crate::support::{Case, Heads, SMALL, Tested, values};

const HEADS: Heads = Heads {
    num_heads: 4,
    num_kv_heads: 2,
    ..SMALL
};

/// Gradients through the op, with cheap operations on both sides of it that a checkpointing
/// strategy may recompute.
fn check_gradients<B: Tested, C: CheckpointStrategy>() {
    let case = Case::packed(&[30, 1, 100], HEADS).rounded(DType::F32);
    let expected = case.actual::<B>(DType::F32);
    let [q, k, v] = case
        .qkv_on::<Autodiff<B, C>>(DType::F32, &B::test_device())
        .map(Tensor::require_grad);
    let neg = |tensor: &Tensor<Autodiff<B, C>, 4>| tensor.clone().neg().neg();
    let (s, o) = (&case.segments, &case.options);
    let out = varlen_attention(neg(&q), neg(&k), neg(&v), s, o);
    assert_eq!(values(&out), expected.out);
    let grads = (out.neg().neg() * case.dout_on(DType::F32, &B::test_device()))
        .sum()
        .backward();
    for (tensor, expected) in [(q, expected.dq), (k, expected.dk), (v, expected.dv)] {
        assert_eq!(values(&tensor.grad(&grads).expect("a gradient")), expected);
    }
}

#[test]
fn gradients_are_those_of_the_backward_pass() {
    check_gradients::<Flex, NoCheckpointing>();
    check_gradients::<NdArray, NoCheckpointing>();
}

#[test]
fn gradients_are_the_same_under_checkpointing() {
    check_gradients::<Flex, BalancedCheckpointing>();
    check_gradients::<NdArray, BalancedCheckpointing>();
}

#[test]
fn parents_without_gradients_are_left_alone() {
    let case = Case::packed(&[30, 10], HEADS).rounded(DType::F32);
    let [q, k, v] = case.qkv_on::<Autodiff<Flex>>(DType::F32, &Default::default());
    let k = k.require_grad();
    let (s, o) = (&case.segments, &case.options);
    let out = varlen_attention(q.clone(), k.clone(), v.clone(), s, o);
    let grads = (out * case.dout_on(DType::F32, &Default::default()))
        .sum()
        .backward();
    assert!(q.grad(&grads).is_none() && v.grad(&grads).is_none());
    let expected = case.actual::<Flex>(DType::F32);
    assert_eq!(values(&k.grad(&grads).unwrap()), expected.dk);
}

#[test]
fn untracked_input_gives_untracked_output() {
    let case = Case::packed(&[3, 4], HEADS);
    let [q, k, v] = case.qkv_on::<Autodiff<Flex>>(DType::F32, &Default::default());
    let out = varlen_attention(q, k, v, &case.segments, &case.options);
    assert!(!out.is_require_grad());
    assert_eq!(values(&out), case.actual::<Flex>(DType::F32).out);
}

#[test]
fn sinks_have_a_gradient() {
    let case = Case::packed(&[30, 10], HEADS)
        .rounded(DType::F32)
        .with_sinks();
    let device = Default::default();
    let [q, k, v] = case.qkv_on::<Autodiff<Flex>>(DType::F32, &device);
    let sinks = case.sinks_on::<Autodiff<Flex>>(DType::F32, &device);
    let sinks = sinks.map(Tensor::require_grad);
    let input = AttentionInput::new(q, k, v).with_sinks(sinks.clone());
    let out = varlen_attention_with_sinks(input, &case.segments, &case.options);
    let expected = case.actual::<Flex>(DType::F32);
    assert_eq!(values(&out), expected.out);
    let grads = (out * case.dout_on(DType::F32, &device)).sum().backward();
    let dsinks = sinks
        .and_then(|sinks| sinks.grad(&grads))
        .expect("a gradient");
    assert_eq!(values(&dsinks), expected.dsinks);
}

#[test]
fn token_major_tensors_give_what_head_major_ones_do() {
    let case = Case::packed(&[30, 10], HEADS).rounded(DType::F32);
    let device = Default::default();
    let expected = case.actual::<Flex>(DType::F32);
    let leaves = case
        .qkv_on::<Autodiff<Flex>>(DType::F32, &device)
        .map(Tensor::require_grad);
    let flat = |tensor: &Tensor<Autodiff<Flex>, 4>| {
        let [_, heads, tokens, dim] = tensor.dims();
        tensor.clone().swap_dims(1, 2).reshape([tokens, heads, dim])
    };
    let [q, k, v] = leaves.each_ref().map(flat);
    let out = varlen_attention(q, k, v, &case.segments, &case.options);
    assert_eq!(out.dims(), [40, 4, 16]);
    let head_major = out.unsqueeze::<4>().swap_dims(1, 2);
    assert_eq!(values(&head_major), expected.out);
    let dout = case.dout_on(DType::F32, &device);
    let grads = (head_major * dout).sum().backward();
    let [dq, dk, dv] = leaves.map(|leaf| values(&leaf.grad(&grads).expect("a gradient")));
    assert_eq!([dq, dk, dv], [expected.dq, expected.dk, expected.dv]);
}
