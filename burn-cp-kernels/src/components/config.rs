//! Sizes that a kernel is compiled for.

/// Units per cube.
pub(crate) const UNITS: usize = 256;
/// Units along a side of the square.
pub(crate) const LANES: usize = UNITS / 16;
/// Columns of a tile of scores. Tiles of keys start at multiples of it in the document.
pub(crate) const COLUMNS: usize = 64;

/// What a kernel is compiled for: the sizes of vectors and how tiles are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Size of a query or key vector.
    pub(crate) head_dim: usize,
    /// Size of a value vector.
    pub(crate) v_head_dim: usize,
    /// Rows of scores per unit; a tile has 16 times as many.
    pub(crate) rows_per_unit: usize,
    /// Dims that are multiplied between two loads, a multiple of 4.
    pub(crate) dim_chunk: usize,
    /// Rows that are weighted between two loads, a multiple of 4.
    pub(crate) row_chunk: usize,
    /// What the scores go through.
    pub(crate) features: Features,
}

/// What scores and weights go through besides masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Features {
    pub(crate) softcap: bool,
    pub(crate) dropout: bool,
    pub(crate) sinks: bool,
}

/// How units share the columns of a product of weights with rows of some dim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Columns {
    /// Units side by side.
    pub(crate) lanes: usize,
    /// Vectors of four columns per unit, `lanes` apart.
    pub(crate) vectors: usize,
    /// Rows per unit, `UNITS / lanes` apart.
    pub(crate) rows: usize,
}

impl Blueprint {
    /// Rows of a tile of scores.
    pub(crate) fn rows(&self) -> usize {
        16 * self.rows_per_unit
    }

    /// How the columns of vectors of this dim are shared.
    pub(crate) fn columns(&self, dim: usize) -> Columns {
        // Eight lanes waste less where 64 does not divide the dim.
        let lanes = if dim.is_multiple_of(64) { 16 } else { 8 };
        Columns {
            lanes,
            vectors: dim.div_ceil(4 * lanes),
            rows: self.rows() * lanes / UNITS,
        }
    }

    /// Vectors of four numbers from one row to the next of a chunk of dims: one more than it holds,
    /// so that neighbouring rows lie in different banks.
    pub(crate) fn chunk_stride(&self) -> usize {
        self.dim_chunk / 4 + 1
    }

    /// Vectors of four numbers that the loaded chunks need at most.
    pub(crate) fn stage(&self) -> usize {
        let products = (self.rows() + COLUMNS) * self.chunk_stride();
        let weighed = |dim: usize| {
            let columns = self.columns(dim);
            self.row_chunk * columns.lanes * columns.vectors
        };
        products
            .max(weighed(self.head_dim))
            .max(weighed(self.v_head_dim))
    }

    /// Vectors of four numbers from one row of weights to the next, padded as [`Self::chunk_stride`].
    pub(crate) fn weight_stride(&self) -> usize {
        COLUMNS / 4 + 1
    }

    /// Bytes of shared memory that any of the kernels needs at most.
    pub(crate) fn shared_bytes(&self) -> usize {
        let vectors = self.stage() + self.rows() * self.weight_stride();
        16 * vectors + 4 * self.rows() * (LANES + 2)
    }
}
