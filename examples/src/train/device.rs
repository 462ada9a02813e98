//! By which backend of Burn a run computes.

use burn::backend::{Autodiff, autodiff::checkpoint::strategy::BalancedCheckpointing};
use burn_cp::launch::{LaunchError, Process, RankDevice};

use super::{
    Architecture, Checkpointing, Device, Outcome, Reporter, TrainBackend, TrainConfig, train,
    train_as_process,
};

/// With Burn's default features its GPU backends are fused; so are these.
#[cfg(feature = "wgpu")]
type Wgpu = burn::backend::Wgpu<f32, i32, u32>;
#[cfg(feature = "cuda")]
type Cuda = burn::backend::Cuda<f32, i32>;

/// Something that runs on any backend that can be trained on.
pub(crate) trait DeviceProgram {
    /// What it returns.
    type Output;

    /// Runs it on one backend.
    fn run<B: TrainBackend<Device: RankDevice>>(self) -> Self::Output;
}

/// Runs a program on a device, with a checkpointing strategy.
///
/// # Panics
/// The program was not built for the device.
pub(crate) fn on_device<P: DeviceProgram>(
    device: Device,
    checkpointing: Checkpointing,
    program: P,
) -> P::Output {
    macro_rules! on {
        ($backend:ty) => {
            match checkpointing {
                Checkpointing::None => program.run::<Autodiff<$backend>>(),
                Checkpointing::Balanced => {
                    program.run::<Autodiff<$backend, BalancedCheckpointing>>()
                }
            }
        };
    }
    match device {
        Device::Cpu => on!(burn::backend::Flex),
        #[cfg(feature = "wgpu")]
        Device::Wgpu => on!(Wgpu),
        #[cfg(feature = "cuda")]
        Device::Cuda => on!(Cuda),
        #[allow(unreachable_patterns, reason = "reached in builds without a device")]
        other => panic!("{other:?} is not built in"),
    }
}

/// [`train`] or [`train_as_process`] on the run's device, with the checkpointing strategy that it asks for. `(resume, keep_gradients)`
/// as there.
///
/// # Errors
/// As there. A device that is not there is a failure of the rank that looks for it.
///
/// # Panics
/// The program was not built for the device, which [`TrainConfig::validate`] refuses.
pub fn train_on_device<A: Architecture>(
    config: &TrainConfig<A>,
    process: Option<Process>,
    reporter: Option<&Reporter<TrainConfig<A>>>,
    flags: (bool, bool),
) -> Result<Outcome, LaunchError> {
    let program = Launched {
        config,
        process,
        reporter,
        flags,
    };
    on_device(config.device, config.checkpointing, program)
}

struct Launched<'a, A: Architecture> {
    config: &'a TrainConfig<A>,
    process: Option<Process>,
    reporter: Option<&'a Reporter<TrainConfig<A>>>,
    flags: (bool, bool),
}

impl<A: Architecture> DeviceProgram for Launched<'_, A> {
    type Output = Result<Outcome, LaunchError>;

    fn run<B: TrainBackend<Device: RankDevice>>(self) -> Self::Output {
        let (config, reporter, (resume, keep_gradients)) = (self.config, self.reporter, self.flags);
        match self.process {
            None => train::<B, A>(config, reporter, resume, keep_gradients),
            Some(process) => {
                train_as_process::<B, A>(process, config, reporter, resume, keep_gradients)
            }
        }
    }
}
