//! `learner-vlm`: a vision-language model on several ranks, against burn-train's own strategy on one device.

use std::{fs, path::Path, process::Command};

use burn::backend::{Autodiff, Flex, NdArray};
use burn_cp::launch::RankDevice;
use burn_cp_examples::{
    learner::{LearnerRun, learn},
    train::{Layout, ModelSize, TrainBackend, TrainConfig},
};
use burn_train::Interrupter;
use tempfile::TempDir;

use crate::{
    losses,
    program::{refuse, succeed},
    relative_error,
};

type Single = Autodiff<Flex>;
type Double = Autodiff<NdArray<f64>>;

const EPOCHS: usize = 2;

fn run(ranks: usize, dp: usize, layout: Layout, out: &Path) -> LearnerRun {
    LearnerRun {
        config: TrainConfig {
            ranks,
            dp,
            layout,
            steps: 3,
            tokens: 200,
            packs_per_step: 2,
            heldout_packs: 2,
            size: ModelSize::Tiny,
            ..TrainConfig::default()
        },
        epochs: EPOCHS,
        single_device: false,
        checkpoint: None,
        out: out.to_owned(),
    }
}

/// Losses of all training steps, and of all held-out packs after each epoch.
fn train<B: TrainBackend<Device: RankDevice>>(run: &LearnerRun) -> [Vec<f64>; 2] {
    learn::<B>(run, &Interrupter::new()).unwrap();
    ["train", "valid"].map(|split| losses(&run.out, split, 1..=EPOCHS))
}

/// The accuracy rule: at most twice the error of burn-train on one device, against the same training in f64.
fn agrees(name: &str, got: &[Vec<f64>; 2], one: &[Vec<f64>; 2], exact: &[Vec<f64>; 2]) {
    for (split, ((got, one), exact)) in ["train", "valid"]
        .iter()
        .zip(got.iter().zip(one).zip(exact))
    {
        let (error, of_one) = (relative_error(got, exact), relative_error(one, exact));
        let bound = 2.0 * of_one + 4.0 * f64::from(f32::EPSILON);
        assert!(error <= bound, "{name}, {split}: {error:e} > {bound:e}");
    }
}

#[test]
fn every_logged_loss_is_that_of_one_device() {
    let out = TempDir::new().unwrap();
    let alone = |name: &str| LearnerRun {
        single_device: true,
        ..run(1, 1, Layout::Contiguous, &out.path().join(name))
    };
    let exact = train::<Double>(&alone("exact"));
    assert_eq!([exact[0].len(), exact[1].len()], [6, 4]);
    let one = train::<Single>(&alone("one"));
    for (name, ranks, layout) in [
        ("1 rank", 1, Layout::Contiguous),
        ("2 ranks", 2, Layout::Contiguous),
        ("2 ranks, head-tail", 2, Layout::HeadTail),
        ("3 ranks, dual-chunk-swap", 3, Layout::DualChunkSwap),
    ] {
        let run = run(ranks, 1, layout, &out.path().join(name));
        agrees(name, &train::<Single>(&run), &one, &exact);
    }
}

#[test]
fn data_parallel_groups_take_an_item_each() {
    let out = TempDir::new().unwrap();
    let of = |ranks: usize, name: &str| run(ranks, 2, Layout::HeadTail, &out.path().join(name));
    let exact = train::<Double>(&of(2, "exact"));
    let two = train::<Single>(&of(2, "two"));
    let four = train::<Single>(&of(4, "four"));
    assert_eq!(exact[0].len(), 6);
    agrees("4 ranks", &four, &two, &exact);
    // One rank that is given the packs of both groups at once.
    let one = train::<Double>(&run(1, 1, Layout::Contiguous, &out.path().join("one")));
    assert!(relative_error(&exact[0], &one[0]) < 1e-9);
}

#[test]
fn a_resumed_training_goes_on_as_if_it_had_not_stopped() {
    let out = TempDir::new().unwrap();
    let (whole, resumed) = (out.path().join("whole"), out.path().join("resumed"));
    let mut run = run(2, 1, Layout::HeadTail, &whole);
    train::<Single>(&run);
    fs::create_dir_all(resumed.join("checkpoint")).unwrap();
    let files =
        ["model-1.mpk", "optim-1.mpk", "scheduler-1.mpk"].map(|file| format!("checkpoint/{file}"));
    for file in &files {
        fs::copy(whole.join(file), resumed.join(file)).unwrap();
    }
    run.checkpoint = Some(1);
    run.out = resumed.clone();
    learn::<Single>(&run, &Interrupter::new()).unwrap();
    assert!(!resumed.join("train/epoch-1").exists());
    for split in ["train", "valid"] {
        let (got, want) = (losses(&resumed, split, [2]), losses(&whole, split, [2]));
        assert_eq!(got, want, "{split}");
    }
    let last = "checkpoint/model-2.mpk";
    let [got, want] = [&resumed, &whole].map(|out| fs::read(out.join(last)).unwrap());
    assert!(got == want, "the weights differ");
}

fn program(out: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_learner-vlm"));
    command.args(["--size", "tiny", "--steps", "2", "--epochs", "1"]);
    command.arg("--out").arg(out).args(args);
    command
}

#[test]
fn the_program_compares_its_ranks_with_one_device() {
    let out = TempDir::new().unwrap();
    let said = succeed(program(out.path(), &["--tokens", "200", "--compare"]));
    assert!(said.contains("held-out losses differ by"), "{said}");
    for file in [
        "checkpoint/model-1.mpk",
        "single-device/checkpoint/model-1.mpk",
    ] {
        assert!(out.path().join(file).exists(), "{file}");
    }
}

#[test]
fn the_program_refuses_what_it_cannot_run() {
    let out = TempDir::new().unwrap();
    for (args, why) in [
        (&["--checkpoint", "7"][..], "found none"),
        (&["--ranks", "3", "--dp", "2"], "ranks"),
        (&["--dp", "2", "--compare"], "--dp must be 1"),
        (&["--tokens", "20"], "data"),
    ] {
        let said = refuse(program(out.path(), args));
        assert!(said.contains(why), "{args:?}: {said}");
    }
}
