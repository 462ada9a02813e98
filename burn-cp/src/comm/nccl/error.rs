//! What NCCL and the driver say.

use cudarc::{driver::DriverError, nccl::sys::ncclResult_t};

/// Why NCCL did not do what it was asked for.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum NcclError {
    /// A library is not there.
    #[error(
        "{library} cannot be loaded: looked for {names} where the system's loader looks (LD_LIBRARY_PATH and its cache); {fix}"
    )]
    Missing {
        library: &'static str,
        names: &'static str,
        fix: &'static str,
    },
    /// NCCL refuses.
    #[error("NCCL: {what} failed: {code:?}{detail}")]
    Call {
        what: &'static str,
        code: ncclResult_t,
        /// NCCL's own last words, if any.
        detail: String,
    },
    /// The driver refuses.
    #[error("CUDA: {what} failed: {error}")]
    Driver {
        what: &'static str,
        error: DriverError,
    },
    /// The device's allocator has no such buffer.
    #[error("a buffer cannot be used: {0}")]
    Buffer(String),
    /// The communicator was aborted earlier.
    #[error("the communicator has been aborted")]
    Aborted,
    /// The communicator was not ready by the deadline.
    #[error("NCCL: {what} was not done after {waited:?}")]
    Slow {
        what: &'static str,
        waited: std::time::Duration,
    },
}

/// Refuses to go on without the driver and NCCL, which are loaded at run time.
pub(super) fn check_libraries() -> Result<(), NcclError> {
    // SAFETY: both only look for a library.
    let (driver, nccl) = unsafe {
        (
            cudarc::driver::sys::is_culib_present(),
            cudarc::nccl::sys::is_culib_present(),
        )
    };
    if !driver {
        return Err(NcclError::Missing {
            library: "the CUDA driver",
            names: "libcuda.so, libcuda.so.1",
            fix: "install NVIDIA's driver",
        });
    }
    if !nccl {
        return Err(NcclError::Missing {
            library: "NCCL",
            names: "libnccl.so, libnccl.so.2",
            fix: "install it (Debian, Ubuntu: libnccl2 from NVIDIA's repository; or the wheel nvidia-nccl-cu13 and its folder \
                  in LD_LIBRARY_PATH)",
        });
    }
    Ok(())
}

pub(super) fn driver<T>(
    what: &'static str,
    result: Result<T, DriverError>,
) -> Result<T, NcclError> {
    result.map_err(|error| NcclError::Driver { what, error })
}
