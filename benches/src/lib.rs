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
    /// CUDA.
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

/// Document lengths that fill `num_tokens` tokens, log-normal: of the given median, with a standard deviation of the logarithm
/// of 1.2. The last document is cut off where the tokens end. A seed gives the same lengths every time.
pub fn log_normal_lengths(seed: u64, median: f64, num_tokens: usize) -> Vec<usize> {
    let mut state = seed;
    let mut uniform = || {
        // SplitMix64 (Steele, Lea and Flood, 2014).
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    };
    let mut lengths = Vec::new();
    let mut left = num_tokens;
    while left > 0 {
        // Box and Muller, 1958.
        let normal =
            (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        let len = ((median * (1.2 * normal).exp()) as usize).clamp(1, left);
        lengths.push(len);
        left -= len;
    }
    lengths
}
