//! Schedules: which tile of rows walks which tiles of keys, and which queries visit which keys.

use std::{any::Any, cmp::Reverse, collections::BTreeMap, ops::Range, sync::Arc};

use cubecl::{client::ComputeClient, prelude::Runtime, server::Handle};

use crate::{
    components::{COLUMNS, KEY_TILE_FIELDS, ROW_TILE_FIELDS, VISIT_FIELDS},
    definition::{AttentionError, DropoutPlace, Segment, Segments},
    launch::tensors::table_place,
};

/// Records of one list of segments, and how many tiles they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// For the forward pass and `dq`.
    pub(crate) row_tiles: Vec<i32>,
    /// For `dk` and `dv`.
    pub(crate) key_tiles: Vec<i32>,
    pub(crate) visits: Vec<i32>,
}

/// A reach that no distance exceeds, with room to add distances to it.
pub(super) const FAR: i32 = 1 << 30;

impl Schedule {
    /// Cuts queries into tiles of the first number of rows, and keys into tiles of the second.
    ///
    /// # Errors
    ///
    /// Buffers whose rows have 2^30 tokens or more.
    pub(crate) fn new(segments: &Segments, rows: [usize; 2]) -> Result<Self, AttentionError> {
        for (what, (_, tokens)) in [
            ("queries", segments.q_shape()),
            ("keys", segments.k_shape()),
        ] {
            if tokens >= FAR as usize {
                return Err(AttentionError::Overflow {
                    what: format!("number of {what} per batch row"),
                    expected: FAR as usize - 1,
                    got: tokens.to_string(),
                });
            }
        }
        let (key_tiles, visits) = key_tiles(segments, rows[1]);
        Ok(Self {
            row_tiles: row_tiles(segments, rows[0]),
            key_tiles,
            visits,
        })
    }

    pub(crate) fn num_row_tiles(&self) -> usize {
        self.row_tiles.len() / ROW_TILE_FIELDS
    }

    pub(crate) fn num_key_tiles(&self) -> usize {
        self.key_tiles.len() / KEY_TILE_FIELDS
    }
}

/// The tiles of each segment, those with the most keys first, then tiles without keys for the rows that
/// no segment names. Segments with many keys come before those with few, so that no long tile begins last.
fn row_tiles(segments: &Segments, rows: usize) -> Vec<i32> {
    let mut records = Vec::new();
    let mut ordered: Vec<_> = segments.iter().zip(segments.places()).collect();
    ordered.sort_by_key(|(segment, _)| Reverse(segment.num_k()));
    for (segment, place) in ordered {
        let starts = (0..segment.num_q()).step_by(rows).rev();
        for start in starts {
            let tile = start..(start + rows).min(segment.num_q());
            records.extend(row_tile(segment, *place, tile));
        }
    }
    let (batch, tokens) = segments.q_shape();
    for (row, gap) in gaps(segments, batch, tokens) {
        for start in gap.clone().step_by(rows) {
            let mut record = [0; ROW_TILE_FIELDS];
            record[0] = row as i32;
            record[1] = start as i32;
            record[2] = rows.min(gap.end - start) as i32;
            records.extend(record);
        }
    }
    records
}

fn row_tile(segment: &Segment, place: DropoutPlace, tile: Range<usize>) -> [i32; ROW_TILE_FIELDS] {
    let offset = segment.k_position % COLUMNS;
    let seeing = tile.start.max(segment.num_blind_queries())..tile.end;
    let columns = if seeing.is_empty() {
        0..0
    } else {
        let first = segment.visible_keys(seeing.start).start;
        let last = segment.visible_keys(seeing.end - 1).end;
        offset + first..offset + last
    };
    let own = own_key(segment, tile.start);
    let (left, right) = reach(segment);
    [
        segment.q_row as i32,
        (segment.q.start + tile.start) as i32,
        tile.len() as i32,
        segment.k_row as i32,
        segment.k.start as i32 - offset as i32,
        (columns.start / COLUMNS) as i32,
        columns.end.div_ceil(COLUMNS) as i32,
        columns.start as i32,
        columns.end as i32,
        own as i32 + offset as i32,
        left,
        right,
        place.document as i32,
        q_position(place, tile.start),
        position(segment, -(offset as i64)),
    ]
}

/// Tiles of all keys of the buffer, and for each the queries of every segment that see some of it.
///
/// Tiles end where the keys of a segment start or end: keys of a tile have the same segments, so that no number of another
/// segment's queries is ever multiplied, not even by 0, on the way to their gradients.
fn key_tiles(segments: &Segments, size: usize) -> (Vec<i32>, Vec<i32>) {
    let (batch, tokens) = segments.k_shape();
    let (mut tiles, mut list) = (Vec::new(), Vec::new());
    for row in 0..batch {
        let here = |segment: &Segment| segment.k_row == row && !segment.k.is_empty();
        let mut cuts = vec![0, tokens];
        for segment in segments.iter().filter(|segment| here(segment)) {
            cuts.extend([segment.k.start, segment.k.end]);
        }
        cuts.sort_unstable();
        cuts.dedup();
        let starts: Vec<usize> = cuts
            .windows(2)
            .flat_map(|run| (run[0]..run[1]).step_by(size))
            .collect();
        let end = |index: usize| starts.get(index + 1).copied().unwrap_or(tokens);
        let mut visits: Vec<Vec<i32>> = vec![Vec::new(); starts.len()];
        for (segment, place) in segments.iter().zip(segments.places()) {
            if !here(segment) {
                continue;
            }
            let first = starts.partition_point(|start| *start < segment.k.start);
            let last = starts.partition_point(|start| *start < segment.k.end);
            for index in first..last {
                visits[index].extend(
                    visit(segment, *place, starts[index]..end(index))
                        .iter()
                        .flatten(),
                );
            }
        }
        for (index, visits) in visits.into_iter().enumerate() {
            let first = (list.len() / VISIT_FIELDS) as i32;
            let queries: i32 = visits.chunks(VISIT_FIELDS).map(|visit| visit[2]).sum();
            list.extend(visits);
            let last = (list.len() / VISIT_FIELDS) as i32;
            let (start, len) = (starts[index], end(index) - starts[index]);
            let run = cuts.partition_point(|cut| *cut <= start);
            let record = [row as i32, start as i32, len as i32, first, last];
            tiles.push(((row, run), queries, record));
        }
    }
    // Runs whose keys are seen the most often come first; tiles of one run stay together.
    let mut most = BTreeMap::new();
    for (run, queries, _) in &tiles {
        let most: &mut i32 = most.entry(*run).or_default();
        *most = (*most).max(*queries);
    }
    tiles.sort_by_key(|(run, _, _)| (Reverse(most[run]), *run));
    let records = tiles.into_iter().flat_map(|(_, _, record)| record);
    (records.collect(), list)
}

/// The queries of a segment that see some key of `tile` (tokens of the buffer).
fn visit(
    segment: &Segment,
    place: DropoutPlace,
    tile: Range<usize>,
) -> Option<[i32; VISIT_FIELDS]> {
    // Of the tile, counted within the segment.
    let keys =
        tile.start.saturating_sub(segment.k.start)..tile.end.min(segment.k.end) - segment.k.start;
    let queries = segment.num_blind_queries()..segment.num_q();
    // The bounds of what a query sees never decrease.
    let count = |before: &dyn Fn(usize) -> bool| {
        let (mut low, mut high) = (queries.start, queries.end);
        while low < high {
            let middle = low + (high - low) / 2;
            match before(middle) {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    };
    let first = count(&|t| segment.visible_keys(t).end <= keys.start);
    let last = count(&|t| segment.visible_keys(t).start < keys.end);
    if first >= last {
        return None;
    }
    let own = own_key(segment, first);
    let key_0 = tile.start as i64 - segment.k.start as i64;
    let (left, right) = reach(segment);
    Some([
        segment.q_row as i32,
        (segment.q.start + first) as i32,
        (last - first) as i32,
        (key_0 - own) as i32,
        (keys.start as i64 - key_0) as i32,
        (keys.end as i64 - key_0) as i32,
        left,
        right,
        place.document as i32,
        q_position(place, first),
        position(segment, key_0),
    ])
}

fn own_key(segment: &Segment, t: usize) -> i64 {
    (segment.num_k() + t) as i64 - segment.num_q() as i64
}

pub(super) fn reach(segment: &Segment) -> (i32, i32) {
    let far = |reach: Option<usize>| {
        reach.map_or(FAR, |reach| i32::try_from(reach).unwrap_or(FAR).min(FAR))
    };
    let (left, right) = segment.reach();
    (far(left), far(right))
}

/// Position in the document of query `t` of the segment, modulo 2^32.
fn q_position(place: DropoutPlace, t: usize) -> i32 {
    place.q_position.wrapping_add(t as u32) as i32
}

/// Position in the document of key `key` of the segment, modulo 2^32.
fn position(segment: &Segment, key: i64) -> i32 {
    (segment.k_position as i64).wrapping_add(key) as i32
}

/// The runs of query rows that no segment names.
pub(super) fn gaps(segments: &Segments, batch: usize, tokens: usize) -> Vec<(usize, Range<usize>)> {
    let mut named: Vec<_> = segments.iter().map(|s| (s.q_row, s.q.clone())).collect();
    named.sort_by_key(|(row, q)| (*row, q.start, q.end));
    let mut gaps = Vec::new();
    for row in 0..batch {
        let mut end = 0;
        for (_, q) in named.iter().filter(|(r, q)| *r == row && !q.is_empty()) {
            if q.start > end {
                gaps.push((row, end..q.start));
            }
            end = q.end;
        }
        if end < tokens {
            gaps.push((row, end..tokens));
        }
    }
    gaps
}

/// A schedule on a device.
pub(crate) struct Uploaded {
    rows: [usize; 2],
    device: String,
    result: Result<Tables, AttentionError>,
}

/// The tables of a schedule on a device.
#[derive(Clone)]
pub(crate) struct Tables {
    pub(crate) row_tiles: Handle,
    pub(crate) num_row_tiles: usize,
    pub(crate) key_tiles: Handle,
    pub(crate) num_key_tiles: usize,
    pub(crate) visits: Handle,
    pub(crate) num_visits: usize,
}

/// The schedule of these segments on the client's device, made at the first call.
pub(crate) fn tables<R: Runtime>(
    client: &ComputeClient<R>,
    device: &R::Device,
    segments: &Segments,
    rows: [usize; 2],
) -> Result<Tables, AttentionError> {
    let device = format!("{:?} {}", device.type_id(), table_place(device));
    let uploaded: Arc<Uploaded> = segments.cache().get_or_make(
        |uploaded: &Uploaded| uploaded.rows == rows && uploaded.device == device,
        || Uploaded {
            rows,
            device: device.clone(),
            result: Schedule::new(segments, rows).map(|schedule| upload(client, &schedule)),
        },
    );
    uploaded.result.clone()
}

fn upload<R: Runtime>(client: &ComputeClient<R>, schedule: &Schedule) -> Tables {
    let table = |records: &[i32]| match records {
        // Devices refuse empty buffers.
        [] => client.create_from_slice(bytemuck::cast_slice(&[0i32])),
        records => client.create_from_slice(bytemuck::cast_slice(records)),
    };
    Tables {
        row_tiles: table(&schedule.row_tiles),
        num_row_tiles: schedule.num_row_tiles(),
        key_tiles: table(&schedule.key_tiles),
        num_key_tiles: schedule.num_key_tiles(),
        visits: table(&schedule.visits),
        num_visits: schedule.visits.len() / VISIT_FIELDS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::Window;

    fn segment(q: Range<usize>, k: Range<usize>, k_position: usize) -> Segment {
        Segment {
            q_row: 0,
            q,
            k_row: 0,
            k,
            k_position,
            causal: true,
            window: None,
        }
    }

    fn example() -> Segments {
        let full = Segment {
            causal: false,
            window: Some(Window::new(30, 9)),
            ..segment(110..190, 0..150, 5)
        };
        let list = vec![
            segment(3..100, 10..200, 70),
            full,
            segment(190..200, 198..200, 0),
            segment(200..200, 0..5, 0),
        ];
        Segments::new(list, (1, 210), (1, 230)).unwrap()
    }

    /// Pairs that the records let see each other.
    fn pairs_by_rows(schedule: &Schedule) -> Vec<(i32, i32)> {
        let mut pairs = Vec::new();
        for r in schedule.row_tiles.chunks(ROW_TILE_FIELDS) {
            for row in 0..r[2] {
                for column in r[5] * COLUMNS as i32..r[6] * COLUMNS as i32 {
                    let distance = column - r[9] - row;
                    let seen = column >= r[7] && column < r[8];
                    if seen && distance <= r[11] && distance >= -r[10] {
                        pairs.push((r[1] + row, r[4] + column));
                    }
                }
            }
        }
        pairs.sort_unstable();
        pairs
    }

    fn pairs_by_keys(schedule: &Schedule) -> Vec<(i32, i32)> {
        let mut pairs = Vec::new();
        for tile in schedule.key_tiles.chunks(KEY_TILE_FIELDS) {
            for visit in tile[3]..tile[4] {
                let v = &schedule.visits[visit as usize * VISIT_FIELDS..][..VISIT_FIELDS];
                for key in v[4]..v[5] {
                    for query in 0..v[2] {
                        let distance = key + v[3] - query;
                        if distance <= v[7] && distance >= -v[6] {
                            pairs.push((v[1] + query, tile[1] + key));
                        }
                    }
                }
            }
        }
        pairs.sort_unstable();
        pairs
    }

    #[test]
    fn both_sides_hold_exactly_the_visible_pairs() {
        let segments = example();
        let mut expected = Vec::new();
        for segment in &segments {
            for t in 0..segment.num_q() {
                let keys = segment.visible_keys(t);
                expected.extend(
                    keys.map(|j| ((segment.q.start + t) as i32, (segment.k.start + j) as i32)),
                );
            }
        }
        expected.sort_unstable();
        for rows in [[32, 32], [64, 128], [128, 64]] {
            let schedule = Schedule::new(&segments, rows).unwrap();
            assert_eq!(pairs_by_rows(&schedule), expected);
            assert_eq!(pairs_by_keys(&schedule), expected);
        }
    }

    #[test]
    fn every_row_and_key_has_one_tile() {
        let schedule = Schedule::new(&example(), [64, 64]).unwrap();
        let tokens = |records: &[i32], fields: usize| {
            let mut tokens: Vec<i32> = records
                .chunks(fields)
                .flat_map(|record| record[1]..record[1] + record[2])
                .collect();
            tokens.sort_unstable();
            tokens
        };
        let rows = tokens(&schedule.row_tiles, ROW_TILE_FIELDS);
        assert_eq!(rows, (0..210).collect::<Vec<_>>());
        let keys = tokens(&schedule.key_tiles, KEY_TILE_FIELDS);
        assert_eq!(keys, (0..230).collect::<Vec<_>>());
    }

    #[test]
    fn tiles_of_keys_lie_within_segments() {
        let segments = example();
        let schedule = Schedule::new(&segments, [64, 64]).unwrap();
        for tile in schedule.key_tiles.chunks(KEY_TILE_FIELDS) {
            let (start, end) = (tile[1] as usize, (tile[1] + tile[2]) as usize);
            for segment in &segments {
                let apart = segment.k.end <= start || segment.k.start >= end;
                let around = segment.k.start <= start && segment.k.end >= end;
                assert!(apart || around || segment.k.is_empty());
            }
            for visit in tile[3]..tile[4] {
                let v = &schedule.visits[visit as usize * VISIT_FIELDS..][..VISIT_FIELDS];
                assert_eq!((v[4], v[5]), (0, tile[2]));
            }
        }
    }

    #[test]
    fn schedules_grow_with_tokens_not_with_pairs() {
        let size = |tokens: usize| {
            let segments = vec![segment(0..tokens, 0..tokens, 0)];
            let segments = Segments::new(segments, (1, tokens), (1, tokens)).unwrap();
            let schedule = Schedule::new(&segments, [64, 64]).unwrap();
            schedule.row_tiles.len() + schedule.key_tiles.len() + schedule.visits.len()
        };
        assert_eq!(size(1 << 16), 16 * size(1 << 12));
    }
}
