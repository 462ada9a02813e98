//! `--launch env`: refusals, and with feature `mpi` training and fine-tuning by processes that mpirun starts.

use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// The program without any launcher's variables.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train-vlm"));
    clean(&mut command);
    command
}

fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        let prefixes = ["OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_"];
        let single = ["RANK", "WORLD_SIZE", "LOCAL_RANK"];
        if prefixes.iter().any(|prefix| name.starts_with(prefix)) || single.contains(&&*name) {
            command.env_remove(&name);
        }
    }
    command.stdin(Stdio::null());
}

fn refuse(command: &mut Command, parts: &[&str]) {
    let Output { status, stderr, .. } = command.output().expect("the program starts");
    let error = String::from_utf8_lossy(&stderr);
    assert!(!status.success(), "expected a refusal");
    for part in parts {
        assert!(error.contains(part), "{part:?} expected in: {error}");
    }
}

#[test]
fn processes_are_not_started_where_flags_or_environment_do_not_say_how() {
    let out = TempDir::new().expect("a folder");
    let env = || {
        let mut command = program();
        command
            .args(["--launch", "env", "--out"])
            .arg(out.path().join("run"));
        command
    };
    refuse(&mut env(), &["describes no rank"]);
    refuse(
        env().args(["--ranks", "2"]),
        &["--ranks 2 with --launch env"],
    );
    refuse(env().env("RANK", "0"), &["half set", "WORLD_SIZE"]);
    let ranks = [("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")];
    let place = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    // A mesh that does not fit is found before anybody is waited for.
    refuse(
        env().envs(ranks).envs(place).args(["--dp", "2"]),
        &["dp", "a divisor of ranks = 3"],
    );
    assert!(
        !out.path().join("run").exists(),
        "nothing is written by a run that does not start"
    );
}

#[test]
fn a_world_of_one_process_trains_alone() {
    let out = TempDir::new().expect("a folder");
    let mut command = program();
    command.args([
        "--launch", "env", "--size", "tiny", "--tokens", "256", "--steps", "1", "--out",
    ]);
    command.arg(out.path());
    for (name, value) in [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")] {
        command.env(name, value);
    }
    command
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", "1");
    let output = command.output().expect("the program starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(out.path().join("summary.json").exists());
}

#[cfg(not(feature = "mpi"))]
#[test]
fn processes_on_cpus_need_mpi() {
    let out = TempDir::new().expect("a folder");
    let mut command = program();
    command
        .args(["--launch", "env", "--size", "tiny", "--out"])
        .arg(out.path());
    for (name, value) in [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")] {
        command.env(name, value);
    }
    command
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", "1");
    refuse(&mut command, &["feature `mpi`"]);
}

#[cfg(feature = "mpi")]
mod mpi {
    use std::{fs, path::Path};

    use serde_json::Value;

    use super::*;

    const RUN: [&str; 8] = [
        "--size", "tiny", "--tokens", "256", "--steps", "3", "--dp", "2",
    ];

    fn summary(out: &Path) -> Value {
        let text = fs::read_to_string(out.join("summary.json")).expect("a summary");
        serde_json::from_str(&text).expect("valid JSON")
    }

    /// Losses of all steps, letter by letter.
    fn losses(out: &Path) -> Vec<String> {
        let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
        let cut = |line: &str| {
            line.split(",\"tokens_per_s\"")
                .next()
                .map(ToOwned::to_owned)
        };
        text.lines().filter_map(cut).collect()
    }

    fn run(command: &mut Command) -> String {
        let output = command.output().expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn mpirun(args: &[&str], out: &Path) -> String {
        mpirun_of(env!("CARGO_BIN_EXE_train-vlm"), args, out)
    }

    fn mpirun_of(program: &str, args: &[&str], out: &Path) -> String {
        let mut command = Command::new("mpirun");
        clean(&mut command);
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .args([
                "--oversubscribe",
                "--mca",
                "btl_vader_single_copy_mechanism",
                "none",
                "-n",
                "4",
            ])
            .arg(program)
            .args(["--launch", "env", "--out"])
            .arg(out)
            .args(args);
        run(&mut command)
    }

    #[test]
    fn processes_fine_tune_as_threads_do() {
        let out = TempDir::new().expect("a folder");
        let [processes, threads] = ["processes", "threads"].map(|name| out.path().join(name));
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let model = folder.join("../tests/fixtures/qwen3_vl/untied");
        let data = folder.join("data/photographs.jsonl");
        let (model, data) = (model.to_string_lossy(), data.to_string_lossy());
        // Rows of one step are accumulated: several backward passes on the same parameters.
        let args = [
            "--model",
            &model,
            "--data",
            &data,
            "--tokens",
            "320",
            "--steps",
            "2",
            "--dp",
            "2",
            "--rows-per-step",
            "4",
            "--learning-rate",
            "1e-3",
            "--warmup-steps",
            "1",
        ];
        let program = env!("CARGO_BIN_EXE_finetune-qwen3-vl");
        let printed = mpirun_of(program, &args, &processes);
        assert_eq!(printed.matches("written to").count(), 1, "{printed}");
        let mut command = Command::new(program);
        command.args(["--ranks", "4", "--out"]).arg(&threads);
        run(command.args(args));
        assert_eq!(losses(&processes), losses(&threads), "to the last digit");
        let [by_processes, by_threads] = [processes, threads].map(|out| summary(&out));
        for same in ["parameters_sha256", "vision_frames_per_rank"] {
            assert_eq!(by_processes[same], by_threads[same], "{same}");
        }
    }

    #[test]
    fn four_processes_train_as_four_threads_do_and_as_one_rank_does() {
        let out = TempDir::new().expect("a folder");
        let [processes, threads] = ["processes", "threads"].map(|name| out.path().join(name));
        let printed = mpirun(&[&RUN[..], &["--compare"]].concat(), &processes);
        assert_eq!(
            printed.matches("written to").count(),
            1,
            "only rank 0 prints: {printed}"
        );
        let compared = summary(&processes);
        assert!(compared["max_rel_diff"].as_f64() < Some(1e-4), "{compared}");
        assert!(
            compared["max_rel_grad_diff"].as_f64() < Some(1e-5),
            "{compared}"
        );
        let mut command = program();
        command
            .args(RUN)
            .args(["--ranks", "4", "--out"])
            .arg(&threads);
        run(&mut command);
        assert_eq!(losses(&processes), losses(&threads), "to the last digit");
        let by_threads = summary(&threads);
        for same in [
            "parameters_sha256",
            "vision_frames_per_rank",
            "kv_tokens_received",
        ] {
            assert_eq!(compared[same], by_threads[same], "{same}");
        }
    }

    #[test]
    fn processes_go_on_from_a_checkpoint() {
        let out = TempDir::new().expect("a folder");
        let [whole, parts] = ["whole", "parts"].map(|name| out.path().join(name));
        let every = ["--checkpoint-every", "1"];
        mpirun(&[&RUN[..], &every].concat(), &whole);
        mpirun(&[&RUN[..], &every].concat(), &parts);
        // As if it had been stopped behind its second step.
        fs::remove_dir_all(parts.join("checkpoints/step-00000003")).expect("the last checkpoint");
        mpirun(&[&RUN[..], &every, &["--resume"]].concat(), &parts);
        let [whole, parts] = [whole, parts].map(|out| summary(&out)["parameters_sha256"].clone());
        assert_eq!(whole, parts);
    }
}
