//! Benchmarks of burn-cp; see `benches/`, and `results/` for what they gave where.

use std::error::Error;

use burn_cp::{
    comm::RankContext,
    launch::{self, LaunchError, Place, Process, ProcessOptions, TensorTransport},
    layout::Documents,
};
use clap::ValueEnum;

/// Where ranks compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Device {
    /// Flex.
    #[default]
    Cpu,
    /// CUDA, fused.
    #[cfg(feature = "cuda")]
    Cuda,
}

/// How ranks are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Launch {
    /// As threads of this process.
    #[default]
    Threads,
    /// As processes that torchrun, mpirun or srun have started, this one among them.
    Env,
}

/// Runs every rank: `num_ranks` threads, or this process's one of a world that the environment describes.
///
/// # Errors
/// The first failure of the world, or an environment that describes no rank.
pub fn launched<F>(
    how: Launch,
    device: Device,
    num_ranks: usize,
    rank: F,
) -> Result<(), Box<dyn Error>>
where
    F: Fn(RankContext) -> Result<(), Box<dyn Error + Send + Sync>> + Send + Sync,
{
    match how {
        Launch::Threads => {
            launch::threads(num_ranks, rank)?;
        }
        Launch::Env => {
            let place = Place::from_env().map_err(LaunchError::from)?;
            let options = ProcessOptions {
                tensors: match device {
                    Device::Cpu => TensorTransport::Mpi,
                    #[cfg(feature = "cuda")]
                    Device::Cuda => TensorTransport::None,
                },
                ..ProcessOptions::default()
            };
            Process::join(&place, options)?.run(rank)?;
        }
    }
    Ok(())
}

/// `num_documents` documents whose lengths follow a fixed pseudo-random sequence between 1 and `2 · mean`, packed into one row.
///
/// # Panics
/// Never: the row is as long as the documents.
pub fn packed_documents(num_documents: usize, mean: usize) -> Documents {
    let mut state: u64 = 0x9E37_79B9_7F4A_7C15;
    let lengths: Vec<usize> = (0..num_documents)
        .map(|_| {
            // xorshift64 (Marsaglia, 2003): the same documents on every machine.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            1 + usize::try_from(state % (2 * mean as u64)).unwrap_or(mean)
        })
        .collect();
    let seq_len = lengths.iter().sum();
    Documents::from_lengths(&[lengths], seq_len).expect("documents that fill their row")
}

/// Lengths of documents that fill `num_tokens` tokens, log-normal around `median` with sigma 1.2, the same on every machine.
pub fn log_normal_lengths(num_tokens: usize, median: usize, seed: u64) -> Vec<usize> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        // xorshift64* (Vigna, 2016).
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1u64 << 53) as f64
    };
    let (mut lengths, mut left) = (Vec::new(), num_tokens);
    while left > 0 {
        // Box and Muller, 1958.
        let radius = (-2.0 * uniform().max(1e-300).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * uniform()).cos();
        let length = (median as f64 * (1.2 * normal).exp()).round().max(1.0);
        let length = if length < left as f64 { length as usize } else { left };
        lengths.push(length);
        left -= length;
    }
    lengths
}
