//! Names of the ways to compute attention.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A way to compute attention. Which one a call takes follows from the backend, its device and the
/// problem unless [`AttentionOptions::routine`](super::AttentionOptions::routine) forces one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Routine {
    /// Burn's tensor operations; on every backend.
    Composed,
    /// A kernel that needs neither tensor cores nor plane operations; on every CubeCL runtime.
    Portable,
    /// A kernel for tensor cores with 16-bit floats.
    TensorCore,
    /// CUDA source for the warpgroup matrix units and copy engines of compute capability 9.0.
    Hopper,
}

impl fmt::Display for Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Composed => "composed",
            Self::Portable => "portable",
            Self::TensorCore => "tensor_core",
            Self::Hopper => "hopper",
        })
    }
}

/// Which routine a call takes, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoutineChoice {
    /// The routine.
    pub routine: Routine,
    /// Why it was chosen, in words.
    pub reason: String,
}

impl RoutineChoice {
    /// A choice and its reason.
    pub fn new(routine: Routine, reason: impl Into<String>) -> Self {
        Self {
            routine,
            reason: reason.into(),
        }
    }
}

impl fmt::Display for RoutineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.routine, self.reason)
    }
}
