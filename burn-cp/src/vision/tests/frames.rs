//! Which rank gets which frames.

use proptest::prelude::*;

use super::super::{
    frames::{num_floor_frames, num_pixel_rows},
    *,
};

fn always(grids: &[[usize; 3]], world_size: usize) -> FrameShares {
    plan_frames(grids, 2, world_size, 0, &VisionShardingConfig::always()).unwrap()
}

type Grids = &'static [[usize; 3]];

/// A split of frames with merge size 2.
struct Split {
    grids: Grids,
    alpha: u64,
    floor: usize,
    num_dummies: usize,
    /// Cost of each rank's frames.
    loads: &'static [u128],
    /// Where each rank's pixel rows end; they start where the previous rank's end.
    ends: &'static [usize],
    /// What each rank's tower is run with, the floor's grid last.
    tower_grids: &'static [Grids],
    /// Frames of each rank's floor.
    floors: &'static [usize],
}

const MIXED: Grids = &[
    [1, 2, 2],
    [1, 4, 4],
    [1, 2, 4],
    [1, 6, 4],
    [1, 2, 2],
    [1, 4, 6],
];
const VIDEOS: Grids = &[[1, 2, 2], [2, 2, 4], [1, 4, 4], [2, 2, 2], [1, 2, 4]];

const ONE: Grids = &[[1, 2, 2]];
const TWO: Grids = &[[2, 2, 2]];
const FOUR: Grids = &[[4, 2, 2]];
const TWO_AND_FOUR: Grids = &[[2, 2, 2], [4, 2, 2]];

const PLAIN: Split = Split {
    grids: &[],
    alpha: 0,
    floor: 0,
    num_dummies: 0,
    loads: &[],
    ends: &[],
    tower_grids: &[],
    floors: &[],
};

const SPLITS: [Split; 12] = [
    Split {
        grids: MIXED,
        loads: &[912, 592],
        ends: &[52, 80],
        tower_grids: &[
            &[[1, 2, 2], [1, 4, 4], [1, 2, 4], [1, 6, 4]],
            &[[1, 2, 2], [1, 4, 6]],
        ],
        ..PLAIN
    },
    Split {
        grids: MIXED,
        loads: &[336, 592, 576],
        ends: &[28, 56, 80],
        tower_grids: &[
            &[[1, 2, 2], [1, 4, 4], [1, 2, 4]],
            &[[1, 6, 4], [1, 2, 2]],
            &[[1, 4, 6]],
        ],
        ..PLAIN
    },
    Split {
        grids: MIXED,
        loads: &[16, 256, 64, 576, 16, 576],
        ends: &[4, 20, 28, 52, 56, 80],
        tower_grids: &[
            &[[1, 2, 2]],
            &[[1, 4, 4]],
            &[[1, 2, 4]],
            &[[1, 6, 4]],
            &[[1, 2, 2]],
            &[[1, 4, 6]],
        ],
        ..PLAIN
    },
    Split {
        grids: VIDEOS,
        loads: &[144, 352],
        ends: &[20, 52],
        tower_grids: &[&[[1, 2, 2], [2, 2, 4]], &[[1, 4, 4], [2, 2, 2], [1, 2, 4]]],
        ..PLAIN
    },
    Split {
        grids: &[[8, 2, 2]],
        loads: &[32; 4],
        ends: &[8, 16, 24, 32],
        tower_grids: &[TWO; 4],
        ..PLAIN
    },
    Split {
        grids: &[[8, 2, 2]],
        floor: 24,
        loads: &[32; 4],
        ends: &[8, 16, 24, 32],
        tower_grids: &[TWO_AND_FOUR; 4],
        floors: &[4; 4],
        ..PLAIN
    },
    Split {
        grids: &[[1, 2, 2]],
        floor: 96,
        num_dummies: 3,
        loads: &[16; 4],
        ends: &[4, 8, 12, 16],
        tower_grids: &[
            &[[1, 2, 2], [23, 2, 2]],
            &[[1, 2, 2]],
            &[[1, 2, 2]],
            &[[1, 2, 2]],
        ],
        floors: &[23, 0, 0, 0],
        ..PLAIN
    },
    Split {
        grids: &[[1, 2, 2], [1, 4, 4]],
        num_dummies: 2,
        loads: &[16, 256, 16, 16],
        ends: &[4, 20, 24, 28],
        tower_grids: &[&[[1, 2, 2]], &[[1, 4, 4]], &[[1, 2, 2]], &[[1, 2, 2]]],
        ..PLAIN
    },
    Split {
        grids: &[[2, 2, 2]],
        num_dummies: 2,
        loads: &[16; 4],
        ends: &[4, 8, 12, 16],
        tower_grids: &[ONE; 4],
        ..PLAIN
    },
    Split {
        grids: &[[2, 4, 4]],
        floor: 96,
        num_dummies: 2,
        loads: &[256, 256, 16, 16],
        ends: &[16, 32, 36, 40],
        tower_grids: &[
            &[[1, 4, 4], [5, 4, 4]],
            &[[1, 4, 4], [5, 4, 4]],
            &[[1, 2, 2]],
            &[[1, 2, 2]],
        ],
        floors: &[5, 5, 0, 0],
        ..PLAIN
    },
    Split {
        grids: &[[32, 2, 2]],
        loads: &[64; 8],
        ends: &[16, 32, 48, 64, 80, 96, 112, 128],
        tower_grids: &[FOUR; 8],
        ..PLAIN
    },
    Split {
        grids: &[[3, 4, 4], [1, 8, 8], [2, 4, 6]],
        alpha: 96,
        floor: 96,
        loads: &[5376, 10240, 5760],
        ends: &[48, 112, 160],
        tower_grids: &[
            &[[3, 4, 4], [3, 4, 4]],
            &[[1, 8, 8], [1, 8, 8]],
            &[[2, 4, 6], [2, 4, 6]],
        ],
        floors: &[3, 1, 2],
        ..PLAIN
    },
];

#[test]
fn ranks_get_consecutive_rows_balanced_by_cost_and_a_floor_of_zeros() {
    for split in SPLITS {
        let world_size = split.ends.len();
        let config = VisionShardingConfig::always().with_min_local_patch_rows(split.floor);
        let shares = plan_frames(split.grids, 2, world_size, split.alpha, &config).unwrap();
        let what = format!(
            "{:?} on {world_size} ranks, floor {}",
            split.grids, split.floor
        );
        assert!(!shares.is_replicated(), "{what}");
        let num_rows = num_pixel_rows(split.grids, 2).unwrap();
        assert_eq!(shares.num_real_tokens() * 4, num_rows, "{what}");
        let num_dummies = shares.shares().iter().filter(|share| share.is_dummy());
        assert_eq!(num_dummies.count(), split.num_dummies, "{what}");
        let mut start = 0;
        for (rank, share) in shares.shares().iter().enumerate() {
            let end = split.ends[rank];
            assert_eq!(share.pixel_rows, start..end, "{what}, rank {rank}");
            assert_eq!(share.num_tokens * 4, end - start, "{what}, rank {rank}");
            assert_eq!(
                share.tower_grids(),
                split.tower_grids[rank],
                "{what}, rank {rank}"
            );
            let floor = split.floors.get(rank).copied().unwrap_or(0);
            assert_eq!(
                share.floor.map_or(0, |[t, _, _]| t),
                floor,
                "{what}, rank {rank}"
            );
            let cost = |&[t, h, w]: &[usize; 3]| {
                (t * h * w) as u128 * ((h * w) as u128 + u128::from(split.alpha))
            };
            let load: u128 = share.grids.iter().map(cost).sum();
            assert_eq!(load, split.loads[rank], "{what}, rank {rank}");
            start = end;
        }
    }
}

#[test]
fn as_many_zero_frames_as_reach_the_floor() {
    for (rows, frame_rows, floor, expected) in [
        (4, 4, 96, 23),
        (8, 4, 96, 22),
        (92, 4, 96, 1),
        (96, 4, 96, 0),
        (100, 4, 96, 0),
        (4, 0, 96, 0),
        (4, 4, 0, 0),
        (16, 16, 96, 5),
        (1, 64, 96, 2),
    ] {
        let got = num_floor_frames(rows, frame_rows, floor);
        assert_eq!(
            got, expected,
            "{rows} rows, frames of {frame_rows}, floor {floor}"
        );
    }
    let config = VisionShardingConfig::always().with_min_local_patch_rows(usize::MAX);
    let error = plan_frames(&[[2, 2, 2]], 2, 2, 0, &config).unwrap_err();
    assert!(
        matches!(error, VisionError::TooLarge { grid: [_, 2, 2] }),
        "{error}"
    );
}

#[test]
fn ranks_without_a_frame_get_a_dummy_behind_the_real_ones() {
    let shares = always(&[[1, 2, 2], [1, 4, 4]], 4);
    assert_eq!(shares.num_frames_per_rank(), [1, 1, 0, 0]);
    assert_eq!(shares.num_tokens_per_rank(), [1, 4, 1, 1]);
    let dummies: Vec<bool> = shares.shares().iter().map(FrameShare::is_dummy).collect();
    assert_eq!(dummies, [false, false, true, true]);
}

#[test]
fn equal_images_stay_apart_while_a_videos_frames_become_one_grid() {
    let shares = always(&[[1, 2, 2], [1, 2, 2], [4, 2, 2]], 2);
    assert_eq!(shares.shares()[0].grids, [[1, 2, 2], [1, 2, 2], [1, 2, 2]]);
    assert_eq!(shares.shares()[1].grids, [[3, 2, 2]]);
}

#[test]
fn a_cost_with_a_linear_term_evens_out_the_number_of_frames() {
    let grids: Vec<[usize; 3]> = [vec![[1, 32, 32]; 4], vec![[1, 8, 14]; 400]].concat();
    let frames = |alpha| {
        let shares = plan_frames(&grids, 2, 8, alpha, &VisionShardingConfig::always()).unwrap();
        let frames = shares.num_frames_per_rank();
        frames.iter().max().unwrap() - frames.iter().min().unwrap()
    };
    assert!(frames(3456) < frames(0));
}

#[test]
fn replicated_when_disabled_alone_empty_or_below_both_thresholds() {
    let grids = [[40, 2, 2], [1, 4, 4]];
    let plan = |world_size, config| plan_frames(&grids, 2, world_size, 0, &config).unwrap();
    let config = VisionShardingConfig::always;
    for replicated in [
        plan(3, VisionShardingConfig::replicated()),
        plan(1, config()),
        plan(3, config().with_min_tokens(45).with_min_frames(42)),
    ] {
        assert!(replicated.is_replicated());
        assert!(
            replicated
                .shares()
                .iter()
                .all(|share| share.frames == (0..41) && share.pixel_rows == (0..176))
        );
        assert_eq!(replicated.shares()[0].grids, grids);
        assert_eq!(replicated.num_real_tokens(), 44);
    }
    assert!(!plan(3, config().with_min_tokens(44).with_min_frames(42)).is_replicated());
    assert!(!plan(3, config().with_min_tokens(45).with_min_frames(41)).is_replicated());
    // Few tokens of many frames.
    let long = |frames| {
        let config = config().with_min_tokens(999).with_min_frames(32);
        plan_frames(&[[frames, 2, 2]], 2, 8, 0, &config).unwrap()
    };
    assert_eq!(long(32).num_tokens_per_rank(), [4; 8]);
    let few = long(31);
    assert!(few.is_replicated());
    assert_eq!(
        (few.num_real_tokens(), few.shares()[7].frames.len()),
        (31, 31)
    );
    let one = config().with_min_tokens(999).with_min_frames(999);
    let one = plan_frames(&[[1, 2, 2]], 2, 4, 0, &one).unwrap();
    assert!(one.is_replicated());
    assert_eq!(
        (one.num_real_tokens(), one.shares()[3].frames.len()),
        (1, 1)
    );
    let none = always(&[], 2);
    assert!(none.is_replicated());
    assert_eq!(
        (none.num_frames_per_rank(), none.shares()[0].is_dummy()),
        (vec![0, 0], false)
    );
}

#[test]
fn grids_that_do_not_fit_are_refused() {
    let plan = |grid, merge, world_size| {
        plan_frames(
            &[[1, 2, 2], grid],
            merge,
            world_size,
            0,
            &VisionShardingConfig::always(),
        )
        .unwrap_err()
    };
    for (grid, merge) in [
        ([1, 3, 2], 2),
        ([1, 2, 3], 2),
        ([0, 2, 2], 2),
        ([1, 0, 2], 2),
        ([1, 2, 2], 0),
    ] {
        assert!(
            matches!(plan(grid, merge, 2), VisionError::Grid { .. }),
            "{grid:?}"
        );
    }
    assert!(matches!(
        plan([usize::MAX, 2, 2], 2, 2),
        VisionError::TooLarge { .. }
    ));
    assert!(matches!(
        plan([1, 2, 2], 2, 0),
        VisionError::Partition(PartitionError::NoParts)
    ));
}

proptest! {
    #[test]
    fn shares_are_consecutive_and_complete(
        halves in prop::collection::vec((1_usize..4, 1_usize..4, 1_usize..4), 1..7),
        world_size in 2_usize..9,
        alpha in 0_u64..100,
    ) {
        let grids: Vec<[usize; 3]> = halves.into_iter().map(|(t, h, w)| [t, 2 * h, 2 * w]).collect();
        let shares = plan_frames(&grids, 2, world_size, alpha, &VisionShardingConfig::always()).unwrap();
        let (mut row, mut frame) = (0, 0);
        let mut entries = Vec::new();
        for share in shares.shares() {
            prop_assert_eq!((share.pixel_rows.start, share.frames.start), (row, frame));
            prop_assert!(!share.pixel_rows.is_empty());
            (row, frame) = (share.pixel_rows.end, share.frames.end);
            let rows: usize = share.grids.iter().map(|[t, h, w]| t * h * w).sum();
            prop_assert_eq!(rows, share.pixel_rows.len());
            prop_assert_eq!(share.num_tokens * 4, rows);
            if !share.is_dummy() {
                prop_assert_eq!(share.frames.len(), share.grids.iter().map(|[t, _, _]| t).sum::<usize>());
                entries.extend(share.grids.iter().flat_map(|&[t, h, w]| vec![[h, w]; t]));
            }
        }
        let expected: Vec<[usize; 2]> = grids.iter().flat_map(|&[t, h, w]| vec![[h, w]; t]).collect();
        let num_dummies = world_size.saturating_sub(expected.len());
        prop_assert_eq!(row, num_pixel_rows(&grids, 2).unwrap() + 4 * num_dummies);
        prop_assert_eq!(entries, expected);
    }
}
