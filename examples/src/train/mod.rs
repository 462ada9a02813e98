//! The training run of `train-vlm`: a small Qwen3-VL learns to read handwritten digits over several ranks.
//!
//! What is trained (documents, packs, their order, the initial weights) follows from the seed, the packed length and the packs
//! per step; how it is computed (ranks, data parallelism, layout, exchange, vision) changes nothing but rounding.
//! [`run`] is the whole program behind its flags; [`train`] is one world on one backend.

mod batches;
mod checkpoint;
mod config;
#[cfg(feature = "flex")]
mod device;
mod evaluate;
#[cfg(feature = "flex")]
pub mod grid;
mod outcome;
mod report;
#[cfg(feature = "flex")]
mod run;
mod schedule;
mod worker;

pub use batches::to_batch;
pub use checkpoint::{CheckpointError, TrainState};
pub use config::{
    Checkpointing, ConfigFileError, Delivery, Device, Exchange, Layout, ModelSize, TrainConfig,
    TrainConfigError, Vision, load_config,
};
#[cfg(feature = "flex")]
pub use device::train_on_device;
pub use evaluate::{Score, evaluate};
pub use outcome::{Outcome, max_rel_diff, max_rel_grad_diff};
pub use report::{ReportError, Reporter, Summary};
#[cfg(feature = "flex")]
pub use run::{Launch, RunError, TrainArgs, run};
pub use worker::{TrainBackend, WorkerError, train, train_as_process};
