//! Images and videos of a batch.

use burn::tensor::{Tensor, TensorData, backend::Backend};

use super::BatchError;

/// The images or videos of a batch, as patches, with the tokens that wait for their features.
#[derive(Debug, Clone)]
pub struct Media<B: Backend> {
    /// What it is, for messages: "image", "video".
    pub name: String,
    /// Patches `[rows, patch_dim]`: entry by entry, frame by frame; an entry `(t, h, w)` has `t·h·w` rows.
    pub pixels: Tensor<B, 2>,
    /// Grid `(t, h, w)` of each entry, in patches.
    pub grids: Vec<[usize; 3]>,
    /// Patches per side of a block that becomes one token.
    pub spatial_merge_size: usize,
    /// Bool `[batch, seq]`: the tokens that features replace, in the order of the entries.
    pub placeholders: TensorData,
}

/// Σ t·h·w: pixel rows of the grids; the largest number there is where they are more than that.
pub fn num_patch_rows(grids: &[[usize; 3]]) -> usize {
    let rows = grids
        .iter()
        .map(|[t, h, w]| t.saturating_mul(*h).saturating_mul(*w));
    rows.fold(0, usize::saturating_add)
}

/// Σ t: frames, the units that a vision tower attends within.
pub fn num_frames(grids: &[[usize; 3]]) -> usize {
    grids.iter().map(|[t, _, _]| t).sum()
}

/// Σ t·h·w / merge²: tokens that a tower with this merge size makes of the grids.
pub fn num_merged_tokens(grids: &[[usize; 3]], spatial_merge_size: usize) -> usize {
    num_patch_rows(grids) / (spatial_merge_size * spatial_merge_size).max(1)
}

impl<B: Backend> Media<B> {
    /// Checks grids against pixel rows and merge size.
    pub(crate) fn check(&self) -> Result<(), BatchError> {
        let merge = self.spatial_merge_size;
        let mut expected = 0_usize;
        for &grid in &self.grids {
            let [t, h, w] = grid;
            let rows = t.checked_mul(h).and_then(|rows| rows.checked_mul(w));
            expected = match rows.and_then(|rows| expected.checked_add(rows)) {
                Some(sum) => sum,
                None => {
                    return Err(BatchError::Grid {
                        what: self.name.clone(),
                        grid,
                        merge,
                    });
                }
            };
            if merge == 0 || rows == Some(0) || h % merge != 0 || w % merge != 0 {
                return Err(BatchError::Grid {
                    what: self.name.clone(),
                    grid,
                    merge,
                });
            }
        }
        let got = self.pixels.dims()[0];
        if expected != got {
            return Err(BatchError::PixelRows {
                what: self.name.clone(),
                grids: self.grids.clone(),
                expected,
                got,
            });
        }
        Ok(())
    }
}
