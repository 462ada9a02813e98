//! Options of an attention call.

use serde::{Deserialize, Serialize};

use super::{AttentionError, Dropout, Routine};

/// What an attention call does beyond its segments. Built with [`AttentionOptions::new`] and the
/// `with_` methods, so that further options do not break callers. Attention sinks, which are a
/// tensor, are part of the input instead.
///
/// # Example
///
/// ```
/// use burn_cp_kernels::AttentionOptions;
///
/// let options = AttentionOptions::new().with_scale(0.125).with_softcap(30.0);
/// assert_eq!((options.scale, options.softcap), (Some(0.125), Some(30.0)));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor on `q · k` before the softmax; `None` means `1 / sqrt(head_dim)`. Must be finite.
    pub scale: Option<f64>,
    /// Bound of the scores: they become `softcap · tanh(score / softcap)` after scaling. Must be
    /// between 1e-30 and 1e30.
    pub softcap: Option<f64>,
    /// Dropout of the weights after the softmax.
    pub dropout: Option<Dropout>,
    /// The routine to take; `None` leaves it to the backend.
    pub routine: Option<Routine>,
    /// Multiprocessors that the kernels leave free for others that run at the same time, as those of collectives do. Heeded by the forward
    /// pass of the routine `hopper`, whose blocks have a list of work each, so that one which begins late ends late; changes no result.
    pub sm_margin: usize,
}

impl AttentionOptions {
    /// The defaults: scale `1 / sqrt(head_dim)`, nothing else.
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

    /// Sets the bound of the scores.
    #[must_use]
    pub fn with_softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Sets dropout.
    #[must_use]
    pub fn with_dropout(mut self, dropout: Dropout) -> Self {
        self.dropout = Some(dropout);
        self
    }

    /// Forces a routine. A call that it cannot serve is refused.
    #[must_use]
    pub fn with_routine(mut self, routine: Routine) -> Self {
        self.routine = Some(routine);
        self
    }

    /// Leaves multiprocessors free.
    #[must_use]
    pub fn with_sm_margin(mut self, sm_margin: usize) -> Self {
        self.sm_margin = sm_margin;
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
    /// [`AttentionError::Option`] if the scale is not finite, the softcap not between 1e-30 and 1e30,
    /// or the dropout's probability not in its range.
    pub fn check(&self) -> Result<(), AttentionError> {
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            return Err(AttentionError::Option {
                what: "scale",
                expected: "a finite number",
                got: scale.to_string(),
            });
        }
        // Kernels compute with it in f32.
        let legal = 1e-30..=1e30;
        if let Some(softcap) = self.softcap.filter(|softcap| !legal.contains(softcap)) {
            return Err(AttentionError::Option {
                what: "softcap",
                expected: "a number between 1e-30 and 1e30",
                got: softcap.to_string(),
            });
        }
        self.dropout.map_or(Ok(()), |dropout| dropout.check())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_refused() {
        let options = AttentionOptions::new;
        for softcap in [0.0, -1.0, 1e-40, 1e40, f64::NAN, f64::INFINITY] {
            let error = options().with_softcap(softcap).check().unwrap_err();
            assert!(matches!(
                error,
                AttentionError::Option {
                    what: "softcap",
                    ..
                }
            ));
        }
        let error = options()
            .with_dropout(Dropout::new(1.0, 0))
            .check()
            .unwrap_err();
        assert!(error.to_string().contains("dropout p"));
        assert!(options().with_scale(f64::INFINITY).check().is_err());
        let all = options().with_scale(0.5).with_softcap(20.0);
        assert!(all.with_dropout(Dropout::new(0.5, 1)).check().is_ok());
    }
}
