//! The media of a stream: what travels beside its tokens, and which tokens wait for it.

use std::fmt;

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

use super::ThdError;
use crate::batch::Media;

/// What placeholder tokens wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediaKind {
    /// Features of images.
    Image,
    /// Features of videos.
    Video,
}

impl fmt::Display for MediaKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Image => "images",
            Self::Video => "videos",
        })
    }
}

/// Images or videos as patches, whole: they are not aligned with tokens, and no rank gets a part of them.
#[derive(Debug, Clone)]
pub struct MediaEntries<B: Backend> {
    /// Patches `[rows, patch_dim]`: entry by entry, frame by frame; an entry `(t, h, w)` has `t·h·w` rows.
    pub pixels: Tensor<B, 2>,
    /// Grid `(t, h, w)` of each entry, in patches.
    pub grids: Vec<[usize; 3]>,
    /// Patches per side of a block that becomes one token.
    pub spatial_merge_size: usize,
}

/// The media of one chunk: those of all its rows, in the order in which their placeholders stand in the stream.
#[derive(Debug, Clone)]
pub struct MediaSlot<B: Backend> {
    /// Its images.
    pub images: Option<MediaEntries<B>>,
    /// Its videos. Their features follow those of the images.
    pub videos: Option<MediaEntries<B>>,
}

impl<B: Backend> MediaSlot<B> {
    /// The slot of a chunk without media.
    pub fn none() -> Self {
        Self {
            images: None,
            videos: None,
        }
    }
}

/// Which tokens of a whole stream wait for a feature of one kind, and for which: the `i`-th of them takes feature row `i`,
/// wherever it is sharded to. Host data, the same on every rank.
///
/// ```
/// use burn_cp::sharder::{MediaKind, MediaMask};
///
/// let mask = MediaMask::from_ids(MediaKind::Image, &[7, 62, 62, 8, 62, 9], 62);
/// assert_eq!(mask.num_features(), 3);
/// // A shard of tokens 0, 1, 4 and 5 takes features 0 and 2.
/// assert_eq!(mask.rows(&[0, 1, 4, 5])?, [0, 2]);
/// # Ok::<(), burn_cp::sharder::ThdError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaMask {
    kind: MediaKind,
    waits: Vec<bool>,
    /// For each token how many ahead of it wait.
    ahead: Vec<usize>,
}

impl MediaMask {
    /// The tokens of a stream that have this id.
    pub fn from_ids(kind: MediaKind, ids: &[i64], placeholder: i64) -> Self {
        let waits: Vec<bool> = ids.iter().map(|&id| id == placeholder).collect();
        let ahead = waits.iter().scan(0, |ahead, &waits| {
            let before = *ahead;
            *ahead += usize::from(waits);
            Some(before)
        });
        Self {
            kind,
            ahead: ahead.collect(),
            waits,
        }
    }

    /// For each token of the stream, in global order, whether it waits for a feature.
    pub fn waits(&self) -> &[bool] {
        &self.waits
    }

    /// Tokens of the stream that wait: the feature rows that there must be.
    pub fn num_features(&self) -> usize {
        self.waits.iter().filter(|waits| **waits).count()
    }

    /// Feature rows of these tokens of the stream, in their order. Tokens that wait for none have none.
    ///
    /// # Errors
    /// [`ThdError::PastMask`] for a token that the stream does not have.
    pub fn rows(&self, tokens: &[usize]) -> Result<Vec<usize>, ThdError> {
        let expected = self.waits.len();
        if let Some(&got) = tokens.iter().find(|token| **token >= expected) {
            return Err(ThdError::PastMask { expected, got });
        }
        let waiting = tokens.iter().filter(|token| self.waits[**token]);
        Ok(waiting.map(|&token| self.ahead[token]).collect())
    }

    /// The features of these tokens of the stream, from those of all: `[num_features, width]` -> `[rows, width]`, in the order of
    /// `tokens`. Where they wait for none, one row of zeros, since no tensor may be empty.
    ///
    /// Differentiable: a feature's gradient comes from the tokens here that take it. The result is a function of `features` also
    /// where it is zeros, so that a rank without media stays on the tower's graph.
    ///
    /// # Errors
    /// [`ThdError::PastMask`]; [`ThdError::FeatureRows`] for another number of features.
    pub fn select<B: Backend>(
        &self,
        features: Tensor<B, 2>,
        tokens: &[usize],
    ) -> Result<Tensor<B, 2>, ThdError> {
        let mut rows = self.rows(tokens)?;
        let ([got, width], expected) = (features.dims(), self.num_features());
        if got != expected {
            return Err(ThdError::FeatureRows {
                kind: self.kind,
                expected,
                got,
            });
        }
        let device = features.device();
        let zero = Tensor::zeros([1, width], (&device, features.dtype()));
        if expected == 0 {
            return Ok(zero);
        }
        let features = if rows.is_empty() {
            rows.push(expected);
            crate::cat(vec![features, zero], 0)
        } else {
            features
        };
        let num_rows = rows.len();
        #[allow(
            clippy::cast_possible_wrap,
            reason = "rows of a tensor that is there fit into 63 bits"
        )]
        let rows: Vec<i64> = rows.into_iter().map(|row| row as i64).collect();
        let rows = Tensor::<B, 1, Int>::from_data(TensorData::new(rows, [num_rows]), &device);
        Ok(features.select(0, rows))
    }

    /// `entries` as media of a batch of `[rows, seq]` tokens, whose placeholders are these.
    pub(super) fn media<B: Backend>(&self, entries: MediaEntries<B>, size: [usize; 2]) -> Media<B> {
        Media {
            name: self.kind.to_string(),
            pixels: entries.pixels,
            grids: entries.grids,
            spatial_merge_size: entries.spatial_merge_size,
            placeholders: TensorData::new(self.waits.clone(), size),
        }
    }
}
