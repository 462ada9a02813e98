//! The form in which keys and values travel, and their gradients come back.

use std::{ops::Range, sync::Arc};

use burn::tensor::{TensorMetadata, ops::FloatTensor};

use super::{
    AttentionCall, InnerAttention,
    driver::KeysAndValues,
    rows::{KvRows, pack_buffer},
};
use crate::{
    collectives::{Call, Collective, ExchangePlan, Payload, Pending},
    plan::ExchangeStrategy,
};

/// How keys and values travel, or their gradients.
#[derive(Debug, Clone, Copy)]
pub(super) enum Travel {
    /// In one message, put together as rows: [`KvRows`].
    Together(KvRows),
    /// Each as it is, `[1, num_kv_heads, tokens, ..]`, where the transport takes rows of any dim from where they are.
    Apart,
}

impl Travel {
    /// The form for an exchange by the plan, of these keys and values. The same on every rank, each of which must call it.
    pub(super) fn of<B: InnerAttention>(
        (k, v): (&FloatTensor<B>, &FloatTensor<B>),
        call: &AttentionCall,
        strategy: ExchangeStrategy,
        plan: &Arc<ExchangePlan>,
    ) -> Self {
        let op = Collective::Exchange {
            dim: 2,
            plan: plan.clone(),
        };
        // Rows of several streams are counted through all of them.
        let apart = strategy != ExchangeStrategy::AllGather
            && k.shape()[0] == 1
            && [k, v].into_iter().all(|tensor| {
                B::moves_any_rows(
                    (&tensor.shape().to_vec(), tensor.dtype()),
                    &B::float_device(tensor),
                    &op,
                    call.group(),
                )
            });
        if apart {
            Self::Apart
        } else {
            Self::Together(KvRows::of::<B>(k, v))
        }
    }

    /// Whose rows are tokens.
    pub(super) fn dim(self) -> usize {
        match self {
            Self::Together(_) => 0,
            Self::Apart => 2,
        }
    }

    /// What travels of keys and values.
    pub(super) fn pack<B: InnerAttention>(
        self,
        k: &FloatTensor<B>,
        v: &FloatTensor<B>,
    ) -> Vec<Payload<B>> {
        match self {
            Self::Together(_) => vec![KvRows::pack::<B>(k, v)],
            Self::Apart => vec![Payload::Float(k.clone()), Payload::Float(v.clone())],
        }
    }

    /// What travels of the gradients of `len` keys, which stand as one row where there is none.
    pub(super) fn pack_buffer<B: InnerAttention>(
        self,
        dk: &FloatTensor<B>,
        dv: &FloatTensor<B>,
        len: usize,
    ) -> Vec<Payload<B>> {
        match self {
            Self::Together(_) => vec![pack_buffer::<B>(dk, dv, len)],
            Self::Apart => {
                let parts = self.pack::<B>(dk, dv).into_iter();
                let none = |part: Payload<B>| part.zeros_like(2, 0);
                parts
                    .map(|part| if len == 0 { none(part) } else { part })
                    .collect()
            }
        }
    }

    /// Keys and values of `batch` equally long streams.
    pub(super) fn unpack<B: InnerAttention>(
        self,
        parts: Vec<Payload<B>>,
        batch: usize,
    ) -> KeysAndValues<B> {
        let mut parts = parts.into_iter();
        match (self, parts.next(), parts.next()) {
            (Self::Together(kv), Some(rows), None) => kv.unpack(rows, batch),
            (Self::Apart, Some(Payload::Float(k)), Some(Payload::Float(v))) => (k, v),
            _ => unreachable!("as many parts as were packed"),
        }
    }

    /// The keys and values of a buffer; an empty one is one row that no segment names, as devices want it.
    pub(super) fn unpack_buffer<B: InnerAttention>(
        self,
        parts: Vec<Payload<B>>,
    ) -> KeysAndValues<B> {
        let dim = self.dim();
        let named = |part: Payload<B>| match part.shape()[dim] {
            0 => part.zeros_like(dim, 1),
            _ => part,
        };
        self.unpack(parts.into_iter().map(named).collect(), 1)
    }

    /// The rows of `ranges` of each part, in their order.
    pub(super) fn take<'a, B: InnerAttention>(
        self,
        parts: &[Payload<B>],
        ranges: impl IntoIterator<Item = &'a Range<usize>> + Clone,
    ) -> Vec<Payload<B>> {
        let dim = self.dim();
        let take = |part: &Payload<B>| {
            let rows = ranges
                .clone()
                .into_iter()
                .map(|range| part.rows(dim, range));
            Payload::concat(rows.collect(), dim, part)
        };
        parts.iter().map(take).collect()
    }

    /// Starts an exchange of each part. `first` is the first operation, and `next` draws the others.
    pub(super) fn start<B: InnerAttention>(
        self,
        parts: Vec<Payload<B>>,
        (call, plan): (&AttentionCall, &Arc<ExchangePlan>),
        first: Call,
        next: impl Fn() -> Call,
    ) -> Vec<Pending<B>> {
        let op = Collective::Exchange {
            dim: self.dim(),
            plan: plan.clone(),
        };
        let mut first = Some(first);
        let start = |part| {
            let number = first.take().unwrap_or_else(&next);
            B::collective_start(part, &op, call.group(), number)
        };
        parts.into_iter().map(start).collect()
    }
}
