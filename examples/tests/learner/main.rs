//! Trainings that burn-train drives over several ranks: the program `learner-vlm`, and the strategy with a small model that can be
//! told to fail.

#![allow(clippy::unwrap_used, reason = "nothing here but tests")]

#[path = "../program/mod.rs"]
mod program;
mod small;
mod strategy;
mod vlm;

use std::{fs, path::Path};

/// The losses that burn-train has logged of the first epochs, step by step. Split: "train" or "valid".
fn losses(out: &Path, split: &str, epochs: impl IntoIterator<Item = usize>) -> Vec<f64> {
    let of_epoch = |epoch: usize| {
        let path = out.join(format!("{split}/epoch-{epoch}/Loss.log"));
        let log = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let value = |line: &str| line.split(',').next().unwrap().parse::<f64>().unwrap();
        log.lines().map(value).collect::<Vec<_>>()
    };
    epochs.into_iter().flat_map(of_epoch).collect()
}

/// `‖got - want‖ / ‖want‖`.
fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| {
        values.map(|value| value * value).sum::<f64>().sqrt()
    };
    let error = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
    error / norm(&mut want.iter().copied())
}
