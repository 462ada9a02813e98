//! What can be wrong with the configuration of a model.

use std::fmt;

/// Every field of a configuration that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("model configuration: {}", list(.problems))]
pub struct ConfigError {
    /// At least one.
    pub problems: Vec<ConfigProblem>,
}

/// A field that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigProblem {
    /// Path of the field, e.g. `text_config.head_dim`.
    pub path: &'static str,
    /// What would be legal.
    pub expected: String,
    /// The value found.
    pub got: String,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: expected {}, got {}",
            self.path, self.expected, self.got
        )
    }
}

fn list(problems: &[ConfigProblem]) -> String {
    problems
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}

/// What was found wrong so far.
#[derive(Default)]
pub(super) struct Problems(Vec<ConfigProblem>);

impl Problems {
    pub(super) fn require(
        &mut self,
        legal: bool,
        path: &'static str,
        expected: impl Into<String>,
        got: impl fmt::Debug,
    ) {
        if !legal {
            self.0.push(ConfigProblem {
                path,
                expected: expected.into(),
                got: format!("{got:?}"),
            });
        }
    }

    /// Remainders by a size of 0 are left to the check of that size.
    pub(super) fn divides(&mut self, path: &'static str, value: usize, by: usize, name: &str) {
        let expected = format!("a multiple of {name} ({by})");
        self.require(by == 0 || value.is_multiple_of(by), path, expected, value);
    }

    pub(super) fn positive(&mut self, sizes: &[(&'static str, usize)]) {
        for &(path, size) in sizes {
            self.require(size > 0, path, "at least 1", size);
        }
    }

    pub(super) fn positive_number(&mut self, path: &'static str, value: f64) {
        self.require(
            value.is_finite() && value > 0.0,
            path,
            "a positive number",
            value,
        );
    }

    /// All of it as an error, if there is any.
    pub(super) fn into_result(self) -> Result<(), ConfigError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(ConfigError { problems: self.0 })
        }
    }
}
