//! By which backend of Burn a run computes.

use burn::backend::{Autodiff, autodiff::checkpoint::strategy::BalancedCheckpointing};
use burn_cp::launch::{LaunchError, Process, RankDevice};

use super::{
    Checkpointing, Device, Outcome, Reporter, TrainBackend, TrainConfig, train, train_as_process,
};

/// With Burn's default features its GPU backends are fused; so are these.
#[cfg(feature = "wgpu")]
type Wgpu = burn::backend::Wgpu<f32, i32, u32>;
#[cfg(feature = "cuda")]
type Cuda = burn::backend::Cuda<f32, i32>;

/// [`train`] or [`train_as_process`] on the run's device, with the checkpointing strategy that it asks for. `(resume, keep_gradients)`
/// as there.
///
/// # Errors
/// As there. A device that is not there is a failure of the rank that looks for it.
///
/// # Panics
/// The program was not built for the device, which [`TrainConfig::validate`] refuses.
pub fn train_on_device(
    config: &TrainConfig,
    process: Option<Process>,
    reporter: Option<&Reporter>,
    flags: (bool, bool),
) -> Result<Outcome, LaunchError> {
    macro_rules! on {
        ($backend:ty) => {
            match config.checkpointing {
                Checkpointing::None => {
                    launched::<Autodiff<$backend>>(config, process, reporter, flags)
                }
                Checkpointing::Balanced => launched::<Autodiff<$backend, BalancedCheckpointing>>(
                    config, process, reporter, flags,
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

fn launched<B: TrainBackend<Device: RankDevice>>(
    config: &TrainConfig,
    process: Option<Process>,
    reporter: Option<&Reporter>,
    (resume, keep_gradients): (bool, bool),
) -> Result<Outcome, LaunchError> {
    match process {
        None => train::<B>(config, reporter, resume, keep_gradients),
        Some(process) => train_as_process::<B>(process, config, reporter, resume, keep_gradients),
    }
}
