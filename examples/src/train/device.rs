//! By which backend of Burn a run computes.

use burn::backend::{Autodiff, autodiff::checkpoint::strategy::BalancedCheckpointing};
use burn_cp::launch::LaunchError;

use super::{Checkpointing, Device, Outcome, Reporter, TrainConfig, train};

/// With Burn's default features its GPU backends are fused; so are these.
#[cfg(feature = "wgpu")]
type Wgpu = burn::backend::Wgpu<f32, i32, u32>;
#[cfg(feature = "cuda")]
type Cuda = burn::backend::Cuda<f32, i32>;

/// [`train`] on the run's device, with the checkpointing strategy that it asks for.
///
/// # Errors
/// As [`train`]. A device that is not there is a panic of the rank that looks for it.
///
/// # Panics
/// The program was not built for the device, which [`TrainConfig::validate`] refuses.
pub fn train_on_device(
    config: &TrainConfig,
    reporter: Option<&Reporter>,
    resume: bool,
    keep_gradients: bool,
) -> Result<Outcome, LaunchError> {
    macro_rules! on {
        ($backend:ty) => {
            match config.checkpointing {
                Checkpointing::None => {
                    train::<Autodiff<$backend>>(config, reporter, resume, keep_gradients)
                }
                Checkpointing::Balanced => train::<Autodiff<$backend, BalancedCheckpointing>>(
                    config,
                    reporter,
                    resume,
                    keep_gradients,
                ),
            }
        };
    }
    match config.device {
        Device::Cpu => on!(burn::backend::Flex),
        #[cfg(feature = "wgpu")]
        Device::Wgpu => on!(Wgpu),
        #[cfg(feature = "cuda")]
        Device::Cuda => on!(Cuda),
        #[allow(unreachable_patterns, reason = "reached in builds without a device")]
        other => panic!("{other:?} is not built in"),
    }
}
