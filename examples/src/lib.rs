//! Models and programs that train over several ranks with `burn-cp`.
//!
//! [`models`] holds real multimodal architectures, [`data`] the documents that the programs read, [`train`] the training run of
//! `train-vlm`, [`plan`] the command that compares layouts and exchanges. The programs themselves are in `src/bin`.

pub mod data;
pub mod models;
pub mod plan;
pub mod train;
