//! The training run of `train-vlm` and `train-mimo`: a small multimodal model learns to read handwritten digits over several ranks.
//!
//! What is trained (documents, packs, their order, the initial weights) follows from the seed, the packed length and the packs
//! per step; how it is computed (ranks, data parallelism, layout, exchange, vision) changes nothing but rounding.
//! [`run`] is the whole program behind its flags; [`train`] is one world on one backend. What is trained is an [`Architecture`]: the
//! loop, its flags, reports, checkpoints and comparison know no model.

mod architecture;
mod batches;
mod checkpoint;
mod choices;
mod config;
#[cfg(feature = "flex")]
mod device;
mod evaluate;
pub(crate) mod fields;
#[cfg(feature = "flex")]
pub mod grid;
mod outcome;
mod report;
#[cfg(feature = "flex")]
mod run;
mod schedule;
mod state;
mod worker;

pub use architecture::{Architecture, TrainBackend, TrainModel};
pub use batches::{to_batch, to_batch_in_order};
pub use checkpoint::CheckpointError;
pub(crate) use checkpoint::Checkpoints;
pub use choices::{Checkpointing, Delivery, Device, Exchange, Layout, ModelSize, Vision};
pub use config::{ConfigFileError, TrainConfig, TrainConfigError, load_config};
#[cfg(feature = "flex")]
pub(crate) use device::{DeviceProgram, on_device};
#[cfg(feature = "flex")]
pub use device::{product_rounding, train_on_device};
pub use evaluate::{Score, evaluate};
pub use fields::FieldError;
pub use outcome::{Outcome, max_rel_diff, max_rel_grad_diff};
pub(crate) use report::checkpoints_in;
pub use report::{ReportError, Reporter, Summary};
#[cfg(feature = "flex")]
pub use run::{Launch, RunError, TrainArgs, run};
#[cfg(feature = "flex")]
pub(crate) use run::{catch_interrupts, process_options};
pub(crate) use schedule::warmup_cosine;
pub use state::{RunConfig, TrainState};
pub use worker::{WorkerError, train, train_as_process};
pub(crate) use worker::{hash_of, named};
