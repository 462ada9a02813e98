//! Which GPU a rank takes.

use cubecl::cuda::CudaDevice;

use crate::{
    comm::RankContext,
    launch::{DeviceError, RankDevice},
};

/// Number of GPUs that the driver shows to this process.
///
/// # Errors
/// The driver or nvrtc, which compiles kernels, is not there, or there is no GPU.
pub(crate) fn num_devices() -> Result<usize, DeviceError> {
    // SAFETY: both only look for a library.
    let (driver, compiler) = unsafe {
        (
            cudarc::driver::sys::is_culib_present(),
            cudarc::nvrtc::sys::is_culib_present(),
        )
    };
    if !driver {
        return Err(DeviceError::Missing {
            library: "the CUDA driver",
            names: "libcuda.so, libcuda.so.1",
            fix: "install NVIDIA's driver",
        });
    }
    if !compiler {
        return Err(DeviceError::Missing {
            library: "nvrtc, CUDA's compiler",
            names: "libnvrtc.so, libnvrtc.so.12, libnvrtc.so.13",
            fix: "install the CUDA toolkit's runtime compiler (cuda-nvrtc)",
        });
    }
    let counted =
        cudarc::driver::result::init().and_then(|()| cudarc::driver::result::device::get_count());
    let count = counted.map_err(|error| DeviceError::Driver {
        reason: error.to_string(),
    })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl RankDevice for CudaDevice {
    fn of_rank(rank: &RankContext) -> Result<Self, DeviceError> {
        let count = num_devices()?;
        let local = rank.local_rank();
        let shared = rank.are_threads() && count > 0;
        if local >= count && !shared {
            return Err(DeviceError::TooFew {
                rank: rank.rank(),
                nth: local + 1,
                expected: local + 1,
                got: count,
            });
        }
        if local >= count {
            tracing::info!(
                rank = rank.rank(),
                gpu = local % count,
                "shares a GPU with another rank"
            );
        }
        Ok(Self::new(local % count))
    }
}
