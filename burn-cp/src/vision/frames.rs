//! Which rank computes which frames.

use std::ops::Range;

use super::{PartitionError, VisionError, VisionShardingConfig, balanced_cuts};

/// What one rank computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameShare {
    /// Its frames, counted over all entries; empty where it computes a dummy frame.
    pub frames: Range<usize>,
    /// Rows of the pixels; those of a dummy frame follow behind the real ones.
    pub pixel_rows: Range<usize>,
    /// Grids `(t, h, w)` of its frames: consecutive frames of one entry are one grid, frames of different entries never are.
    pub grids: Vec<[usize; 3]>,
    /// Tokens (after merging) that it makes.
    pub num_tokens: usize,
}

impl FrameShare {
    /// Whether its only frame is one of zeros, there so that the tower runs on every rank.
    pub fn is_dummy(&self) -> bool {
        self.frames.is_empty() && !self.pixel_rows.is_empty()
    }
}

/// The frames of all entries, dealt out to ranks in order. Made by [`plan_frames`]; every rank derives the same one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameShares {
    shares: Vec<FrameShare>,
    replicated: bool,
    num_real_tokens: usize,
}

impl FrameShares {
    /// What each rank computes, in rank order.
    pub fn shares(&self) -> &[FrameShare] {
        &self.shares
    }

    /// Whether every rank computes every frame.
    pub fn is_replicated(&self) -> bool {
        self.replicated
    }

    /// Tokens (after merging) of all real frames. Those of dummy frames come behind them.
    pub fn num_real_tokens(&self) -> usize {
        self.num_real_tokens
    }

    /// Real frames that each rank computes, in rank order.
    pub fn num_frames_per_rank(&self) -> Vec<usize> {
        self.shares.iter().map(|share| share.frames.len()).collect()
    }

    /// Tokens (after merging) that each rank makes, in rank order, with those of dummy frames.
    pub fn num_tokens_per_rank(&self) -> Vec<usize> {
        self.shares.iter().map(|share| share.num_tokens).collect()
    }
}

/// `t` frames of an entry share this.
#[derive(Debug, Clone, Copy)]
struct Frame {
    entry: usize,
    h: usize,
    w: usize,
}

impl Frame {
    fn num_patches(&self) -> usize {
        self.h * self.w
    }

    /// Attention within the frame is quadratic in its patches, everything else linear. Saturates.
    fn cost(&self, alpha: u64) -> u128 {
        let patches = self.num_patches() as u128;
        patches.saturating_mul(patches + u128::from(alpha))
    }
}

/// Σ t·h·w of grids that divide into merge blocks.
pub(super) fn num_pixel_rows(grids: &[[usize; 3]], merge: usize) -> Result<usize, VisionError> {
    grids.iter().try_fold(0_usize, |rows, &grid| {
        let [t, h, w] = grid;
        if merge == 0 || t == 0 || h == 0 || w == 0 || h % merge != 0 || w % merge != 0 {
            return Err(VisionError::Grid { grid, merge });
        }
        let patches = t.checked_mul(h).and_then(|rows| rows.checked_mul(w));
        patches
            .and_then(|patches| rows.checked_add(patches))
            .ok_or(VisionError::TooLarge { grid })
    })
}

/// Deals the frames of `grids` out to `world_size` ranks.
///
/// Every entry `(t, h, w)` is `t` frames of `h·w` patches; a frame of `p` patches costs `p·(p + alpha)`. Each rank gets
/// consecutive frames, such that the most expensive share is as cheap as possible (see [`balanced_cuts`]). With fewer frames
/// than ranks, the last ranks get a dummy frame of one token. Every rank gets all frames where sharding is disabled, where
/// there is one rank or no frame, and where both tokens and frames are below the thresholds of `config`.
///
/// Pure host; every rank derives the same shares from the same arguments.
///
/// # Errors
/// A grid that is empty or does not divide into blocks of `merge` × `merge` patches; more patches than fit an index; no rank.
pub fn plan_frames(
    grids: &[[usize; 3]],
    merge: usize,
    world_size: usize,
    alpha: u64,
    config: &VisionShardingConfig,
) -> Result<FrameShares, VisionError> {
    let num_rows = num_pixel_rows(grids, merge)?;
    if world_size == 0 {
        return Err(PartitionError::NoParts.into());
    }
    let tokens_of = |rows: usize| if rows == 0 { 0 } else { rows / (merge * merge) };
    let num_frames: usize = grids.iter().map(|[t, _, _]| t).sum();
    let num_real_tokens = tokens_of(num_rows);
    let too_few = num_real_tokens < config.min_tokens && num_frames < config.min_frames;
    if !config.enabled || world_size == 1 || num_frames == 0 || too_few {
        let share = FrameShare {
            frames: 0..num_frames,
            pixel_rows: 0..num_rows,
            grids: grids.to_vec(),
            num_tokens: num_real_tokens,
        };
        return Ok(FrameShares {
            shares: vec![share; world_size],
            replicated: true,
            num_real_tokens,
        });
    }
    let mut frames: Vec<Frame> = Vec::with_capacity(num_frames.max(world_size));
    for (entry, &[t, h, w]) in grids.iter().enumerate() {
        frames.extend((0..t).map(|_| Frame { entry, h, w }));
    }
    let cuts = if num_frames < world_size {
        frames.resize(
            world_size,
            Frame {
                entry: grids.len(),
                h: merge,
                w: merge,
            },
        );
        (0..=world_size).collect()
    } else {
        let costs: Vec<u128> = frames.iter().map(|frame| frame.cost(alpha)).collect();
        balanced_cuts(&costs, world_size)?
    };
    let mut first_row = 0;
    let share = |cut: &[usize]| {
        let mine = &frames[cut[0]..cut[1]];
        let rows: usize = mine.iter().map(Frame::num_patches).sum();
        let pixel_rows = first_row..first_row + rows;
        first_row += rows;
        let real = cut[0].min(num_frames)..cut[1].min(num_frames);
        FrameShare {
            frames: real,
            pixel_rows,
            grids: coalesce(mine),
            num_tokens: tokens_of(rows),
        }
    };
    let shares = cuts.windows(2).map(share).collect();
    Ok(FrameShares {
        shares,
        replicated: false,
        num_real_tokens,
    })
}

/// Grids of consecutive frames: one per run of frames of the same entry, which share height and width.
fn coalesce(frames: &[Frame]) -> Vec<[usize; 3]> {
    let runs = frames.chunk_by(|a, b| a.entry == b.entry);
    runs.map(|run| [run.len(), run[0].h, run[0].w]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn always(grids: &[[usize; 3]], world_size: usize) -> FrameShares {
        plan_frames(grids, 2, world_size, 0, &VisionShardingConfig::always()).unwrap()
    }

    #[test]
    fn ranks_get_consecutive_rows_and_grids() {
        let mixed = [
            [1, 2, 2],
            [1, 4, 4],
            [1, 2, 4],
            [1, 6, 4],
            [1, 2, 2],
            [1, 4, 6],
        ];
        let videos = [[1, 2, 2], [2, 2, 4], [1, 4, 4], [2, 2, 2], [1, 2, 4]];
        let (small, medium) = ([1, 2, 2], [1, 4, 4]);
        // Grids, ends of the ranks' pixel rows, and the ranks' grids.
        let table = [
            (
                mixed.to_vec(),
                vec![52, 80],
                vec![mixed[..4].to_vec(), mixed[4..].to_vec()],
            ),
            (
                mixed.to_vec(),
                vec![28, 56, 80],
                vec![
                    mixed[..3].to_vec(),
                    mixed[3..5].to_vec(),
                    mixed[5..].to_vec(),
                ],
            ),
            (
                mixed.to_vec(),
                vec![4, 20, 28, 52, 56, 80],
                mixed.map(|grid| vec![grid]).to_vec(),
            ),
            (
                videos.to_vec(),
                vec![20, 52],
                vec![videos[..2].to_vec(), videos[2..].to_vec()],
            ),
            (
                vec![[8, 2, 2]],
                vec![8, 16, 24, 32],
                vec![vec![[2, 2, 2]]; 4],
            ),
            (vec![small], vec![4, 8, 12, 16], vec![vec![small]; 4]),
            (
                vec![small, medium],
                vec![4, 20, 24, 28],
                vec![vec![small], vec![medium], vec![small], vec![small]],
            ),
            (vec![[2, 2, 2]], vec![4, 8, 12, 16], vec![vec![small]; 4]),
        ];
        for (grids, ends, expected) in table {
            let shares = always(&grids, ends.len());
            assert!(!shares.is_replicated());
            assert_eq!(
                shares.num_real_tokens() * 4,
                num_pixel_rows(&grids, 2).unwrap()
            );
            let mut start = 0;
            for ((share, &end), grids) in shares.shares().iter().zip(&ends).zip(&expected) {
                assert_eq!(share.pixel_rows, start..end);
                assert_eq!(&share.grids, grids);
                assert_eq!(share.num_tokens, (end - start) / 4);
                start = end;
            }
        }
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
}
