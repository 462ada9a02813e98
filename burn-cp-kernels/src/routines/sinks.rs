//! Attention sinks in tensor operations, for routines whose kernels do not know them.
//!
//! A sink is one more column of the softmax, without a value. So it scales the output of the other
//! columns by `exp(lse) / (exp(lse) + exp(sink))`, and the weights of the backward pass are those
//! of `log(exp(lse) + exp(sink))`.

use burn::tensor::{Tensor, backend::Backend};

/// Scales `out [batch, num_heads, tokens, dim]`, computed without sinks, given its `lse [batch,
/// num_heads, tokens, 1]` and `sinks [num_heads]`. Rows without keys stay 0.
pub(crate) fn apply<B: Backend>(
    out: Tensor<B, 4>,
    lse: Tensor<B, 4>,
    sinks: Tensor<B, 1>,
) -> Tensor<B, 4> {
    // Not Burn's sigmoid, which computes in f32 whatever the dtype is.
    out / ((per_head(sinks) - finite(lse)).exp() + 1.0)
}

/// `log(exp(lse) + exp(sink))`, `[batch, num_heads, tokens, 1]`.
pub(crate) fn with_sinks<B: Backend>(lse: Tensor<B, 4>, sinks: Tensor<B, 1>) -> Tensor<B, 4> {
    let sinks = per_head(sinks).expand(lse.dims());
    let max = finite(lse.clone().max_pair(sinks.clone()));
    max.clone() + ((lse - max.clone()).exp() + (sinks - max).exp()).log()
}

/// Gradient of the sinks, `[num_heads]`: `-sum(exp(sink - total) · delta)` with `total` of
/// [`with_sinks`] and `delta = rowsum(dout · out)`, over the rows that see a key (`lse` is finite).
pub(crate) fn gradient<B: Backend>(
    sinks: Tensor<B, 1>,
    lse: Tensor<B, 4>,
    total: Tensor<B, 4>,
    delta: Tensor<B, 4>,
) -> Tensor<B, 1> {
    let [_, num_heads, _, _] = lse.dims();
    let rows = (per_head(sinks) - total).exp() * delta;
    let blind = lse.equal_elem(f64::NEG_INFINITY);
    let sums = rows.mask_fill(blind, 0.0).sum_dim(2).sum_dim(0);
    sums.neg().reshape([num_heads])
}

/// Of rows without keys, whose log is -inf, a finite one: where a sink is as well, their difference would not be a number.
fn finite<B: Backend>(log: Tensor<B, 4>) -> Tensor<B, 4> {
    log.clamp_min(f64::from(f32::MIN))
}

fn per_head<B: Backend>(sinks: Tensor<B, 1>) -> Tensor<B, 4> {
    let [num_heads] = sinks.dims();
    sinks.reshape([1, num_heads, 1, 1])
}
