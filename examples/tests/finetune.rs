//! `finetune-qwen3-vl` and `generate-qwen3-vl` as a user runs them.

mod program;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use burn_cp_examples::hf::WeightFiles;
use serde_json::Value;
use tempfile::TempDir;

use program::{refuse, succeed, summary};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn model(name: &str) -> PathBuf {
    root().join("../tests/fixtures/qwen3_vl").join(name)
}

fn photographs() -> PathBuf {
    root().join("data/photographs.jsonl")
}

/// The program over a model of the fixtures and some data.
fn finetune(data: &Path, out: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune-qwen3-vl"));
    command
        .arg("--model")
        .arg(model("untied"))
        .arg("--data")
        .arg(data)
        .arg("--out")
        .arg(out);
    command
        .args([
            "--tokens",
            "320",
            "--learning-rate",
            "1e-3",
            "--warmup-steps",
            "1",
        ])
        .args(args);
    command
}

fn losses(out: &Path) -> Vec<f64> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let loss = |line: &str| {
        serde_json::from_str::<Value>(line).expect("valid JSON")["loss"]
            .as_f64()
            .expect("a loss")
    };
    text.lines().map(loss).collect()
}

/// A file of conversations beside the photographs.
fn data(folder: &Path, lines: &[&str]) -> PathBuf {
    let photographs = folder.join("photographs");
    fs::create_dir_all(&photographs).expect("a folder");
    for entry in fs::read_dir(root().join("data/photographs")).expect("photographs") {
        let path = entry.expect("a photograph").path();
        fs::copy(&path, photographs.join(path.file_name().expect("a name"))).expect("a copy");
    }
    let file = folder.join("train.jsonl");
    fs::write(&file, lines.join("\n")).expect("a file");
    file
}

const GOOD: &str = r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "photographs/coffee.jpg"}, {"type": "text", "text": "what?"}]}, {"role": "assistant", "content": "coffee"}]}"#;

#[test]
fn photographs_on_two_ranks_are_learned_as_on_one() {
    let folder = TempDir::new().expect("a folder");
    for (name, args) in [
        ("cp", &["--ranks", "2", "--rows-per-step", "2"][..]),
        (
            "dp",
            &[
                "--ranks",
                "2",
                "--dp",
                "2",
                "--rows-per-step",
                "2",
                "--layout",
                "contiguous",
                "--freeze",
                "vision",
            ],
        ),
        (
            "swap",
            &[
                "--ranks",
                "2",
                "--layout",
                "dual-chunk-swap",
                "--chunk",
                "7",
            ],
        ),
        ("balanced", &["--ranks", "3", "--layout", "balanced"]),
    ] {
        let out = folder.path().join(name);
        succeed(finetune(
            &photographs(),
            &out,
            &[args, &["--steps", "4", "--compare"]].concat(),
        ));
        let summary = summary(&out);
        let difference = |field: &str| summary[field].as_f64().expect("a number");
        assert!(difference("max_rel_diff") <= 1e-4, "{name}: {summary}");
        assert!(difference("max_rel_grad_diff") <= 1e-4, "{name}: {summary}");
        assert_eq!(losses(&out).len(), 4);
        assert!(out.join("loss.svg").is_file());
    }
    let frames = &summary(&folder.path().join("cp"))["vision_frames_per_rank"];
    assert!(
        frames
            .as_array()
            .expect("a list")
            .iter()
            .all(|frames| frames.as_u64() > Some(0)),
        "{frames}"
    );
}

/// The decoder's, the embedding's and the head's values stay; those of the tower do not.
#[test]
fn a_frozen_decoder_stays_as_it_was() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    let args = ["--ranks", "2", "--steps", "2", "--freeze", "text"];
    let error = refuse(finetune(&photographs(), &out, &args));
    assert!(
        error.contains("line 6") && error.contains("an image or a video"),
        "{error}"
    );
    let file = data(folder.path(), &[GOOD, GOOD]);
    succeed(finetune(&file, &out, &[&args[..], &["--compare"]].concat()));
    let difference = summary(&out)["max_rel_grad_diff"].as_f64();
    assert!(
        difference.is_some_and(|difference| difference <= 1e-4),
        "{difference:?}"
    );
    let weights = |directory: &Path| {
        let mut problems = Vec::new();
        let files = WeightFiles::scan(directory, &mut problems);
        assert_eq!(problems, []);
        files
    };
    let (before, after) = (
        weights(&model("untied")),
        weights(&out.join("checkpoints/step-00000002")),
    );
    for name in before.tensors().keys() {
        let same = before.read(name) == after.read(name);
        assert_eq!(same, !name.starts_with("model.visual."), "{name}");
    }
}

#[test]
fn a_model_learns_goes_on_after_a_stop_and_answers() {
    let folder = TempDir::new().expect("a folder");
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let args = ["--ranks", "2", "--steps", "12", "--checkpoint-every", "5"];
    succeed(finetune(&photographs(), &whole, &args));
    let learned = losses(&whole);
    assert!(learned[11] < 0.9 * learned[0], "{learned:?}");
    // The same run, cut behind its second checkpoint.
    fs::create_dir_all(parts.join("checkpoints")).expect("a folder");
    let at = "checkpoints/step-00000010";
    copy(&whole.join(at), &parts.join(at));
    succeed(finetune(
        &photographs(),
        &parts,
        &[&args[..], &["--resume"]].concat(),
    ));
    assert_eq!(
        summary(&whole)["parameters_sha256"],
        summary(&parts)["parameters_sha256"]
    );
    // A checkpoint is a model directory.
    let saved = whole.join("checkpoints/step-00000012");
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "preprocessor_config.json",
    ] {
        assert!(saved.join(file).is_file(), "{file}");
    }
    let answer = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_generate-qwen3-vl"));
        command
            .arg("--model")
            .arg(&saved)
            .arg("--image")
            .arg(root().join("data/photographs/chelsea.jpg"));
        command
            .args(["--prompt", "Which animal?", "--max-tokens", "8"])
            .args(args);
        command
    };
    assert_eq!(succeed(answer(&[])), succeed(answer(&[])));
    let drawn = ["--temperature", "1.5", "--seed", "3"];
    assert_eq!(succeed(answer(&drawn)), succeed(answer(&drawn)));
    assert!(refuse(answer(&["--top-p", "0"])).contains("top_p"));
    // Resuming as another run is refused.
    let other = refuse(finetune(
        &photographs(),
        &parts,
        &["--ranks", "2", "--steps", "13", "--resume"],
    ));
    assert!(
        other.contains("another run") && other.contains("steps"),
        "{other}"
    );
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("a copy");
    }
}

#[test]
fn wrong_lines_are_told_by_their_number() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    let with = |lines: &[&str]| {
        refuse(finetune(
            &data(folder.path(), lines),
            &out,
            &["--steps", "1"],
        ))
    };
    let cases = [
        (r#"{"messages": [{"role": "user", "content": "cut"#, "EOF"),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "sound", "sound": "a"}]}]}"#,
            "line 3",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "only a question"}]}"#,
            "assistant",
        ),
    ];
    for (line, part) in cases {
        let error = with(&[GOOD, "", line]);
        assert!(
            error.contains("train.jsonl, line 3") && error.contains(part),
            "{error}"
        );
    }
    let error = with(&[""]);
    assert!(error.contains("no document"), "{error}");
}

#[test]
fn pictures_that_do_not_decode_are_told_by_their_path() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    let file = data(
        folder.path(),
        &[
            GOOD,
            &GOOD.replace("coffee.jpg", "broken.jpg"),
            &GOOD.replace("coffee.jpg", "absent.jpg"),
        ],
    );
    let bytes = fs::read(folder.path().join("photographs/coffee.jpg")).expect("a photograph");
    let broken = folder.path().join("photographs/broken.jpg");
    fs::write(&broken, &bytes[..200]).expect("a file");
    let error = refuse(finetune(&file, &out, &["--steps", "1"]));
    assert!(
        error.contains("line 2") && error.contains("photographs/broken.jpg"),
        "{error}"
    );
    fs::write(&broken, &bytes).expect("a file");
    let error = refuse(finetune(&file, &out, &["--steps", "1"]));
    assert!(
        error.contains("line 3") && error.contains("photographs/absent.jpg"),
        "{error}"
    );
}

#[test]
fn placeholders_that_do_not_match_are_told() {
    let folder = TempDir::new().expect("a folder");
    let line = GOOD.replace("what?", "what is <|image_pad|>?");
    let error = refuse(finetune(
        &data(folder.path(), &[&line]),
        &folder.path().join("run"),
        &["--steps", "1"],
    ));
    assert!(
        error.contains("line 1")
            && error.contains("<|image_pad|>")
            && error.contains("expected 1")
            && error.contains("got 2"),
        "{error}"
    );
}

#[test]
fn long_documents_are_dropped_and_counted_or_refused() {
    let folder = TempDir::new().expect("a folder");
    let long = GOOD.replace("what?", &"what? ".repeat(200));
    let file = data(folder.path(), &[GOOD, &long]);
    let out = folder.path().join("run");
    let text = succeed(finetune(&file, &out, &["--steps", "1"]));
    assert!(text.contains("1 documents; 1 left out"), "{text}");
    assert_eq!(summary(&out)["dropped_documents"], 1);
    let error = refuse(finetune(
        &file,
        &out,
        &["--steps", "1", "--long-documents", "refuse"],
    ));
    assert!(
        error.contains("line 2") && error.contains("at most 320 tokens"),
        "{error}"
    );
}

#[test]
fn directories_that_are_no_model_and_dtypes_that_a_device_lacks_are_refused() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("run");
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune-qwen3-vl"));
    command
        .arg("--model")
        .arg(root().join("data"))
        .arg("--data")
        .arg(photographs())
        .arg("--out")
        .arg(&out);
    let error = refuse(command);
    assert!(
        error.contains("config.json") && error.contains("tokenizer.json"),
        "{error}"
    );
    let error = refuse(finetune(&photographs(), &out, &["--dtype", "bf16"]));
    assert!(
        error.contains("dtype") && error.contains("f32 on the device cpu"),
        "{error}"
    );
}
