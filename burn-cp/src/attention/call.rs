//! One call of attention: everything but the tensors.

use std::sync::Arc;

use super::{AttentionOptions, PreparedAttention};
use crate::{
    comm::{ProcessGroup, ProgramOrder},
    plan::ExchangeStrategy,
};

/// What an attention operation needs besides its tensors; kept by its backward step. Cheap to clone.
#[derive(Debug, Clone)]
pub struct AttentionCall {
    prepared: Arc<PreparedAttention>,
    group: ProcessGroup,
    strategy: ExchangeStrategy,
    kernel: burn_cp_kernels::AttentionOptions,
    tracked: bool,
}

impl AttentionCall {
    /// A call over a prepared plan, whose ranks are those of `group`.
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
        Self {
            prepared,
            group,
            strategy,
            kernel,
            tracked: false,
        }
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

    /// The group over which the sequence is sharded.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    pub(super) fn prepared(&self) -> &PreparedAttention {
        &self.prepared
    }

    pub(super) fn strategy(&self) -> ExchangeStrategy {
        self.strategy
    }

    pub(super) fn kernel(&self) -> &burn_cp_kernels::AttentionOptions {
        &self.kernel
    }

    pub(super) fn is_tracked(&self) -> bool {
        self.tracked
    }
}
