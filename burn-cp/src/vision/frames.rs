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
    /// Grid of further frames of zeros, as high and wide as its last one, with which its tower is run so that it gets
    /// [`min_local_patch_rows`](VisionShardingConfig::min_local_patch_rows). Their features go nowhere.
    pub floor: Option<[usize; 3]>,
    /// Tokens (after merging) that it makes, without those of the floor.
    pub num_tokens: usize,
}

impl FrameShare {
    /// Whether its only frame is one of zeros, there so that the tower runs on every rank.
    pub fn is_dummy(&self) -> bool {
        self.frames.is_empty() && !self.pixel_rows.is_empty()
    }

    /// Grids that its tower is run with: those of its frames, then the floor's.
    pub fn tower_grids(&self) -> Vec<[usize; 3]> {
        self.grids.iter().copied().chain(self.floor).collect()
    }

    /// Pixel rows of the floor.
    pub fn num_floor_rows(&self) -> usize {
        self.floor.map_or(0, |[t, h, w]| t * h * w)
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
/// than ranks, the last ranks get a dummy frame of one token. A rank whose real frames have fewer pixel rows than
/// [`min_local_patch_rows`](VisionShardingConfig::min_local_patch_rows) gets frames of zeros on top. Every rank gets all frames where sharding is disabled, where
/// there is one rank or no frame, and where both tokens and frames are below the thresholds of `config`.
///
/// Pure host; every rank derives the same shares from the same arguments.
///
/// # Errors
/// A grid that is empty or does not divide into blocks of `merge` × `merge` patches; more patches than fit an index, with those
/// of the floor; no rank.
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
            floor: None,
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
        // Every share has a frame, and a share of dummies has nothing else.
        let floor = match mine.last() {
            Some(last) if !real.is_empty() => floor_of(rows, last, config.min_local_patch_rows)?,
            _ => None,
        };
        Ok(FrameShare {
            frames: real,
            pixel_rows,
            grids: coalesce(mine),
            floor,
            num_tokens: tokens_of(rows),
        })
    };
    let shares = cuts
        .windows(2)
        .map(share)
        .collect::<Result<_, VisionError>>()?;
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

/// Grid of the frames like `last` that bring `rows` up to `floor`.
fn floor_of(rows: usize, last: &Frame, floor: usize) -> Result<Option<[usize; 3]>, VisionError> {
    let (h, w) = (last.h, last.w);
    let missing = num_floor_frames(rows, last.num_patches(), floor);
    let grid = [missing, h, w];
    let more = missing.checked_mul(last.num_patches());
    more.and_then(|more| more.checked_add(rows))
        .ok_or(VisionError::TooLarge { grid })?;
    Ok((missing > 0).then_some(grid))
}

/// Frames of `frame_rows` rows that bring `rows` up to `floor`; none where a frame has no rows.
pub(super) fn num_floor_frames(rows: usize, frame_rows: usize, floor: usize) -> usize {
    match frame_rows {
        0 => 0,
        frame_rows => floor.saturating_sub(rows).div_ceil(frame_rows),
    }
}
