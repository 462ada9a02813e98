//! Errors of configuration files that name the path of the field at fault.

use serde::{Deserialize, Deserializer, de::Error};

/// A type whose derived reader is a function of its own (`#[serde(remote = "Self")]`), so that its `Deserialize` can add paths.
pub(crate) trait ReadFields<'de>: Sized {
    /// The derived reader.
    fn read_fields<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error>;
}

struct Fields<T>(T);

impl<'de, T: ReadFields<'de>> Deserialize<'de> for Fields<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::read_fields(deserializer).map(Self)
    }
}

/// Reads a value with every error preceded by the path of its field.
pub(crate) fn read_with_path<'de, T: ReadFields<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    serde_path_to_error::deserialize(deserializer)
        .map(|Fields(value)| value)
        .map_err(|error| match error.path().iter().next() {
            Some(_) => D::Error::custom(format_args!("{}: {}", error.path(), error.inner())),
            None => error.into_inner(),
        })
}
