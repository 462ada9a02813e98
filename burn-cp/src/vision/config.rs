//! When and how the vision tower is sharded.

use serde::{Deserialize, Serialize};

/// When the vision tower is split over ranks, and what a frame is taken to cost.
///
/// Fields that a configuration file leaves out have their defaults; unknown fields are refused. Must be equal on every rank.
///
/// ```
/// use burn_cp::vision::VisionShardingConfig;
///
/// let config = VisionShardingConfig::default().with_min_frames(8);
/// assert_eq!((config.enabled, config.min_tokens, config.min_frames), (true, 2048, 8));
/// assert_eq!(config.alpha(1152), 3456);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct VisionShardingConfig {
    /// Whether the tower is split at all; otherwise every rank computes every frame. Default: true.
    pub enabled: bool,
    /// Tokens (after merging) from which splitting pays. Below it the tower is split only if `min_frames` are there.
    /// Default: 2048.
    pub min_tokens: usize,
    /// Frames from which splitting pays, however few tokens they make. Default: 32.
    pub min_frames: usize,
    /// `alpha` in the cost `p·(p + alpha)` of a frame of `p` patches: the work per patch that does not grow with the frame,
    /// relative to that of attending to one other patch. Default (`None`): three times the tower's width.
    pub cost_alpha: Option<u64>,
}

impl Default for VisionShardingConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            min_tokens: 2048,
            min_frames: 32,
            cost_alpha: None,
        }
    }
}

impl VisionShardingConfig {
    /// Splits whatever there is: both thresholds are 0.
    #[must_use]
    pub fn always() -> Self {
        Self {
            min_tokens: 0,
            min_frames: 0,
            ..Self::default()
        }
    }

    /// Never splits: every rank computes every frame.
    #[must_use]
    pub fn replicated() -> Self {
        Self {
            enabled: false,
            ..Self::default()
        }
    }

    /// The same with another `min_tokens`.
    #[must_use]
    pub fn with_min_tokens(self, min_tokens: usize) -> Self {
        Self { min_tokens, ..self }
    }

    /// The same with another `min_frames`.
    #[must_use]
    pub fn with_min_frames(self, min_frames: usize) -> Self {
        Self { min_frames, ..self }
    }

    /// The same with a cost of `p·(p + alpha)` per frame, whatever the tower's width.
    #[must_use]
    pub fn with_cost_alpha(self, alpha: u64) -> Self {
        Self {
            cost_alpha: Some(alpha),
            ..self
        }
    }

    /// `alpha` for a tower whose hidden states are `hidden_size` wide.
    pub fn alpha(&self, hidden_size: usize) -> u64 {
        self.cost_alpha.unwrap_or_else(|| 3 * hidden_size as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_fields_have_defaults_and_unknown_ones_are_refused() {
        let read = |text| serde_json::from_str::<VisionShardingConfig>(text);
        assert_eq!(read("{}").unwrap(), VisionShardingConfig::default());
        let given = read(r#"{ "min_tokens": 0, "min_frames": 0, "cost_alpha": 5 }"#).unwrap();
        assert_eq!(given, VisionShardingConfig::always().with_cost_alpha(5));
        assert!(
            read(r#"{ "min_frame": 1 }"#)
                .unwrap_err()
                .to_string()
                .contains("min_frame")
        );
        for wrong in [
            r#"{ "enabled": 1 }"#,
            r#"{ "min_tokens": -1 }"#,
            r#"{ "min_frames": true }"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        let text = serde_json::to_string(&given).unwrap();
        assert_eq!(read(&text).unwrap(), given);
    }

    #[test]
    fn alpha_follows_the_towers_width_unless_given() {
        assert_eq!(VisionShardingConfig::default().alpha(1152), 3456);
        assert_eq!(
            VisionShardingConfig::default()
                .with_cost_alpha(0)
                .alpha(1152),
            0
        );
    }
}
