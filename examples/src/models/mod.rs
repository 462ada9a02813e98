//! Models for the programs of this crate, written against `burn_cp::nn::SequenceModel`.
//!
//! A model here computes on one rank's shard and says nothing about ranks: attention and media go through the step.

pub mod gated_linear_attention;
pub mod qwen3_vl;
