//! What goes into a model's steps and what comes out of them.

use burn::tensor::{Tensor, backend::Backend};
use burn_train::{
    ItemLazy,
    metric::{Adaptor, LossInput},
};

use crate::{
    attention::ContextParallelBackend,
    loss::TokenLoss,
    sharder::{ContextParallel, ContextParallelConfig},
};

/// An item of a data loader, with the rank that it is for: the `Input` of a model's `TrainStep` and `InferenceStep`.
///
/// A loader makes it with [`ForRank::new`]; the strategy gives each rank a copy that knows its rank. The item should be host
/// data, from which the model's step makes a [`SequenceBatch`](crate::batch::SequenceBatch) on its own device.
#[derive(Debug, Clone)]
pub struct ForRank<T> {
    item: T,
    cp: Option<ContextParallel>,
}

impl<T> ForRank<T> {
    /// An item that no rank has been given yet: under burn-train's own strategies, and after a training, it stays with one
    /// rank that shares nothing.
    pub fn new(item: T) -> Self {
        Self { item, cp: None }
    }

    /// The item, the same on every rank that shares its sequences.
    pub fn item(&self) -> &T {
        &self.item
    }

    /// The rank's end of the run, by whose [`shard`](ContextParallel::shard) every rank makes its step. For an item of no rank
    /// a run on one rank with the default configuration.
    pub fn context(&self) -> ContextParallel {
        let alone = || ContextParallel::solo(ContextParallelConfig::default());
        self.cp.clone().unwrap_or_else(alone)
    }

    pub(super) fn given_to(self, cp: &ContextParallel) -> Self {
        Self {
            cp: Some(cp.clone()),
            ..self
        }
    }
}

/// The loss of all ranks as a number: an output for steps whose only metric is burn-train's `LossMetric`.
///
/// burn-train is shown the output of rank 0, which must therefore not be rank 0's share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GlobalLoss(
    /// Mean over the labels of all ranks.
    pub f64,
);

impl<B: ContextParallelBackend> From<&TokenLoss<B>> for GlobalLoss {
    /// Waits for the device.
    fn from(loss: &TokenLoss<B>) -> Self {
        Self(loss.global_value())
    }
}

impl ItemLazy for GlobalLoss {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl<B: Backend> Adaptor<LossInput<B>> for GlobalLoss {
    fn adapt(&self) -> LossInput<B> {
        LossInput::new(Tensor::from_data([self.0], &B::Device::default()))
    }
}
