//! One rank's loop.

use std::time::{Duration, Instant};

use burn::{
    module::Module,
    optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer},
    tensor::FloatDType,
};
use burn_cp::{
    comm::{self, CommError, Groups, RankContext},
    launch::{self, DeviceError, LaunchError, Process, RankDevice, ThreadsOptions},
    layout::LayoutError,
    nn::{ParameterError, SequenceSharded},
    optim::{GradientSync, clip_by_global_norm},
    sharder::{ContextParallel, CpStep, StepError},
};

use super::{
    Corpus, FinetuneConfig, FinetuneConfigError, Freeze, checkpoints, linear_cross_entropy,
    precision::{cast_gradients, cast_parameters},
};
use crate::{
    data::{IGNORED_LABEL, Pack},
    hf::{DirectoryError, ModelDirectory, PromptError},
    models::qwen3_vl::Qwen3Vl,
    train::{
        CheckpointError, DeviceProgram, Outcome, ReportError, Reporter, TrainBackend, TrainState,
        hash_of, named, to_batch, warmup_cosine,
    },
};

/// Why a rank stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub(super) enum WorkerError {
    #[error(transparent)]
    Config(#[from] FinetuneConfigError),
    #[error(transparent)]
    Model(#[from] DirectoryError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
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
    #[error("step {step} has loss {loss} and gradient norm {norm}: lower the learning rate")]
    Diverged { step: u64, loss: f64, norm: f64 },
}

/// What all ranks of a process share.
pub(super) struct Job<'a> {
    pub(super) config: &'a FinetuneConfig,
    pub(super) directory: &'a ModelDirectory,
    pub(super) corpus: &'a Corpus,
    /// Ranks of the run that is reported on.
    pub(super) reporter: Option<&'a Reporter<FinetuneConfig>>,
    pub(super) resume: bool,
    /// Whether the outcome holds the gradients of the first step.
    pub(super) keep_gradients: bool,
    /// The one rank that this process is; absent: all of them, as threads.
    pub(super) process: Option<Process>,
}

impl DeviceProgram for Job<'_> {
    type Output = Result<Outcome, LaunchError>;

    fn run<B: TrainBackend<Device: RankDevice>>(mut self) -> Self::Output {
        if let Some(process) = self.process.take() {
            return process.run(|rank| Worker::<B>::new(&self, &rank)?.run());
        }
        let options = ThreadsOptions {
            deadline: Duration::from_secs(self.config.deadline_seconds),
            ..ThreadsOptions::default()
        };
        let outcomes = launch::threads_with(self.config.ranks, options, |rank| {
            Worker::<B>::new(&self, &rank)?.run()
        })?;
        Ok(outcomes.into_iter().next().unwrap_or_default())
    }
}

struct Worker<'a, B: TrainBackend> {
    job: &'a Job<'a>,
    device: B::Device,
    groups: Groups,
    dp_rank: usize,
    cp: ContextParallel,
    tokens: u64,
    frames: u64,
    busy: Duration,
}

impl<'a, B: TrainBackend<Device: RankDevice>> Worker<'a, B> {
    fn new(job: &'a Job<'a>, rank: &RankContext) -> Result<Self, WorkerError> {
        let mesh = job.config.mesh()?;
        let dp_rank = mesh
            .coordinate(rank.rank(), "dp")
            .map_err(CommError::from)?;
        let groups = comm::bind(&mesh, rank)?;
        let padding = job.corpus.processor().padding_id();
        let cp = ContextParallel::new(&groups, job.config.context_parallel(padding))?;
        Ok(Self {
            job,
            device: B::Device::of_rank(rank)?,
            groups,
            dp_rank,
            cp,
            tokens: 0,
            frames: 0,
            busy: Duration::ZERO,
        })
    }

    fn run(mut self) -> Result<Outcome, WorkerError> {
        let config = self.job.config;
        let optimizer = AdamWConfig::new()
            .with_beta_2(0.95)
            .with_epsilon(1e-8)
            .with_weight_decay(config.weight_decay as f32)
            .init::<B, SequenceSharded<Qwen3Vl<B>>>();
        let resumed = self
            .job
            .reporter
            .filter(|_| self.job.resume)
            .map(Reporter::checkpoints);
        let (model, mut optimizer, mut state) = match &resumed {
            Some(saved) => {
                let (model, state) = checkpoints::load_model::<B>(saved, config, &self.device)?;
                let optimizer =
                    checkpoints::load_optimizer(saved, config, optimizer, &self.device)?;
                (model, optimizer, state)
            }
            None => (
                self.job.directory.load(&self.device, FloatDType::F32)?,
                optimizer,
                TrainState::new(config),
            ),
        };
        let mut model = SequenceSharded::new::<B>(frozen(model, config.freeze), &self.cp)?;
        let mut outcome = Outcome::default();
        let rows = self.rows();
        while state.step < config.steps {
            let (loss, grads) = self.gradients(&model, &rows[state.step as usize])?;
            if self.job.keep_gradients && state.step == 0 {
                outcome.first_gradients = Some(named(&grads, &model));
            }
            let world = self.groups.world()?;
            let (grads, norm) =
                clip_by_global_norm::<B, _>(grads, &model, config.clip_norm, &world)?;
            if !(loss.is_finite() && norm.is_finite()) {
                return Err(WorkerError::Diverged {
                    step: state.step,
                    loss,
                    norm,
                });
            }
            let rate = warmup_cosine(
                config.learning_rate,
                config.warmup_steps,
                config.steps,
                state.step,
            );
            model = optimizer.step(rate, model, grads);
            state.advance(loss);
            if self.after_step(&model, &optimizer, &mut state)? {
                break;
            }
        }
        outcome.steps_done = state.step;
        outcome.losses = state.losses;
        outcome.parameters_sha256 = hash_of(&model);
        outcome.tokens_per_s = self.tokens_per_s();
        outcome.vision_frames_per_rank = self
            .groups
            .world()?
            .host_all_gather("frames", self.frames)?;
        Ok(outcome)
    }

    /// For each step the rows that this rank's group trains on.
    fn rows(&self) -> Vec<Vec<Vec<usize>>> {
        let config = self.job.config;
        let mut rows = Vec::new();
        let mut epochs = (0..).flat_map(|epoch| self.job.corpus.rows(config.seed, epoch));
        for _ in 0..config.steps {
            let step: Vec<Vec<usize>> = epochs.by_ref().take(config.rows_per_step).collect();
            rows.push(
                step.into_iter()
                    .enumerate()
                    .filter(|(at, _)| at % config.dp == self.dp_rank)
                    .map(|(_, row)| row)
                    .collect(),
            );
        }
        rows
    }

    /// Loss and synchronised gradients of one step, accumulated over its rows.
    fn gradients(
        &mut self,
        model: &SequenceSharded<Qwen3Vl<B>>,
        rows: &[Vec<usize>],
    ) -> Result<(f64, GradientsParams), WorkerError> {
        let config = self.job.config;
        let packs: Vec<Pack> = rows
            .iter()
            .map(|row| self.job.corpus.pack(row))
            .collect::<Result<_, _>>()?;
        let start = Instant::now();
        // Every rank of a group has all labels of its packs; one rank of each speaks for it.
        let own: u64 = packs
            .iter()
            .flat_map(|pack| &pack.labels)
            .filter(|&&label| label != IGNORED_LABEL)
            .count() as u64;
        let spoken = if self.cp.group().rank() == 0 { own } else { 0 };
        let num_labels: u64 = self
            .cp
            .loss_group()
            .host_all_gather("number of labels", spoken)?
            .iter()
            .sum();
        let working = if config.is_bf16() {
            cast_parameters::<B, _>(model.inner().clone(), FloatDType::BF16)
        } else {
            model.inner().clone()
        };
        let mut accumulated = GradientsAccumulator::new();
        let mut sum = 0.0;
        for pack in &packs {
            let step = self.step_of(pack)?;
            let hidden = working.model.forward(&step)?;
            let trains_matrix = config.freeze != Freeze::Text;
            let loss = linear_cross_entropy(
                &step,
                hidden,
                working.head(),
                (num_labels, config.chunk),
                trains_matrix,
            );
            // As `TokenLoss::backward`: no rank runs ahead of a backward pass.
            self.cp.loss_group().barrier()?;
            let grads = GradientsParams::from_grads(loss.local.backward(), &working);
            accumulated.accumulate(&working, grads);
            sum += loss.sum.into_data().iter::<f64>().sum::<f64>();
            let shares = step.frame_shares(&working.model.visual)?;
            self.frames += shares.num_frames_per_rank()[self.cp.group().rank()] as u64;
            self.tokens += pack.num_real_tokens() as u64;
        }
        let grads = GradientSync::default().sync::<B, _>(
            accumulated.grads(),
            &working,
            self.cp.loss_group(),
        );
        let grads = if config.is_bf16() {
            cast_gradients::<B, _>(grads, &working)
        } else {
            grads
        };
        let sums = self.cp.loss_group().host_all_gather("loss", sum)?;
        self.busy += start.elapsed();
        Ok((sums.iter().sum::<f64>() / num_labels.max(1) as f64, grads))
    }

    fn step_of(&self, pack: &Pack) -> Result<CpStep<B>, WorkerError> {
        let directory = self.job.directory;
        let vocab = directory.config().text_config.vocab_size;
        let shape = directory.processor().shape();
        let batch = to_batch::<B>(
            std::slice::from_ref(pack),
            &shape,
            vocab,
            self.job.config.alignment(),
            &self.device,
        )?;
        Ok(self.cp.shard(batch, &self.device)?)
    }

    /// Reports, saves, and asks whether to stop before the last step.
    fn after_step<O: Optimizer<SequenceSharded<Qwen3Vl<B>>, B>>(
        &self,
        model: &SequenceSharded<Qwen3Vl<B>>,
        optimizer: &O,
        state: &mut TrainState<FinetuneConfig>,
    ) -> Result<bool, WorkerError> {
        let Some(reporter) = self.job.reporter else {
            return Ok(false);
        };
        let config = self.job.config;
        let last = state.step == config.steps;
        let world = self.groups.world()?;
        let interrupted = world.host_all_gather("interrupt", reporter.is_interrupted())?;
        let stop = interrupted.contains(&true) && !last;
        let save = last || stop || state.step.is_multiple_of(config.checkpoint_every);
        if self.groups.global_rank() == 0 {
            reporter.step(state, None, self.tokens_per_s())?;
            if save {
                checkpoints::save(
                    &reporter.checkpoints(),
                    self.job.directory,
                    model,
                    optimizer,
                    state,
                )?;
            }
        }
        Ok(stop)
    }

    #[allow(clippy::cast_precision_loss)]
    fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 * self.job.config.dp as f64 / self.busy.as_secs_f64().max(1e-9)
    }
}

/// The model without gradients for what is not trained.
fn frozen<B: TrainBackend>(mut model: Qwen3Vl<B>, freeze: Freeze) -> Qwen3Vl<B> {
    match freeze {
        Freeze::None => model,
        Freeze::Vision => model.freeze_vision(),
        Freeze::Text => {
            model.model.language_model = model.model.language_model.no_grad();
            model.lm_head = model.lm_head.map(Module::no_grad);
            model
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser;

    use super::{super::FinetuneArgs, *};
    use crate::{finetune::Dtype, train::on_device};

    /// Losses of three steps on two ranks. The program refuses bf16 on a CPU, where it is slow; what it computes can be seen there.
    fn losses(dtype: Dtype) -> Vec<f64> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (model, data) = (
            root.join("../tests/fixtures/qwen3_vl/untied"),
            root.join("data/photographs.jsonl"),
        );
        let args = FinetuneArgs::parse_from([
            "finetune-qwen3-vl".as_ref(),
            "--model".as_ref(),
            model.as_os_str(),
            "--data".as_ref(),
            data.as_os_str(),
        ]);
        let config = FinetuneConfig {
            dtype,
            steps: 3,
            tokens: 320,
            learning_rate: 1e-2,
            warmup_steps: 1,
            ..args.config(2)
        };
        let directory = ModelDirectory::open(&model).unwrap();
        let corpus = Corpus::read(
            &data,
            &directory,
            config.tokens,
            config.long_documents,
            false,
        )
        .unwrap();
        let job = Job {
            config: &config,
            directory: &directory,
            corpus: &corpus,
            reporter: None,
            resume: false,
            keep_gradients: false,
            process: None,
        };
        let outcome = on_device(config.device, config.checkpointing, job).unwrap();
        outcome.losses
    }

    #[test]
    fn in_bf16_a_run_learns_as_in_f32() {
        let (exact, rounded) = (losses(Dtype::F32), losses(Dtype::Bf16));
        assert_ne!(exact, rounded);
        for (exact, rounded) in exact.iter().zip(&rounded) {
            // bf16 has 8 bits; the mean over all labels is far better than one of them.
            assert!((exact - rounded).abs() < 0.01 * exact, "{exact} {rounded}");
        }
        assert!(exact[2] < 0.95 * exact[0], "{exact:?}");
    }
}
