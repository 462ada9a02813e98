//! A packed batch as one rank has it: a step per chunk, and the verbs over all of them.

use burn::tensor::{Tensor, backend::Backend};

use super::{MediaKind, MediaMask, MediaSlot, ThdError};
use crate::{
    attention::ContextParallelBackend,
    batch::{BatchError, Media},
    collectives::CollectiveElement,
    layout::{ThdMetadata, ThdTables},
    sharder::{Coordinates, CpStep, StepError},
};

/// What the tokens of one chunk wait for.
#[derive(Debug, Clone, Default)]
pub(super) struct Masks {
    pub(super) images: Option<MediaMask>,
    pub(super) videos: Option<MediaMask>,
}

impl Masks {
    /// Whether any token waits.
    pub(super) fn wait(&self) -> bool {
        let mut masks = [&self.images, &self.videos].into_iter().flatten();
        masks.any(|mask| mask.num_features() > 0)
    }

    /// A slot's media, with the tokens of `[rows, seq]` that wait for them.
    pub(super) fn media<B: Backend>(
        &self,
        slot: MediaSlot<B>,
        size: [usize; 2],
    ) -> Result<Vec<Media<B>>, StepError> {
        let kinds = [
            (MediaKind::Image, &self.images, slot.images),
            (MediaKind::Video, &self.videos, slot.videos),
        ];
        let mut media = Vec::new();
        for (kind, mask, entries) in kinds {
            match (mask, entries) {
                (None, Some(_)) => return Err(ThdError::NoPlaceholderId { kind }.into()),
                (Some(mask), Some(entries)) => media.push(mask.media(entries, size)),
                (Some(mask), None) if mask.num_features() > 0 => {
                    return Err(BatchError::Placeholders {
                        what: kind.to_string(),
                        placeholders: mask.num_features(),
                        embeddings: 0,
                    }
                    .into());
                }
                (_, None) => {}
            }
        }
        Ok(media)
    }
}

/// One rank's part of a packed batch: a [`CpStep`] for each chunk, which holds one row.
///
/// Where several chunks are accumulated, divide each loss by [`num_labels`](Self::num_labels) of all of them
/// ([`CpStep::cross_entropy_over`]).
#[derive(Debug, Clone)]
pub struct ThdStep<B: Backend> {
    steps: Vec<CpStep<B>>,
    masks: Vec<Masks>,
    /// Rows of the batch in a chunk, and tokens of a row.
    size: [usize; 2],
}

impl<B: ContextParallelBackend> ThdStep<B> {
    /// `size` is `[rows, seq]` of each chunk.
    pub(super) fn new(steps: Vec<CpStep<B>>, masks: Vec<Masks>, size: [usize; 2]) -> Self {
        Self { steps, masks, size }
    }

    /// Chunks of the batch.
    pub fn num_chunks(&self) -> usize {
        self.steps.len()
    }

    /// The step of each chunk, in order: what a model is given.
    pub fn steps(&self) -> &[CpStep<B>] {
        &self.steps
    }

    /// Tokens of each chunk's stream, all ranks'.
    pub fn stream_len(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Tokens of each chunk's stream on this rank: the same in every chunk, and on every rank.
    pub fn local_len(&self) -> usize {
        self.steps[0].local_len()
    }

    /// Boundaries of the documents of all streams, before they were dealt out, for libraries that ask for them.
    ///
    /// # Errors
    /// A document with padding ahead of or between its real tokens, which boundaries cannot express.
    pub fn tables(&self) -> Result<ThdTables, StepError> {
        let streams = self
            .steps
            .iter()
            .map(|step| step.documents().thd_metadata());
        let streams: Vec<_> = streams.collect::<Result<_, _>>()?;
        Ok(ThdMetadata::tables(&streams))
    }

    /// This rank's tokens of a whole tensor, along `dim`: `[.., batch, seq, ..]` (input coordinates), or
    /// `[.., num_chunks, stream_len, ..]` (padded ones) -> `[.., num_chunks, local_len, ..]`.
    ///
    /// No communication, and every rank may call it or not; the gradient of a token lands where the token came from. Nothing is
    /// added to streams, so that no fill is needed.
    ///
    /// # Panics
    /// Another number of tokens in `dim`, or of rows in the dim ahead of it.
    pub fn shard_tokens<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        from: Coordinates,
    ) -> Tensor<B, D, K> {
        let rows = match from {
            Coordinates::Input => self.size[0],
            Coordinates::Padded => 1,
        };
        self.each("shard_tokens", tensor, dim, rows, |step, part| {
            step.shard_tokens(part, dim, from, None)
        })
    }

    /// The whole tensor of every rank's tokens, along `dim`: `[.., num_chunks, local_len, ..]` -> `[.., batch, seq, ..]`
    /// (input coordinates), or `[.., num_chunks, stream_len, ..]` (padded ones).
    ///
    /// Every rank of the group must call it: it communicates once per chunk, in order. Its adjoint is that of
    /// [`CpStep::gather_tokens`].
    ///
    /// # Panics
    /// Before anything travels: another number of tokens in `dim`, or of chunks in the dim ahead of it.
    pub fn gather_tokens<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        to: Coordinates,
    ) -> Tensor<B, D, K> {
        self.each("gather_tokens", tensor, dim, 1, |step, part| {
            step.gather_tokens(part, dim, to, None)
        })
    }

    /// [`gather_tokens`](Self::gather_tokens) for a loss that every rank computes alike from the whole tensor, as
    /// [`CpStep::gather_tokens_for_replicated_loss`].
    ///
    /// # Panics
    /// As [`gather_tokens`](Self::gather_tokens).
    pub fn gather_tokens_for_replicated_loss<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        to: Coordinates,
    ) -> Tensor<B, D, K> {
        self.each("gather_tokens", tensor, dim, 1, |step, part| {
            step.gather_tokens_for_replicated_loss(part, dim, to, None)
        })
    }

    /// `run` over the part of each chunk, which is `rows` of the dim ahead of `dim`.
    fn each<const D: usize, K: CollectiveElement<B>>(
        &self,
        what: &str,
        tensor: Tensor<B, D, K>,
        dim: usize,
        rows: usize,
        run: impl Fn(&CpStep<B>, Tensor<B, D, K>) -> Tensor<B, D, K>,
    ) -> Tensor<B, D, K> {
        let (num_chunks, shape) = (self.num_chunks(), tensor.shape());
        let ahead = dim.checked_sub(1).filter(|_| dim < D);
        let Some(ahead) = ahead.filter(|ahead| shape[*ahead] == num_chunks * rows) else {
            panic!(
                "{what}: expected {} rows in the dim ahead of dim {dim}, got {shape:?}",
                num_chunks * rows
            );
        };
        let part = |chunk: usize| tensor.clone().narrow(ahead, chunk * rows, rows);
        let parts = self.steps.iter().enumerate();
        let parts = parts.map(|(chunk, step)| run(step, part(chunk))).collect();
        crate::cat(parts, ahead)
    }

    /// Which tokens of a chunk's whole stream wait for features of this kind. `None` where no token is known to be able to: no
    /// placeholder is configured, or the batch holds embeddings.
    ///
    /// # Panics
    /// There is no such chunk.
    pub fn media_mask(&self, chunk: usize, kind: MediaKind) -> Option<&MediaMask> {
        let masks = &self.masks[chunk];
        match kind {
            MediaKind::Image => masks.images.as_ref(),
            MediaKind::Video => masks.videos.as_ref(),
        }
    }

    /// Rows of a chunk's features of this kind that this rank's tokens take, in the order of its tokens.
    ///
    /// [`CpStep::media_rows`] has those of both kinds together, as [`CpStep::encode_media`] returns them: images ahead of videos.
    ///
    /// # Panics
    /// There is no such chunk.
    pub fn media_rows(&self, chunk: usize, kind: MediaKind) -> Vec<usize> {
        let rows = self.media_mask(chunk, kind).map(|mask| {
            mask.rows(&self.local_tokens(chunk))
                .expect("a rank owns tokens of the stream, to which none are added")
        });
        rows.unwrap_or_default()
    }

    /// The features of a chunk that this rank's tokens take, from all of its features of this kind: `[placeholders, width]`
    /// -> `[own placeholders, width]`, as [`MediaMask::select`].
    ///
    /// Of what [`CpStep::encode_media`] returns where features are gathered, the first rows are those of images. Where they are
    /// delivered to their consumers, they are selected already.
    ///
    /// # Errors
    /// [`ThdError::FeatureRows`] for another number of features; no token can wait for this kind ([`Self::media_mask`]).
    ///
    /// # Panics
    /// There is no such chunk.
    pub fn select_media(
        &self,
        chunk: usize,
        kind: MediaKind,
        features: Tensor<B, 2>,
    ) -> Result<Tensor<B, 2>, StepError> {
        match self.media_mask(chunk, kind) {
            Some(mask) => Ok(mask.select(features, &self.local_tokens(chunk))?),
            None => Err(StepError::Missing {
                what: format!("placeholders of {kind}"),
                available: "no id of them in the configuration, or embeddings".into(),
            }),
        }
    }

    /// Tokens of a chunk's stream that this rank owns, in local order.
    fn local_tokens(&self, chunk: usize) -> Vec<usize> {
        let step = &self.steps[chunk];
        step.layout().indices(step.group().rank())
    }
}
