//! Trains a small Qwen3-VL on several ranks; see `--help`.

use std::process::ExitCode;

use burn_cp_examples::{
    models::qwen3_vl::Qwen3VlConfig,
    train::{TrainArgs, run},
};

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("RUST_LOG"))
        .with_writer(std::io::stderr)
        .init();
    match run::<Qwen3VlConfig>(&TrainArgs::parse_for::<Qwen3VlConfig>()) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => ExitCode::from(130),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
