//! The strategy: what all ranks do alike, who saves, and how a failing rank ends a training.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use burn::{
    backend::{Autodiff, Flex, NdArray},
    record::{FullPrecisionSettings, NamedMpkFileRecorder},
};
use burn_cp::{
    comm::{FailureCause, ProcessGroup},
    launch::{LaunchError, RankDevice, ThreadsOptions},
    mesh::DeviceMesh,
    optim::broadcast_parameters,
    sharder::{ContextParallelConfig, StepError},
    train::{ContextParallelStrategy, TrainError},
};
use burn_cp_examples::train::TrainBackend;
use burn_train::{
    Interrupter, MetricEarlyStoppingStrategy, StoppingCondition,
    checkpoint::{CheckpointingAction, CheckpointingStrategy},
    metric::{
        LossMetric,
        store::{Aggregate, Direction, EventStoreClient, Split},
    },
};
use tempfile::TempDir;

use crate::{
    losses, relative_error,
    small::{Act, Phase, Script, Small, VALIDATED, learner, training},
};

type Single = Autodiff<Flex>;
type Double = Autodiff<NdArray<f64>>;

/// Longer than any of these trainings takes; a rank that waits so long was forgotten.
const HUNG: Duration = Duration::from_secs(60);

fn strategy(dp: usize, cp: usize) -> ContextParallelStrategy {
    let mesh = DeviceMesh::new([("dp", dp), ("cp", cp)]).unwrap();
    let options = ThreadsOptions {
        deadline: HUNG / 2,
        ..ThreadsOptions::default()
    };
    ContextParallelStrategy::new(mesh, ContextParallelConfig::default()).with_options(options)
}

/// What `f` returns, unless it hangs.
fn in_time<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(f()));
    receiver.recv_timeout(HUNG).expect("the training ends")
}

/// Two epochs of four steps that go as the script says.
fn play(
    num_ranks: usize,
    script: &Arc<Script>,
    interrupter: Interrupter,
) -> Result<(), LaunchError> {
    let script = script.clone();
    in_time(move || {
        let out = TempDir::new().unwrap();
        let training = training::<Single>(out.path(), 4, &script)
            .num_epochs(2)
            .with_interrupter(interrupter);
        let learner = learner(Small::new(), 0.1);
        strategy(1, num_ranks).launch(training, learner).map(drop)
    })
}

#[test]
fn readme_shows_lines_of_the_guide_s_page() {
    let readme = include_str!("../../../README.md");
    let page = include_str!("../../../docs/burn-train.md");
    let (_, section) = readme.split_once("## In burn-train's loop").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let blocks: Vec<_> = section.split("```").skip(1).step_by(2).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        let lines = block.strip_prefix("rust,ignore\n").unwrap();
        assert!(page.contains(lines), "{lines}");
    }
}

#[test]
fn all_ranks_make_the_same_steps() {
    let script = Arc::<Script>::default();
    play(3, &script, Interrupter::new()).unwrap();
    assert_eq!(script.begun(3), [vec![8; 3], vec![2 * VALIDATED; 3]]);
}

#[test]
fn an_interrupt_stops_all_ranks_in_the_same_step() {
    for (phase, step, steps) in [
        (Phase::Train, 3, [3, 0]),
        (Phase::Train, 6, [6, VALIDATED]),
        (Phase::Validate, 1, [4, 1]),
    ] {
        let interrupter = Interrupter::new();
        let act = Act::Interrupt(interrupter.clone());
        let script = Script::with(phase, 1, step, act);
        play(3, &script, interrupter).unwrap();
        let want = steps.map(|num| vec![num; 3]);
        assert_eq!(script.begun(3), want, "{phase:?} {step}");
    }
}

#[test]
fn a_panic_ends_the_training_and_names_the_rank() {
    for (phase, rank, step, act) in [
        (Phase::Train, 0, 1, Act::Panic),
        (Phase::Train, 1, 2, Act::Panic),
        (Phase::Train, 2, 5, Act::PanicAfterForward),
        (Phase::Train, 0, 2, Act::PanicAfterForward),
        (Phase::Validate, 2, 1, Act::Panic),
        // Behind it no rank is met any more.
        (Phase::Validate, 1, 2 * VALIDATED, Act::PanicAfterForward),
    ] {
        let script = Script::with(phase, rank, step, act);
        let error = play(3, &script, Interrupter::new()).unwrap_err();
        let LaunchError::Rank(failure) = error else {
            panic!("{error}");
        };
        assert_eq!(failure.rank, rank, "{phase:?} {step}: {failure}");
        let FailureCause::Panic(message) = &failure.cause else {
            panic!("{failure}");
        };
        assert_eq!(message, "as the script says");
    }
}

#[test]
fn an_error_of_a_step_arrives_with_its_type() {
    let script = Script::with(Phase::Train, 1, 2, Act::Fail);
    let error = play(2, &script, Interrupter::new()).unwrap_err();
    let LaunchError::Rank(failure) = error else {
        panic!("{error}");
    };
    let FailureCause::Error(cause) = &failure.cause else {
        panic!("{failure}");
    };
    assert!(cause.downcast_ref::<StepError>().is_some(), "{failure}");
}

#[test]
fn without_our_launch_the_panic_says_why_and_the_strategy_keeps_the_error() {
    let strategy = strategy(1, 2);
    let kept = strategy.clone();
    let caught = in_time(move || {
        let out = TempDir::new().unwrap();
        let script = Script::with(Phase::Train, 1, 1, Act::Panic);
        let training = training::<Single>(out.path(), 1, &script)
            .with_training_strategy(burn_train::TrainingStrategy::Custom(Arc::new(strategy)));
        let learner = learner(Small::new(), 0.1);
        let run = || drop(training.launch(learner));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err()
    });
    let message = caught.downcast_ref::<String>().unwrap();
    assert!(
        message.contains("rank 1") && message.contains("as the script says"),
        "{message}"
    );
    assert!(matches!(kept.take_failure(), Some(LaunchError::Rank(_))));
    assert!(kept.take_failure().is_none());
}

#[test]
fn a_configuration_that_does_not_fit_is_refused() {
    let out = TempDir::new().unwrap();
    let launch = |strategy: ContextParallelStrategy, num_items| -> LaunchError {
        let training = training::<Single>(out.path(), num_items, &Arc::default());
        let result = strategy.launch(training, learner(Small::new(), 0.1));
        result.map(drop).unwrap_err()
    };
    let mesh = DeviceMesh::new([("rows", 2)]).unwrap();
    let other = ContextParallelStrategy::new(mesh, ContextParallelConfig::default());
    assert!(launch(other, 4).to_string().contains("axis"));
    let LaunchError::Rank(failure) = launch(strategy(2, 1), 1) else {
        panic!("a rank's failure")
    };
    let FailureCause::Error(cause) = &failure.cause else {
        panic!("{failure}");
    };
    let cause = cause.downcast_ref::<TrainError>();
    assert!(
        matches!(
            cause,
            Some(TrainError::TooFewItems {
                epoch: 1,
                expected: 2,
                got: 1
            })
        ),
        "{failure}"
    );
}

#[test]
fn early_stopping_is_decided_once() {
    let out = TempDir::new().unwrap();
    let script = Arc::<Script>::default();
    let stopping = MetricEarlyStoppingStrategy::new(
        &LossMetric::<Flex>::new(),
        Aggregate::Mean,
        Direction::Lowest,
        Split::Valid,
        StoppingCondition::NoImprovementSince { n_epochs: 2 },
    );
    let training = training::<Single>(out.path(), 3, &script)
        .num_epochs(9)
        .early_stopping(stopping);
    // Nothing is learned, so the first epoch stays the best.
    strategy(1, 3)
        .launch(training, learner(Small::new(), 0.0))
        .unwrap();
    assert_eq!(script.begun(3), [vec![3 * 3; 3], vec![3 * VALIDATED; 3]]);
}

/// Saves every epoch, and notes who asked.
struct Saves(Arc<Mutex<Vec<(usize, String)>>>);

impl CheckpointingStrategy for Saves {
    fn checkpointing(&mut self, epoch: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        let thread = thread::current().name().unwrap_or_default().to_owned();
        self.0.lock().unwrap().push((epoch, thread));
        vec![CheckpointingAction::Save]
    }
}

#[test]
fn rank_0_alone_saves_each_epoch_once() {
    let out = TempDir::new().unwrap();
    let asked = Arc::<Mutex<_>>::default();
    let training = training::<Single>(out.path(), 2, &Arc::default())
        .num_epochs(2)
        .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
        .with_checkpointing_strategy(Saves(Arc::clone(&asked)));
    strategy(2, 2)
        .launch(training, learner(Small::new(), 0.1))
        .unwrap();
    let want = [1, 2].map(|epoch| (epoch, "rank-0".to_owned()));
    assert_eq!(*asked.lock().unwrap(), want);
    let files = fs::read_dir(out.path().join("checkpoint")).unwrap();
    let mut files: Vec<_> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let want = [
        "model-1",
        "model-2",
        "optim-1",
        "optim-2",
        "scheduler-1",
        "scheduler-2",
    ];
    assert_eq!(files, want.map(|file| format!("{file}.mpk")));
}

/// Losses of two epochs of five items, with an optimizer step for every second item.
fn accumulated<B: TrainBackend<Device: RankDevice>>(
    model: &Small<B>,
    num_ranks: Option<usize>,
    out: &Path,
) -> Vec<f64> {
    let training = training::<B>(out, 5, &Arc::default())
        .num_epochs(2)
        .grads_accumulation(2);
    let learner = learner(model.clone(), 0.5);
    match num_ranks {
        Some(num_ranks) => drop(strategy(1, num_ranks).launch(training, learner).unwrap()),
        None => drop(training.launch(learner)),
    }
    let train = losses(out, "train", [1, 2]);
    train
        .into_iter()
        .chain(losses(out, "valid", [1, 2]))
        .collect()
}

/// In f64 nothing but the order of sums differs.
#[test]
fn gradients_accumulate_as_on_one_device() {
    let out = TempDir::new().unwrap();
    // Drawn once, so that both trainings begin with the same weights.
    let model = broadcast_parameters(Small::<Double>::new(), 0, &ProcessGroup::solo());
    let one = accumulated(&model, None, &out.path().join("one"));
    assert_eq!(one.len(), 2 * (5 + VALIDATED));
    let three = accumulated(&model, Some(3), &out.path().join("three"));
    let error = relative_error(&three, &one);
    assert!(error < 1e-12, "{error:e}");
}
