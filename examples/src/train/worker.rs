//! One rank's training loop.

use std::time::{Duration, Instant};

use burn::{
    module::{AutodiffModule, Module, ModuleVisitor, Param},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::Tensor,
};
use burn_cp::{
    comm::{self, CommError, Groups, RankContext},
    launch::{self, DeviceError, LaunchError, Process, RankDevice, ThreadsOptions},
    layout::LayoutError,
    nn::{ParameterError, SequenceModel, SequenceSharded},
    optim::{GradientSync, clip_by_global_norm},
    plan::{ExchangeStrategy, MaskKind},
    sharder::{ContextParallel, CpStep, StepError},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    Architecture, CheckpointError, Outcome, ReportError, Reporter, TrainBackend, TrainConfig,
    TrainConfigError, TrainModel, TrainState, evaluate, outcome::NamedGradients,
    schedule::warmup_cosine,
};
use crate::{
    data::{Pack, PackSource, Split},
    models::qwen3_vl::ConfigError,
};

type Sharded<A, B> = SequenceSharded<<A as Architecture>::Model<B>>;

/// Why a rank stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum WorkerError {
    #[error(transparent)]
    Config(#[from] TrainConfigError),
    #[error(transparent)]
    Model(#[from] ConfigError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Parameters(#[from] ParameterError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Report(#[from] ReportError),
    /// Loss or gradients are no numbers.
    #[error("step {step} has loss {loss} and gradient norm {norm}: lower the learning rate")]
    Diverged {
        /// The step.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Norm of its gradients.
        norm: f64,
    },
}

/// Trains on one world of ranks that are threads, and returns what all of them agree on.
///
/// With a `reporter`, rank 0 reports and checkpoints through it; with `resume`, all ranks continue from its checkpoint. With
/// `keep_gradients`, the outcome holds the synchronised gradients of step 0.
///
/// # Errors
/// The first failure of the world.
pub fn train<B: TrainBackend, A: Architecture>(
    config: &TrainConfig<A>,
    reporter: Option<&Reporter<TrainConfig<A>>>,
    resume: bool,
    keep_gradients: bool,
) -> Result<Outcome, LaunchError>
where
    B::Device: RankDevice,
{
    let options = ThreadsOptions {
        deadline: Duration::from_secs(config.deadline_seconds),
        ..ThreadsOptions::default()
    };
    let outcomes = launch::threads_with(config.ranks, options, |rank| {
        Worker::<B, A>::new(config, &rank, reporter)?.run(resume, keep_gradients)
    })?;
    Ok(outcomes.into_iter().next().unwrap_or_default())
}

/// [`train`] where this process is one rank of the world, and the others train in theirs.
///
/// Every process calls it with the same `config`, whose number of ranks is that of processes, and either all or none with a
/// `reporter`; those of ranks other than 0 only read ([`Reporter::reader`]).
///
/// # Errors
/// The first failure of the world.
pub fn train_as_process<B: TrainBackend, A: Architecture>(
    process: Process,
    config: &TrainConfig<A>,
    reporter: Option<&Reporter<TrainConfig<A>>>,
    resume: bool,
    keep_gradients: bool,
) -> Result<Outcome, LaunchError>
where
    B::Device: RankDevice,
{
    process.run(|rank| Worker::<B, A>::new(config, &rank, reporter)?.run(resume, keep_gradients))
}

struct Worker<'a, B: TrainBackend, A: Architecture> {
    config: &'a TrainConfig<A>,
    /// Rank 0 only.
    reporter: Option<&'a Reporter<TrainConfig<A>>>,
    /// Every rank: checkpoints are read, and interrupts heard, by all.
    shared: Option<&'a Reporter<TrainConfig<A>>>,
    device: B::Device,
    groups: Groups,
    /// Place along the data-parallel axis.
    dp_rank: usize,
    cp: ContextParallel,
    packs: PackSource,
    heldout: PackSource,
    counts: Counts,
}

/// What this rank has done so far.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Counts {
    frames: u64,
    kv_tokens: u64,
    real_tokens: u64,
    busy: Duration,
}

impl<'a, B: TrainBackend, A: Architecture> Worker<'a, B, A>
where
    B::Device: RankDevice,
{
    fn new(
        config: &'a TrainConfig<A>,
        rank: &RankContext,
        reporter: Option<&'a Reporter<TrainConfig<A>>>,
    ) -> Result<Self, WorkerError> {
        let mesh = config.mesh()?;
        let dp_rank = mesh
            .coordinate(rank.rank(), "dp")
            .map_err(CommError::from)?;
        let groups = comm::bind(&mesh, rank)?;
        let cp = ContextParallel::new(&groups, config.context_parallel())?;
        Ok(Self {
            config,
            reporter: reporter.filter(|_| rank.rank() == 0),
            shared: reporter,
            device: B::Device::of_rank(rank)?,
            groups,
            dp_rank,
            cp,
            packs: config.packs(Split::Train)?,
            heldout: config.packs(Split::HeldOut)?,
            counts: Counts::default(),
        })
    }

    fn run(mut self, resume: bool, keep_gradients: bool) -> Result<Outcome, WorkerError> {
        let mut model = self
            .config
            .model()
            .init::<B>(&self.device, self.config.seed)?;
        if self.config.freeze_vision {
            model = model.freeze_vision();
        }
        let mut optimizer = AdamWConfig::new()
            .with_beta_2(self.config.beta_2 as f32)
            .with_weight_decay(self.config.weight_decay as f32)
            .init::<B, Sharded<A, B>>();
        let mut state = TrainState::new(self.config);
        let mut model = SequenceSharded::new::<B>(model, &self.cp)?;
        if let (true, Some(reporter)) = (resume, self.shared) {
            let loaded = reporter.checkpoints().load::<B, _, _>(
                model,
                optimizer,
                self.config,
                &self.device,
            )?;
            (model, optimizer, state) = loaded;
            let rank = self.groups.global_rank();
            self.counts.frames = state.vision_frames_per_rank[rank];
            self.counts.kv_tokens = state.kv_tokens_received[rank];
        }
        let mut outcome = Outcome {
            losses: state.losses.clone(),
            ..Outcome::default()
        };
        while state.step < self.config.steps {
            let (loss, grads) = self.gradients(&model, state.step)?;
            if keep_gradients && state.step == 0 {
                outcome.first_gradients = Some(named(&grads, &model));
            }
            let world = self.groups.world()?;
            let (grads, norm) =
                clip_by_global_norm::<B, _>(grads, &model, self.config.clip_norm, &world)?;
            if !(loss.is_finite() && norm.is_finite()) {
                let step = state.step;
                return Err(WorkerError::Diverged { step, loss, norm });
            }
            let config = self.config;
            let (peak, warmup) = (config.learning_rate, config.warmup_steps);
            let rate = warmup_cosine(peak, warmup, config.steps, state.step);
            model = optimizer.step(rate, model, grads);
            state.advance(loss);
            let stop = self.after_step(&model, &optimizer, &mut state)?;
            if stop {
                break;
            }
        }
        outcome.heldout = evaluate(
            &model.valid(),
            &self.cp,
            &self.heldout,
            self.config,
            &self.device,
        )?;
        outcome.steps_done = state.step;
        outcome.losses = state.losses;
        outcome.parameters_sha256 = hash_of(&model);
        self.finish(outcome)
    }

    /// Loss and synchronised gradients of one optimizer step.
    fn gradients(
        &mut self,
        model: &Sharded<A, B>,
        step: u64,
    ) -> Result<(f64, GradientsParams), WorkerError> {
        let packs = self.packs_of(step);
        let start = Instant::now();
        let config = self.config;
        let batch = config.batch::<B>(&packs, self.packs.shape(), &self.device)?;
        let step = self.cp.shard(batch, &self.device)?;
        SequenceModel::<B>::capabilities(model)
            .check_step(&step)
            .map_err(StepError::from)?;
        let loss = model.inner().loss(&step)?;
        let grads = GradientsParams::from_grads(loss.backward(), model);
        let grads = GradientSync::default().sync::<B, _>(grads, model, self.cp.loss_group());
        let value = loss.global_value();
        self.counts.busy += start.elapsed();
        self.count(&packs, &step, model)?;
        Ok((value, grads))
    }

    /// The packs of a step that this rank's group trains on, one row each.
    fn packs_of(&self, step: u64) -> Vec<Pack> {
        let (dp, per_step) = (self.config.dp as u64, self.config.packs_per_step as u64);
        let dp_rank = self.dp_rank as u64;
        (0..per_step)
            .filter(|j| j % dp == dp_rank)
            .map(|j| self.packs.pack(step * per_step + j))
            .collect()
    }

    fn count(
        &mut self,
        packs: &[Pack],
        step: &CpStep<B>,
        model: &Sharded<A, B>,
    ) -> Result<(), WorkerError> {
        let rank = self.cp.group().rank();
        let shares = step.frame_shares(model.inner().tower())?;
        self.counts.frames += shares.num_frames_per_rank()[rank] as u64;
        let plan = step.plan(MaskKind::CAUSAL)?;
        if plan.moves_tokens() {
            self.counts.kv_tokens += match self.cp.config().exchange {
                ExchangeStrategy::AllGather => {
                    let (all, own) = (plan.layout().seq_len(), plan.layout().local_len(rank));
                    (step.batch_size() * (all - own)) as u64
                }
                _ => plan.rank(rank).kv_tokens_received as u64,
            };
        }
        // Packs are shared by the ranks of a group; its first rank counts them.
        if rank == 0 {
            self.counts.real_tokens +=
                packs.iter().map(Pack::num_real_tokens).sum::<usize>() as u64;
        }
        Ok(())
    }

    /// Reports, checkpoints, and asks whether to stop before the last step.
    fn after_step<O>(
        &mut self,
        model: &Sharded<A, B>,
        optimizer: &O,
        state: &mut TrainState<TrainConfig<A>>,
    ) -> Result<bool, WorkerError>
    where
        O: Optimizer<Sharded<A, B>, B>,
    {
        if self.shared.is_none() {
            return Ok(false);
        }
        let last = state.step == self.config.steps;
        // Every rank hears of an interrupt at the same step.
        let interrupted = self.shared.is_some_and(Reporter::is_interrupted);
        let world = self.groups.world()?;
        let stop = world
            .host_all_gather("interrupt", interrupted)?
            .contains(&true)
            && !last;
        let score = if state.step.is_multiple_of(self.config.eval_every) && !last {
            Some(evaluate(
                &model.valid(),
                &self.cp,
                &self.heldout,
                self.config,
                &self.device,
            )?)
        } else {
            None
        };
        let save = last || stop || state.step.is_multiple_of(self.config.checkpoint_every);
        if save {
            self.gather_counts(state)?;
        }
        if let Some(reporter) = self.reporter {
            reporter.step(state, score, self.tokens_per_s())?;
            if save {
                reporter
                    .checkpoints()
                    .save::<B, _, _>(model, optimizer, state)?;
            }
        }
        Ok(stop)
    }

    /// Writes what every rank has counted into the state.
    fn gather_counts(&self, state: &mut TrainState<TrainConfig<A>>) -> Result<(), WorkerError> {
        let counts = self
            .groups
            .world()?
            .host_all_gather("counts", self.counts)?;
        state.vision_frames_per_rank = counts.iter().map(|counts| counts.frames).collect();
        state.kv_tokens_received = counts.iter().map(|counts| counts.kv_tokens).collect();
        Ok(())
    }

    #[allow(clippy::cast_precision_loss)]
    fn tokens_per_s(&self) -> f64 {
        let tokens = self.counts.real_tokens as f64 * self.config.dp as f64;
        tokens / self.counts.busy.as_secs_f64().max(1e-9)
    }

    /// Adds what only all ranks together know.
    fn finish(self, mut outcome: Outcome) -> Result<Outcome, WorkerError> {
        let world = self.groups.world()?;
        let counts = world.host_all_gather("counts", self.counts)?;
        outcome.vision_frames_per_rank = counts.iter().map(|counts| counts.frames).collect();
        outcome.kv_tokens_received = counts.iter().map(|counts| counts.kv_tokens).collect();
        let tokens: u64 = counts.iter().map(|counts| counts.real_tokens).sum();
        let slowest = counts
            .iter()
            .map(|counts| counts.busy)
            .max()
            .unwrap_or_default();
        #[allow(clippy::cast_precision_loss)]
        let per_s = tokens as f64 / slowest.as_secs_f64().max(1e-9);
        outcome.tokens_per_s = per_s;
        Ok(outcome)
    }
}

/// Gradients by parameter path, on the host.
pub(crate) fn named<B: TrainBackend, M: AutodiffModule<B>>(
    grads: &GradientsParams,
    module: &M,
) -> NamedGradients {
    let mut visitor = Named {
        grads,
        path: Vec::new(),
        found: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}

struct Named<'a> {
    grads: &'a GradientsParams,
    path: Vec<String>,
    found: NamedGradients,
}

impl<B: TrainBackend> ModuleVisitor<B> for Named<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) {
            self.found.push((
                self.path.join("."),
                grad.into_data().iter::<f64>().collect(),
            ));
        }
    }
}

/// SHA-256 of all parameters, in module order.
pub(crate) fn hash_of<B: TrainBackend, M: Module<B>>(module: &M) -> String {
    let mut hash = ParameterHash(Sha256::new());
    module.visit(&mut hash);
    hash.0
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

struct ParameterHash(Sha256);

impl<B: TrainBackend> ModuleVisitor<B> for ParameterHash {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.update(param.val().into_data().as_bytes());
    }
}
