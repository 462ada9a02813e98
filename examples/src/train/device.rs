//! By which backend of Burn a run computes.

use burn::{
    backend::{Autodiff, autodiff::checkpoint::strategy::BalancedCheckpointing},
    tensor::{Int, Tensor, TensorData},
};
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

/// How far a device's products of `f32` matrices round their inputs: the largest relative error of a matrix times the identity. 0 on
/// devices that keep all bits; about 2^-11 where products take 10 of 23 bits of the fraction (`tf32`), as CubeCL's are
/// suspected to on tensor cores.
///
/// # Panics
/// The program was not built for the device, or the device is not there.
pub fn product_rounding(device: Device) -> f64 {
    on_device(device, Checkpointing::None, ProductRounding)
}

struct ProductRounding;

impl DeviceProgram for ProductRounding {
    type Output = f64;

    fn run<B: TrainBackend<Device: RankDevice>>(self) -> f64 {
        const N: usize = 128;
        let device = B::Device::default();
        // Fractions of all 23 bits.
        let values: Vec<f32> = (0..N * N)
            .map(|n| 1.0 + (n * 2_654_435_761 % (1 << 23)) as f32 / (1 << 23) as f32)
            .collect();
        let x = Tensor::<B, 2>::from_data(TensorData::new(values.clone(), [N, N]), &device);
        let rows = Tensor::<B, 1, Int>::arange(0..N as i64, &device).reshape([N, 1]);
        let identity = rows.clone().equal(rows.transpose()).float();
        let got = x.matmul(identity).into_data();
        got.iter::<f32>()
            .zip(values)
            .map(|(got, want)| f64::from((got - want).abs() / want))
            .fold(0.0, f64::max)
    }
}
