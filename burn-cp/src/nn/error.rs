//! The error type of this room.

/// Why a layer cannot be built from its configuration, or made from one of Burn's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NnError {
    /// A field has a value that no layer can have.
    #[error("{what}: expected {expected}, got {got}")]
    Field {
        /// The field at fault.
        what: &'static str,
        /// What would be legal.
        expected: String,
        /// The value found.
        got: String,
    },
    /// `num_heads` is not a multiple of `num_kv_heads`.
    #[error("num_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")]
    HeadGroups {
        /// Heads of the queries.
        num_heads: usize,
        /// Heads of keys and values.
        num_kv_heads: usize,
    },
    /// The rotary sections do not share out the frequencies of a head.
    #[error("rotary sections of head_dim {head_dim}: expected {expected}, got {sections:?}")]
    Sections {
        /// Width of a head.
        head_dim: usize,
        /// What would be legal.
        expected: String,
        /// The sections found.
        sections: [usize; 3],
    },
    /// A module or record of Burn's cannot become one of ours with the same results.
    #[error("{path}: expected {expected}, got {got}")]
    Unconvertible {
        /// Path of the field at fault within Burn's module.
        path: String,
        /// What would be convertible.
        expected: String,
        /// The value found.
        got: String,
    },
}

impl NnError {
    pub(super) fn field(
        what: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Self {
        Self::Field {
            what,
            expected: expected.into(),
            got: got.to_string(),
        }
    }
}
