//! Models and programs that train over several ranks with `burn-cp`.
//!
//! [`models`] holds real multimodal architectures, [`hf`] published model directories, [`classifier`] a stock text classifier, [`data`] the
//! documents that the programs read, [`train`] the training run of `train-vlm` and `train-mimo`, `learner` that of `train-vlm` in
//! burn-train's loop (feature `train`), [`finetune`] and [`generate`] the programs for published models, [`plan`] the command that compares
//! layouts and exchanges. The programs themselves are in `src/bin`.

#[cfg(feature = "flex")]
pub mod classifier;
pub mod data;
#[cfg(feature = "flex")]
pub mod finetune;
#[cfg(feature = "flex")]
pub mod generate;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub mod hf;
#[cfg(feature = "train")]
pub mod learner;
pub mod models;
pub mod plan;
pub mod train;
