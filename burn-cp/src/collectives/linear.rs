//! The collectives as linear maps, each with its adjoint.

use std::sync::Arc;

use burn::tensor::Shape;

use super::{ExchangePlan, Payload};
use crate::comm::{CollectiveKind, ProcessGroup, Signature};

/// A collective on the tensors of all ranks of a group: a linear map, whose adjoint is another one of these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Collective {
    /// Concatenation along `dim`; `sizes[r]` rows come from rank `r`. Adjoint: [`Self::ReduceScatter`].
    AllGather {
        /// Dim that is concatenated.
        dim: usize,
        /// Size of `dim` on each rank.
        sizes: Arc<[usize]>,
    },
    /// Sum, of which rank `r` keeps `sizes[r]` rows of `dim`. Adjoint: [`Self::AllGather`].
    ReduceScatter {
        /// Dim that is split.
        dim: usize,
        /// Size of `dim` on each rank.
        sizes: Arc<[usize]>,
    },
    /// Sum on every rank. Adjoint: itself.
    AllReduce,
    /// Planned ranges between pairs. Adjoint: [`Self::ExchangeReverse`].
    Exchange {
        /// Dim whose rows travel.
        dim: usize,
        /// This rank's view of the plan.
        plan: Arc<ExchangePlan>,
    },
    /// Rows go back to where they came from and are summed there, in rank order. Adjoint: [`Self::Exchange`].
    ExchangeReverse {
        /// Dim whose rows travel.
        dim: usize,
        /// This rank's view of the forward plan.
        plan: Arc<ExchangePlan>,
    },
    /// The root's tensor on every rank. Adjoint: [`Self::Reduce`].
    Broadcast {
        /// Rank of the group whose tensor is sent.
        root: usize,
    },
    /// The sum at the root, zeros elsewhere. Adjoint: [`Self::Broadcast`].
    Reduce {
        /// Rank of the group that receives the sum.
        root: usize,
    },
}

impl Collective {
    /// The map `Aᵀ` with `<A x, y> = <x, Aᵀ y>`, summed over the ranks.
    #[must_use]
    pub fn adjoint(&self) -> Self {
        match self.clone() {
            Self::AllGather { dim, sizes } => Self::ReduceScatter { dim, sizes },
            Self::ReduceScatter { dim, sizes } => Self::AllGather { dim, sizes },
            Self::AllReduce => Self::AllReduce,
            Self::Exchange { dim, plan } => Self::ExchangeReverse { dim, plan },
            Self::ExchangeReverse { dim, plan } => Self::Exchange { dim, plan },
            Self::Broadcast { root } => Self::Reduce { root },
            Self::Reduce { root } => Self::Broadcast { root },
        }
    }

    fn kind(&self) -> CollectiveKind {
        match self {
            Self::AllGather { .. } => CollectiveKind::AllGather,
            Self::ReduceScatter { .. } => CollectiveKind::ReduceScatter,
            Self::AllReduce => CollectiveKind::AllReduce,
            Self::Exchange { .. } => CollectiveKind::Exchange,
            Self::ExchangeReverse { .. } => CollectiveKind::ExchangeReverse,
            Self::Broadcast { .. } => CollectiveKind::Broadcast,
            Self::Reduce { .. } => CollectiveKind::Reduce,
        }
    }

    /// What all ranks must agree on before this collective moves anything.
    pub(crate) fn signature<B: burn::tensor::backend::Backend>(
        &self,
        payload: &Payload<B>,
        call: &Call,
    ) -> Signature {
        let shape: Shape = payload.shape();
        let mut sizes: Vec<Option<usize>> = shape.iter().map(|&size| Some(size)).collect();
        let mut arguments = match self {
            Self::AllGather { dim, sizes: all } => {
                sizes[*dim] = None;
                format!("dim {dim}, sizes {all:?}")
            }
            Self::ReduceScatter { dim, sizes: all } => format!("dim {dim}, sizes {all:?}"),
            Self::AllReduce => String::new(),
            Self::Exchange { dim, plan } | Self::ExchangeReverse { dim, plan } => {
                sizes[*dim] = None;
                format!("dim {dim}, ranges {:016x}", plan.fingerprint())
            }
            Self::Broadcast { root } | Self::Reduce { root } => format!("root {root}"),
        };
        if let Some(plan) = call.plan {
            arguments.push_str(&format!(", plan {plan:016x}"));
        }
        Signature {
            kind: self.kind(),
            label: call.label.into(),
            dtype: format!("{:?}", payload.dtype()),
            shape: sizes,
            arguments,
            adjoint_of: call.adjoint_of,
            tracked: call.tracked,
        }
    }
}

/// One execution of a collective: its number in the group's program order, and what it belongs to.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Number within the group; every rank draws numbers in the same order.
    pub number: u64,
    /// What the caller does with it, for messages.
    pub label: &'static str,
    /// Number of the forward operation that this is the adjoint of.
    pub adjoint_of: Option<u64>,
    /// Whether the result is recorded for a backward pass.
    pub tracked: bool,
    /// First bytes of the hash of the plan that it follows; ranks that follow different plans are told so.
    pub plan: Option<u64>,
}

impl Call {
    /// The next operation of a group.
    pub fn forward(group: &ProcessGroup, label: &'static str) -> Self {
        Self {
            number: group.next_number(),
            label,
            adjoint_of: None,
            tracked: false,
            plan: None,
        }
    }

    /// The next operation of a group, as the adjoint of an earlier one.
    pub fn adjoint(group: &ProcessGroup, label: &'static str, of: u64) -> Self {
        Self {
            adjoint_of: Some(of),
            ..Self::forward(group, label)
        }
    }
}
