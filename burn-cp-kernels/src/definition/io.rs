//! The bundles that go into and come out of attention. Generic over what a tensor is, so that
//! backend primitives (`T`) and `Tensor<B, 4>` with `Tensor<B, 3>` (`T`, `L`) share them.

/// Result of the forward pass.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionOutput<T, L = T> {
    /// `[q_batch, num_heads, q_tokens, v_head_dim]`, dtype of `q`. Rows that see no key, and rows
    /// that no segment names, are 0.
    pub out: T,
    /// `[q_batch, num_heads, q_tokens]`: natural log of the sum of `exp(scale · q · k)` over the
    /// visible keys; f32, or f64 when `q` is f64. `-inf` where no key is visible.
    pub lse: L,
}

impl<T, L> AttentionOutput<T, L> {
    /// Bundles the two results.
    pub fn new(out: T, lse: L) -> Self {
        Self { out, lse }
    }
}

/// Input of the backward pass.
///
/// `out` and `lse` may have been merged from several forward calls over disjoint sets of keys: the
/// gradients are then this call's share of the whole, and the shares sum to it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionBackwardInput<T, L = T> {
    /// `[q_batch, num_heads, q_tokens, head_dim]`.
    pub q: T,
    /// `[k_batch, num_kv_heads, k_tokens, head_dim]`, dtype of `q`.
    pub k: T,
    /// `[k_batch, num_kv_heads, k_tokens, v_head_dim]`, dtype of `q`.
    pub v: T,
    /// `[q_batch, num_heads, q_tokens, v_head_dim]`, any float dtype.
    pub out: T,
    /// `[q_batch, num_heads, q_tokens]`, any float dtype.
    pub lse: L,
    /// Gradient of `out`, same shape, any float dtype.
    pub dout: T,
}

impl<T, L> AttentionBackwardInput<T, L> {
    /// Bundles the inputs: `q`, `k`, `v` as given to the forward pass, its (or the merged) `out`
    /// and `lse`, and the gradient of `out`.
    pub fn new(q: T, k: T, v: T, out: T, lse: L, dout: T) -> Self {
        Self {
            q,
            k,
            v,
            out,
            lse,
            dout,
        }
    }
}

/// Result of the backward pass.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionGradients<T> {
    /// `[q_batch, num_heads, q_tokens, head_dim]`, dtype of `q`; 0 for rows without keys.
    pub dq: T,
    /// `[k_batch, num_kv_heads, k_tokens, head_dim]`, dtype of `k`; summed over the segments and
    /// the heads of a group that read the key, in a fixed order.
    pub dk: T,
    /// `[k_batch, num_kv_heads, k_tokens, v_head_dim]`, dtype of `v`; summed likewise.
    pub dv: T,
}

impl<T> AttentionGradients<T> {
    /// Bundles the three gradients.
    pub fn new(dq: T, dk: T, dv: T) -> Self {
        Self { dq, dk, dv }
    }
}
