//! `train-mimo` as a user runs it. What it shares with `train-vlm` is tested there.

mod program;

use std::{path::Path, process::Command};

use program::{refuse, succeed, summary};
use tempfile::TempDir;

fn train(out: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train-mimo"));
    let tiny = ["--size", "tiny", "--tokens", "256"];
    command.arg("--out").arg(out).args(tiny).args(args);
    command
}

#[test]
fn four_ranks_train_as_one_does() {
    let folder = TempDir::new().expect("a folder");
    for (name, args) in [
        (
            "dp",
            &["--ranks", "4", "--dp", "2", "--exchange", "head-all-to-all"][..],
        ),
        ("swapped", &["--ranks", "4", "--layout", "dual-chunk-swap"]),
        (
            "balanced",
            &["--layout", "balanced", "--vision-delivery", "to-consumers"],
        ),
    ] {
        let out = folder.path().join(name);
        succeed(train(
            &out,
            &[&["--steps", "3", "--compare"], args].concat(),
        ));
        let summary = summary(&out);
        for (field, most) in [("max_rel_diff", 1e-4), ("max_rel_grad_diff", 1e-5)] {
            let got = summary[field].as_f64().expect("a number");
            assert!(got <= most, "{name}: {summary}");
        }
    }
}

#[test]
fn help_is_the_programs_own() {
    let folder = TempDir::new().expect("a folder");
    let text = succeed(train(&folder.path().join("run"), &["--help"]));
    for part in ["MiMo-V2-Flash", "Usage: train-mimo", "runs/train-mimo"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn wrong_flags_are_refused_before_anything_is_written() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    for (args, part) in [
        (&["--ranks", "0"][..], "ranks: expected at least 1, got 0"),
        (&["--rank", "2"], "unexpected argument"),
        (&["--layout", "striped"], "possible values: contiguous"),
        (
            &["--resume"],
            "expected a checkpoint of train-mimo, found none",
        ),
    ] {
        let error = refuse(train(&out, args));
        assert!(error.contains(part), "{args:?}: {error}");
        assert!(!out.exists(), "{args:?} left something behind");
    }
}

#[test]
fn heads_that_ranks_do_not_divide_are_refused() {
    let folder = TempDir::new().expect("a folder");
    let args = ["--ranks", "4", "--exchange", "head-all-to-all"];
    let error = refuse(train(&folder.path().join("run"), &args));
    assert!(error.contains("4 ranks divide, got 2"), "{error}");
}

#[test]
fn a_checkpoint_of_another_program_is_not_continued() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    succeed(train(&out, &["--steps", "2"]));
    succeed(train(&out, &["--steps", "2", "--resume"]));
    let mut other = Command::new(env!("CARGO_BIN_EXE_train-vlm"));
    let args = [
        "--size", "tiny", "--tokens", "256", "--steps", "2", "--resume",
    ];
    other.arg("--out").arg(&out).args(args);
    let error = refuse(other);
    assert!(
        error.contains("expected a burn-cp train-vlm checkpoint"),
        "{error}"
    );
}
