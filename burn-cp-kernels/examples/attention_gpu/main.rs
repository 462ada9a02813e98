//! Attention on a CUDA device: is it right, equal to the bit where promised, and how fast?
//!
//! One program that needs no Rust on the machine with the device:
//!
//! ```text
//! cargo build --release -p burn-cp-kernels --example attention_gpu --features cuda,reference,burn/autotune
//! attention_gpu check bits far time burn      # any of these; all without arguments
//! attention_gpu only=tensor_core check time   # of one routine
//! attention_gpu tokens=1024,8192 burn         # of such lengths
//! compute-sanitizer --tool racecheck attention_gpu small
//! ```
//!
//! `check` compiles more kernels than any other: one process per routine, all at once, is done first.
//!
//! Ends with status 1 if a result is wrong.

mod cases;
mod correct;
mod parts;
mod speed;

use std::{process::ExitCode, sync::OnceLock};

use burn_cp_kernels::Routine;

/// The device, without fusion: kernels are launched as they are called.
type Device = burn_cubecl::CubeBackend<cubecl::cuda::CudaRuntime, f32, i32, u8>;

/// The routines with kernels.
const ROUTINES: [Routine; 3] = [Routine::Portable, Routine::TensorCore, Routine::Hopper];

/// The routine that was asked for by name, if one was.
static ONLY: OnceLock<String> = OnceLock::new();

/// Whether a routine was asked for.
fn wanted(routine: Routine) -> bool {
    ONLY.get().is_none_or(|only| *only == routine.to_string())
}

fn main() -> ExitCode {
    let mut asked = Vec::new();
    let mut lengths = vec![1024, 2048, 4096, 8192];
    for word in std::env::args().skip(1) {
        match word.split_once('=') {
            Some(("only", routine)) => {
                if !ROUTINES.iter().any(|known| known.to_string() == routine) {
                    eprintln!("expected only=portable, tensor_core or hopper, got {routine}");
                    return ExitCode::from(2);
                }
                ONLY.get_or_init(|| routine.to_owned());
            }
            Some(("tokens", list)) => match list.split(',').map(str::parse).collect() {
                Ok(list) => lengths = list,
                Err(error) => {
                    eprintln!("expected numbers of tokens, got {list}: {error}");
                    return ExitCode::from(2);
                }
            },
            _ => asked.push(word),
        }
    }
    if asked.is_empty() {
        asked = ["check", "bits", "far", "time", "burn"]
            .map(String::from)
            .into();
    }
    let mut failures = 0;
    for what in asked {
        let start = std::time::Instant::now();
        match what.as_str() {
            "check" => failures += correct::check(),
            "small" => failures += correct::small(),
            "bits" => failures += correct::bits(),
            "far" => failures += correct::far(),
            "time" => speed::routines(),
            "burn" => speed::against_burn(&lengths),
            "portable" => speed::portable(),
            other => {
                eprintln!("expected check, small, bits, far, time, portable or burn, got {other}");
                return ExitCode::from(2);
            }
        }
        println!("{what}: {:.1} s", start.elapsed().as_secs_f64());
    }
    match failures {
        0 => ExitCode::SUCCESS,
        failures => {
            println!("{failures} results are wrong");
            ExitCode::FAILURE
        }
    }
}
