//! MiMo-V2-Flash against the reference: what `tests/fixtures/make_mimo_v2_flash.py` recorded, through the real loader.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../device/mod.rs"]
mod device;
mod fixture;
mod loading;
mod parity;
mod streams;
