//! Sizes that a kernel for matrix units is compiled for.

use crate::components::{COLUMNS, Features};

/// Units per plane.
const PLANE: usize = 32;
/// Planes per cube.
const PLANES: usize = 4;
/// Units per cube.
pub(crate) const UNITS: usize = PLANE * PLANES;
/// Rows of the left operand of a product of the unit, and numbers of a row that it multiplies.
pub(crate) const SIDE: usize = 16;
/// Numbers that are copied at once.
pub(crate) const CHUNK: usize = 8;
/// Units per cube of the kernel for all gradients.
pub(crate) const JOINT_UNITS: usize = 2 * UNITS;
/// Keys of its tiles, and queries between two loads.
pub(crate) const JOINT_KEYS: usize = 128;
pub(crate) const JOINT_QUERIES: usize = 64;
/// Numbers of its vectors, filled up.
const JOINT_DIM: usize = 128;
/// Rows on the left of every product of one of its planes.
pub(crate) const JOINT_ROWS: usize = 2 * SIDE;
/// Columns of keys between two loads for the gradient of queries.
pub(crate) const QUERY_COLUMNS: usize = 32;

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MatrixBlueprint {
    /// Size of a query or key vector.
    pub(crate) head_dim: usize,
    /// Size of a value vector.
    pub(crate) v_head_dim: usize,
    /// Blocks of 16 query rows per plane.
    pub(crate) query_blocks: usize,
    /// Blocks of 16 keys per plane.
    pub(crate) key_blocks: usize,
    /// Queries between two loads for the gradients of keys and values.
    pub(crate) key_columns: usize,
    /// Whether the gradients of keys and of values are sums of two launches, since one plane has
    /// not the registers for both.
    pub(crate) key_parts: bool,
    /// Whether one launch computes all gradients.
    pub(crate) joint: bool,
    /// What the scores go through.
    pub(crate) features: Features,
}

/// Which gradients a launch over tiles of keys computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum KeyPart {
    Both,
    Keys,
    Values,
}

impl KeyPart {
    pub(crate) fn keys(self) -> bool {
        !matches!(self, Self::Values)
    }

    pub(crate) fn values(self) -> bool {
        !matches!(self, Self::Keys)
    }

    /// Sums that a plane has for the gradients of keys and of values.
    pub(crate) fn counts(self, blueprint: &MatrixBlueprint) -> (usize, usize) {
        let count = |wanted: bool, layout: Layout| match wanted {
            true => blueprint.key_blocks * layout.padded() / 8,
            false => 0,
        };
        (
            count(self.keys(), blueprint.keys()),
            count(self.values(), blueprint.values()),
        )
    }
}

/// Rows of vectors in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    /// Numbers per row that the tensor has.
    pub(crate) dim: usize,
}

impl Layout {
    /// Numbers per row, filled up with zeros to whole products.
    pub(crate) fn padded(&self) -> usize {
        self.dim.next_multiple_of(SIDE)
    }

    /// Chunks that are copied per row.
    pub(crate) fn chunks(&self) -> usize {
        self.padded() / CHUNK
    }

    /// Chunks from one row to the next: odd, so that eight rows lie in different banks.
    pub(crate) fn stride(&self) -> usize {
        self.chunks() + 1
    }
}

/// Weights by key and query, as planes hand them to each other.
pub(crate) const EXCHANGED: Layout = Layout { dim: JOINT_QUERIES };

impl MatrixBlueprint {
    pub(crate) fn keys(&self) -> Layout {
        Layout { dim: self.head_dim }
    }

    pub(crate) fn values(&self) -> Layout {
        Layout {
            dim: self.v_head_dim,
        }
    }

    /// Query rows of a tile.
    pub(crate) fn query_rows(&self) -> usize {
        PLANES * SIDE * self.query_blocks
    }

    /// Keys of a tile of the gradients of keys and values.
    pub(crate) fn key_rows(&self) -> usize {
        PLANES * SIDE * self.key_blocks
    }

    /// Bytes of shared memory of the forward pass, of the gradient of queries, and of those of keys and
    /// values; without what barriers take.
    pub(crate) fn shared_bytes(&self) -> [usize; 3] {
        let (k, v) = (self.keys().stride(), self.values().stride());
        let chunk = 2 * CHUNK;
        let columns = |count: usize| 2 * count * (k + v) * chunk;
        [
            self.query_rows() * k * chunk + columns(COLUMNS),
            self.query_rows() * (k + v) * chunk + columns(QUERY_COLUMNS),
            self.key_rows() * (k + v) * chunk
                + columns(self.key_columns)
                + 4 * 4 * self.key_columns,
        ]
    }

    /// Bytes of shared memory of the kernel for all gradients, without what barriers take; none for vectors that it does not serve. Smaller
    /// ones than these are computed as fast by the other kernels, and larger ones do not fit its registers.
    pub(crate) fn joint_bytes(&self) -> Option<usize> {
        if [self.keys(), self.values()].map(|layout| layout.padded()) != [JOINT_DIM; 2] {
            return None;
        }
        let rows = JOINT_KEYS + 2 * JOINT_QUERIES;
        let vectors = rows * (self.keys().stride() + self.values().stride());
        let exchanged = 2 * JOINT_KEYS * EXCHANGED.stride();
        Some(2 * CHUNK * (vectors + exchanged) + 4 * 4 * JOINT_QUERIES + 4)
    }
}
