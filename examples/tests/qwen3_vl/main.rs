//! Qwen3-VL against the reference: what `tests/fixtures/make_qwen3_vl.py` recorded, through the real loader and processor.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../device/mod.rs"]
mod device;
mod fixture;
mod generation;
mod loading;
mod parity;
mod processing;
