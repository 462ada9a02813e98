//! Which device a rank takes.

use crate::comm::RankContext;

/// Why a rank has no device.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A library that CUDA needs is not there.
    #[error(
        "{library} cannot be loaded: looked for {names} where the system's loader looks (LD_LIBRARY_PATH and its cache); {fix}"
    )]
    Missing {
        /// What it is.
        library: &'static str,
        /// File names that were looked for.
        names: &'static str,
        /// How to get it.
        fix: &'static str,
    },
    /// The driver is there, and refuses.
    #[error("CUDA's driver cannot be used: {reason}")]
    Driver {
        /// In the driver's words.
        reason: String,
    },
    /// More processes on this host than GPUs.
    #[error(
        "rank {rank}, the {nth} of this host's processes, has no GPU: expected at least {expected} GPUs, got {got}"
    )]
    TooFew {
        /// Global rank.
        rank: usize,
        /// Its place among the host's processes, from 1.
        nth: usize,
        /// GPUs that it takes.
        expected: usize,
        /// GPUs that the driver shows; `CUDA_VISIBLE_DEVICES` may hide some.
        got: usize,
    },
}

/// Devices of a backend, dealt out to ranks.
///
/// Implemented for the devices of the backends that this build has.
pub trait RankDevice: Sized {
    /// The device of a rank: by its place on its host where there are several. Ranks that are threads share devices in turn where
    /// there are fewer; processes may not. wgpu: always the default device.
    ///
    /// Need not be called by every rank.
    ///
    /// # Errors
    /// A driver is not there, or has fewer devices than this host has processes.
    fn of_rank(rank: &RankContext) -> Result<Self, DeviceError>;
}
