//! `finetune-qwen3-vl`: a published Qwen3-VL trained further on conversations with pictures, over several ranks.
//!
//! Holds the run's configuration ([`FinetuneConfig`]), the conversations and their packing ([`Corpus`]), a loss that never holds the
//! logits of all tokens ([`linear_cross_entropy`]), the loop of one rank, and the program behind its flags ([`run`]). Model
//! directories are [`hf`](crate::hf)'s; report, checkpoints and devices are [`train`](crate::train)'s.

mod checkpoints;
mod config;
mod corpus;
mod loss;
mod precision;
mod run;
mod worker;

pub use config::{Dtype, FinetuneConfig, FinetuneConfigError, Freeze, LongDocuments};
pub use corpus::{Corpus, CorpusError, LineError};
pub use loss::{ChunkedLoss, linear_cross_entropy};
pub use run::{FinetuneArgs, FinetuneError, run};
