//! The bundles that go into and come out of attention. Generic over what a tensor is, so that
//! backend primitives (`T`) and `Tensor`s of rank 4, 3 and 1 (`T`, `L`, `S`) share them.

/// Input of the forward pass.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionInput<T, S = T> {
    /// `[q_batch, num_heads, q_tokens, head_dim]`.
    pub q: T,
    /// `[k_batch, num_kv_heads, k_tokens, head_dim]`, dtype of `q`.
    pub k: T,
    /// `[k_batch, num_kv_heads, k_tokens, v_head_dim]`, dtype of `q`.
    pub v: T,
    /// Attention sinks `[num_heads]`, any float dtype: `exp(sink)` of its head joins each row's sum of
    /// exponentials (Xiao et al., 2023, arXiv:2309.17453, in the learnt form of gpt-oss).
    pub sinks: Option<S>,
}

impl<T, S> AttentionInput<T, S> {
    /// Bundles queries, keys and values; no sinks.
    pub fn new(q: T, k: T, v: T) -> Self {
        let sinks = None;
        Self { q, k, v, sinks }
    }

    /// The same input with sinks, or without.
    #[must_use]
    pub fn with_sinks(self, sinks: Option<S>) -> Self {
        Self { sinks, ..self }
    }
}

/// Result of the forward pass.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionOutput<T, L = T> {
    /// `[q_batch, num_heads, q_tokens, v_head_dim]`, dtype of `q`. Rows that see no key, and rows
    /// that no segment names, are 0.
    pub out: T,
    /// `[q_batch, num_heads, q_tokens]`: natural log of the sum of `exp(score)` over the visible
    /// keys, without the sink; f32, or f64 when `q` is f64. `-inf` where no key is visible.
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
/// gradients are then this call's share of the whole, and the shares sum to it. A sink enters the
/// merged output once; `dsinks` is then the whole gradient in each call, not a share.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionBackwardInput<T, L = T, S = T> {
    /// `[q_batch, num_heads, q_tokens, head_dim]`.
    pub q: T,
    /// `[k_batch, num_kv_heads, k_tokens, head_dim]`, dtype of `q`.
    pub k: T,
    /// `[k_batch, num_kv_heads, k_tokens, v_head_dim]`, dtype of `q`.
    pub v: T,
    /// `[q_batch, num_heads, q_tokens, v_head_dim]`, any float dtype.
    pub out: T,
    /// `[q_batch, num_heads, q_tokens]`, any float dtype; without the sink.
    pub lse: L,
    /// Gradient of `out`, same shape, any float dtype.
    pub dout: T,
    /// Attention sinks `[num_heads]`, as in the forward pass.
    pub sinks: Option<S>,
}

impl<T, L, S> AttentionBackwardInput<T, L, S> {
    /// Bundles the inputs: `q`, `k`, `v` as given to the forward pass, its (or the merged) `out`
    /// and `lse`, and the gradient of `out`. No sinks.
    pub fn new(q: T, k: T, v: T, out: T, lse: L, dout: T) -> Self {
        Self {
            q,
            k,
            v,
            out,
            lse,
            dout,
            sinks: None,
        }
    }

    /// The same input with the sinks of the forward pass, or without.
    #[must_use]
    pub fn with_sinks(self, sinks: Option<S>) -> Self {
        Self { sinks, ..self }
    }
}

/// Result of the backward pass.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionGradients<T, S = T> {
    /// `[q_batch, num_heads, q_tokens, head_dim]`, dtype of `q`; 0 for rows without keys.
    pub dq: T,
    /// `[k_batch, num_kv_heads, k_tokens, head_dim]`, dtype of `k`; summed over the segments and
    /// the heads of a group that read the key, in a fixed order.
    pub dk: T,
    /// `[k_batch, num_kv_heads, k_tokens, v_head_dim]`, dtype of `v`; summed likewise.
    pub dv: T,
    /// Gradient of the sinks `[num_heads]`, their dtype; `None` without sinks.
    pub dsinks: Option<S>,
}

impl<T, S> AttentionGradients<T, S> {
    /// Bundles the three gradients; none of sinks.
    pub fn new(dq: T, dk: T, dv: T) -> Self {
        Self {
            dq,
            dk,
            dv,
            dsinks: None,
        }
    }

    /// The same gradients with that of the sinks.
    #[must_use]
    pub fn with_dsinks(self, dsinks: Option<S>) -> Self {
        Self { dsinks, ..self }
    }
}
