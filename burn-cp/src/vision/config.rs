//! When and how the vision tower is sharded.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// When the vision tower is split over ranks, and what a frame is taken to cost.
///
/// Fields that a configuration file leaves out have their defaults. Unknown fields and wrong values are refused with their
/// path, what was expected and what was there; see [`Self::deserialize_at`]. Must be equal on every rank.
///
/// ```
/// use burn_cp::vision::VisionShardingConfig;
///
/// let config = VisionShardingConfig::default().with_min_frames(8);
/// assert_eq!((config.enabled, config.min_tokens, config.min_frames), (true, 2048, 8));
/// assert_eq!(config.min_local_patch_rows, 96);
/// assert_eq!(config.alpha(1152), 3456);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
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
    #[serde(serialize_with = "alpha_or_auto")]
    pub cost_alpha: Option<u64>,
}

impl Default for VisionShardingConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            min_tokens: 2048,
            min_frames: 32,
            min_local_patch_rows: 96,
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

    /// `alpha` for a tower whose hidden states are `hidden_size` wide.
    pub fn alpha(&self, hidden_size: usize) -> u64 {
        self.cost_alpha
            .unwrap_or_else(|| (hidden_size as u64).saturating_mul(3))
    }

    /// Reads a configuration that stands at `path` within a larger one, so that errors name whole paths; `""` at the top.
    ///
    /// Needs a format that tells what it holds (JSON, TOML and the like).
    ///
    /// # Errors
    /// An unknown or repeated field, or a value that is not what its field takes: `path.field: expected .., got ..`.
    pub fn deserialize_at<'de, D: Deserializer<'de>>(
        path: &str,
        deserializer: D,
    ) -> Result<Self, D::Error> {
        deserializer.deserialize_struct("VisionShardingConfig", &FIELDS, Fields { path })
    }
}

impl<'de> Deserialize<'de> for VisionShardingConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize_at("", deserializer)
    }
}

const AUTO: &str = "auto";

const FIELDS: [&str; 5] = [
    "enabled",
    "min_tokens",
    "min_frames",
    "min_local_patch_rows",
    "cost_alpha",
];

// Serde hands the field over by reference.
#[allow(clippy::ref_option)]
fn alpha_or_auto<S: Serializer>(alpha: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    match alpha {
        Some(alpha) => serializer.serialize_u64(*alpha),
        None => serializer.serialize_str(AUTO),
    }
}

/// Reads the fields of a configuration at `path`.
struct Fields<'a> {
    path: &'a str,
}

impl Fields<'_> {
    fn wrong<E: Error>(&self, field: &str, expected: &str, got: impl fmt::Display) -> E {
        let dot = if self.path.is_empty() { "" } else { "." };
        E::custom(format_args!(
            "{}{dot}{field}: expected {expected}, got {got}",
            self.path
        ))
    }

    fn set<E: Error>(
        &self,
        config: &mut VisionShardingConfig,
        field: &str,
        given: &Given,
    ) -> Result<(), E> {
        let number = || match given {
            Given::Integer(value) => usize::try_from(*value).ok(),
            _ => None,
        };
        let expected = match field {
            "enabled" => "true or false",
            "cost_alpha" => "\"auto\" or an integer of at least 0",
            _ => "an integer of at least 0",
        };
        let wrong = || self.wrong(field, expected, given);
        match (field, given) {
            ("enabled", Given::Bool(enabled)) => config.enabled = *enabled,
            ("min_tokens", _) => config.min_tokens = number().ok_or_else(wrong)?,
            ("min_frames", _) => config.min_frames = number().ok_or_else(wrong)?,
            ("min_local_patch_rows", _) => {
                config.min_local_patch_rows = number().ok_or_else(wrong)?;
            }
            ("cost_alpha", Given::Nothing) => config.cost_alpha = None,
            ("cost_alpha", Given::Text(text)) if text == AUTO => config.cost_alpha = None,
            ("cost_alpha", Given::Integer(value)) => {
                config.cost_alpha = Some(u64::try_from(*value).map_err(|_| wrong())?);
            }
            _ => return Err(wrong()),
        }
        Ok(())
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = VisionShardingConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let colon = if self.path.is_empty() { "" } else { ": " };
        let fields = FIELDS.join(", ");
        write!(f, "{}{colon}a table with the fields {fields}", self.path)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut config = VisionShardingConfig::default();
        let mut seen: Vec<String> = Vec::new();
        while let Some(field) = map.next_key::<String>()? {
            if !FIELDS.contains(&field.as_str()) {
                let known = format!("one of {}", FIELDS.join(", "));
                return Err(self.wrong(&field, &known, "an unknown field"));
            }
            if seen.contains(&field) {
                return Err(self.wrong(&field, "one value", "a second one"));
            }
            let given = map.next_value::<Given>()?;
            self.set(&mut config, &field, &given)?;
            seen.push(field);
        }
        Ok(config)
    }
}

/// A value as the file has it, kept so that an error can show it.
enum Given {
    Nothing,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    List,
    Table,
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Bool(value) => write!(f, "the bool {value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "the float {value:?}"),
            Self::Text(text) => write!(f, "the text {text:?}"),
            Self::List => f.write_str("a list"),
            Self::Table => f.write_str("a table"),
        }
    }
}

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Anything)
    }
}

struct Anything;

impl<'de> Visitor<'de> for Anything {
    type Value = Given;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<Given, E> {
        Ok(Given::Nothing)
    }

    fn visit_none<E: Error>(self) -> Result<Given, E> {
        Ok(Given::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Given, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Given, E> {
        Ok(Given::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Given, E> {
        Ok(Given::Integer(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Given, E> {
        Ok(Given::Integer(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Given, E> {
        Ok(Given::Float(value))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Given, E> {
        Ok(Given::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Given, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Given::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Given, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Given::Table)
    }
}
