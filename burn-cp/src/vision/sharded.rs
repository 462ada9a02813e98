//! A vision tower that runs on every rank's share of the frames.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use burn::tensor::{Bool, DType, Tensor, backend::Backend};

use super::{
    FrameShare, FrameShares, TowerFault, VisionError, VisionFeatures, VisionShardingConfig,
    VisionTower, frames::num_pixel_rows, plan_frames,
};
use crate::{
    collectives::{self, CollectiveBackend},
    comm::{CommError, ProcessGroup, odd_one_out, panic_message},
};

const OPERATION: &str = "vision tower";

/// Runs a vision tower over a group of ranks: each rank computes some of the frames and receives the features of all.
///
/// A trainable tower needs a group whose ranks hold different tokens of the same batch (the `cp` axis), over which its
/// parameters' gradients are summed afterwards: each rank's backward pass yields the part of its own frames.
#[derive(Debug)]
pub struct FrameSharded<'a, V> {
    tower: &'a V,
    group: &'a ProcessGroup,
    config: &'a VisionShardingConfig,
}

impl<'a, V> FrameSharded<'a, V> {
    /// Splits the frames of `tower` over `group`. Moves nothing; `config` must be equal on every rank.
    pub fn new(tower: &'a V, group: &'a ProcessGroup, config: &'a VisionShardingConfig) -> Self {
        Self {
            tower,
            group,
            config,
        }
    }

    /// Which rank computes which frames of `grids`. Pure host; equal on every rank.
    ///
    /// # Errors
    /// As [`plan_frames`].
    pub fn plan<B: Backend>(&self, grids: &[[usize; 3]]) -> Result<FrameShares, VisionError>
    where
        V: VisionTower<B>,
    {
        let alpha = self.config.alpha(self.tower.hidden_size());
        plan_frames(
            grids,
            self.tower.spatial_merge_size(),
            self.group.size(),
            alpha,
            self.config,
        )
    }

    /// Embeds pixels `[rows, patch_dim]` with the grids `(t, h, w)` of their entries, `rows = Σ t·h·w`.
    ///
    /// Returns the features of all entries in order, `Σ t·h·w / merge²` rows each, on every rank. Every rank of the group must
    /// call it with the same arguments, also one whose tokens need no feature. Where frames are split, the embeddings and
    /// all deepstack layers travel in one all-gather, whose adjoint sums every rank's gradient at the rank that computed the
    /// frame; the gradient of a dummy frame is zero. Where they are not (see [`plan_frames`]), every rank runs the tower on
    /// everything and nothing travels.
    ///
    /// On a backend with gradients, every rank's loss must depend on the result or on a later differentiable collective of
    /// the same order, even if its tokens need no feature: its backward pass takes part in the adjoint.
    ///
    /// # Errors
    /// No entry; grids that do not divide into merge blocks or do not match the pixel rows. [`VisionError::Tower`] where the
    /// tower of any rank panicked, returned another number of rows than its tokens, or differs from the others' in layers,
    /// widths, dtype or trainability: the same error on every rank, before any tensor has moved.
    ///
    /// # Panics
    /// Where frames are not split, when the tower does. With a [`CommError`] when communication within the tower or the
    /// all-gather fails.
    pub fn forward<B>(
        &self,
        pixels: Tensor<B, 2>,
        grids: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, VisionError>
    where
        B: CollectiveBackend,
        V: VisionTower<B>,
    {
        let (expected, got) = (
            num_pixel_rows(grids, self.tower.spatial_merge_size())?,
            pixels.dims()[0],
        );
        if expected != got {
            return Err(VisionError::PixelRows {
                grids: grids.to_vec(),
                expected,
                got,
            });
        }
        if grids.is_empty() {
            return Err(VisionError::NoEntries);
        }
        let shares = self.plan(grids)?;
        let share = &shares.shares()[self.group.rank()];
        let trainable = self.tower.is_trainable();
        if shares.is_replicated() {
            let features = self.tower.forward(pixels, grids);
            OutputForm::of(&features, share.num_tokens, trainable)
                .map_err(|fault| self.fault(self.group.rank(), fault))?;
            return Ok(features);
        }
        let outcome = self
            .run_tower(share_of(pixels, share), &share.grids)
            .and_then(|features| {
                let form = OutputForm::of(&features, share.num_tokens, trainable)?;
                Ok((features, form))
            });
        let (features, form) = self.agree(outcome)?;
        Ok(self.gather(features, &form, &shares))
    }

    fn fault(&self, index: usize, fault: TowerFault) -> VisionError {
        VisionError::Tower {
            rank: self.group.global_ranks()[index],
            fault,
        }
    }

    /// The tower's features, or what it did instead of returning them.
    fn run_tower<B: Backend>(
        &self,
        pixels: Tensor<B, 2>,
        grids: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, TowerFault>
    where
        V: VisionTower<B>,
    {
        // The tower is only read, and nothing of it is used once any rank has failed.
        catch_unwind(AssertUnwindSafe(|| self.tower.forward(pixels, grids))).map_err(|payload| {
            if payload.is::<CommError>() {
                // Not the tower's own failure: its rank and operation are those of the failed collective.
                resume_unwind(payload);
            }
            TowerFault::Panicked {
                message: panic_message(payload.as_ref()),
            }
        })
    }

    /// Tells all ranks how each tower ended, so that either all go on to the all-gather or all return the same error.
    fn agree<T>(
        &self,
        outcome: Result<(T, OutputForm), TowerFault>,
    ) -> Result<(T, OutputForm), VisionError> {
        let report = outcome
            .as_ref()
            .map(|(_, form)| form.clone())
            .map_err(Clone::clone);
        let reports = self.group.host_all_gather(OPERATION, report)?;
        let Some((index, fault)) = first_fault(&reports) else {
            return outcome.map_err(|fault| self.fault(self.group.rank(), fault));
        };
        let mine = if index == self.group.rank() {
            Err(fault.clone())
        } else {
            Ok(())
        };
        // Makes the rank at fault the world's first failure. The error says the same as the one below, with less detail.
        let _ = self.group.consensus(OPERATION, mine);
        Err(self.fault(index, fault))
    }

    /// The features of all ranks' frames, in order and without those of dummy frames.
    fn gather<B: CollectiveBackend>(
        &self,
        features: VisionFeatures<B>,
        form: &OutputForm,
        shares: &FrameShares,
    ) -> VisionFeatures<B> {
        let mut parts = features.deepstack;
        parts.insert(0, features.embeddings);
        let message = if parts.len() == 1 {
            parts.swap_remove(0)
        } else {
            Tensor::cat(parts, 1)
        };
        let all =
            collectives::all_gather_sized(message, 0, &shares.num_tokens_per_rank(), self.group);
        // Dummy frames come last.
        let rows = 0..shares.num_real_tokens();
        let mut column = 0;
        let mut split = form.widths.iter().map(|width| {
            let columns = column..column + width;
            column = columns.end;
            all.clone().slice([rows.clone(), columns])
        });
        let embeddings = split
            .next()
            .expect("the first width is that of the embeddings");
        let deepstack = split.collect();
        VisionFeatures {
            embeddings,
            deepstack,
        }
    }
}

/// The pixel rows of a share.
fn share_of<B: Backend>(pixels: Tensor<B, 2>, share: &FrameShare) -> Tensor<B, 2> {
    let [num_rows, patch_dim] = pixels.dims();
    if !share.is_dummy() {
        return if share.pixel_rows == (0..num_rows) {
            pixels
        } else {
            pixels.slice([share.pixel_rows.clone()])
        };
    }
    // Zeros in the graph of the pixels, so that the output is tracked here exactly if it is on the ranks with real frames.
    // A dummy frame is one merge block, so the first real frame has enough rows to make it from.
    let shape = [share.pixel_rows.len(), patch_dim];
    let everywhere = Tensor::<B, 2, Bool>::ones(shape, &pixels.device());
    pixels.narrow(0, 0, shape[0]).mask_fill(everywhere, 0)
}

/// What the outputs of all towers must have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OutputForm {
    /// Of the embeddings, then of each deepstack layer.
    widths: Vec<usize>,
    dtype: DType,
    trainable: bool,
}

impl OutputForm {
    /// The form of well-formed features of `num_tokens` tokens.
    fn of<B: Backend>(
        features: &VisionFeatures<B>,
        num_tokens: usize,
        trainable: bool,
    ) -> Result<Self, TowerFault> {
        let dtype = features.embeddings.dtype();
        let mut widths = Vec::with_capacity(1 + features.deepstack.len());
        for (i, part) in std::iter::once(&features.embeddings)
            .chain(&features.deepstack)
            .enumerate()
        {
            let what = || {
                if i == 0 {
                    "embeddings".to_owned()
                } else {
                    format!("deepstack layer {}", i - 1)
                }
            };
            let [rows, width] = part.dims();
            if rows != num_tokens {
                return Err(TowerFault::NumTokens {
                    what: what(),
                    expected: num_tokens,
                    got: rows,
                });
            }
            if part.dtype() != dtype {
                return Err(TowerFault::Dtype {
                    what: what(),
                    expected: dtype,
                    got: part.dtype(),
                });
            }
            widths.push(width);
        }
        Ok(Self {
            widths,
            dtype,
            trainable,
        })
    }
}

impl fmt::Display for OutputForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (embeddings, layers) = self.widths.split_at(1);
        let trainable = if self.trainable {
            "trainable"
        } else {
            "frozen"
        };
        let num_layers = layers.len();
        write!(
            f,
            "embeddings of width {embeddings:?} and {num_layers} deepstack layers of widths {layers:?}"
        )?;
        write!(f, ", {:?}, {trainable}", self.dtype)
    }
}

/// The first rank, by index in the group, whose tower failed or whose output differs from that of most ranks.
fn first_fault(reports: &[Result<OutputForm, TowerFault>]) -> Option<(usize, TowerFault)> {
    if let Some(fault) = reports
        .iter()
        .enumerate()
        .find_map(|(i, report)| Some((i, report.clone().err()?)))
    {
        return Some(fault);
    }
    let forms: Vec<&OutputForm> = reports.iter().flatten().collect();
    let (odd, expected) = odd_one_out(&forms)?;
    Some((
        odd,
        TowerFault::Form {
            expected: forms[expected].to_string(),
            got: forms[odd].to_string(),
        },
    ))
}
