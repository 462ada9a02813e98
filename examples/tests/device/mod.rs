//! Where models are compared with what was recorded, and how closely: CPUs, or the devices of the feature `cuda` or `wgpu`.

use std::{
    env,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use burn_cp_examples::train::{self, product_rounding};
use serde::Deserialize;

#[cfg(feature = "cuda")]
pub(crate) type Plain = burn::backend::Cuda<f32, i32>;
#[cfg(all(feature = "wgpu", not(feature = "cuda")))]
pub(crate) type Plain = burn::backend::Wgpu<f32, i32>;
#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
pub(crate) type Plain = burn::backend::Flex;

const DEVICE: train::Device = if cfg!(feature = "cuda") {
    train::Device::Cuda
} else if cfg!(feature = "wgpu") {
    train::Device::Wgpu
} else {
    train::Device::Cpu
};

/// What was recorded of a model: in the repository, or in the folder that `BURN_CP_FIXTURES` names, where that is not at hand.
pub(crate) fn fixtures(model: &str) -> PathBuf {
    let folder = env::var_os("BURN_CP_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"),
        PathBuf::from,
    );
    folder.join(model)
}

/// What the device's products may be off by, whose factors are both rounded.
fn rounding() -> f64 {
    static ROUNDING: OnceLock<f64> = OnceLock::new();
    2.0 * *ROUNDING.get_or_init(|| product_rounding(DEVICE))
}

/// Fails where values that the same device computed are apart by more, relative to the tensor's largest value, than 1e-4 or what one of its
/// products may be off by.
pub(crate) fn close(what: &str, got: &[f64], want: &[f64]) {
    within(rounding().max(1e-4), what, got, want);
}

/// The most that an element of a model's results and gradients moves, relative to the largest of its tensor, where the reference rounds the
/// factors of its products to 10 bits behind the first (`tests/fixtures/rounding.py`).
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(crate) struct Rounding {
    pub(crate) results: f64,
    pub(crate) gradients: f64,
}

/// Fails where values are apart from the reference, relative to the tensor's largest value, by more than 1e-4 or, on a device whose
/// products round, than twice what such rounding moves them by in the reference.
pub(crate) fn close_to_reference(moved: f64, what: &str, got: &[f64], want: &[f64]) {
    // What `moved` was computed with.
    let recorded = 2.0 / f64::from(1 << 11);
    within(
        (2.0 * moved * rounding() / recorded).max(1e-4),
        what,
        got,
        want,
    );
}

/// Hidden states, and gradients by name.
type Results<'a> = (&'a [f64], &'a [(String, Vec<f64>)]);

/// Fails where what several ranks computed is not what one did.
pub(crate) fn close_to_one_rank(
    what: &dyn Fn(&str) -> String,
    (hidden, gradients): Results<'_>,
    (of_one, gradients_of_one): Results<'_>,
) {
    close(&what("hidden states, one rank's"), hidden, of_one);
    assert_eq!(gradients.len(), gradients_of_one.len());
    for ((path, values), (_, want)) in gradients.iter().zip(gradients_of_one) {
        close(&what(&format!("{path}, one rank's")), values, want);
    }
}

fn within(tolerance: f64, what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    let largest = want
        .iter()
        .fold(0.0, |largest: f64, value| largest.max(value.abs()));
    let difference = got.iter().zip(want).fold(0.0, |worst: f64, (got, want)| {
        let difference = (got - want).abs();
        if worst.is_nan() || difference.is_nan() {
            f64::NAN
        } else {
            worst.max(difference)
        }
    });
    assert!(
        difference <= tolerance * largest,
        "{what}: {difference:.2e} apart, values up to {largest:.2e}, expected {tolerance:.1e} of that at most"
    );
}
