//! Trains a small MiMo-V2-Flash on several ranks; see `--help`.

use std::process::ExitCode;

use burn_cp_examples::{
    models::mimo_v2_flash::MimoV2FlashVlConfig,
    train::{TrainArgs, run},
};

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("RUST_LOG"))
        .with_writer(std::io::stderr)
        .init();
    match run::<MimoV2FlashVlConfig>(&TrainArgs::parse_for::<MimoV2FlashVlConfig>()) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => ExitCode::from(130),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
