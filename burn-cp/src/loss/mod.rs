//! Losses that are a mean over the tokens of all ranks.
//!
//! Each rank sums over its own labels and divides by the number of labels of all ranks that share the loss. Backward runs on
//! that share; every exchange's adjoint is a plain sum, so the gradients summed over the ranks are those of one device.

use burn::tensor::{
    DType, FloatDType, Int, Tensor, TensorData, activation::log_softmax, backend::Backend,
};

use crate::{
    attention::ContextParallelBackend,
    collectives::{self, Payload, read_to_host},
    comm::ProcessGroup,
    sharder::{CpStep, IGNORED_LABEL, StepError, ThdStep},
};

/// A loss as one rank has it, and as all ranks have it together.
#[derive(Debug, Clone)]
pub struct TokenLoss<B: ContextParallelBackend> {
    /// This rank's share `[1]`: backward runs on it. Connected to the graph also where this rank has no label.
    pub local: Tensor<B, 1>,
    /// The sum of all shares `[1]`, without gradient, the same on every rank: for reporting.
    pub global: Tensor<B, 1>,
    group: ProcessGroup,
}

impl<B: ContextParallelBackend> TokenLoss<B> {
    /// The loss of all ranks as a number. Waits for the device.
    pub fn global_value(&self) -> f64 {
        let global = Payload::Float(self.global.clone().into_primitive().tensor());
        read_to_host::<B>(global)
            .iter::<f64>()
            .next()
            .unwrap_or_default()
    }

    /// Runs backward on this rank's share, once every rank has come this far.
    ///
    /// Burn cleans up after a backward pass by locking every graph of the process. Where ranks are threads and several
    /// backward passes run between two synchronisations of gradients (accumulation on a mesh with several groups), ranks
    /// could wait for each other's clean-up in a circle; meeting before each pass rules that out. Every rank of the loss
    /// group must call it.
    pub fn backward(&self) -> B::Gradients
    where
        B: burn::tensor::backend::AutodiffBackend,
    {
        self.group.barrier().unwrap_or_else(|error| error.raise());
        self.local.backward()
    }
}

/// What a token-mean loss is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumLabels {
    /// Labels over all ranks of the loss group, and over all microbatches of a step.
    pub global: u64,
}

impl<B: ContextParallelBackend> ThdStep<B> {
    /// Labels of all chunks over all ranks of the loss group: what the loss of each chunk is divided by
    /// ([`CpStep::cross_entropy_over`]). Every rank must call it; host only.
    ///
    /// # Errors
    /// The ranks could not talk to each other.
    pub fn num_labels(&self) -> Result<NumLabels, StepError> {
        let local = self.steps().iter().map(CpStep::num_local_labels).sum();
        num_labels(self.steps()[0].loss_group(), local)
    }
}

/// Labels of all ranks, of which this one has `local`.
fn num_labels(group: &ProcessGroup, local: u64) -> Result<NumLabels, StepError> {
    let counts = group.host_all_gather("number of labels", local)?;
    Ok(NumLabels {
        global: counts.iter().sum(),
    })
}

impl<B: ContextParallelBackend> CpStep<B> {
    /// Labels of this rank's tokens that are not ignored.
    pub fn num_local_labels(&self) -> u64 {
        let labels = self.labels().unwrap_or_default();
        labels
            .iter()
            .filter(|&&label| label != IGNORED_LABEL)
            .count() as u64
    }

    /// Labels over all ranks of the loss group. Every rank must call it; host only. With several microbatches, add them up.
    ///
    /// # Errors
    /// The ranks could not talk to each other.
    pub fn num_labels(&self) -> Result<NumLabels, StepError> {
        num_labels(self.loss_group(), self.num_local_labels())
    }

    /// Mean cross entropy over the labels of all ranks, from this rank's logits `[batch, local_tokens, vocab]`. In `f32` for logits of smaller
    /// dtypes, in which neither a large vocabulary's sums nor many labels' have a place.
    ///
    /// Ignored positions are selected out. Without any label the loss is 0. Every rank of the loss group must call it.
    ///
    /// # Errors
    /// The step has no labels, the logits have another shape, a label is outside of them, or the ranks could not talk. Logits and labels are
    /// looked at on the rank that has them, and the others end with `PeerFailed`; with `SequenceBatch::with_vocab_size` a label that cannot
    /// be is an error of the batch, on every rank.
    ///
    /// # Panics
    /// With the typed panic of collectives, where the sum over ranks fails.
    pub fn cross_entropy(&self, logits: Tensor<B, 3>) -> Result<TokenLoss<B>, StepError> {
        // What is wrong with labels or logits is found before any rank is met.
        let sum = self.cross_entropy_sum(logits)?;
        let num_labels = self.num_labels()?;
        Ok(self.share(sum, num_labels))
    }

    /// [`Self::cross_entropy`], divided by a given number of labels: that of all microbatches whose gradients are summed.
    /// Every rank of the loss group must call it.
    ///
    /// # Errors
    /// As [`Self::cross_entropy`], and it panics as that does.
    pub fn cross_entropy_over(
        &self,
        logits: Tensor<B, 3>,
        num_labels: NumLabels,
    ) -> Result<TokenLoss<B>, StepError> {
        let sum = self.cross_entropy_sum(logits)?;
        Ok(self.share(sum, num_labels))
    }

    /// This rank's sum as a share of the loss of all ranks.
    fn share(&self, sum: Tensor<B, 1>, num_labels: NumLabels) -> TokenLoss<B> {
        if num_labels.global == 0 {
            tracing::warn!("no rank has a label: the loss and its gradients are 0");
        }
        #[allow(clippy::cast_precision_loss)]
        // Not a division: Burn rounds the gradient of one by a scalar to f32, also in f64.
        let local = sum.mul_scalar(1.0 / num_labels.global.max(1) as f64);
        let global = collectives::all_reduce(local.clone().detach(), self.loss_group());
        TokenLoss {
            local,
            global,
            group: self.loss_group().clone(),
        }
    }

    fn cross_entropy_sum(&self, logits: Tensor<B, 3>) -> Result<Tensor<B, 1>, StepError> {
        let Some(labels) = self.labels() else {
            return Err(StepError::Missing {
                what: "labels".into(),
                available: "none of them".into(),
            });
        };
        let [batch, tokens, vocab] = logits.dims();
        if [batch, tokens] != [self.batch_size(), self.local_len()] {
            return Err(StepError::Invalid {
                what: "logits [batch, local_tokens, vocab]".into(),
                expected: format!("[{}, {}, vocab]", self.batch_size(), self.local_len()),
                got: format!("[{batch}, {tokens}, {vocab}]"),
            });
        }
        let mut rows = Vec::new();
        let mut targets = Vec::new();
        for (row, &label) in labels
            .iter()
            .enumerate()
            .filter(|(_, label)| **label != IGNORED_LABEL)
        {
            if usize::try_from(label).is_ok_and(|label| label < vocab) {
                #[allow(clippy::cast_possible_wrap)]
                rows.push(row as i64);
                targets.push(label);
            } else {
                return Err(StepError::Invalid {
                    what: "label".into(),
                    expected: format!("0..{vocab}, or {IGNORED_LABEL} for ignored"),
                    got: label.to_string(),
                });
            }
        }
        let device = logits.device();
        let flat = logits.reshape([batch * tokens, vocab]);
        if rows.is_empty() {
            // Zero whatever the logits hold, and still a function of them: this rank's adjoints must run.
            let first = widened(flat.slice([0..1, 0..1]));
            let all = Tensor::<B, 2>::zeros([1, 1], &device).equal_elem(0.0);
            return Ok(first.mask_fill(all, 0.0).sum());
        }
        let num = rows.len();
        let rows = Tensor::<B, 1, Int>::from_data(TensorData::new(rows, [num]), &device);
        let targets = Tensor::<B, 2, Int>::from_data(TensorData::new(targets, [num, 1]), &device);
        let log_probabilities = log_softmax(widened(flat.select(0, rows)), 1);
        Ok(log_probabilities.gather(1, targets).sum().neg())
    }
}

/// In `f32` at least.
fn widened<B: Backend>(logits: Tensor<B, 2>) -> Tensor<B, 2> {
    match logits.dtype() {
        DType::F32 | DType::F64 => logits,
        _ => logits.cast(FloatDType::F32),
    }
}
