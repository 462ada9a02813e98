//! Records of the schedule of the kernel for all gradients: runs of i32. The host writes them in `launch`.

use cubecl::prelude::*;

/// Numbers in a [`JointTile`] and a [`Run`].
pub(crate) const JOINT_FIELDS: usize = 16;

/// A tile of keys of one key head, for the kernel of all gradients. Its turn group are tiles whose shares of `dq` are added one after the
/// other, in falling or rising order, after those of earlier groups.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct JointTile {
    pub(crate) k_row: i32,
    /// Token of the tile's first row; may lie before the buffer.
    pub(crate) k_token: i32,
    /// Rows of the tile that are keys, half-open.
    pub(crate) first_key: i32,
    pub(crate) last_key: i32,
    pub(crate) kv_head: i32,
    /// Runs of queries, half-open.
    pub(crate) first_run: i32,
    pub(crate) last_run: i32,
    /// Tiles of the turn group, relative to this one, both of them within.
    pub(crate) turn_low: i32,
    pub(crate) turn_high: i32,
    pub(crate) rising: i32,
}

/// Reads record `index`.
#[cube]
pub(crate) fn joint_tile(records: &Array<i32>, index: u32) -> JointTile {
    let at = index as usize * JOINT_FIELDS;
    JointTile {
        k_row: records[at],
        k_token: records[at + 1],
        first_key: records[at + 2],
        last_key: records[at + 3],
        kv_head: records[at + 4],
        first_run: records[at + 6],
        last_run: records[at + 7],
        turn_low: records[at + 8],
        turn_high: records[at + 9],
        rising: records[at + 10],
    }
}

/// Tiles of queries of one segment that see some key of a tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Run {
    pub(crate) q_row: i32,
    pub(crate) q_token: i32,
    pub(crate) num_tiles: i32,
    /// Queries from the first tile to the segment's end.
    pub(crate) num_queries: i32,
    /// The first query's own key, counted from the tile's first row.
    pub(crate) own: i32,
    /// Keys of the segment, half-open, counted alike.
    pub(crate) first_key: i32,
    pub(crate) last_key: i32,
    pub(crate) left: i32,
    pub(crate) right: i32,
    /// Number of the first tile among all tiles of queries.
    pub(crate) q_tile: i32,
}

/// Reads record `index`.
#[cube]
pub(crate) fn run(records: &Array<i32>, index: i32) -> Run {
    let at = index as usize * JOINT_FIELDS;
    Run {
        q_row: records[at],
        q_token: records[at + 1],
        num_tiles: records[at + 2],
        num_queries: records[at + 3],
        own: records[at + 4],
        first_key: records[at + 5],
        last_key: records[at + 6],
        left: records[at + 7],
        right: records[at + 8],
        q_tile: records[at + 9],
    }
}
