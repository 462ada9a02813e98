//! Options of an attention call.

use serde::{Deserialize, Serialize};

use super::AttentionError;

/// What an attention call does beyond its segments. Built with [`AttentionOptions::new`] and the
/// `with_` methods, so that further options do not break callers.
///
/// # Example
///
/// ```
/// use burn_cp_kernels::AttentionOptions;
///
/// let options = AttentionOptions::new().with_scale(0.125);
/// assert_eq!(options.scale, Some(0.125));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor on `q · k` before the softmax; `None` means `1 / sqrt(head_dim)`. Must be finite.
    pub scale: Option<f64>,
}

impl AttentionOptions {
    /// The defaults: scale `1 / sqrt(head_dim)`.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the factor on `q · k`.
    #[must_use]
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// The factor on `q · k` for queries of this `head_dim`.
    #[must_use]
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.scale
            .unwrap_or_else(|| 1.0 / (head_dim.max(1) as f64).sqrt())
    }

    /// Checks the values.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Option`] if the scale is not finite.
    pub fn check(&self) -> Result<(), AttentionError> {
        match self.scale {
            Some(scale) if !scale.is_finite() => Err(AttentionError::Option {
                what: "scale",
                expected: "a finite number",
                got: scale.to_string(),
            }),
            _ => Ok(()),
        }
    }
}
