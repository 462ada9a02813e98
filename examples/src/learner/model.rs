//! The reader of digits as burn-train wants a model.

use burn::{
    module::Module,
    tensor::{Int, Tensor, TensorData, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    launch,
    layout::LayoutError,
    loss::TokenLoss,
    nn::SequenceModel,
    sharder::{CpStep, IGNORED_LABEL, StepError},
    train::ForRank,
};
use burn_train::{
    InferenceStep, ItemLazy, TrainOutput, TrainStep,
    metric::{AccuracyInput, Adaptor, LossInput},
};

use super::Packs;
use crate::{
    data::vocabulary,
    models::qwen3_vl::Qwen3Vl,
    train::{Score, TrainBackend, to_batch},
};

/// A Qwen3-VL that reads packs of digit documents.
#[derive(Module, Debug)]
pub struct DigitReader<B: Backend> {
    /// The model.
    pub model: Qwen3Vl<B>,
    /// What every document is padded to a multiple of, where the layout takes one stream of documents.
    #[module(skip)]
    pub alignment: Option<usize>,
}

/// What a step says, the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Reading {
    /// Mean cross entropy over the labels of all ranks.
    pub loss: f64,
    /// Digits of all ranks.
    pub score: Score,
}

impl Reading {
    /// Both together; the loss is the mean over the digits.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let num_right = self.score.num_right + other.score.num_right;
        let num_asked = self.score.num_asked + other.score.num_asked;
        #[allow(clippy::cast_precision_loss)]
        let sum =
            self.loss * self.score.num_asked as f64 + other.loss * other.score.num_asked as f64;
        Self {
            #[allow(clippy::cast_precision_loss)]
            loss: sum / num_asked.max(1) as f64,
            score: Score {
                num_right,
                num_asked,
            },
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Step(#[from] StepError),
}

impl<B: ContextParallelBackend> DigitReader<B> {
    /// The loss of this rank's part of an item, and what all ranks read.
    fn read(&self, item: &ForRank<Packs>) -> Result<(TokenLoss<B>, Reading), ReadError> {
        let device = self.devices().remove(0);
        let Packs { packs, shape } = item.item();
        let batch = to_batch::<B>(packs, shape, vocabulary::SIZE, self.alignment, &device)?;
        let step = item.context().shard(batch, &device)?;
        let logits = self.model.forward(&step)?;
        let score = score(&logits, &step)?;
        let loss = step.cross_entropy(logits)?;
        let reading = Reading {
            loss: loss.global_value(),
            score,
        };
        Ok((loss, reading))
    }
}

/// Right and asked digits of all ranks.
fn score<B: ContextParallelBackend>(
    logits: &Tensor<B, 3>,
    step: &CpStep<B>,
) -> Result<Score, StepError> {
    let choices = logits.clone().argmax(2).into_data();
    let labels = step.labels().unwrap_or_default();
    let asked = (choices.iter::<i64>().zip(labels)).filter(|(_, label)| **label != IGNORED_LABEL);
    let mut own = Score::default();
    for (choice, label) in asked {
        own.num_asked += 1;
        own.num_right += u64::from(choice == *label);
    }
    let all = step.loss_group().host_all_gather("digits", own)?;
    Ok(Score {
        num_right: all.iter().map(|score| score.num_right).sum(),
        num_asked: all.iter().map(|score| score.num_asked).sum(),
    })
}

// burn-train's steps have no errors: what goes wrong ends the rank.
impl<B: TrainBackend> TrainStep for DigitReader<B> {
    type Input = ForRank<Packs>;
    type Output = Reading;

    fn step(&self, item: Self::Input) -> TrainOutput<Reading> {
        let (loss, reading) = self
            .read(&item)
            .unwrap_or_else(|error| launch::raise(error));
        TrainOutput::new(self, loss.backward(), reading)
    }
}

impl<B: ContextParallelBackend> InferenceStep for DigitReader<B> {
    type Input = ForRank<Packs>;
    type Output = Reading;

    fn step(&self, item: Self::Input) -> Reading {
        let read = self
            .read(&item)
            .unwrap_or_else(|error| launch::raise(error));
        read.1
    }
}

impl ItemLazy for Reading {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl<B: Backend> Adaptor<LossInput<B>> for Reading {
    fn adapt(&self) -> LossInput<B> {
        LossInput::new(Tensor::from_data([self.loss], &B::Device::default()))
    }
}

impl<B: Backend> Adaptor<AccuracyInput<B>> for Reading {
    /// burn-train counts by itself, so it is shown each digit as a choice between right and wrong, of which right is wanted.
    fn adapt(&self) -> AccuracyInput<B> {
        let Score {
            num_right,
            num_asked,
        } = self.score;
        let choices: Vec<f32> = (0..num_asked)
            .flat_map(|digit| {
                if digit < num_right {
                    [1.0, 0.0]
                } else {
                    [0.0, 1.0]
                }
            })
            .collect();
        let asked = choices.len() / 2;
        let device = B::Device::default();
        let wanted = Tensor::<B, 1, Int>::zeros([asked], &device);
        let choices = Tensor::from_data(TensorData::new(choices, [asked, 2]), &device);
        AccuracyInput::new(choices, wanted)
    }
}
