//! `train-vlm` behind its flags.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use burn_cp::launch::{LaunchError, Place, Process, ProcessOptions, TensorTransport};
use clap::{Args, FromArgMatches, ValueEnum};

use super::{
    Architecture, CheckpointError, Checkpointing, ConfigFileError, Delivery, Device, Exchange,
    Layout, ModelSize, Outcome, ReportError, Reporter, Summary, TrainConfig, TrainConfigError,
    Vision, load_config, max_rel_diff, max_rel_grad_diff, report::checkpoints_in, train_on_device,
};

/// How ranks are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Launch {
    /// As threads of this process.
    #[default]
    Threads,
    /// As processes that torchrun, mpirun or srun have started, this one among them.
    Env,
}

/// Flags of the programs that train an architecture on digits; see [`Self::parse_for`].
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// How ranks are started: as threads of this process, or as processes by torchrun, mpirun or srun
    #[arg(long, value_enum, default_value_t)]
    pub launch: Launch,
    /// Number of ranks where they are threads [default: 2]
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Ranks along the data-parallel axis; the mesh is dp x (ranks / dp) [default: 1]
    #[arg(long)]
    pub dp: Option<usize>,
    /// Where ranks compute [default: cpu]
    #[arg(long, value_enum)]
    pub device: Option<Device>,
    /// Which rank owns which tokens [default: head-tail]
    #[arg(long, value_enum)]
    pub layout: Option<Layout>,
    /// How keys and values travel [default: needed-only]
    #[arg(long, value_enum)]
    pub exchange: Option<Exchange>,
    /// Where the vision tower runs [default: sharded]
    #[arg(long, value_enum)]
    pub vision: Option<Vision>,
    /// Which ranks are given the vision tower's features [default: gathered]
    #[arg(long, value_enum)]
    pub vision_delivery: Option<Delivery>,
    /// Leave the vision tower as it was initialised
    #[arg(long)]
    pub freeze_vision: bool,
    /// What the backward pass computes again [default: none]
    #[arg(long, value_enum)]
    pub checkpointing: Option<Checkpointing>,
    /// Optimizer steps [default: 600]
    #[arg(long)]
    pub steps: Option<u64>,
    /// Decides documents, packs and initial weights [default: 1]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Tokens of a pack [default: 512]
    #[arg(long)]
    pub tokens: Option<usize>,
    /// Packs of one optimizer step, divisible by dp [default: 2]
    #[arg(long)]
    pub packs_per_step: Option<usize>,
    /// Which model [default: small]
    #[arg(long, value_enum)]
    pub size: Option<ModelSize>,
    /// Steps between two checkpoints [default: 75]
    #[arg(long)]
    pub checkpoint_every: Option<u64>,
    /// Also train with one rank from the same start, and report how far the two are apart
    #[arg(long)]
    pub compare: bool,
    /// Configuration file, TOML or JSON; flags go before it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Folder for metrics, summary, curve and checkpoints; what an earlier run left there is replaced
    #[arg(long, value_name = "DIR", default_value = "runs/train")]
    pub out: PathBuf,
    /// Continue from the newest checkpoint in --out
    #[arg(long, conflicts_with = "compare")]
    pub resume: bool,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum RunError {
    #[error(transparent)]
    ConfigFile(#[from] ConfigFileError),
    #[error(transparent)]
    Config(#[from] TrainConfigError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The comparison has no result.
    #[error(
        "the run cannot be compared with one rank: losses differ by {loss}, gradients by {gradient}"
    )]
    Incomparable {
        /// Largest relative difference of the loss.
        loss: f64,
        /// Largest relative difference of a gradient.
        gradient: f64,
    },
    /// Flags that contradict each other.
    #[error("--ranks {ranks} with --launch env: the number of ranks is that of the processes")]
    RanksOfProcesses {
        /// What `--ranks` says.
        ranks: usize,
    },
    /// Ctrl-C cannot be caught.
    #[error("cannot listen for Ctrl-C: {0}")]
    Interrupt(#[from] ctrlc::Error),
}

impl TrainArgs {
    /// The flags that the program of an architecture was started with. Ends the process where they are wrong, or ask for help.
    #[must_use]
    pub fn parse_for<A: Architecture>() -> Self {
        // The derive puts the type's own documentation there, so these come last.
        let command = Self::augment_args(clap::Command::new(A::PROGRAM))
            .version(env!("CARGO_PKG_VERSION"))
            .about(A::ABOUT)
            .long_about(A::ABOUT)
            .mut_arg("out", |arg| arg.default_value(A::OUT));
        let matches = command.get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// The run that file and flags describe, checked.
    ///
    /// # Errors
    /// A file that cannot be used, or a field out of range.
    pub fn resolve<A: Architecture>(&self) -> Result<TrainConfig<A>, RunError> {
        self.resolve_for(None)
    }

    /// [`Self::resolve`] for so many processes.
    fn resolve_for<A: Architecture>(
        &self,
        processes: Option<usize>,
    ) -> Result<TrainConfig<A>, RunError> {
        let mut config = match &self.config {
            Some(path) => load_config(path)?,
            None => TrainConfig::default(),
        };
        macro_rules! flags {
            ($($field:ident),*) => { $(if let Some(value) = self.$field { config.$field = value; })* };
        }
        flags!(
            ranks,
            dp,
            device,
            layout,
            exchange,
            vision,
            vision_delivery,
            checkpointing,
            steps,
            seed,
            tokens,
            packs_per_step,
            size
        );
        flags!(checkpoint_every);
        config.freeze_vision |= self.freeze_vision;
        if let Some(processes) = processes {
            config.ranks = processes;
        }
        config.validate()?;
        Ok(config)
    }
}

/// Runs the program: trains, compares if asked to, writes everything. Whether the run was interrupted.
///
/// Where ranks are processes, every one of them calls it; rank 0 prints and writes, the others only train.
///
/// # Errors
/// A wrong flag or file, a folder that cannot be written, a checkpoint that cannot be used, an environment that describes no rank,
/// or a rank that failed.
pub fn run<A: Architecture>(args: &TrainArgs) -> Result<bool, RunError> {
    match args.launch {
        Launch::Threads => report_run::<A>(args, args.resolve()?, Ranks::Threads),
        Launch::Env => {
            if let Some(ranks) = args.ranks {
                return Err(RunError::RanksOfProcesses { ranks });
            }
            let place = Place::from_env().map_err(LaunchError::from)?;
            let config: TrainConfig<A> = args.resolve_for(Some(place.world_size))?;
            let options = process_options(config.device, config.deadline_seconds);
            if place.rank == 0 {
                // Connects behind what can fail on this rank alone.
                return report_run(args, config, Ranks::Processes(place, options));
            }
            let resumed = args
                .resume
                .then(|| checkpoints_in(&args.out).latest(&config));
            resumed.transpose()?;
            let reporter = Reporter::<TrainConfig<A>>::reader(&args.out);
            catch_interrupts(reporter.interrupt(), Arc::default())?;
            let ranks = Ranks::Processes(place, options);
            let outcome = train_on(&config, ranks, Some(&reporter), (args.resume, args.compare))?;
            Ok(outcome.steps_done < config.steps)
        }
    }
}

/// How ranks that are processes move tensors from such a device.
pub(crate) fn process_options(device: Device, deadline_seconds: u64) -> ProcessOptions {
    ProcessOptions {
        deadline: Duration::from_secs(deadline_seconds),
        tensors: match device {
            Device::Cuda => TensorTransport::None,
            Device::Cpu | Device::Wgpu => TensorTransport::Mpi,
        },
        ..ProcessOptions::default()
    }
}

/// The ranks of a run.
enum Ranks {
    Threads,
    /// This process is one of them.
    Processes(Place, ProcessOptions),
}

/// Asks the run to stop on the first Ctrl-C. A second one does not wait for the step to end; what is written is whole either way.
/// Behind the run itself nothing is left to save.
pub(crate) fn catch_interrupts(
    interrupt: Arc<AtomicBool>,
    done: Arc<AtomicBool>,
) -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(move || {
        if interrupt.swap(true, Ordering::Relaxed) || done.load(Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
}

/// The run of a rank that prints and writes.
fn report_run<A: Architecture>(
    args: &TrainArgs,
    config: TrainConfig<A>,
    ranks: Ranks,
) -> Result<bool, RunError> {
    let resumed = if args.resume {
        Some(checkpoints_in(&args.out).latest(&config)?)
    } else {
        None
    };
    let reporter = Reporter::new(&args.out, config.steps, resumed.as_ref())?;
    let done = Arc::new(AtomicBool::new(false));
    catch_interrupts(reporter.interrupt(), done.clone())?;
    let mesh = config.mesh()?;
    let kind = match ranks {
        Ranks::Threads => "threads",
        Ranks::Processes(..) => "processes",
    };
    reporter.print(&format!(
        "{mesh} in {kind}, {:?}, {:?} layout, {:?} exchange",
        config.device, config.layout, config.exchange
    ));
    reporter.start();
    let outcome = train_on(&config, ranks, Some(&reporter), (args.resume, args.compare))?;
    let interrupted = outcome.steps_done < config.steps;
    let final_loss = outcome.losses.last().copied().unwrap_or(f64::NAN);
    reporter.row(
        outcome.steps_done,
        final_loss,
        outcome.tokens_per_s,
        outcome.heldout.accuracy(),
    );
    reporter.finish();
    let mut summary = summarize(&config, &outcome, interrupted);
    let curves = vec![(format!("{mesh}"), outcome.losses.clone())];
    reporter.draw(&title::<A>(), &curves)?;
    reporter.write_summary(&summary)?;
    done.store(true, Ordering::Relaxed);
    if args.compare && !interrupted {
        compare(&config, &outcome, (&reporter, curves), &mut summary)?;
    }
    show(&summary, &args.out);
    Ok(interrupted)
}

/// Losses by name.
type Curves = Vec<(String, Vec<f64>)>;

/// What the curve is called.
fn title<A: Architecture>() -> String {
    format!("{}: loss per answer digit", A::PROGRAM)
}

/// Trains with one rank as well, and reports how far the two are apart.
fn compare<A: Architecture>(
    config: &TrainConfig<A>,
    outcome: &Outcome,
    (reporter, mut curves): (&Reporter<TrainConfig<A>>, Curves),
    summary: &mut Summary<A>,
) -> Result<(), RunError> {
    println!("training with one rank from the same start ...");
    let reference = train_on(&config.on_one_rank(), Ranks::Threads, None, (false, true))?;
    let grads = |outcome: &Outcome| outcome.first_gradients.clone().unwrap_or_default();
    let loss = max_rel_diff(&outcome.losses, &reference.losses);
    let gradient = max_rel_grad_diff(&grads(outcome), &grads(&reference));
    if !(loss.is_finite() && gradient.is_finite()) {
        return Err(RunError::Incomparable { loss, gradient });
    }
    summary.max_rel_diff = Some(loss);
    summary.max_rel_grad_diff = Some(gradient);
    curves.push(("one rank".to_owned(), reference.losses));
    reporter.draw(&title::<A>(), &curves)?;
    Ok(reporter.write_summary(summary)?)
}

/// Trains as threads, or as the process that it is.
fn train_on<A: Architecture>(
    config: &TrainConfig<A>,
    ranks: Ranks,
    reporter: Option<&Reporter<TrainConfig<A>>>,
    (resume, keep_gradients): (bool, bool),
) -> Result<Outcome, LaunchError> {
    let process = match ranks {
        Ranks::Threads => None,
        Ranks::Processes(place, options) => Some(Process::join(&place, options)?),
    };
    train_on_device(config, process, reporter, (resume, keep_gradients))
}

fn summarize<A: Architecture>(
    config: &TrainConfig<A>,
    outcome: &Outcome,
    interrupted: bool,
) -> Summary<A> {
    Summary {
        ranks: config.ranks,
        steps: outcome.steps_done,
        final_loss: outcome.losses.last().copied().unwrap_or(f64::NAN),
        heldout_accuracy: outcome.heldout.accuracy(),
        tokens_per_s: outcome.tokens_per_s,
        max_rel_diff: None,
        max_rel_grad_diff: None,
        vision_frames_per_rank: outcome.vision_frames_per_rank.clone(),
        kv_tokens_received: outcome.kv_tokens_received.clone(),
        parameters_sha256: outcome.parameters_sha256.clone(),
        interrupted,
        config: config.clone(),
    }
}

fn show<A: Architecture>(summary: &Summary<A>, out: &std::path::Path) {
    println!(
        "vision frames per rank: {:?}",
        summary.vision_frames_per_rank
    );
    println!(
        "K/V tokens received per rank and layer: {:?}",
        summary.kv_tokens_received
    );
    if let (Some(loss), Some(grad)) = (summary.max_rel_diff, summary.max_rel_grad_diff) {
        println!("largest relative difference from one rank: loss {loss:.1e}, gradient {grad:.1e}");
    }
    if summary.interrupted {
        println!(
            "interrupted after step {}; continue with --resume",
            summary.steps
        );
    }
    println!("written to {}", out.display());
}
