//! What Burn's `MultiHeadAttention` becomes when sequences are sharded.

use burn::{
    module::Module,
    nn::{
        Linear,
        attention::{MultiHeadAttention, MultiHeadAttentionRecord},
    },
    tensor::{Tensor, backend::Backend},
};

use super::{ContextParallelAttention, NnError};
use crate::{
    attention::{AttentionOptions, ContextParallelBackend},
    sharder::CpStep,
};

/// The largest value that, standing in for the score of a hidden key, leaves it a weight of exactly 0 in `f64` too: `exp` of it
/// vanishes from −746 on, and the rest is room for the scores.
const LARGEST_MIN_FLOAT: f64 = -1e3;

/// The same layer, and the same parameters under their old ids, with causal attention over a step's documents; see
/// [`ContextParallelAttention::full`] for the other kind. Nothing is copied or drawn.
///
/// A token of the result sees what the token of a `MultiHeadAttention` sees under a causal mask within its document; a token
/// that is padding sees nothing, and its output is the bias of the output projection.
///
/// Dropout keeps its probability and is drawn from the seed of the batch, see [`StepDropout`](super::StepDropout); a model with several such layers
/// numbers them with [`ContextParallelAttention::in_layer`]. It drops weights after the softmax, as in Vaswani et al., 2017,
/// section 5.4; Burn's layer sets scores to 0 ahead of the softmax.
impl<B: Backend> TryFrom<MultiHeadAttention<B>> for ContextParallelAttention<B> {
    type Error = NnError;

    /// # Errors
    /// [`NnError::Unconvertible`]: quiet softmax, dropout of everything, a `min_float` that leaves hidden keys a weight, or
    /// heads that do not make up `d_model`.
    fn try_from(layer: MultiHeadAttention<B>) -> Result<Self, NnError> {
        check("", &layer)?;
        Ok(Self {
            head_dim: layer.d_k,
            q_proj: layer.query,
            k_proj: layer.key,
            v_proj: layer.value,
            o_proj: layer.output,
            q_norm: None,
            k_norm: None,
            mask: None,
            causal: true,
            window: None,
            rope: None,
            dropout: layer.dropout.prob,
            layer: 0,
        })
    }
}

impl<B: Backend> ContextParallelAttention<B> {
    /// Takes over what was saved of a `MultiHeadAttention`: `query`, `key`, `value` and `output` become `q_proj`, `k_proj`,
    /// `v_proj` and `o_proj`, ids included.
    ///
    /// # Errors
    /// [`NnError::Unconvertible`]: this layer norms its heads, which the record knows nothing of, or a projection has another
    /// shape, or a bias that the other has not.
    pub fn load_multi_head_record(
        self,
        record: MultiHeadAttentionRecord<B>,
    ) -> Result<Self, NnError> {
        if self.q_norm.is_some() || self.k_norm.is_some() {
            return Err(unconvertible(
                "",
                "q_norm",
                "a layer without norms of its heads",
                "norms",
            ));
        }
        Ok(Self {
            q_proj: load("query", self.q_proj, record.query)?,
            k_proj: load("key", self.k_proj, record.key)?,
            v_proj: load("value", self.v_proj, record.value)?,
            o_proj: load("output", self.o_proj, record.output)?,
            ..self
        })
    }
}

fn load<B: Backend>(
    what: &str,
    linear: Linear<B>,
    record: <Linear<B> as Module<B>>::Record,
) -> Result<Linear<B>, NnError> {
    let shown = |linear: &Linear<B>, bias: bool| {
        let shape = linear.weight.lazy_shape().to_vec();
        format!("{shape:?} with{} bias", if bias { "" } else { "out" })
    };
    let expected = shown(&linear, linear.bias.is_some());
    let bias = record.bias.is_some();
    let loaded = linear.load_record(record);
    let got = shown(&loaded, bias);
    if got != expected {
        return Err(unconvertible("", what, expected, got));
    }
    Ok(loaded)
}

/// Is this a layer whose attention the kernels compute? `path` is where it stands, empty or ending in a dot.
pub(super) fn check<B: Backend>(path: &str, layer: &MultiHeadAttention<B>) -> Result<(), NnError> {
    if layer.quiet_softmax {
        return Err(unconvertible(
            path,
            "quiet_softmax",
            "false: quiet softmax is not converted",
            true,
        ));
    }
    check_dropout(path, "dropout", layer.dropout.prob)?;
    let min_float = layer.min_float;
    if min_float.is_nan() || min_float > LARGEST_MIN_FLOAT {
        let expected =
            format!("at most {LARGEST_MIN_FLOAT}, so that hidden keys have weight 0 here as there");
        return Err(unconvertible(path, "min_float", expected, min_float));
    }
    if layer.d_k == 0 || layer.n_heads.checked_mul(layer.d_k) != Some(layer.d_model) {
        let got = format!(
            "{} for {} heads of {}",
            layer.d_model, layer.n_heads, layer.d_k
        );
        return Err(unconvertible(path, "d_model", "n_heads times d_k", got));
    }
    Ok(())
}

/// What is kept is divided by the probability to keep it.
pub(super) fn check_dropout(path: &str, what: &str, prob: f64) -> Result<(), NnError> {
    if (0.0..1.0).contains(&prob) {
        return Ok(());
    }
    Err(unconvertible(
        path,
        what,
        "at least 0 and less than 1, since nothing would be kept",
        prob,
    ))
}

pub(super) fn unconvertible(
    path: &str,
    what: &str,
    expected: impl Into<String>,
    got: impl ToString,
) -> NnError {
    NnError::Unconvertible {
        path: format!("{path}{what}"),
        expected: expected.into(),
        got: got.to_string(),
    }
}

/// What `layer` makes of `x [batch, local_tokens, d_model]` with the attention of a step: the same shape. Every rank of the
/// step's group must call it.
pub(super) fn attend<B: ContextParallelBackend>(
    layer: &MultiHeadAttention<B>,
    x: Tensor<B, 3>,
    step: &CpStep<B>,
    options: &AttentionOptions,
) -> Tensor<B, 3> {
    let [q, k, v] = [&layer.query, &layer.key, &layer.value]
        .map(|projection| heads(layer, projection.forward(x.clone())));
    joined(layer, step.attention(q, k, v, options))
}

/// `[batch, tokens, d_model]` -> `[batch, n_heads, tokens, d_k]`
pub(super) fn heads<B: Backend>(layer: &MultiHeadAttention<B>, x: Tensor<B, 3>) -> Tensor<B, 4> {
    let [batch, tokens, _] = x.dims();
    x.reshape([batch, tokens, layer.n_heads, layer.d_k])
        .swap_dims(1, 2)
}

/// The inverse of [`heads`], through the output projection.
pub(super) fn joined<B: Backend>(layer: &MultiHeadAttention<B>, out: Tensor<B, 4>) -> Tensor<B, 3> {
    let [batch, _, tokens, _] = out.dims();
    let width = layer.n_heads * layer.d_k;
    layer
        .output
        .forward(out.swap_dims(1, 2).reshape([batch, tokens, width]))
}
