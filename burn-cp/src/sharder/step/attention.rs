//! Attention of a step's tokens, and the plans that it follows.

use std::sync::{Arc, PoisonError};

use burn::tensor::{Tensor, TensorPrimitive};

use super::{CpStep, StepError};
use crate::{
    attention::{
        AttentionCall, AttentionInput, AttentionOptions, ContextParallelBackend, PreparedAttention,
    },
    plan::{AttentionPlan, CostShape, ExchangeStrategy, MaskKind},
};

impl<B: ContextParallelBackend> CpStep<B> {
    /// The plan of attention under a mask: who computes what, and which tokens move. Made once per mask and step.
    ///
    /// # Errors
    /// A mask that cannot be planned for this batch, as [`AttentionPlan::new`] says.
    pub fn plan(&self, mask: MaskKind) -> Result<Arc<AttentionPlan>, StepError> {
        Ok(self.prepared(mask)?.plan().clone())
    }

    pub(crate) fn prepared(&self, mask: MaskKind) -> Result<Arc<PreparedAttention>, StepError> {
        let mut made = self
            .inner
            .prepared
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(prepared) = made.get(&mask) {
            return Ok(prepared.clone());
        }
        let plan = AttentionPlan::new(
            self.inner.documents.clone(),
            self.inner.layout.clone(),
            mask,
        )?;
        let prepared = Arc::new(PreparedAttention::new(
            Arc::new(plan),
            self.inner.cp.rank(),
        )?);
        made.insert(mask, prepared.clone());
        Ok(prepared)
    }

    /// Attention of this rank's tokens over their documents: `q [batch, num_heads, local_tokens, head_dim]`,
    /// `k [batch, num_kv_heads, local_tokens, head_dim]`, `v [batch, num_kv_heads, local_tokens, v_head_dim]`, of one float dtype ->
    /// `[batch, num_heads, local_tokens, v_head_dim]`; 0 at padding.
    ///
    /// Every rank of the group must call it, in the same order. Differentiable: the backward pass runs the adjoint of the
    /// exchange, also on a rank that is all padding.
    ///
    /// # Panics
    /// Shapes that do not fit the step, or that the strategy cannot serve (see [`Self::exchange`]); a mask that cannot be planned for
    /// it ([`plan`](Self::plan) gives the error as a value), on every rank before anything travels. A failure between ranks ends this
    /// one with a typed panic.
    pub fn attention(
        &self,
        q: Tensor<B, 4>,
        k: Tensor<B, 4>,
        v: Tensor<B, 4>,
        options: &AttentionOptions,
    ) -> Tensor<B, 4> {
        self.attend(AttentionInput::new(q, k, v), options)
    }

    /// [`Self::attention`] with attention sinks of all heads, `[num_heads]`, of any float dtype: `exp(sink)` of its head joins each
    /// query's sum of exponentials, once. Every rank of the group must call it.
    ///
    /// Differentiable in the sinks too. Each rank's gradient of them is its share, as of any parameter that all ranks hold, and
    /// [`sync_gradients`](crate::optim::sync_gradients) sums the shares.
    ///
    /// # Panics
    /// As [`Self::attention`].
    pub fn attention_with_sinks(
        &self,
        q: Tensor<B, 4>,
        k: Tensor<B, 4>,
        v: Tensor<B, 4>,
        sinks: Tensor<B, 1>,
        options: &AttentionOptions,
    ) -> Tensor<B, 4> {
        let input = AttentionInput::new(q, k, v).with_sinks(Some(sinks));
        self.attend(input, options)
    }

    fn attend(
        &self,
        input: AttentionInput<Tensor<B, 4>, Tensor<B, 1>>,
        options: &AttentionOptions,
    ) -> Tensor<B, 4> {
        let call = self.attention_call(options);
        let AttentionInput { q, k, v, sinks, .. } = input;
        let [q, k, v] = [q, k, v].map(|tensor| tensor.into_primitive().tensor());
        let sinks = sinks.map(|sinks| sinks.into_primitive().tensor());
        let input = AttentionInput::new(q, k, v).with_sinks(sinks);
        Tensor::from_primitive(TensorPrimitive::Float(B::context_attention(input, &call)))
    }

    /// The exchange strategy that attention of these sizes takes: the configured one, or what
    /// [`ExchangeStrategy::Auto`] stands for. Pure host; the same on every rank. A model may ask before it computes anything.
    ///
    /// # Errors
    /// The strategy cannot serve this step's layout and documents, these heads, or dropout.
    ///
    /// # Panics
    /// A scale or a probability of dropout that no call takes.
    pub fn exchange(
        &self,
        shape: &CostShape,
        options: &AttentionOptions,
    ) -> Result<ExchangeStrategy, StepError> {
        self.prepared(options.mask)?;
        Ok(self.attention_call(options).strategy(shape)?)
    }

    /// What [`Self::attention`] runs, for callers below autodiff that want the log-sum-exponentials too
    /// ([`attend_with_lse`](crate::attention::attend_with_lse)).
    ///
    /// # Panics
    /// The documents cannot be planned under this mask; see [`plan`](Self::plan).
    pub fn attention_call(&self, options: &AttentionOptions) -> AttentionCall {
        let prepared = self
            .prepared(options.mask)
            .unwrap_or_else(|error| panic!("attention: {error}"));
        AttentionCall::new(
            prepared,
            self.inner.cp.clone(),
            self.inner.config.exchange,
            options,
        )
        .with_overlap(self.inner.config.overlap)
        .with_kept_keys(self.inner.config.keep_keys)
        .with_sm_margin(self.inner.config.sm_margin)
    }
}
