//! A vision tower that runs on every rank's share of the frames.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use burn::tensor::{Bool, Tensor, backend::Backend};

use super::{
    FrameShare, FrameShares, TowerError, TowerFault, VisionDelivery, VisionError, VisionFeatures,
    VisionShardingConfig, VisionTower, delivery,
    form::{OutputForm, first_fault},
    frames::num_pixel_rows,
    plan_frames,
};
use crate::{
    collectives::CollectiveBackend,
    comm::{CommError, FailureCause, ProcessGroup, panic_message},
};

const OPERATION: &str = "vision tower";

/// Runs a vision tower over a group of ranks: each rank computes some of the frames and receives the features of all, or those
/// that it asks for.
///
/// A trainable tower needs a group whose ranks hold different tokens of the same batch (the `cp` axis), over which its
/// parameters' gradients are summed afterwards: each rank's backward pass yields the part of its own frames. A frozen one may
/// be split over more ranks ([`Self::over`]).
#[derive(Debug)]
pub struct FrameSharded<'a, V> {
    tower: &'a V,
    /// Ranks that hold different tokens of one batch.
    cp: &'a ProcessGroup,
    /// Ranks that share the frames.
    group: &'a ProcessGroup,
    config: &'a VisionShardingConfig,
    /// Rows of the features that this rank takes, where they go to their consumers.
    rows: Option<&'a [Range<usize>]>,
}

impl<'a, V> FrameSharded<'a, V> {
    /// Splits the frames of `tower` over `cp`, the ranks that hold different tokens of the same batch. Moves nothing; `config`
    /// must be equal on every rank.
    pub fn new(tower: &'a V, cp: &'a ProcessGroup, config: &'a VisionShardingConfig) -> Self {
        Self {
            tower,
            cp,
            group: cp,
            config,
            rows: None,
        }
    }

    /// The same, but over other ranks: all must be given the same pixels, as replicas of a tensor-parallel axis are.
    ///
    /// Where some of them lie outside of the group given to [`Self::new`], [`Self::forward`] refuses a tower with gradients:
    /// the adjoint of the gather sums over all ranks of `group`, and replicas hold the same gradient, not parts of one.
    #[must_use]
    pub fn over(self, group: &'a ProcessGroup) -> Self {
        Self { group, ..self }
    }

    /// The same for a rank that needs these rows of the features of all entries, in this order. Counts where the configuration
    /// delivers to consumers; ranks may ask for the same rows, and a row may be asked for by none.
    #[must_use]
    pub fn for_rows(self, rows: &'a [Range<usize>]) -> Self {
        Self {
            rows: Some(rows),
            ..self
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
    /// Returns the features of all entries in order, `Σ t·h·w / merge²` rows each, on every rank; or where the configuration
    /// delivers to consumers ([`VisionDelivery::ToConsumers`]) the rows of [`Self::for_rows`], and one row without meaning where
    /// those are none, so that no tensor is empty. Every rank of the group must
    /// call it with the same pixels and grids, also one whose tokens need no feature. Where frames are split, the embeddings and
    /// all deepstack layers travel in one all-gather or exchange, whose adjoint sums every rank's gradient at the rank that
    /// computed the frame; the gradient of a dummy frame is zero. Where they are not (see [`plan_frames`]), every rank runs the
    /// tower on everything and nothing travels.
    ///
    /// On a backend with gradients, every rank's loss must depend on the result or on a later differentiable collective of
    /// the same order, even if its tokens need no feature: its backward pass takes part in the adjoint.
    ///
    /// # Errors
    /// [`VisionError::NoConsumers`] and [`VisionError::Rows`] where features go to their consumers. No entry; grids that do not divide into merge blocks or do not match the pixel rows. [`VisionError::TrainableScope`],
    /// before anything is sent, where the tower or the pixels have gradients and the group is wider than those allow;
    /// [`CommError::Disagreement`] where the ranks of such a group were given different grids. [`VisionError::Tower`] where the
    /// tower of any rank returned an error, panicked, returned another number of rows than its tokens, or differs from the
    /// others' in layers, widths, dtype or trainability: the same error on every rank, before any tensor has moved. A
    /// [`CommError`] that the tower returns stays one, and ends the other ranks. Where frames are not split, only the rank whose
    /// tower fails says so.
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
        let rows = match (self.config.delivery, self.rows) {
            (VisionDelivery::Gathered, _) => None,
            (VisionDelivery::ToConsumers, Some(rows)) => Some(rows),
            (VisionDelivery::ToConsumers, None) => return Err(VisionError::NoConsumers),
        };
        self.check_scope(&pixels, grids)?;
        let shares = self.plan(grids)?;
        if shares.is_replicated() {
            return self.run_whole(pixels, grids, &shares, rows);
        }
        let share = &shares.shares()[self.group.rank()];
        let trainable = self.tower.is_trainable();
        let merge = self.tower.spatial_merge_size();
        let num_rows = share.pixel_rows.len() + share.num_floor_rows();
        let outcome = self
            .run_tower(pixels_of(pixels, share), &share.tower_grids())?
            .and_then(|features| {
                let form = OutputForm::of(&features, num_rows / (merge * merge), trainable)?;
                Ok((features, form))
            });
        let (features, form, rows) = self.agree(outcome, rows)?;
        let mut message = delivery::message(features);
        if share.floor.is_some() {
            message = message.narrow(0, 0, share.num_tokens);
        }
        let received = match rows {
            None => delivery::gather(message, &shares, self.group),
            Some(rows) => {
                let plan = shares
                    .delivery(&rows, self.group.rank())
                    .map_err(|error| self.with_global_rank(error))?;
                delivery::deliver(message, plan, self.group)
            }
        };
        Ok(delivery::split(received, &form.widths))
    }

    /// The tower on all frames, where they are not split.
    fn run_whole<B: Backend>(
        &self,
        pixels: Tensor<B, 2>,
        grids: &[[usize; 3]],
        shares: &FrameShares,
        rows: Option<&[Range<usize>]>,
    ) -> Result<VisionFeatures<B>, VisionError>
    where
        V: VisionTower<B>,
    {
        let num_rows = shares.num_real_tokens();
        let features = returned_features(self.tower.forward(pixels, grids))?
            .and_then(|features| {
                OutputForm::of(&features, num_rows, self.tower.is_trainable())?;
                Ok(features)
            })
            .map_err(|fault| self.fault(self.group.rank(), fault))?;
        match rows {
            None => Ok(features),
            Some(rows) => {
                let rank = self.group.global_ranks()[self.group.rank()];
                delivery::check_rows(rows, num_rows, rank)?;
                Ok(delivery::select(features, rows))
            }
        }
    }

    /// Refuses gradients over replicas, and replicas that were given something else.
    fn check_scope<B>(&self, pixels: &Tensor<B, 2>, grids: &[[usize; 3]]) -> Result<(), VisionError>
    where
        B: CollectiveBackend,
        V: VisionTower<B>,
    {
        let is_outside = |rank: &&usize| !self.cp.global_ranks().contains(rank);
        let ranks = self.group.global_ranks().iter();
        let outside: Vec<usize> = ranks.filter(is_outside).copied().collect();
        if !self.config.enabled || outside.is_empty() {
            return Ok(());
        }
        let is_tracked = || B::leaf_id(&pixels.clone().into_primitive().tensor()).is_some();
        if self.tower.is_trainable() || is_tracked() {
            return Err(VisionError::TrainableScope {
                expected: self.cp.name().to_owned(),
                got: self.group.name().to_owned(),
                outside,
            });
        }
        // Nothing else has compared what ranks beyond those of a step were given.
        let shown = |grids: &Vec<[usize; 3]>| format!("{grids:?}");
        self.group
            .agree("the grids of the vision tower", grids.to_vec(), shown)?;
        Ok(())
    }

    /// The error of a plan, which counts ranks of the group.
    fn with_global_rank(&self, error: VisionError) -> VisionError {
        match error {
            VisionError::Rows {
                rank,
                start,
                end,
                expected,
            } => VisionError::Rows {
                rank: self.group.global_ranks()[rank],
                start,
                end,
                expected,
            },
            error => error,
        }
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
    ) -> Result<Result<VisionFeatures<B>, TowerFault>, CommError>
    where
        V: VisionTower<B>,
    {
        // The tower is only read, and nothing of it is used once any rank has failed.
        match catch_unwind(AssertUnwindSafe(|| self.tower.forward(pixels, grids))) {
            Ok(returned) => returned_features(returned).inspect_err(|error| self.fail(error)),
            // Not the tower's own failure: its rank and operation are those of the failed collective.
            Err(payload) if payload.is::<CommError>() => {
                if let Some(error) = payload.downcast_ref() {
                    self.fail(error);
                }
                resume_unwind(payload)
            }
            Err(payload) => Ok(Err(TowerFault::Panicked {
                message: panic_message(payload.as_ref()),
            })),
        }
    }

    /// Makes a failed collective of the tower known to the ranks that wait for this one, if nothing else has failed yet.
    fn fail(&self, error: &CommError) {
        let rank = self.group.global_ranks()[self.group.rank()];
        let cause = FailureCause::Comm(error.clone());
        self.group.fail(rank, OPERATION, cause);
    }

    /// Tells all ranks how each tower ended and which rows each rank takes, so that either all go on to the exchange or all
    /// return the same error.
    fn agree<T>(
        &self,
        outcome: Result<(T, OutputForm), TowerFault>,
        rows: Option<&[Range<usize>]>,
    ) -> Result<(T, OutputForm, Option<WantedRows>), VisionError> {
        let report = outcome
            .as_ref()
            .map(|(_, form)| form.clone())
            .map_err(Clone::clone);
        let sent = (report, rows.map(<[_]>::to_vec));
        let all = self.group.host_all_gather(OPERATION, sent)?;
        let (reports, wanted): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let Some((index, fault)) = first_fault(&reports) else {
            let (features, form) = outcome.map_err(|fault| self.fault(self.group.rank(), fault))?;
            return Ok((features, form, wanted.into_iter().collect()));
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
}

/// Rows that each rank of a group takes.
type WantedRows = Vec<Vec<Range<usize>>>;

/// What a tower returned, or its fault. A failed collective is not the tower's own failure.
fn returned_features<B: Backend>(
    returned: Result<VisionFeatures<B>, TowerError>,
) -> Result<Result<VisionFeatures<B>, TowerFault>, CommError> {
    match returned.map_err(|error| error.downcast::<CommError>()) {
        Ok(features) => Ok(Ok(features)),
        Err(Ok(error)) => Err(*error),
        Err(Err(error)) => Ok(Err(TowerFault::Failed {
            error: FailureCause::Error(error.into()).to_string(),
        })),
    }
}

/// The pixel rows of a share, with those of its floor.
fn pixels_of<B: Backend>(pixels: Tensor<B, 2>, share: &FrameShare) -> Tensor<B, 2> {
    let [num_rows, patch_dim] = pixels.dims();
    if share.is_dummy() {
        // Zeros in the graph of the pixels, so that the output is tracked here exactly if it is on the ranks with real
        // frames. A dummy frame is one merge block, so the first real frame has enough rows to make it from.
        let shape = [share.pixel_rows.len(), patch_dim];
        let everywhere = Tensor::<B, 2, Bool>::ones(shape, &pixels.device());
        return pixels.narrow(0, 0, shape[0]).mask_fill(everywhere, 0);
    }
    let mine = if share.pixel_rows == (0..num_rows) {
        pixels
    } else {
        pixels.slice([share.pixel_rows.clone()])
    };
    match share.num_floor_rows() {
        0 => mine,
        num_rows => {
            let zeros = Tensor::zeros([num_rows, patch_dim], (&mine.device(), mine.dtype()));
            crate::cat(vec![mine, zeros], 0)
        }
    }
}
