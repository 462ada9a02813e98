//! One step: this rank's part of a batch, and the verbs that need to know how it was cut.

mod attention;

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::{Arc, Mutex},
};

use burn::tensor::{Bool, Int, Tensor, TensorData, TensorPrimitive, backend::Backend};

use super::{ContextParallelConfig, StepError, arrangement::Arrangement, media::LocalPlaceholders};
use crate::{
    attention::{ContextParallelBackend, PreparedAttention},
    batch::Media,
    collectives::{CollectiveElement, Payload},
    comm::ProcessGroup,
    layout::{Documents, TokenLayout},
    plan::MaskKind,
    vision::{FrameSharded, FrameShares, VisionDelivery, VisionFeatures, VisionTower},
};

/// The primary stream as the model is given it.
#[derive(Debug)]
pub(super) enum Primary<B: Backend> {
    Ids(Option<Tensor<B, 2, Int>>),
    Embeddings(Payload<B>),
}

/// Images or videos of a step, whole on every rank.
#[derive(Debug, Clone)]
pub(super) struct StepMedia<B: Backend> {
    pixels: Tensor<B, 2>,
    grids: Vec<[usize; 3]>,
    merge: usize,
}

impl<B: Backend> StepMedia<B> {
    pub(super) fn new(media: &Media<B>) -> Self {
        Self {
            pixels: media.pixels.clone(),
            grids: media.grids.clone(),
            merge: media.spatial_merge_size,
        }
    }
}

#[derive(Debug)]
pub(super) struct LocalStreams<B: Backend> {
    pub(super) primary: Primary<B>,
    /// `batch · local_tokens` values, kept on the host: the loss selects by them.
    pub(super) labels: Option<Vec<i64>>,
    pub(super) positions: Tensor<B, 3, Int>,
    pub(super) padding: TensorData,
    pub(super) media_rows: LocalPlaceholders,
    pub(super) deepstack: Vec<Tensor<B, 3>>,
    pub(super) streams: BTreeMap<String, Payload<B>>,
    pub(super) dropout_seed: Option<u64>,
    pub(super) device: B::Device,
}

#[derive(Debug)]
struct Inner<B: Backend> {
    config: Arc<ContextParallelConfig>,
    cp: ProcessGroup,
    loss: ProcessGroup,
    documents: Arc<Documents>,
    layout: Arc<TokenLayout>,
    arrangement: Arrangement,
    local: LocalStreams<B>,
    media: Vec<StepMedia<B>>,
    prepared: Mutex<HashMap<MaskKind, Arc<PreparedAttention>>>,
}

/// One rank's part of one batch. Immutable, cheap to clone, and passed to the model explicitly: nothing about a step is global.
///
/// Local tensors hold this rank's tokens in its own order, `local_tokens` of every row; see [`Self::layout`] for which those are.
/// Their first dim, `batch`, runs over the rows that are dealt out: the placed ones where the batch has a placement.
#[derive(Debug)]
pub struct CpStep<B: Backend> {
    inner: Arc<Inner<B>>,
}

impl<B: Backend> Clone for CpStep<B> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
        }
    }
}

impl<B: ContextParallelBackend> CpStep<B> {
    pub(super) fn new(
        config: Arc<ContextParallelConfig>,
        [cp, loss]: [ProcessGroup; 2],
        (documents, layout, arrangement): (Arc<Documents>, Arc<TokenLayout>, Arrangement),
        local: LocalStreams<B>,
        media: Vec<StepMedia<B>>,
    ) -> Self {
        let prepared = Mutex::default();
        Self {
            inner: Arc::new(Inner {
                config,
                cp,
                loss,
                documents,
                layout,
                arrangement,
                local,
                media,
                prepared,
            }),
        }
    }

    /// Rows of local tensors: those of the batch, or of its placement.
    pub fn batch_size(&self) -> usize {
        self.inner.arrangement.padded_size()[0]
    }

    /// Tokens of each row on this rank; at least 1.
    pub fn local_len(&self) -> usize {
        self.inner.layout.local_len(self.inner.cp.rank())
    }

    /// `[batch, seq]` of the batch as it came, before placement and padding.
    pub fn input_size(&self) -> [usize; 2] {
        self.inner.arrangement.input_size()
    }

    pub(super) fn arrangement(&self) -> &Arrangement {
        &self.inner.arrangement
    }

    /// How the batch was sharded.
    pub fn config(&self) -> &ContextParallelConfig {
        &self.inner.config
    }

    /// Images or videos of the batch, counted as it added them.
    pub fn num_media(&self) -> usize {
        self.inner.media.len()
    }

    /// The group over which the sequence is sharded.
    pub fn group(&self) -> &ProcessGroup {
        &self.inner.cp
    }

    /// The group over which the loss is averaged and gradients are summed.
    pub fn loss_group(&self) -> &ProcessGroup {
        &self.inner.loss
    }

    /// Which rank owns which tokens of the padded rows.
    pub fn layout(&self) -> &TokenLayout {
        &self.inner.layout
    }

    /// The documents, in padded rows.
    pub fn documents(&self) -> &Documents {
        &self.inner.documents
    }

    /// The device that the batch was sharded to.
    pub fn device(&self) -> &B::Device {
        &self.inner.local.device
    }

    /// What the batch wants dropout to be drawn from.
    pub fn dropout_seed(&self) -> Option<u64> {
        self.inner.local.dropout_seed
    }

    /// Token ids: `[batch, local_tokens]`, or `[batch, padded seq]` where the primary stream is left whole.
    ///
    /// # Errors
    /// The batch carries embeddings.
    pub fn ids(&self) -> Result<Tensor<B, 2, Int>, StepError> {
        match &self.inner.local.primary {
            Primary::Ids(Some(ids)) => Ok(ids.clone()),
            _ => Err(StepError::Missing {
                what: "ids".into(),
                available: "embeddings".into(),
            }),
        }
    }

    /// Embeddings: `[batch, local_tokens, hidden]`, or `[batch, padded seq, hidden]` where the primary stream is left whole.
    ///
    /// # Errors
    /// The batch carries ids.
    pub fn embeddings(&self) -> Result<Tensor<B, 3>, StepError> {
        match &self.inner.local.primary {
            Primary::Embeddings(Payload::Float(tensor)) => Ok(Tensor::from_primitive(
                TensorPrimitive::Float(tensor.clone()),
            )),
            _ => Err(StepError::Missing {
                what: "embeddings".into(),
                available: "ids".into(),
            }),
        }
    }

    /// Positions `[axes, batch, local_tokens]`: 1 axis, or as many as the batch gave.
    pub fn positions(&self) -> Tensor<B, 3, Int> {
        self.inner.local.positions.clone()
    }

    /// Positions for learned embeddings `[batch, local_tokens]`: those of the first axis of [`Self::positions`], and 0 at padding,
    /// where they would count on past the longest document.
    pub fn embedding_positions(&self) -> Tensor<B, 2, Int> {
        let positions = self.positions().narrow(0, 0, 1).squeeze_dim::<2>(0);
        positions.mask_fill(self.padding_mask(), 0)
    }

    /// `[batch, local_tokens]`, true where a token is padding: the batch's own, or added by the layout.
    pub fn padding_mask(&self) -> Tensor<B, 2, Bool> {
        Tensor::from_data(self.inner.local.padding.clone(), self.device())
    }

    /// Labels of this rank's tokens, row by row; −100 is ignored. `None` where the batch has none.
    pub fn labels(&self) -> Option<&[i64]> {
        self.inner.local.labels.as_deref()
    }

    /// A further stream, cut like the tokens.
    ///
    /// # Errors
    /// The batch does not carry it.
    ///
    /// # Panics
    /// It has another kind of element, or another number of dims.
    pub fn stream<const D: usize, K: CollectiveElement<B>>(
        &self,
        name: &str,
    ) -> Result<Tensor<B, D, K>, StepError> {
        match self.inner.local.streams.get(name) {
            Some(payload) => Ok(K::from_payload(payload.clone())),
            None => Err(StepError::Missing {
                what: format!("stream {name:?}"),
                available: format!("{:?}", self.inner.local.streams.keys().collect::<Vec<_>>()),
            }),
        }
    }

    /// Deepstack features that the batch brought, each `[batch, local_tokens, hidden]`: zeros at tokens without one.
    pub fn deepstack(&self) -> &[Tensor<B, 3>] {
        &self.inner.local.deepstack
    }

    /// `[batch, local_tokens]`, true where an image's or video's feature replaces the token.
    pub fn media_mask(&self) -> Tensor<B, 2, Bool> {
        self.inner.local.media_rows.mask(self.device())
    }

    /// Feature rows of the whole batch's media that this rank's tokens take, in the order of its tokens, as runs.
    pub fn media_rows(&self) -> Vec<Range<usize>> {
        self.inner.local.media_rows.wanted()
    }

    /// Feature rows as [`Self::encode_media`] returns them, `[media tokens, width]`, at this rank's tokens:
    /// `[batch, local_tokens, width]`, zeros where a token has none.
    ///
    /// # Panics
    /// Another number of rows: than the batch has placeholders, or where features go to their consumers than this rank has.
    pub fn scatter_media(&self, features: Tensor<B, 2>) -> Tensor<B, 3> {
        let media_rows = &self.inner.local.media_rows;
        match self.inner.config.vision.delivery {
            VisionDelivery::Gathered => media_rows.scatter(features),
            VisionDelivery::ToConsumers => media_rows.scatter_own(features),
        }
    }

    /// Runs a vision tower over the batch's media, split by frames over the group if the configuration says so. `None`, on
    /// every rank, where the batch has none. Every rank of the group must call it.
    ///
    /// The features are those of the whole batch, or where the configuration says
    /// [`ToConsumers`](VisionDelivery::ToConsumers) those of this rank's tokens in the order of its tokens
    /// ([`Self::media_rows`]), split or not; a rank without such tokens is given one row that stands for nothing.
    /// [`Self::scatter_media`] takes either.
    ///
    /// # Errors
    /// The tower has another merge size than the media, or it fails: where frames are split on any rank, otherwise on this one.
    pub fn encode_media<V: VisionTower<B>>(
        &self,
        tower: &V,
    ) -> Result<Option<VisionFeatures<B>>, StepError> {
        self.encode(tower, None)
    }

    /// [`encode_media`](Self::encode_media) over a wider group, all of whose ranks hold the same media: for a frozen tower. Every
    /// rank of that group must call it.
    ///
    /// # Errors
    /// As there; a trainable tower.
    pub fn encode_media_over<V: VisionTower<B>>(
        &self,
        tower: &V,
        group: &ProcessGroup,
    ) -> Result<Option<VisionFeatures<B>>, StepError> {
        self.encode(tower, Some(group))
    }

    fn encode<V: VisionTower<B>>(
        &self,
        tower: &V,
        group: Option<&ProcessGroup>,
    ) -> Result<Option<VisionFeatures<B>>, StepError> {
        let grids = self.media_grids();
        if grids.is_empty() {
            return Ok(None);
        }
        let media = &self.inner.media;
        if let Some(other) = media
            .iter()
            .find(|media| media.merge != tower.spatial_merge_size())
        {
            return Err(StepError::Invalid {
                what: "spatial_merge_size of the batch's media".into(),
                expected: tower.spatial_merge_size().to_string(),
                got: other.merge.to_string(),
            });
        }
        let pixels: Vec<_> = media.iter().map(|media| media.pixels.clone()).collect();
        let pixels = if pixels.len() == 1 {
            pixels[0].clone()
        } else {
            crate::cat(pixels, 0)
        };
        let rows = self.media_rows();
        let sharded = self.frame_sharded(tower).for_rows(&rows);
        let sharded = match group {
            Some(group) => sharded.over(group),
            None => sharded,
        };
        Ok(Some(sharded.forward(pixels, &grids)?))
    }

    /// Which rank's tower encodes which frames of the batch's media. Pure host.
    ///
    /// # Errors
    /// As [`plan_frames`](crate::vision::plan_frames).
    pub fn frame_shares<V: VisionTower<B>>(&self, tower: &V) -> Result<FrameShares, StepError> {
        Ok(self.frame_sharded(tower).plan::<B>(&self.media_grids())?)
    }

    fn frame_sharded<'a, V: VisionTower<B>>(&'a self, tower: &'a V) -> FrameSharded<'a, V> {
        FrameSharded::new(tower, &self.inner.cp, &self.inner.config.vision)
    }

    fn media_grids(&self) -> Vec<[usize; 3]> {
        self.inner
            .media
            .iter()
            .flat_map(|media| media.grids.iter().copied())
            .collect()
    }
}
