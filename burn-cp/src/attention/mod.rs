//! Attention over sequences that are sharded over ranks.
//!
//! Attention is one operation of the autodiff graph: keys and values travel as the plan says, the varlen kernel runs on this
//! rank's queries, and the backward pass exchanges again instead of keeping what others sent, unless told to keep it. There is one driver per exchange
//! strategy, and each serves every layout: a driver sees segments, pieces and rows, never a policy. This room knows plans, groups
//! and kernels; it does not know batches or models.
//!
//! # What each strategy promises
//!
//! | strategy | overlap | forward | backward |
//! | --- | --- | --- | --- |
//! | `AllGather`, `NeededOnly`, `LeftHalo` | off | the bits of one rank | accurate |
//! | `AllGather`, `NeededOnly`, `LeftHalo` | on | accurate | accurate |
//! | `Ring` | always | accurate | accurate |
//! | `HeadAllToAll` | never | the bits of one rank | accurate |
//!
//! *The bits of one rank*: what the same kernel gives one rank that holds all tokens. *Accurate*: against attention in `f64`, as far off
//! as attention written in tensor operations is at most twice, in the same dtype. Every strategy gives the same bits from run to run,
//! forward and backward, since nothing depends on who arrives first; kernels must do so too. `Auto` promises what it takes.
//!
//! Partial results (overlap, ring) are merged in `f32` at least, and so are gradients of keys and values that several ranks contribute
//! to, in a fixed order: by rank without overlap, the owner's own first with it, and by step in a ring. What kernels return and what
//! travels has the dtype of the tensors. A sink joins the sum of exponentials once, after merging.

mod call;
mod driver;
mod gathered;
mod heads;
mod heads_plan;
mod merge;
mod prepared;
mod ring;
mod ring_plan;
mod rows;
mod split;
mod strategy;
mod subset;
mod travel;

use burn::tensor::ops::FloatTensor;
use burn_cp_kernels::{AttentionBackend, VarlenAttentionBackend};
use serde::{Deserialize, Serialize};

pub use burn_cp_kernels::{AttentionGradients, AttentionInput, Dropout};
pub use call::AttentionCall;
pub use driver::{AttentionState, attend, attend_with_lse, attend_with_state, attention_gradients};
pub use prepared::{PrepareError, PreparedAttention};
pub use strategy::resolve;

use crate::{collectives::CollectiveBackend, plan::MaskKind};

/// A backend that runs context-parallel attention: Flex, NdArray, CubeCL's plain and fused, and `Autodiff` over any of them.
pub trait ContextParallelBackend: CollectiveBackend + VarlenAttentionBackend {
    /// Attention of this rank's queries: `q [batch, num_heads, local_tokens, head_dim]`,
    /// `k [batch, num_kv_heads, local_tokens, head_dim]`, `v [batch, num_kv_heads, local_tokens, v_head_dim]`, of one float dtype, and where
    /// there are sinks those of all heads, `[num_heads]` ->
    /// `[batch, num_heads, local_tokens, v_head_dim]`.
    ///
    /// Every rank of the call's group must call it. Differentiable on autodiff backends: one operation, whose backward pass
    /// runs the adjoint of the exchange. The gradient of the sinks is this rank's share of it, like that of any parameter that all
    /// ranks hold: the sum over ranks is the whole.
    fn context_attention(
        input: AttentionInput<FloatTensor<Self>>,
        call: &AttentionCall,
    ) -> FloatTensor<Self>;
}

/// A backend below autodiff that has the kernels and can exchange.
pub trait InnerAttention: AttentionBackend + CollectiveBackend {}

impl<B: AttentionBackend + CollectiveBackend> InnerAttention for B {}

/// What a model asks of attention.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionOptions {
    /// Which tokens of its document a token sees.
    pub mask: MaskKind,
    /// Factor of the scores; `1/sqrt(head_dim)` where none is given.
    #[serde(default)]
    pub scale: Option<f64>,
    /// Dropout of the weights after the softmax. What is dropped follows from the seed, the head, the document and the two
    /// positions in it, so that every sharding drops the same. Exchanges that do not know them all,
    /// [`Ring`](crate::plan::ExchangeStrategy::Ring) and [`HeadAllToAll`](crate::plan::ExchangeStrategy::HeadAllToAll), are refused.
    /// Seeds must differ between layers and steps.
    #[serde(default)]
    pub dropout: Option<Dropout>,
}

impl AttentionOptions {
    /// Each token sees itself and the earlier tokens of its document.
    pub fn causal() -> Self {
        Self {
            mask: MaskKind::CAUSAL,
            scale: None,
            dropout: None,
        }
    }

    /// Each token sees its whole document.
    pub fn full() -> Self {
        Self {
            mask: MaskKind::Full,
            scale: None,
            dropout: None,
        }
    }

    /// Causal, and the tokens of each of the batch's bidirectional spans see each other; see
    /// [`SequenceBatch::with_spans`](crate::batch::SequenceBatch::with_spans).
    pub fn causal_with_spans() -> Self {
        Self {
            mask: MaskKind::CAUSAL_WITH_SPANS,
            ..Self::causal()
        }
    }

    /// Causal, and the tokens of each document's prefix see each other; see
    /// [`SequenceBatch::with_prefixes`](crate::batch::SequenceBatch::with_prefixes).
    pub fn prefix() -> Self {
        Self {
            mask: MaskKind::PREFIX,
            ..Self::causal()
        }
    }

    /// Each document has its own mask; see [`SequenceBatch::with_masks`](crate::batch::SequenceBatch::with_masks).
    pub fn per_document() -> Self {
        Self {
            mask: MaskKind::PER_DOCUMENT,
            ..Self::causal()
        }
    }

    /// Causal with a window: each token sees itself and the `window` tokens before it. Spans, prefixes and masks of
    /// documents cannot have one: that is an error when attention is planned.
    #[must_use]
    pub fn with_window(self, window: usize) -> Self {
        Self {
            mask: self.mask.with_window(window),
            ..self
        }
    }

    /// Scores are multiplied by `scale`.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self {
            scale: Some(scale),
            ..self
        }
    }

    /// Weights are dropped.
    #[must_use]
    pub fn with_dropout(self, dropout: Dropout) -> Self {
        Self {
            dropout: Some(dropout),
            ..self
        }
    }
}
