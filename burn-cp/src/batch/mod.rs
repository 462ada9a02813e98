//! What a model is fed: one batch of sequences with all that belongs to its tokens, whole, as every rank of a group holds it.
//!
//! Integer and bool streams stay [`TensorData`] on the host until they are sharded, so that a batch can be checked, and
//! its plan made, without waiting for a device. Everything here is data; [`sharder`](crate::sharder) checks and shards it.

mod documents;
mod error;
mod loss_mask;
mod marks;
mod media;
mod rows;
mod stream;

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData, backend::Backend};

pub use error::BatchError;
pub use loss_mask::IGNORED_LABEL;
pub(crate) use marks::Marks;
pub use media::{Media, num_frames, num_merged_tokens, num_patch_rows};
pub(crate) use stream::{HostInts, filled, host_bools, shard_payload, zeros_payload};
pub use stream::{PadRule, Stream, StreamDeclaration};

use crate::layout::{AlignedDocuments, Documents, Placement};

/// The primary stream: what becomes the first hidden state.
#[derive(Debug, Clone)]
pub enum Primary<B: Backend> {
    /// Token ids `[batch, seq]`, integers.
    Ids(TensorData),
    /// Embeddings `[batch, seq, hidden]`.
    Embeddings(Tensor<B, 3>),
}

/// Marked tokens `[batch, seq]`, and features of several layers.
pub(crate) type Deepstack<B> = (TensorData, Vec<Tensor<B, 2>>);

/// One batch of sequences, `batch >= 1` rows of `seq` tokens. Every rank of a context-parallel group holds the same.
///
/// Built from its primary stream by `with_` methods; nothing is checked before it is sharded.
#[derive(Debug, Clone)]
pub struct SequenceBatch<B: Backend> {
    pub(crate) primary: Primary<B>,
    pub(crate) labels: Option<TensorData>,
    pub(crate) vocab_size: Option<usize>,
    pub(crate) positions: Option<TensorData>,
    pub(crate) documents: Option<Documents>,
    pub(crate) padding_mask: Option<TensorData>,
    pub(crate) marks: Marks,
    pub(crate) placement: Option<Placement>,
    pub(crate) media: Vec<Media<B>>,
    pub(crate) deepstack: Option<Deepstack<B>>,
    pub(crate) streams: BTreeMap<String, Stream<B>>,
    pub(crate) dropout_seed: Option<u64>,
}

impl<B: Backend> SequenceBatch<B> {
    /// A batch of token ids `[batch, seq]`, any integer dtype.
    pub fn from_ids(ids: TensorData) -> Self {
        Self::new(Primary::Ids(ids))
    }

    /// A batch of embeddings `[batch, seq, hidden]`. Gradients flow back to them.
    pub fn from_embeddings(embeddings: Tensor<B, 3>) -> Self {
        Self::new(Primary::Embeddings(embeddings))
    }

    fn new(primary: Primary<B>) -> Self {
        Self {
            primary,
            labels: None,
            vocab_size: None,
            positions: None,
            documents: None,
            padding_mask: None,
            marks: Marks::default(),
            placement: None,
            media: Vec::new(),
            deepstack: None,
            streams: BTreeMap::new(),
            dropout_seed: None,
        }
    }

    /// Labels `[batch, seq]`, integers: already shifted, so that a token's label is the id that should follow it; −100 is ignored.
    #[must_use]
    pub fn with_labels(mut self, labels: TensorData) -> Self {
        self.labels = Some(labels);
        self
    }

    /// Declares the number of classes, so that a label outside of them is an error of the batch.
    #[must_use]
    pub fn with_vocab_size(mut self, vocab_size: usize) -> Self {
        self.vocab_size = Some(vocab_size);
        self
    }

    /// Positions `[batch, seq]`, or `[axes, batch, seq]` for multi-axis rotary embeddings; integers. Without them each
    /// document counts from 0 and the count goes on through the padding behind it.
    #[must_use]
    pub fn with_positions(mut self, positions: TensorData) -> Self {
        self.positions = Some(positions);
        self
    }

    /// Which tokens form which document. Without them every row is one document. If the batch has a placement, these are the
    /// documents of the placed rows.
    #[must_use]
    pub fn with_documents(mut self, documents: Documents) -> Self {
        self.documents = Some(documents);
        self
    }

    /// Which tokens are padding: `[batch, seq]`, bool or integer, true at padding. It wins over what documents say: a token that
    /// it marks is no key and no query of its document.
    #[must_use]
    pub fn with_padding_mask(mut self, padding_mask: TensorData) -> Self {
        self.padding_mask = Some(padding_mask);
        self
    }

    /// Where the tokens of the batch stand in the rows that are dealt out. All its streams are moved there when it is sharded;
    /// a further stream's rows must run along the dim ahead of its tokens.
    #[must_use]
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// Documents that have been given room, and the placement that moves the batch's tokens there.
    ///
    /// ```
    /// use burn::tensor::TensorData;
    /// use burn_cp::{batch::SequenceBatch, layout::Documents};
    ///
    /// // For dual-chunk-swap over 2 ranks: one row, every document padded to a multiple of 4.
    /// let documents = Documents::from_lengths(&[vec![3, 5], vec![6]], 8)?;
    /// let batch = SequenceBatch::<burn::backend::Flex>::from_ids(TensorData::zeros::<i64, _>([2, 8]))
    ///     .with_aligned_documents(documents.aligned(2 * 2)?.flattened());
    /// # Ok::<(), burn_cp::layout::LayoutError>(())
    /// ```
    #[must_use]
    pub fn with_aligned_documents(self, aligned: AlignedDocuments) -> Self {
        self.with_documents(aligned.documents)
            .with_placement(aligned.placement)
    }

    /// Adds images or videos. Where several are added, their features follow each other in this order.
    #[must_use]
    pub fn with_media(mut self, media: Media<B>) -> Self {
        self.media.push(media);
        self
    }

    /// Features that a vision tower has already made for several decoder layers: `layers` of `[visual tokens, hidden]`, of
    /// which row `i` belongs to the `i`-th token that the mask `[batch, seq]` (bool) marks, rows of the batch in order.
    #[must_use]
    pub fn with_deepstack(mut self, mask: TensorData, layers: Vec<Tensor<B, 2>>) -> Self {
        self.deepstack = Some((mask, layers));
        self
    }

    /// Adds a further token-aligned tensor. Its name must be declared in the configuration, with its sequence dim and pad
    /// rule; an undeclared stream is an error, since nobody would shard or read it.
    #[must_use]
    pub fn with_stream(mut self, name: impl Into<String>, stream: Stream<B>) -> Self {
        self.streams.insert(name.into(), stream);
        self
    }

    /// What dropout is drawn from in this step: another number for each step and microbatch, the same on all ranks that hold
    /// the batch, another on other data-parallel ranks. A model with dropout needs it in training.
    #[must_use]
    pub fn with_dropout_seed(mut self, seed: u64) -> Self {
        self.dropout_seed = Some(seed);
        self
    }

    /// `[batch, seq]` of the primary stream, or the shape that it has instead.
    pub(crate) fn size(&self) -> Result<[usize; 2], BatchError> {
        let shape: Vec<usize> = match &self.primary {
            Primary::Ids(ids) => ids.shape.to_vec(),
            Primary::Embeddings(embeddings) => embeddings.dims()[..2].to_vec(),
        };
        match shape[..] {
            [batch, seq] if batch > 0 && seq > 0 => Ok([batch, seq]),
            [_, _] => Err(BatchError::Empty { shape }),
            _ => Err(BatchError::Shape {
                what: "ids".into(),
                expected: "[batch, seq]".into(),
                got: shape,
            }),
        }
    }
}
