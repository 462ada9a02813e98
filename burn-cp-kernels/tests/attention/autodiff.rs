//! The autodiff op.

use burn::{
    backend::{Autodiff, Flex, NdArray},
    tensor::{DType, Tensor},
};
use burn_autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn_cp_kernels::{AttentionBackend, varlen_attention};

use crate::support::{Case, Heads, SMALL, values};

const HEADS: Heads = Heads {
    num_heads: 4,
    num_kv_heads: 2,
    ..SMALL
};

/// Gradients through the op, with cheap operations on both sides of it that a checkpointing
/// strategy may recompute.
fn check_gradients<B: AttentionBackend, C: CheckpointStrategy>() {
    let case = Case::packed(&[30, 1, 100], HEADS).rounded(DType::F32);
    let expected = case.actual::<B>(DType::F32);
    let [q, k, v] = case
        .qkv::<Autodiff<B, C>>(DType::F32)
        .map(Tensor::require_grad);
    let neg = |tensor: &Tensor<Autodiff<B, C>, 4>| tensor.clone().neg().neg();
    let (s, o) = (&case.segments, &case.options);
    let out = varlen_attention(neg(&q), neg(&k), neg(&v), s, o);
    assert_eq!(values(&out), expected.out);
    let grads = (out.neg().neg() * case.dout(DType::F32)).sum().backward();
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
    let [q, k, v] = case.qkv::<Autodiff<Flex>>(DType::F32);
    let k = k.require_grad();
    let (s, o) = (&case.segments, &case.options);
    let out = varlen_attention(q.clone(), k.clone(), v.clone(), s, o);
    let grads = (out * case.dout(DType::F32)).sum().backward();
    assert!(q.grad(&grads).is_none() && v.grad(&grads).is_none());
    let expected = case.actual::<Flex>(DType::F32);
    assert_eq!(values(&k.grad(&grads).unwrap()), expected.dk);
}

#[test]
fn untracked_input_gives_untracked_output() {
    let case = Case::packed(&[3, 4], HEADS);
    let [q, k, v] = case.qkv::<Autodiff<Flex>>(DType::F32);
    let out = varlen_attention(q, k, v, &case.segments, &case.options);
    assert!(!out.is_require_grad());
    assert_eq!(values(&out), case.actual::<Flex>(DType::F32).out);
}
