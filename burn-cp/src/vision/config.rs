//! When and how the vision tower is sharded.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::field_path::{ReadFields, read_with_path};

/// Which ranks are given which features, where the tower is split over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VisionDelivery {
    /// Every rank is given all of them, in the order of the frames: for models that need more than their shard's.
    #[default]
    Gathered,
    /// Every rank is given those of its own tokens, in the order of its tokens: what a rank receives and holds shrinks with
    /// the number of ranks.
    ToConsumers,
}

/// When the vision tower is split over ranks, and what a frame is taken to cost.
///
/// Fields that a configuration file leaves out have their defaults. Unknown fields and wrong values are refused with their
/// path, what was expected and what was there. Must be equal on every rank.
///
/// ```
/// use burn_cp::vision::VisionShardingConfig;
///
/// let config = VisionShardingConfig::default().with_min_frames(8);
/// assert_eq!((config.enabled, config.min_tokens, config.min_frames), (true, 2048, 8));
/// assert_eq!(config.min_local_patch_rows, 96);
/// assert_eq!(config.alpha(1152), 3456);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
// The derived functions become functions of the type, which the traits below call.
#[serde(remote = "Self", default, deny_unknown_fields)]
#[non_exhaustive]
pub struct VisionShardingConfig {
    /// Whether the tower is split at all; otherwise every rank computes every frame. Default: true.
    pub enabled: bool,
    /// Tokens (after merging) from which splitting pays. Below it the tower is split only if `min_frames` are there.
    /// Default: 2048.
    pub min_tokens: usize,
    /// Frames from which splitting pays, however few tokens they make. Default: 32.
    pub min_frames: usize,
    /// Pixel rows that a rank with a frame runs at least where the tower is split; it adds frames of zeros, whose features
    /// nobody sees, since kernels may be slow or chosen differently for very few rows. 0: no such floor. Default: 96.
    pub min_local_patch_rows: usize,
    /// `alpha` in the cost `p·(p + alpha)` of a frame of `p` patches: the work per patch that does not grow with the frame,
    /// relative to that of attending to one other patch. Default (`None`, in files `"auto"`): three times the tower's width.
    #[serde(serialize_with = "alpha_or_auto", deserialize_with = "auto_or_alpha")]
    pub cost_alpha: Option<u64>,
    /// Who is given the features. Default: gathered.
    pub delivery: VisionDelivery,
}

impl Default for VisionShardingConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            min_tokens: 2048,
            min_frames: 32,
            min_local_patch_rows: 96,
            cost_alpha: None,
            delivery: VisionDelivery::Gathered,
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

    /// The same with another `min_local_patch_rows`; 0 for none.
    #[must_use]
    pub fn with_min_local_patch_rows(self, min_local_patch_rows: usize) -> Self {
        Self {
            min_local_patch_rows,
            ..self
        }
    }

    /// The same with a cost of `p·(p + alpha)` per frame, whatever the tower's width.
    #[must_use]
    pub fn with_cost_alpha(self, alpha: u64) -> Self {
        Self {
            cost_alpha: Some(alpha),
            ..self
        }
    }

    /// The same with features that go where `delivery` says.
    #[must_use]
    pub fn with_delivery(self, delivery: VisionDelivery) -> Self {
        Self { delivery, ..self }
    }

    /// `alpha` for a tower whose hidden states are `hidden_size` wide.
    pub fn alpha(&self, hidden_size: usize) -> u64 {
        self.cost_alpha
            .unwrap_or_else(|| (hidden_size as u64).saturating_mul(3))
    }
}

const AUTO: &str = "auto";

// Serde hands the field over by reference.
#[allow(clippy::ref_option)]
fn alpha_or_auto<S: Serializer>(alpha: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    match alpha {
        Some(alpha) => serializer.serialize_u64(*alpha),
        None => serializer.serialize_str(AUTO),
    }
}

fn auto_or_alpha<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected \"auto\" or an integer of at least 0")]
    enum Alpha {
        Number(u64),
        Name(String),
        Nothing(()),
    }
    match Alpha::deserialize(deserializer)? {
        Alpha::Number(alpha) => Ok(Some(alpha)),
        Alpha::Name(name) if name.trim().eq_ignore_ascii_case(AUTO) => Ok(None),
        Alpha::Nothing(()) => Ok(None),
        Alpha::Name(name) => Err(D::Error::custom(format_args!(
            "expected \"auto\" or an integer of at least 0, got {name:?}"
        ))),
    }
}

impl Serialize for VisionShardingConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> ReadFields<'de> for VisionShardingConfig {
    fn read_fields<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer)
    }
}

impl<'de> Deserialize<'de> for VisionShardingConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_with_path(deserializer)
    }
}
