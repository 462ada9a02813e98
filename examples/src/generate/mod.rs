//! `generate-qwen3-vl`: answers to questions about pictures, on one device.
//!
//! Holds decoding with keys and values kept ([`Generator`]), the choice of the next token ([`Sampling`]), and the program behind its
//! flags ([`run`]).

mod cache;
mod choose;
mod run;

pub use cache::Generator;
pub use choose::{Chooser, Sampling, SamplingError};
pub use run::{GenerateArgs, GenerateError, run};
