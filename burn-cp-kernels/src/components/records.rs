//! Records of a schedule as kernels read them: runs of i32. The host writes them in `launch`.

use cubecl::prelude::*;

/// Numbers in a [`RowTile`].
pub(crate) const ROW_TILE_FIELDS: usize = 15;
/// Numbers in a [`KeyTile`].
pub(crate) const KEY_TILE_FIELDS: usize = 5;
/// Numbers in a [`Visit`].
pub(crate) const VISIT_FIELDS: usize = 11;

/// A tile of query rows and the tiles of keys that it walks.
///
/// Keys are counted in columns: column 0 is where the tile of the document in which the segment's
/// keys start begins.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowTile {
    pub(crate) q_row: i32,
    pub(crate) q_token: i32,
    pub(crate) num_rows: i32,
    pub(crate) k_row: i32,
    /// Token of column 0; may lie before the buffer.
    pub(crate) k_token: i32,
    /// Tiles of columns, half-open.
    pub(crate) first_tile: i32,
    pub(crate) last_tile: i32,
    /// Columns that some row of the tile sees, half-open.
    pub(crate) first_column: i32,
    pub(crate) last_column: i32,
    /// Column of the first row's own key.
    pub(crate) own: i32,
    /// Columns before and after its own one that a row sees.
    pub(crate) left: i32,
    pub(crate) right: i32,
    /// For dropout: number of the document, positions of the first row and of column 0.
    pub(crate) document: u32,
    pub(crate) q_position: u32,
    pub(crate) k_position: u32,
}

/// Reads record `index`.
#[cube]
pub(crate) fn row_tile(records: &Array<i32>, index: u32) -> RowTile {
    let at = index as usize * ROW_TILE_FIELDS;
    RowTile {
        q_row: records[at],
        q_token: records[at + 1],
        num_rows: records[at + 2],
        k_row: records[at + 3],
        k_token: records[at + 4],
        first_tile: records[at + 5],
        last_tile: records[at + 6],
        first_column: records[at + 7],
        last_column: records[at + 8],
        own: records[at + 9],
        left: records[at + 10],
        right: records[at + 11],
        document: u32::reinterpret(records[at + 12]),
        q_position: u32::reinterpret(records[at + 13]),
        k_position: u32::reinterpret(records[at + 14]),
    }
}

/// A tile of keys and the visits of queries to it, half-open.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct KeyTile {
    pub(crate) k_row: i32,
    pub(crate) k_token: i32,
    pub(crate) num_keys: i32,
    pub(crate) first_visit: i32,
    pub(crate) last_visit: i32,
}

/// Reads record `index`.
#[cube]
pub(crate) fn key_tile(records: &Array<i32>, index: u32) -> KeyTile {
    let at = index as usize * KEY_TILE_FIELDS;
    KeyTile {
        k_row: records[at],
        k_token: records[at + 1],
        num_keys: records[at + 2],
        first_visit: records[at + 3],
        last_visit: records[at + 4],
    }
}

/// The queries of one segment that see some key of a tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Visit {
    pub(crate) q_row: i32,
    pub(crate) q_token: i32,
    pub(crate) num_queries: i32,
    /// Key 0 of the tile minus the first query's own key.
    pub(crate) shift: i32,
    /// Keys of the tile that belong to the segment, half-open.
    pub(crate) first_key: i32,
    pub(crate) last_key: i32,
    pub(crate) left: i32,
    pub(crate) right: i32,
    /// For dropout: number of the document, positions of the first query and of key 0.
    pub(crate) document: u32,
    pub(crate) q_position: u32,
    pub(crate) k_position: u32,
}

/// Reads record `index`.
#[cube]
pub(crate) fn visit(records: &Array<i32>, index: i32) -> Visit {
    let at = index as usize * VISIT_FIELDS;
    Visit {
        q_row: records[at],
        q_token: records[at + 1],
        num_queries: records[at + 2],
        shift: records[at + 3],
        first_key: records[at + 4],
        last_key: records[at + 5],
        left: records[at + 6],
        right: records[at + 7],
        document: u32::reinterpret(records[at + 8]),
        q_position: u32::reinterpret(records[at + 9]),
        k_position: u32::reinterpret(records[at + 10]),
    }
}
