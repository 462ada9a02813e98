//! One call of attention: everything but the tensors.

use std::sync::Arc;

use super::{AttentionOptions, PreparedAttention, resolve};
use crate::{
    collectives::Call,
    comm::{ProcessGroup, ProgramOrder},
    plan::{CostShape, ExchangeStrategy, PlanError},
};

/// What an attention operation needs besides its tensors; kept by its backward step. Cheap to clone.
#[derive(Debug, Clone)]
pub struct AttentionCall {
    prepared: Arc<PreparedAttention>,
    group: ProcessGroup,
    strategy: ExchangeStrategy,
    overlap: bool,
    keep_keys: bool,
    sm_margin: usize,
    kernel: burn_cp_kernels::AttentionOptions,
    tracked: bool,
}

impl AttentionCall {
    /// A call over a prepared plan, whose ranks are those of `group`. Exchange and computation do not overlap.
    ///
    /// # Panics
    /// The plan was prepared for another rank or another number of ranks, the scale is not finite, or the
    /// probability of dropout not at least 0 and less than 1.
    pub fn new(
        prepared: Arc<PreparedAttention>,
        group: ProcessGroup,
        strategy: ExchangeStrategy,
        options: &AttentionOptions,
    ) -> Self {
        assert_eq!(
            prepared.plan().world_size(),
            group.size(),
            "attention: ranks of the plan and of the group"
        );
        assert_eq!(
            prepared.rank(),
            group.rank(),
            "attention: the plan was prepared for another rank"
        );
        let mut kernel = burn_cp_kernels::AttentionOptions::new();
        kernel.scale = options.scale;
        kernel.dropout = options.dropout;
        kernel
            .check()
            .unwrap_or_else(|error| panic!("attention: {error}"));
        // Nothing is dropped, so that no exchange has to know what.
        kernel.dropout = kernel.dropout.filter(|dropout| dropout.p > 0.0);
        Self {
            prepared,
            group,
            strategy,
            overlap: false,
            keep_keys: false,
            sm_margin: 0,
            kernel,
            tracked: false,
        }
    }

    /// The same call, in which [`AllGather`](ExchangeStrategy::AllGather), [`NeededOnly`](ExchangeStrategy::NeededOnly) and
    /// [`LeftHalo`](ExchangeStrategy::LeftHalo) compute with a rank's own keys while those of others travel, or do not. The same on
    /// every rank. [`Ring`](ExchangeStrategy::Ring) always does, [`HeadAllToAll`](ExchangeStrategy::HeadAllToAll) never, and no call with
    /// dropout does.
    #[must_use]
    pub fn with_overlap(self, overlap: bool) -> Self {
        Self { overlap, ..self }
    }

    /// The same call, in which [`AllGather`](ExchangeStrategy::AllGather), [`NeededOnly`](ExchangeStrategy::NeededOnly) and
    /// [`LeftHalo`](ExchangeStrategy::LeftHalo) keep the keys and values that they got for the backward pass, or exchange them again
    /// there. The same on every rank. [`Ring`](ExchangeStrategy::Ring) always exchanges again.
    #[must_use]
    pub fn with_kept_keys(self, keep_keys: bool) -> Self {
        Self { keep_keys, ..self }
    }

    /// The same call, whose forward pass leaves this many multiprocessors of a GPU free where it computes while keys and values travel
    /// ([`burn_cp_kernels::AttentionOptions::sm_margin`]). Ranks may differ.
    #[must_use]
    pub fn with_sm_margin(self, sm_margin: usize) -> Self {
        Self { sm_margin, ..self }
    }

    /// The same call, recorded for a backward pass or not.
    #[must_use]
    pub fn tracked(&self, tracked: bool) -> Self {
        Self {
            tracked,
            ..self.clone()
        }
    }

    /// The same call with a handle on its group that does not keep the group's order alive: for backward steps, which Burn
    /// keeps for as long as the order refers to their output.
    #[must_use]
    pub(crate) fn outside_order(&self) -> Self {
        let group = self.group.with_order(ProgramOrder::new());
        Self {
            group,
            ..self.clone()
        }
    }

    /// Whether any rank needs keys of another; the same answer on every rank.
    pub fn communicates(&self) -> bool {
        self.group.size() > 1 && self.prepared.plan().moves_tokens()
    }

    /// The strategy that tensors of these sizes take: what the call was made with, or what
    /// [`ExchangeStrategy::Auto`] stands for. Pure host; the same on every rank.
    ///
    /// # Errors
    /// The strategy cannot serve the call.
    pub fn strategy(&self, shape: &CostShape) -> Result<ExchangeStrategy, PlanError> {
        let strategy = self.taken(shape)?;
        tracing::debug!(asked = ?self.strategy, taken = ?strategy, overlap = self.overlaps(), "attention");
        Ok(strategy)
    }

    fn taken(&self, shape: &CostShape) -> Result<ExchangeStrategy, PlanError> {
        let overlap = self.overlaps();
        let taken = resolve(self.prepared.plan(), self.strategy, overlap, shape)?;
        // What is dropped depends on the head, of which a rank that has traded tokens for heads numbers its own from 0, and on positions, which
        // a ring's step counts among the keys that it has.
        let exchange = match taken {
            ExchangeStrategy::HeadAllToAll => "head-all-to-all",
            ExchangeStrategy::Ring => "ring",
            _ => return Ok(taken),
        };
        if self.kernel.dropout.is_none() || !self.communicates() {
            return Ok(taken);
        }
        match self.strategy {
            ExchangeStrategy::Auto => Ok(ExchangeStrategy::NeededOnly),
            _ => Err(PlanError::Dropout { exchange }),
        }
    }

    /// Elements that this rank receives from others in a forward pass over tensors of these sizes. Backward moves keys and values
    /// again, and as many elements of gradients the other way. Pure host.
    ///
    /// # Errors
    /// The strategy cannot serve the call.
    pub fn elements_received(&self, shape: &CostShape) -> Result<usize, PlanError> {
        let strategy = self.taken(shape)?;
        if !self.communicates() {
            return Ok(0);
        }
        let (rank, size) = (self.group.rank(), self.group.size());
        let kv = shape.num_kv_heads * (shape.head_dim + shape.v_head_dim);
        Ok(match strategy {
            ExchangeStrategy::AllGather => {
                let sizes = self.prepared.sizes();
                kv * (sizes.iter().sum::<usize>() - sizes[rank])
            }
            ExchangeStrategy::Ring => {
                let steps = self.prepared.ring().steps.iter();
                kv * steps
                    .map(|step| step.exchange.num_received(rank))
                    .sum::<usize>()
            }
            ExchangeStrategy::HeadAllToAll => {
                let heads = self.prepared.heads();
                let there = kv + shape.num_heads * shape.head_dim;
                let back = shape.num_heads * shape.v_head_dim;
                (there * heads.there.num_received(rank) + back * heads.back.num_received(rank))
                    / size
            }
            _ => kv * self.prepared.exchange().num_received(rank),
        })
    }

    /// The group over which the sequence is sharded.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    pub(super) fn prepared(&self) -> &PreparedAttention {
        &self.prepared
    }

    /// Whether what was exchanged is kept for a backward pass that comes.
    pub(super) fn keeps_keys(&self) -> bool {
        self.keep_keys && self.tracked
    }

    /// Not with dropout: a part of the keys does not know their positions, from which it is drawn.
    pub(super) fn overlaps(&self) -> bool {
        self.overlap && self.kernel.dropout.is_none()
    }

    pub(super) fn kernel(&self) -> &burn_cp_kernels::AttentionOptions {
        &self.kernel
    }

    /// Options of a kernel that runs while something travels, or while nothing does.
    pub(super) fn kernel_beside(&self, travels: bool) -> burn_cp_kernels::AttentionOptions {
        let margin = if travels { self.sm_margin } else { 0 };
        self.kernel.clone().with_sm_margin(margin)
    }

    /// The group's next operation, as one of the forward pass.
    pub(super) fn forward(&self) -> Call {
        Call {
            plan: Some(self.prepared.short_hash()),
            tracked: self.tracked,
            ..Call::forward(&self.group, "attention")
        }
    }

    /// The group's next operation, as one of the backward pass of the forward operation `of`.
    pub(super) fn backward(&self, label: &'static str, of: u64) -> Call {
        Call {
            plan: Some(self.prepared.short_hash()),
            ..Call::adjoint(&self.group, label, of)
        }
    }
}
