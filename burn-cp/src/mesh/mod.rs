//! The grid of ranks: named axes, coordinates, and which ranks form a group along one or several axes.
//!
//! Pure host data. The room knows neither devices nor transports: turning a group into something
//! that can communicate is the business of `comm`.

mod error;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use error::MeshError;

/// One named axis of a [`DeviceMesh`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeshAxis {
    /// Name, unique within the mesh.
    pub name: String,
    /// Number of ranks along the axis, at least 1.
    pub size: usize,
}

/// A grid of ranks with named axes.
///
/// Ranks are numbered row-major: along the last axis neighbours differ by one. Every rank that builds
/// the mesh from the same axes gets the same answers; nothing is communicated.
///
/// In a configuration file a mesh is the list of its axes, `[{ name, size }, ..]`; an invalid list is
/// refused while it is read.
///
/// ```
/// use burn_cp::mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::new([("dp", 2), ("cp", 4)])?;
/// assert_eq!(mesh.world_size(), 8);
/// assert_eq!(mesh.coordinates(6)?, vec![1, 2]);
/// assert_eq!(mesh.group(6, &["cp"])?, vec![4, 5, 6, 7]);
/// assert_eq!(mesh.group(6, &["dp"])?, vec![2, 6]);
/// # Ok::<(), burn_cp::mesh::MeshError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<MeshAxis>", into = "Vec<MeshAxis>")]
pub struct DeviceMesh {
    axes: Vec<MeshAxis>,
    world_size: usize,
}

impl DeviceMesh {
    /// Builds a mesh from its axes, the slowest varying one first.
    ///
    /// # Errors
    ///
    /// No axes, empty or repeated names, a size of 0, or more ranks than a `usize` can count.
    pub fn new<N: Into<String>>(
        axes: impl IntoIterator<Item = (N, usize)>,
    ) -> Result<Self, MeshError> {
        let axes = axes
            .into_iter()
            .map(|(name, size)| MeshAxis {
                name: name.into(),
                size,
            })
            .collect();
        Self::from_axes(axes)
    }

    fn from_axes(axes: Vec<MeshAxis>) -> Result<Self, MeshError> {
        if axes.is_empty() {
            return Err(MeshError::NoAxes);
        }
        let mut world_size = 1_usize;
        for (index, axis) in axes.iter().enumerate() {
            if axis.name.trim().is_empty() {
                return Err(MeshError::EmptyName { index });
            }
            if axes[..index].iter().any(|other| other.name == axis.name) {
                return Err(MeshError::DuplicateName {
                    name: axis.name.clone(),
                });
            }
            if axis.size == 0 {
                return Err(MeshError::ZeroSize {
                    name: axis.name.clone(),
                });
            }
            world_size = world_size
                .checked_mul(axis.size)
                .ok_or_else(|| MeshError::Overflow {
                    mesh: factors(&axes),
                })?;
        }
        Ok(Self { axes, world_size })
    }

    /// The axes, the slowest varying one first.
    pub fn axes(&self) -> &[MeshAxis] {
        &self.axes
    }

    /// Number of ranks: the product of all sizes.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Checks that the mesh describes exactly the ranks that exist.
    ///
    /// # Errors
    ///
    /// [`MeshError::WorldSize`] with all factors in its message.
    pub fn check_world(&self, world_size: usize) -> Result<(), MeshError> {
        if self.world_size == world_size {
            return Ok(());
        }
        Err(MeshError::WorldSize {
            mesh: self.to_string(),
            expected: self.world_size,
            got: world_size,
        })
    }

    /// Number of ranks along the axis `name`.
    ///
    /// # Errors
    ///
    /// [`MeshError::UnknownAxis`], which lists the axes there are.
    pub fn axis_size(&self, name: &str) -> Result<usize, MeshError> {
        self.axis_index(name).map(|index| self.axes[index].size)
    }

    /// Coordinates of `rank`, one per axis in the order of [`axes`](Self::axes).
    ///
    /// # Errors
    ///
    /// [`MeshError::RankOutOfRange`].
    pub fn coordinates(&self, rank: usize) -> Result<Vec<usize>, MeshError> {
        self.check_rank(rank)?;
        let coordinates = self
            .axes
            .iter()
            .zip(self.strides())
            .map(|(axis, stride)| rank / stride % axis.size)
            .collect();
        Ok(coordinates)
    }

    /// Coordinate of `rank` along the axis `name`.
    ///
    /// # Errors
    ///
    /// An unknown axis, or a rank outside the mesh.
    pub fn coordinate(&self, rank: usize, name: &str) -> Result<usize, MeshError> {
        let index = self.axis_index(name)?;
        Ok(self.coordinates(rank)?[index])
    }

    /// The rank at `coordinates`, the inverse of [`coordinates`](Self::coordinates).
    ///
    /// # Errors
    ///
    /// Another number of coordinates than there are axes, or one outside its axis.
    pub fn rank(&self, coordinates: &[usize]) -> Result<usize, MeshError> {
        if coordinates.len() != self.axes.len() {
            return Err(MeshError::NumCoordinates {
                mesh: self.to_string(),
                expected: self.axes.len(),
                got: coordinates.len(),
            });
        }
        let mut rank = 0;
        for (axis, &coordinate) in self.axes.iter().zip(coordinates) {
            if coordinate >= axis.size {
                return Err(MeshError::CoordinateOutOfRange {
                    axis: axis.name.clone(),
                    expected: axis.size,
                    got: coordinate,
                });
            }
            rank = rank * axis.size + coordinate;
        }
        Ok(rank)
    }

    /// The ranks, ascending, that differ from `rank` at most along `axes`; `rank` is one of them.
    ///
    /// The order in which `axes` are listed does not matter. Without axes the group is `[rank]`.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh, an unknown axis, or an axis listed twice.
    pub fn group(&self, rank: usize, axes: &[&str]) -> Result<Vec<usize>, MeshError> {
        self.check_rank(rank)?;
        let selected = self.select(axes)?;
        Ok(self.group_of(rank, &selected))
    }

    /// All groups along `axes`: a partition of the ranks, ordered by each group's first rank.
    ///
    /// # Errors
    ///
    /// An unknown axis, or an axis listed twice.
    pub fn groups(&self, axes: &[&str]) -> Result<Vec<Vec<usize>>, MeshError> {
        let selected = self.select(axes)?;
        let strides = self.strides();
        // The first rank of a group has coordinate 0 along every selected axis.
        let is_first = |rank: usize| {
            (self.axes.iter().zip(&strides).zip(&selected)).all(|((axis, stride), &selected)| {
                !selected || (rank / stride).is_multiple_of(axis.size)
            })
        };
        Ok((0..self.world_size)
            .filter(|&rank| is_first(rank))
            .map(|rank| self.group_of(rank, &selected))
            .collect())
    }

    fn group_of(&self, rank: usize, selected: &[bool]) -> Vec<usize> {
        let mut ranks = vec![rank];
        for ((axis, stride), &selected) in self.axes.iter().zip(self.strides()).zip(selected) {
            if selected {
                // Strides fall from axis to axis, so that this expansion stays sorted.
                ranks = ranks
                    .iter()
                    .flat_map(|&member| {
                        let base = member - member / stride % axis.size * stride;
                        (0..axis.size).map(move |coordinate| base + coordinate * stride)
                    })
                    .collect();
            }
        }
        ranks
    }

    fn select(&self, names: &[&str]) -> Result<Vec<bool>, MeshError> {
        let mut selected = vec![false; self.axes.len()];
        for name in names {
            let index = self.axis_index(name)?;
            if std::mem::replace(&mut selected[index], true) {
                return Err(MeshError::RepeatedAxis {
                    name: (*name).to_owned(),
                });
            }
        }
        Ok(selected)
    }

    fn axis_index(&self, name: &str) -> Result<usize, MeshError> {
        self.axes
            .iter()
            .position(|axis| axis.name == name)
            .ok_or_else(|| {
                let known: Vec<&str> = self.axes.iter().map(|axis| axis.name.as_str()).collect();
                MeshError::UnknownAxis {
                    name: name.to_owned(),
                    known: known.join(", "),
                }
            })
    }

    fn check_rank(&self, rank: usize) -> Result<(), MeshError> {
        if rank < self.world_size {
            return Ok(());
        }
        Err(MeshError::RankOutOfRange {
            mesh: self.to_string(),
            expected: self.world_size,
            got: rank,
        })
    }

    fn strides(&self) -> Vec<usize> {
        let mut stride = self.world_size;
        self.axes
            .iter()
            .map(|axis| {
                stride /= axis.size;
                stride
            })
            .collect()
    }
}

impl TryFrom<Vec<MeshAxis>> for DeviceMesh {
    type Error = MeshError;

    fn try_from(axes: Vec<MeshAxis>) -> Result<Self, MeshError> {
        Self::from_axes(axes)
    }
}

impl From<DeviceMesh> for Vec<MeshAxis> {
    fn from(mesh: DeviceMesh) -> Self {
        mesh.axes
    }
}

impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&factors(&self.axes))
    }
}

fn factors(axes: &[MeshAxis]) -> String {
    let factors: Vec<String> = axes
        .iter()
        .map(|axis| format!("{}={}", axis.name, axis.size))
        .collect();
    factors.join(" x ")
}
