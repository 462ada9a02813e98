//! Answers a prompt about pictures; see `--help`.

use std::{io::stdout, process::ExitCode};

use burn_cp_examples::generate::{GenerateArgs, run};
use clap::Parser;

fn main() -> ExitCode {
    match run(&GenerateArgs::parse(), &mut stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
