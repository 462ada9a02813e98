//! Accuracy on documents that were never trained on.

use burn::tensor::Tensor;
use burn_cp::{
    attention::ContextParallelBackend,
    nn::SequenceModel,
    sharder::{ContextParallel, IGNORED_LABEL, StepError},
};
use serde::{Deserialize, Serialize};

use super::{Architecture, TrainConfig};
use crate::data::PackSource;

/// Answer digits, and how many of them were the model's first choice given all tokens before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Score {
    /// Digits that were right.
    pub num_right: u64,
    /// Digits that were asked for.
    pub num_asked: u64,
}

impl Score {
    /// Share of digits that were right; 0 where none was asked for.
    pub fn accuracy(&self) -> f64 {
        #[allow(clippy::cast_precision_loss)]
        let share = self.num_right as f64 / self.num_asked.max(1) as f64;
        share
    }
}

/// Scores a model on the first `heldout_packs` packs of `source`, dealt out over dp and sharded over cp. Every rank must call it.
///
/// # Errors
/// A batch that cannot be sharded, or ranks that failed.
pub fn evaluate<B: ContextParallelBackend, A: Architecture>(
    model: &impl SequenceModel<B>,
    cp: &ContextParallel,
    source: &PackSource,
    config: &TrainConfig<A>,
    device: &B::Device,
) -> Result<Score, StepError> {
    let (loss, group) = (cp.loss_group(), cp.group());
    let dp_rank = (loss.rank() / group.size()) as u64;
    let mut score = Score::default();
    // dp ranks may have different numbers of packs: they meet only when the scores are added up.
    for index in (0..config.heldout_packs).filter(|index| index % config.dp as u64 == dp_rank) {
        let batch = config.batch::<B>(&[source.pack(index)], source.shape(), device)?;
        let step = cp.shard(batch, device)?;
        let logits: Tensor<B, 3> = model.forward(&step)?;
        let choices = logits.argmax(2).into_data();
        let labels = step.labels().unwrap_or_default();
        for (choice, &label) in choices
            .iter::<i64>()
            .zip(labels)
            .filter(|(_, label)| **label != IGNORED_LABEL)
        {
            score.num_asked += 1;
            score.num_right += u64::from(choice == label);
        }
    }
    let scores = loss.host_all_gather("held-out score", score)?;
    Ok(Score {
        num_right: scores.iter().map(|score| score.num_right).sum(),
        num_asked: scores.iter().map(|score| score.num_asked).sum(),
    })
}
