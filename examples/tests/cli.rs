//! The programs as a user runs them: what they write, what they refuse, and that a stopped run goes on as if it had not been.

mod program;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;

use program::{refuse, succeed, summary};

fn train(out: &Path, args: &[&str]) -> Command {
    bare(
        out,
        &[&["--size", "tiny", "--tokens", "256"], args].concat(),
    )
}

/// The program with these arguments and an `--out` only.
fn bare(out: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train-vlm"));
    command.arg("--out").arg(out).args(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What was written of each step but its speed, letter by letter.
fn loss_texts(out: &Path) -> Vec<String> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    text.lines()
        .map(|line| {
            line.split(",\"tokens_per_s\"")
                .next()
                .unwrap_or_default()
                .to_owned()
        })
        .collect()
}

fn losses(out: &Path) -> Vec<(u64, f64)> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let lines = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("valid JSON"));
    lines
        .map(|line| {
            (
                line["step"].as_u64().expect("step"),
                line["loss"].as_f64().expect("loss"),
            )
        })
        .collect()
}

/// Waits until a run has reported `steps` steps.
fn wait_for(child: &mut Child, out: &Path, steps: usize) {
    let start = Instant::now();
    loop {
        let lines =
            fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |text| text.lines().count());
        if lines >= steps {
            return;
        }
        assert!(
            child.try_wait().expect("a child").is_none(),
            "the run ended before it could be stopped"
        );
        assert!(
            start.elapsed() < Duration::from_secs(300),
            "no step was reported in time"
        );
        sleep(Duration::from_millis(20));
    }
}

fn checkpoint(out: &Path) -> PathBuf {
    let mut names: Vec<PathBuf> = fs::read_dir(out.join("checkpoints"))
        .expect("checkpoints")
        .map(|entry| entry.expect("entry").path())
        .collect();
    names.sort();
    names.pop().expect("a checkpoint")
}

const RUN: [&str; 4] = ["--steps", "24", "--checkpoint-every", "4"];

#[test]
fn a_killed_or_interrupted_run_resumes_to_the_bit() {
    let folder = TempDir::new().expect("a folder");
    let whole = folder.path().join("whole");
    succeed(train(&whole, &RUN));
    assert_eq!(losses(&whole).len(), 24);
    for signal in ["KILL", "INT"] {
        let out = folder.path().join(signal);
        let mut child = train(&out, &RUN).spawn().expect("the program starts");
        wait_for(&mut child, &out, 6);
        let sent = Command::new("kill")
            .args([&format!("-{signal}"), &child.id().to_string()])
            .status();
        assert!(sent.expect("kill").success());
        let status = child.wait().expect("an end");
        assert!(!status.success(), "{signal}");
        if signal == "INT" {
            assert_eq!(status.code(), Some(130));
            assert_eq!(summary(&out)["interrupted"], true);
        }
        assert!(
            losses(&out).len() < 24,
            "the run was stopped too late to test anything"
        );
        let resumed: Vec<&str> = RUN.iter().copied().chain(["--resume"]).collect();
        succeed(train(&out, &resumed));
        assert_eq!(loss_texts(&out), loss_texts(&whole), "{signal}");
        for field in [
            "parameters_sha256",
            "final_loss",
            "heldout_accuracy",
            "steps",
        ] {
            assert_eq!(
                summary(&out)[field],
                summary(&whole)[field],
                "{signal}: {field}"
            );
        }
    }
}

#[test]
fn a_comparison_writes_everything_it_promises() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("nested/run");
    let text = succeed(train(
        &out,
        &["--steps", "3", "--ranks", "4", "--dp", "2", "--compare"],
    ));
    assert!(text.contains("held-out accuracy"), "{text}");
    let summary = summary(&out);
    assert_eq!(
        (&summary["ranks"], &summary["steps"]),
        (&4.into(), &3.into())
    );
    assert!(
        summary["max_rel_diff"].as_f64().expect("a number") <= 1e-4,
        "{summary}"
    );
    assert!(
        summary["max_rel_grad_diff"].as_f64().expect("a number") <= 1e-5,
        "{summary}"
    );
    for field in ["vision_frames_per_rank", "kv_tokens_received"] {
        assert_eq!(
            summary[field].as_array().expect("a list").len(),
            4,
            "{field}"
        );
    }
    for field in ["final_loss", "heldout_accuracy", "tokens_per_s"] {
        assert!(summary[field].is_f64(), "{field}");
    }
    assert!(
        fs::read_to_string(out.join("loss.svg"))
            .expect("a curve")
            .contains("one rank")
    );
    assert!(checkpoint(&out).join("model.mpk").exists());
}

#[test]
fn documents_and_weights_do_not_depend_on_how_the_run_is_sharded() {
    let folder = TempDir::new().expect("a folder");
    let first = |name: &str, args: &[&str]| {
        let out = folder.path().join(name);
        succeed(train(&out, &[&["--steps", "1"], args].concat()));
        losses(&out)[0].1
    };
    let one = first("one", &["--ranks", "1"]);
    let four = first(
        "four",
        &[
            "--ranks",
            "4",
            "--dp",
            "2",
            "--layout",
            "contiguous",
            "--exchange",
            "all-gather",
        ],
    );
    assert!((one - four).abs() <= 1e-5 * one, "{one} {four}");
    let swapped = first("swapped", &["--ranks", "2", "--layout", "dual-chunk-swap"]);
    assert!((one - swapped).abs() <= 1e-5 * one, "{one} {swapped}");
    let other = first("other", &["--ranks", "1", "--seed", "9"]);
    assert!(
        (one - other).abs() > 1e-4,
        "another seed gives other documents"
    );
}

#[test]
fn wrong_flags_are_refused_before_anything_is_written() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    for (args, part) in [
        (&["--ranks", "0"][..], "ranks: expected at least 1, got 0"),
        (
            &["--ranks", "4", "--dp", "3"],
            "dp: expected a divisor of ranks = 4, got 3",
        ),
        (
            &["--ranks", "3", "--dp", "3", "--packs-per-step", "2"],
            "packs_per_step: expected a multiple of dp = 3, got 2",
        ),
        (&["--tokens", "20"], "a pack should have at least"),
        (&["--steps", "0"], "steps: expected at least 1, got 0"),
        (
            &["--layout", "striped"],
            "possible values: contiguous, head-tail, dual-chunk-swap, balanced",
        ),
        (&["--rank", "2"], "unexpected argument"),
        (&["--resume", "--compare"], "cannot be used with"),
        (
            &["--resume"],
            "expected a checkpoint of train-vlm, found none",
        ),
    ] {
        let error = refuse(bare(&out, args));
        assert!(error.contains(part), "{args:?}: {error}");
        assert!(!out.exists(), "{args:?} left something behind");
    }
}

#[test]
fn wrong_configuration_files_are_refused_with_the_path_of_the_field() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    for (name, text, parts) in [
        ("a.toml", "stepz = 3", &["a.toml", "stepz"][..]),
        (
            "b.toml",
            "[data]\nmax_images = \"many\"",
            &["data.max_images", "many"],
        ),
        (
            "c.json",
            r#"{"data": {"max_imagez": 3}}"#,
            &["data.max_imagez"],
        ),
        ("d.json", r#"{"layout": "striped"}"#, &["layout", "striped"]),
        ("e.toml", "steps = ", &["e.toml"]),
        ("f.yaml", "steps: 3", &[".toml or .json"]),
        ("g.toml", "[data]\nmax_images = 99", &["max_images", "99"]),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("a file");
        let error = refuse(train(&out, &["--config", path.to_str().expect("UTF-8")]));
        for part in parts {
            assert!(error.contains(part), "{name}: {error}");
        }
        assert!(!out.exists(), "{name} left something behind");
    }
    let error = refuse(train(&out, &["--config", "no/such/file.toml"]));
    assert!(error.contains("no/such/file.toml"), "{error}");
    let path = folder.path().join("good.toml");
    fs::write(&path, "steps = 1\nranks = 1\nseed = 3").expect("a file");
    succeed(train(
        &out,
        &["--config", path.to_str().expect("UTF-8"), "--ranks", "2"],
    ));
    assert_eq!(
        (&summary(&out)["ranks"], &summary(&out)["config"]["seed"]),
        (&2.into(), &3.into()),
        "flags win"
    );
}

#[test]
fn an_out_that_cannot_be_written_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "mine").expect("a file");
    let error = refuse(train(&file.join("run"), &["--steps", "1"]));
    assert!(error.contains("file"), "{error}");
    assert_eq!(fs::read_to_string(&file).expect("still there"), "mine");
}

#[test]
fn a_new_run_removes_its_predecessor_and_nothing_else() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    succeed(train(&out, &["--steps", "2"]));
    let mine = out.join("checkpoints/step-old");
    fs::create_dir(&mine).expect("a folder");
    fs::write(mine.join("notes"), "mine").expect("a file");
    succeed(train(&out, &["--steps", "1"]));
    assert_eq!(
        fs::read_to_string(mine.join("notes")).expect("still there"),
        "mine"
    );
    assert_eq!(losses(&out).len(), 1);
    assert!(out.join("checkpoints/step-00000001").exists());
    assert!(!out.join("checkpoints/step-00000002").exists());
    succeed(train(&out, &["--steps", "1", "--resume"]));
}

#[test]
fn damaged_and_foreign_checkpoints_are_refused() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    let run = ["--steps", "2"];
    let resume = ["--steps", "2", "--resume"];
    succeed(train(&out, &run));
    let state = checkpoint(&out).join("state.json");
    let model = checkpoint(&out).join("model.mpk");
    let error = refuse(train(&out, &["--steps", "2", "--resume", "--seed", "7"]));
    assert!(
        error.contains("another run") && error.contains("seed was 1, now 7"),
        "{error}"
    );

    let bytes = fs::read(&model).expect("weights");
    fs::write(&model, &bytes[..bytes.len() / 2]).expect("a file");
    let error = refuse(train(&out, &resume));
    assert!(
        error.contains("model.mpk") && error.contains("truncated"),
        "{error}"
    );
    fs::write(&model, &bytes).expect("a file");
    succeed(train(&out, &resume));

    let text = fs::read_to_string(&state).expect("a state");
    fs::write(&state, &text[..text.len() / 2]).expect("a file");
    let error = refuse(train(&out, &resume));
    assert!(
        error.contains("state.json") && error.contains("expected a burn-cp train-vlm checkpoint"),
        "{error}"
    );
    fs::write(
        &state,
        text.replace("burn-cp train-vlm checkpoint", "somebody else's"),
    )
    .expect("a file");
    let error = refuse(train(&out, &resume));
    assert!(error.contains("somebody else's"), "{error}");
}

#[test]
fn pack_and_shard_prints_documents_layout_and_plan() {
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pack-and-shard"));
        command
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    };
    let text = succeed(run(&["--ranks", "3"]));
    for part in [
        "documents",
        "rank 2: tokens",
        "K/V tokens that travel",
        "pixel rows",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let swapped = succeed(run(&["--ranks", "2", "--layout", "dual-chunk-swap"]));
    assert!(swapped.contains("rank 1: tokens"), "{swapped}");
    assert!(refuse(run(&["--ranks", "0"])).contains("got 0"));
}
