//! A small model that counts its steps rank by rank, and does as it is told: panic, fail, or ask for an interrupt.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
};

use burn::{
    data::dataloader::{DataLoader, DataLoaderIterator, Progress},
    lr_scheduler::constant::ConstantLr,
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{Sgd, SgdConfig, adaptor::OptimizerAdaptor},
    tensor::{Tensor, TensorData, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::SequenceBatch,
    launch,
    layout::Documents,
    loss::TokenLoss,
    nn::{ContextParallelAttention, ContextParallelAttentionConfig},
    sharder::IGNORED_LABEL,
    train::{ForRank, GlobalLoss},
};
use burn_cp_examples::train::TrainBackend;
use burn_train::{
    InferenceStep, Interrupter, Learner, LearningComponentsMarker, SupervisedTraining, TrainOutput,
    TrainStep, metric::LossMetric,
};

/// What a step is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Train,
    Validate,
}

/// What a rank does in one of its steps.
#[derive(Clone)]
pub(crate) enum Act {
    Panic,
    /// When the other ranks are about to run backward.
    PanicAfterForward,
    /// Has logits for other tokens than its own.
    Fail,
    Interrupt(Interrupter),
}

/// The one step of one rank that is special, counted from 1, and how many steps each rank has begun.
#[derive(Default)]
pub(crate) struct Script {
    special: Option<(Phase, usize, usize, Act)>,
    begun: Mutex<BTreeMap<(Phase, usize), usize>>,
}

impl Script {
    pub(crate) fn with(phase: Phase, rank: usize, step: usize, act: Act) -> Arc<Self> {
        Arc::new(Self {
            special: Some((phase, rank, step, act)),
            ..Self::default()
        })
    }

    fn begin(&self, phase: Phase, rank: usize) -> Option<&Act> {
        let mut begun = self.begun.lock().unwrap();
        let step = begun.entry((phase, rank)).or_default();
        *step += 1;
        let (_, _, _, act) = self
            .special
            .as_ref()
            .filter(|special| (special.0, special.1, special.2) == (phase, rank, *step))?;
        Some(act)
    }

    /// Steps of training and of validation that each rank has begun.
    pub(crate) fn begun(&self, num_ranks: usize) -> [Vec<usize>; 2] {
        let begun = self.begun.lock().unwrap();
        [Phase::Train, Phase::Validate].map(|phase| {
            (0..num_ranks)
                .map(|rank| begun.get(&(phase, rank)).copied().unwrap_or_default())
                .collect()
        })
    }
}

/// An item: which numbers, and the script.
#[derive(Clone)]
pub(crate) struct Work {
    seed: usize,
    script: Arc<Script>,
}

const WIDTH: usize = 8;
const TOKENS: usize = 12;
const CLASSES: usize = 5;

impl Work {
    /// Two rows of documents of uneven lengths with padding behind, and a few labels.
    fn batch<B: Backend>(&self, device: &B::Device) -> SequenceBatch<B> {
        let values: Vec<f32> = (0..2 * TOKENS * WIDTH)
            .map(|i| ((self.seed * 97 + i) as f32 * 0.7).sin())
            .collect();
        let labels: Vec<i64> = (0..2 * TOKENS)
            .map(|i| {
                if i % 3 == 0 {
                    (i % CLASSES) as i64
                } else {
                    IGNORED_LABEL
                }
            })
            .collect();
        let rows = [vec![5, 1, 4], vec![7]];
        let data = TensorData::new(values, [2, TOKENS, WIDTH]);
        SequenceBatch::from_embeddings(Tensor::from_data(data, device))
            .with_labels(TensorData::new(labels, [2, TOKENS]))
            .with_documents(Documents::from_lengths(&rows, TOKENS).unwrap())
    }
}

#[derive(Module, Debug)]
pub(crate) struct Small<B: Backend> {
    attention: ContextParallelAttention<B>,
    output: Linear<B>,
}

impl<B: ContextParallelBackend> Small<B> {
    pub(crate) fn new() -> Self {
        let device = B::Device::default();
        let attention = ContextParallelAttentionConfig::new(WIDTH, 2, 1, WIDTH);
        Self {
            attention: attention.init(&device).unwrap(),
            output: LinearConfig::new(WIDTH, CLASSES).init(&device),
        }
    }

    fn loss(&self, item: &ForRank<Work>, phase: Phase) -> TokenLoss<B> {
        let cp = item.context();
        let group = cp.loss_group();
        let work = item.item();
        let act = work.script.begin(phase, group.global_ranks()[group.rank()]);
        match act {
            Some(Act::Panic) => panic!("as the script says"),
            Some(Act::Interrupt(interrupter)) => interrupter.stop(Some("the script says so")),
            Some(Act::Fail | Act::PanicAfterForward) | None => {}
        }
        let device = self.devices().remove(0);
        let step = cp.shard(work.batch::<B>(&device), &device);
        let step = step.unwrap_or_else(|error| launch::raise(error));
        let x = step
            .embeddings()
            .unwrap_or_else(|error| launch::raise(error));
        let mut logits = self.output.forward(self.attention.forward(x, &step));
        if matches!(act, Some(Act::Fail)) {
            logits = logits.narrow(1, 0, 1);
        }
        let loss = step.cross_entropy(logits);
        let loss = loss.unwrap_or_else(|error| launch::raise(error));
        if matches!(act, Some(Act::PanicAfterForward)) {
            panic!("as the script says");
        }
        loss
    }
}

impl<B: TrainBackend> TrainStep for Small<B> {
    type Input = ForRank<Work>;
    type Output = GlobalLoss;

    fn step(&self, item: Self::Input) -> TrainOutput<GlobalLoss> {
        let loss = self.loss(&item, Phase::Train);
        TrainOutput::new(self, loss.backward(), GlobalLoss::from(&loss))
    }
}

impl<B: ContextParallelBackend> InferenceStep for Small<B> {
    type Input = ForRank<Work>;
    type Output = GlobalLoss;

    fn step(&self, item: Self::Input) -> GlobalLoss {
        GlobalLoss::from(&self.loss(&item, Phase::Validate))
    }
}

/// A number of items, the same in every epoch.
#[derive(Clone)]
struct Works {
    first: usize,
    num: usize,
    script: Arc<Script>,
}

struct Pass(Works, usize);

impl Iterator for Pass {
    type Item = ForRank<Work>;

    fn next(&mut self) -> Option<Self::Item> {
        (self.1 < self.0.num).then(|| {
            self.1 += 1;
            ForRank::new(Work {
                seed: self.0.first + self.1,
                script: self.0.script.clone(),
            })
        })
    }
}

impl DataLoaderIterator<ForRank<Work>> for Pass {
    fn progress(&self) -> Progress {
        Progress::new(self.1, self.0.num)
    }
}

impl<B: Backend> DataLoader<B, ForRank<Work>> for Works {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<ForRank<Work>> + 'a> {
        Box::new(Pass(self.clone(), 0))
    }

    fn num_items(&self) -> usize {
        self.num
    }

    fn to_device(&self, _: &B::Device) -> Arc<dyn DataLoader<B, ForRank<Work>>> {
        Arc::new(self.clone())
    }

    fn slice(&self, _: usize, _: usize) -> Arc<dyn DataLoader<B, ForRank<Work>>> {
        unimplemented!("no strategy here slices")
    }
}

type Optimizer<B> = OptimizerAdaptor<Sgd<<B as TrainBackend>::Inner>, Small<B>, B>;
type Components<B> = LearningComponentsMarker<B, ConstantLr, Small<B>, Optimizer<B>>;

pub(crate) const VALIDATED: usize = 2;

/// Epochs of `num_items` training items and [`VALIDATED`] held-out ones.
pub(crate) fn training<B: TrainBackend>(
    out: &Path,
    num_items: usize,
    script: &Arc<Script>,
) -> SupervisedTraining<Components<B>> {
    let works = |first, num| Works {
        first,
        num,
        script: script.clone(),
    };
    let train: Arc<dyn DataLoader<B, ForRank<Work>>> = Arc::new(works(0, num_items));
    let valid: Arc<dyn DataLoader<B::Inner, ForRank<Work>>> = Arc::new(works(1000, VALIDATED));
    SupervisedTraining::new(out, train, valid)
        .metrics((LossMetric::<B::Inner>::new(),))
        .with_application_logger(None)
}

pub(crate) fn learner<B: TrainBackend>(model: Small<B>, rate: f64) -> Learner<Components<B>> {
    Learner::new(model, SgdConfig::new().init(), ConstantLr::from(rate))
}
