//! What a rank does in a training: rank 0 reads the data and tells the others, and decides when to stop.

use std::{
    iter,
    ops::RangeInclusive,
    sync::mpsc::{Receiver, Sender},
};

use burn::{
    data::dataloader::Progress,
    module::AutodiffModule,
    optim::GradientsAccumulator,
    tensor::{Device, backend::AutodiffBackend},
};
use burn_train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerEvent, LearningComponentsTypes,
    TrainLoader, TrainStep, TrainingComponents, TrainingItem, TrainingModel, ValidLoader,
};

use super::{ForRank, TrainError};
use crate::{
    attention::ContextParallelBackend,
    collectives::CollectiveBackend,
    comm::{self, CommError, Groups, RankContext},
    launch::RankDevice,
    mesh::DeviceMesh,
    nn::check_parameters,
    optim::GradientSync,
    sharder::{ContextParallel, ContextParallelConfig},
};

/// What rank 0 tells another rank to do next.
pub(super) enum Order<T, V> {
    BeginEpoch,
    Train(ForRank<T>),
    Validate(ForRank<V>),
    Stop,
}

/// One rank's model and optimizer, and its place in the mesh.
pub(super) struct Rank<LC: LearningComponentsTypes> {
    learner: Learner<LC>,
    groups: Groups,
    cp: ContextParallel,
    gradients: GradientsAccumulator<TrainingModel<LC>>,
    /// Backward passes of an optimizer step.
    num_accumulated: usize,
    /// Passes since the last optimizer step.
    num_pending: usize,
}

impl<LC, T, V> Rank<LC>
where
    LC: LearningComponentsTypes,
    LC::TrainingModel: TrainStep<Input = ForRank<T>>,
    LC::InferenceModel: InferenceStep<Input = ForRank<V>>,
    LC::Backend: ContextParallelBackend,
    <LC::Backend as AutodiffBackend>::InnerBackend: CollectiveBackend,
    Device<LC::Backend>: RankDevice,
{
    /// Every rank must call it.
    pub(super) fn new(
        (mesh, config): (&DeviceMesh, &ContextParallelConfig),
        context: &RankContext,
        mut learner: Learner<LC>,
        num_accumulated: usize,
    ) -> Result<Self, TrainError> {
        let groups = comm::bind(mesh, context)?;
        let cp = ContextParallel::new(&groups, config.clone())?;
        let device = <Device<LC::Backend> as RankDevice>::of_rank(context)?;
        learner.fork(&device);
        check_parameters::<LC::Backend, _>(&learner.model(), cp.loss_group())?;
        Ok(Self {
            learner,
            groups,
            cp,
            gradients: GradientsAccumulator::new(),
            num_accumulated,
            num_pending: 0,
        })
    }

    pub(super) fn into_model(self) -> TrainingModel<LC> {
        self.learner.model()
    }

    /// Gradients that an epoch has left over are dropped, as burn-train does.
    fn begin_epoch(&mut self) {
        self.gradients = GradientsAccumulator::new();
        self.num_pending = 0;
    }

    /// One backward pass, and where it is due an optimizer step. Every rank must call it.
    fn train(&mut self, item: ForRank<T>) -> <LC::TrainingModel as TrainStep>::Output {
        self.learner.lr_step();
        let output = self.learner.train_step(item.given_to(&self.cp));
        let model = self.learner.model();
        self.gradients.accumulate(&model, output.grads);
        self.num_pending += 1;
        if self.num_pending >= self.num_accumulated {
            self.num_pending = 0;
            let grads = self.gradients.grads();
            let group = self.cp.loss_group();
            let grads = GradientSync::default().sync::<LC::Backend, _>(grads, &model, group);
            drop(model);
            self.learner.optimizer_step(grads);
        }
        output.item
    }

    /// Every rank must call it.
    fn validate(
        &self,
        model: &LC::InferenceModel,
        item: ForRank<V>,
    ) -> <LC::InferenceModel as InferenceStep>::Output {
        model.step(item.given_to(&self.cp))
    }

    /// Does what rank 0 says until it says that there is no more.
    pub(super) fn follow(&mut self, orders: &Receiver<Order<T, V>>) -> Result<(), TrainError> {
        let mut frozen = None;
        loop {
            match orders.recv() {
                Ok(Order::BeginEpoch) => {
                    frozen = None;
                    self.begin_epoch();
                }
                Ok(Order::Train(item)) => {
                    self.train(item);
                }
                Ok(Order::Validate(item)) => {
                    let model = frozen.get_or_insert_with(|| self.learner.model().valid());
                    self.validate(model, item);
                }
                Ok(Order::Stop) => return Ok(()),
                Err(_) => {
                    // Ends with why rank 0 ended, as soon as that is on record.
                    self.groups.world()?.barrier()?;
                    return Err(TrainError::LeadLeft);
                }
            }
        }
    }
}

/// What rank 0 has besides its rank. It outlives the rank, so that a failure is known to all before anything is written or
/// closed.
pub(super) struct Lead<LC: LearningComponentsTypes> {
    pub(super) components: TrainingComponents<LC>,
    pub(super) loaders: (TrainLoader<LC>, ValidLoader<LC>),
    pub(super) epochs: RangeInclusive<usize>,
}

/// Rank 0's line to the ranks from 1 on.
pub(super) struct Followers<T, V>(pub(super) Vec<Sender<Order<T, V>>>);

impl<T, V> Followers<T, V> {
    fn tell(&self, order: impl Fn(usize) -> Order<T, V>) {
        for (i, sender) in self.0.iter().enumerate() {
            // A rank that has ended is found out by the next collective, which says why.
            let _ = sender.send(order(i + 1));
        }
    }
}

impl<LC, T, V> Lead<LC>
where
    LC: LearningComponentsTypes,
    LC::TrainingModel: TrainStep<Input = ForRank<T>>,
    LC::InferenceModel: InferenceStep<Input = ForRank<V>>,
    LC::Backend: ContextParallelBackend,
    <LC::Backend as AutodiffBackend>::InnerBackend: CollectiveBackend,
    Device<LC::Backend>: RankDevice,
    T: Clone,
    V: Clone,
{
    pub(super) fn run(
        &mut self,
        rank: &mut Rank<LC>,
        followers: &Followers<T, V>,
    ) -> Result<(), TrainError> {
        let num_epochs = *self.epochs.end();
        let shares = Shares::new(rank)?;
        self.count_resumed_epochs();
        for epoch in self.epochs.clone() {
            let progress = Progress::new(epoch, num_epochs);
            self.train_epoch(rank, followers, &shares, &progress)?;
            if self.interrupted(epoch) {
                break;
            }
            self.valid_epoch(rank, followers, &progress);
            self.settle_metrics();
            let store = &self.components.event_store;
            if let Some(checkpointer) = &mut self.components.checkpointer {
                checkpointer.checkpoint(&rank.learner, epoch, store);
            }
            if let Some(stopping) = &mut self.components.early_stopping
                && stopping.should_stop(epoch, store)
            {
                break;
            }
            // burn-train itself would make one more step.
            if self.interrupted(epoch) {
                break;
            }
        }
        followers.tell(|_| Order::Stop);
        Ok(())
    }

    /// burn-train counts epochs by their ends, so the first one of a resumed training would be logged as epoch 1, over that one's
    /// log.
    fn count_resumed_epochs(&mut self) {
        let last = self.epochs.start().saturating_sub(1);
        if last > 0 {
            let processor = &mut self.components.event_processor;
            processor.process_train(LearnerEvent::EndEpoch(last));
            processor.process_valid(LearnerEvent::EndEpoch(last));
        }
    }

    fn interrupted(&self, epoch: usize) -> bool {
        let interrupter = &self.components.interrupter;
        let stop = interrupter.should_stop();
        if stop {
            let reason = interrupter.get_message();
            tracing::info!(epoch, ?reason, "training interrupted");
        }
        stop
    }

    fn train_epoch(
        &mut self,
        rank: &mut Rank<LC>,
        followers: &Followers<T, V>,
        shares: &Shares,
        global_progress: &Progress,
    ) -> Result<(), TrainError> {
        let epoch = global_progress.items_processed;
        followers.tell(|_| Order::BeginEpoch);
        rank.begin_epoch();
        let mut items = self.loaders.0.iter();
        for iteration in 1.. {
            let mut round: Vec<_> = iter::from_fn(|| items.next())
                .take(shares.num_items)
                .collect();
            if round.len() < shares.num_items {
                if iteration == 1 {
                    return Err(TrainError::TooFewItems {
                        epoch,
                        expected: shares.num_items,
                        got: round.len(),
                    });
                }
                if !round.is_empty() {
                    tracing::info!(
                        epoch,
                        num_items = round.len(),
                        "left out: too few for a step"
                    );
                }
                break;
            }
            followers.tell(|rank| Order::Train(round[shares.of_rank[rank]].clone()));
            let item = TrainingItem {
                item: rank.train(round.swap_remove(shares.of_rank[0])),
                progress: items.progress(),
                global_progress: global_progress.clone(),
                iteration: Some(iteration),
                lr: Some(rank.learner.lr_current()),
            };
            let event = LearnerEvent::ProcessedItem(item);
            self.components.event_processor.process_train(event);
            if self.components.interrupter.should_stop() {
                break;
            }
        }
        let event = LearnerEvent::EndEpoch(epoch);
        self.components.event_processor.process_train(event);
        Ok(())
    }

    fn valid_epoch(
        &mut self,
        rank: &Rank<LC>,
        followers: &Followers<T, V>,
        global_progress: &Progress,
    ) {
        let model = rank.learner.model().valid();
        let mut items = self.loaders.1.iter();
        let mut iteration = 0;
        while let Some(item) = items.next() {
            iteration += 1;
            followers.tell(|_| Order::Validate(item.clone()));
            let item = TrainingItem {
                item: rank.validate(&model, item),
                progress: items.progress(),
                global_progress: global_progress.clone(),
                iteration: Some(iteration),
                lr: None,
            };
            let event = LearnerEvent::ProcessedItem(item);
            self.components.event_processor.process_valid(event);
            if self.components.interrupter.should_stop() {
                break;
            }
        }
        let event = LearnerEvent::EndEpoch(global_progress.items_processed);
        self.components.event_processor.process_valid(event);
    }

    /// Waits until the metrics of all events are in the store.
    ///
    /// burn-train handles events in a thread of its own, with one more waiting. When the second of two that change nothing
    /// waits, the first has been taken up, and what came before is done. Checkpoints and early stopping then depend on the whole
    /// epoch, not on how far that thread has come.
    fn settle_metrics(&mut self) {
        for _ in 0..2 {
            let event = LearnerEvent::Start;
            self.components.event_processor.process_valid(event);
        }
    }
}

/// Which of a step's items each rank trains on.
struct Shares {
    of_rank: Vec<usize>,
    num_items: usize,
}

impl Shares {
    /// Ranks take an item of their own where they differ in their place along a loss axis other than that of sequences; along
    /// axes that are neither they hold parts of one model.
    fn new<LC: LearningComponentsTypes>(rank: &Rank<LC>) -> Result<Self, TrainError> {
        let (mesh, config) = (rank.groups.mesh(), rank.cp.config());
        let data_axes = config
            .loss_axes
            .iter()
            .filter(|axis| **axis != config.cp_axis);
        let (mut of_rank, mut num_items) = (vec![0; mesh.world_size()], 1);
        for axis in data_axes {
            let size = mesh.axis_size(axis).map_err(CommError::from)?;
            for (rank, item) in of_rank.iter_mut().enumerate() {
                *item = *item * size + mesh.coordinate(rank, axis).map_err(CommError::from)?;
            }
            num_items *= size;
        }
        Ok(Self { of_rank, num_items })
    }
}
