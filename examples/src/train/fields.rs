//! Checks that configurations of several programs share.

use burn_cp::mesh::{DeviceMesh, MeshError};

use super::Device;

/// A field whose value is out of range. The field's name is that of the flag and of the configuration file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field}: expected {expected}, got {got}")]
pub struct FieldError {
    /// The field.
    pub field: &'static str,
    /// What it may be.
    pub expected: String,
    /// What it is.
    pub got: String,
}

impl FieldError {
    pub(crate) fn new(
        field: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Self {
        Self {
            field,
            expected: expected.into(),
            got: got.to_string(),
        }
    }
}

/// The mesh `dp x (ranks / dp)`.
pub(crate) fn mesh<E>(ranks: usize, dp: usize) -> Result<DeviceMesh, E>
where
    E: From<FieldError> + From<MeshError>,
{
    if ranks == 0 {
        return Err(FieldError::new("ranks", "at least 1", 0).into());
    }
    if dp == 0 || !ranks.is_multiple_of(dp) {
        let expected = format!("a divisor of ranks = {ranks}");
        return Err(FieldError::new("dp", expected, dp).into());
    }
    Ok(DeviceMesh::new([("dp", dp), ("cp", ranks / dp)])?)
}

/// A device that the program was built for.
pub(crate) fn device(device: Device) -> Result<(), FieldError> {
    let built = Device::built();
    if built.contains(&device) {
        return Ok(());
    }
    let name = |device: Device| format!("{device:?}").to_lowercase();
    let (feature, names) = (name(device), built.into_iter().map(name));
    let names = names.collect::<Vec<_>>().join(", ");
    let expected = format!("{names}, or a build with the feature {feature}");
    Err(FieldError::new("device", expected, feature))
}

/// As many as can be dealt out to `dp` groups.
pub(crate) fn per_step(field: &'static str, value: usize, dp: usize) -> Result<(), FieldError> {
    if value == 0 || !value.is_multiple_of(dp) {
        return Err(FieldError::new(
            field,
            format!("a multiple of dp = {dp}"),
            value,
        ));
    }
    Ok(())
}

pub(crate) fn at_least_one(fields: &[(&'static str, u64)]) -> Result<(), FieldError> {
    match fields.iter().find(|(_, value)| *value == 0) {
        Some((field, value)) => Err(FieldError::new(field, "at least 1", value)),
        None => Ok(()),
    }
}

/// Positive numbers, and a weight decay that may be 0.
pub(crate) fn optimizer(
    positive: &[(&'static str, f64)],
    weight_decay: f64,
) -> Result<(), FieldError> {
    let wrong = |value: f64| !(value.is_finite() && value > 0.0);
    if let Some((field, value)) = positive.iter().find(|(_, value)| wrong(*value)) {
        return Err(FieldError::new(field, "a positive number", value));
    }
    if !(weight_decay.is_finite() && weight_decay >= 0.0) {
        return Err(FieldError::new(
            "weight_decay",
            "a number of at least 0",
            weight_decay,
        ));
    }
    Ok(())
}
