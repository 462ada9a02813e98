//! What can be wrong with a mesh or with a question put to it.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a mesh was refused, or why a question about it has no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MeshError {
    /// The list of axes was empty.
    #[error("mesh: expected at least one axis, got none")]
    NoAxes,
    /// An axis has an empty (or blank) name.
    #[error("mesh: axis {index} has an empty name")]
    EmptyName {
        /// Place of the axis in the list.
        index: usize,
    },
    /// Two axes have the same name.
    #[error("mesh: two axes are named \"{name}\"")]
    DuplicateName {
        /// The name that occurs twice.
        name: String,
    },
    /// An axis has no ranks along it.
    #[error("mesh axis \"{name}\": expected a size of at least 1, got 0")]
    ZeroSize {
        /// The axis.
        name: String,
    },
    /// The product of the sizes does not fit in a `usize`.
    #[error(
        "mesh {mesh}: the number of ranks does not fit in {} bits",
        usize::BITS
    )]
    Overflow {
        /// The mesh with all its factors.
        mesh: String,
    },
    /// The mesh describes another number of ranks than the world has.
    #[error("mesh {mesh} = {expected} ranks, but the world has {got}")]
    WorldSize {
        /// The mesh with all its factors.
        mesh: String,
        /// Ranks that the mesh describes.
        expected: usize,
        /// Ranks that there are.
        got: usize,
    },
    /// No axis has this name.
    #[error("mesh has no axis \"{name}\"; its axes are {known}")]
    UnknownAxis {
        /// The name asked for.
        name: String,
        /// The names there are, separated by commas.
        known: String,
    },
    /// One axis was named more than once in a list of axes.
    #[error("axis \"{name}\" is listed more than once")]
    RepeatedAxis {
        /// The axis.
        name: String,
    },
    /// A rank outside the mesh.
    #[error("mesh {mesh}: expected a rank below {expected}, got {got}")]
    RankOutOfRange {
        /// The mesh with all its factors.
        mesh: String,
        /// Number of ranks of the mesh.
        expected: usize,
        /// The rank asked for.
        got: usize,
    },
    /// Another number of coordinates than there are axes.
    #[error("mesh {mesh}: expected {expected} coordinates, got {got}")]
    NumCoordinates {
        /// The mesh with all its factors.
        mesh: String,
        /// Number of axes.
        expected: usize,
        /// Number of coordinates given.
        got: usize,
    },
    /// A coordinate outside its axis.
    #[error("mesh axis \"{axis}\": expected a coordinate below {expected}, got {got}")]
    CoordinateOutOfRange {
        /// The axis.
        axis: String,
        /// Size of the axis.
        expected: usize,
        /// The coordinate given.
        got: usize,
    },
}
