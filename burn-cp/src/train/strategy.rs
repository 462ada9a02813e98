//! The strategy: a world of threads for one training.

use std::{
    iter,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, channel},
    },
};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{
        Device, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_train::{
    InferenceStep, Learner, LearningComponentsTypes, LearningResult, SupervisedLearningStrategy,
    SupervisedTraining, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingModel, TrainingStrategy, ValidLoader,
};

use super::{
    ForRank, TrainError,
    rank::{Followers, Lead, Order, Rank},
};
use crate::{
    attention::ContextParallelBackend,
    collectives::CollectiveBackend,
    comm::RankContext,
    launch::{self, LaunchError, RankDevice, ThreadsOptions},
    mesh::DeviceMesh,
    sharder::ContextParallelConfig,
};

/// Trains with sequences sharded over the ranks of a mesh, which are threads of this process.
///
/// Given to `SupervisedTraining::with_training_strategy` as `TrainingStrategy::Custom`, or through [`Self::launch`], which
/// returns failures as errors.
///
/// *Data.* Rank 0 reads the loaders. Each step takes one item for each group of ranks that shares sequences (one for every place
/// along the loss axes other than that of sequences), in the loader's order; those left at the end of an epoch, too few for a
/// step, are left out. In validation every group takes every item. Loaders are not moved to a device: items are host data.
///
/// *Steps.* A model's `TrainStep` is given its rank's [`ForRank`] and returns this rank's gradients; the strategy sums them over the
/// loss axes, and every rank takes the same optimizer step. Gradient accumulation sums, as burn-train's own does.
///
/// *What is reported and saved* is rank 0's: a step's output should say what all ranks agree on, such as
/// [`GlobalLoss`](super::GlobalLoss). Interrupts, early stopping and checkpoints are decided by rank 0 between two steps, and the
/// others follow, so that all ranks make the same steps.
///
/// *Failures.* A rank that panics or fails ends all others. burn-train's loop has no errors: `fit` panics, with a message that
/// names the rank and why, and [`Self::take_failure`] has the typed error.
#[derive(Debug, Clone)]
pub struct ContextParallelStrategy {
    mesh: DeviceMesh,
    config: ContextParallelConfig,
    options: ThreadsOptions,
    /// Shared by clones, since burn-train keeps one of them.
    failure: Arc<Mutex<Option<LaunchError>>>,
}

impl ContextParallelStrategy {
    /// A strategy over `mesh`, which has the axes that `config` names; whether it has is checked when training starts.
    pub fn new(mesh: DeviceMesh, config: ContextParallelConfig) -> Self {
        Self {
            mesh,
            config,
            options: ThreadsOptions::default(),
            failure: Arc::default(),
        }
    }

    /// With other options of its threads, such as how long a rank waits for another.
    #[must_use]
    pub fn with_options(self, options: ThreadsOptions) -> Self {
        Self { options, ..self }
    }

    /// Why the last training of this strategy or a clone of it failed, if it did; asked again it says nothing.
    pub fn take_failure(&self) -> Option<LaunchError> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// `training.launch(learner)` with this strategy.
    ///
    /// # Errors
    /// The first failure of the world: a rank's panic or error, a configuration that does not fit, or a [`TrainError`]. The panic
    /// that carried it through burn-train has been reported by Rust's hook; any other panic goes on.
    pub fn launch<LC, T, V>(
        &self,
        training: SupervisedTraining<LC>,
        learner: Learner<LC>,
    ) -> Result<LearningResult<LC::InferenceModel>, LaunchError>
    where
        LC: LearningComponentsTypes + Send + 'static,
        LC::TrainingModel: TrainStep<Input = ForRank<T>>,
        LC::InferenceModel: InferenceStep<Input = ForRank<V>>,
        LC::Backend: ContextParallelBackend,
        <LC::Backend as AutodiffBackend>::InnerBackend: CollectiveBackend,
        Device<LC::Backend>: RankDevice,
        T: Clone + Send + 'static,
        V: Clone + Send + 'static,
    {
        self.take_failure();
        let strategy = TrainingStrategy::Custom(Arc::new(self.clone()));
        let training = training.with_training_strategy(strategy);
        catch_unwind(AssertUnwindSafe(|| training.launch(learner)))
            .map_err(|panic| self.take_failure().unwrap_or_else(|| resume_unwind(panic)))
    }
}

/// How a rank hears of what to do.
enum Seat<T, V> {
    Lead(Followers<T, V>),
    Follower(Receiver<Order<T, V>>),
}

fn seats<T, V>(world_size: usize) -> Vec<Seat<T, V>> {
    let (senders, receivers): (Vec<_>, Vec<_>) = (1..world_size).map(|_| channel()).unzip();
    let lead = iter::once(Seat::Lead(Followers(senders)));
    lead.chain(receivers.into_iter().map(Seat::Follower))
        .collect()
}

impl<LC, T, V> SupervisedLearningStrategy<LC> for ContextParallelStrategy
where
    LC: LearningComponentsTypes + Send + 'static,
    LC::TrainingModel: TrainStep<Input = ForRank<T>>,
    LC::InferenceModel: InferenceStep<Input = ForRank<V>>,
    LC::Backend: ContextParallelBackend,
    <LC::Backend as AutodiffBackend>::InnerBackend: CollectiveBackend,
    Device<LC::Backend>: RankDevice,
    T: Clone + Send + 'static,
    V: Clone + Send + 'static,
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        draw_parameters::<LC::Backend, _>(&learner.model());
        let num_accumulated = components.grad_accumulation.unwrap_or(1).max(1);
        let lead = Mutex::new(Lead {
            epochs: starting_epoch..=components.num_epochs,
            components,
            loaders: (train, valid),
        });
        let seats: Vec<_> = seats(self.mesh.world_size())
            .into_iter()
            .map(|seat| Mutex::new(Some((seat, learner.clone()))))
            .collect();
        let run = |context: RankContext| -> Result<Option<TrainingModel<LC>>, TrainError> {
            let mut seat = seats[context.rank()]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let (seat, learner) = seat.take().expect("a rank runs once");
            let place = (&self.mesh, &self.config);
            let mut rank = Rank::new(place, &context, learner, num_accumulated)?;
            match seat {
                Seat::Lead(followers) => {
                    let mut lead = lead.lock().unwrap_or_else(PoisonError::into_inner);
                    lead.run(&mut rank, &followers)?;
                    Ok(Some(rank.into_model()))
                }
                Seat::Follower(orders) => {
                    rank.follow(&orders)?;
                    Ok(None)
                }
            }
        };
        match launch::threads_with(self.mesh.world_size(), self.options, run) {
            Ok(models) => {
                let model = models.into_iter().flatten().next();
                let lead = lead.into_inner().unwrap_or_else(PoisonError::into_inner);
                let model = model.expect("rank 0 returns its model");
                (model, lead.components.event_processor)
            }
            Err(error) => {
                let message = format!("context-parallel training failed: {error}");
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                panic!("{message}")
            }
        }
    }
}

/// Draws parameters that are not yet, since each rank's clone would draw values of its own. (`SupervisedTraining::launch` happens to
/// draw them when it looks for the model's device.)
fn draw_parameters<B: Backend, M: Module<B>>(module: &M) {
    struct Draw;
    impl<B: Backend> ModuleVisitor<B> for Draw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            param.val();
        }
    }
    module.visit(&mut Draw);
}
