//! Packed batches as streams: the rows of a batch one behind the other, in as many streams as a pipeline has microbatches, each
//! dealt out document by document.
//!
//! A stream is sharded as every batch is, and what comes of it is a [`CpStep`]: attention, losses and vision know nothing of
//! chunks. What is here is the cutting of a batch into chunks, the media that come beside its tokens, and the token verbs over all
//! chunks together.

mod error;
mod media;
mod step;
#[cfg(test)]
mod tests;

use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use error::ThdError;
pub use media::{MediaEntries, MediaKind, MediaMask, MediaSlot};
use step::Masks;
pub use step::ThdStep;

use super::{ContextParallel, CpStep, StepError};
use crate::{
    attention::ContextParallelBackend,
    batch::{BatchError, HostInts, Primary, SequenceBatch},
    comm::ProgramOrder,
    layout::{Documents, LayoutPolicy},
};

/// How packed batches are made into streams. The same on every rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ThdConfig {
    /// Streams that a batch is cut into, each of the same number of rows.
    pub num_chunks: usize,
    /// Id of the tokens that wait for a feature of an image; without it chunks bring none.
    pub image_token_id: Option<i64>,
    /// Id of the tokens that wait for a feature of a video; without it chunks bring none.
    pub video_token_id: Option<i64>,
}

impl Default for ThdConfig {
    fn default() -> Self {
        Self {
            num_chunks: 1,
            image_token_id: None,
            video_token_id: None,
        }
    }
}

/// Shards packed batches `[batch, seq]` ("THD": tokens, heads, head dim) as streams with dual-chunk-swap within every document.
///
/// A batch is cut into [`ThdConfig::num_chunks`] chunks of its rows, in order. The rows of a chunk stand one behind the other in
/// one stream of `batch / num_chunks · seq` tokens, of which each rank owns chunk `r` from the front and chunk `r` from the back
/// of every document. Nothing is left over and nothing is cut that is not aligned with tokens: the media of a chunk
/// ([`MediaSlot`]) stay whole on every rank, and which tokens wait for them is known before anything is sharded.
///
/// What other implementations refuse here is exact: multi-axis positions, with or without chunks (they are cut with their tokens,
/// row by row); a loss mask ([`SequenceBatch::with_loss_mask`], which labels take in); documents without a token, and streams
/// of padding; padding anywhere in a document; token verbs over chunks. Which tokens a rank owns is never missing, since its step
/// says so. Attention is set up by nothing but the step that a
/// model is given, so that no module has to be found in it or replaced, and transports need not divide the heads unless the exchange of
/// heads is asked for ([`ContextParallel::check_heads`]).
///
/// ```
/// use burn::tensor::TensorData;
/// use burn_cp::{
///     batch::SequenceBatch,
///     layout::LayoutPolicy,
///     sharder::{ContextParallel, ContextParallelConfig, ThdConfig, ThdSharder},
/// };
///
/// type B = burn::backend::Flex;
/// let device = Default::default();
/// let config = ContextParallelConfig { layout: LayoutPolicy::DualChunkSwap, ..Default::default() };
/// let thd = ThdConfig { num_chunks: 2, ..Default::default() };
/// let sharder = ThdSharder::new(ContextParallel::solo(config), thd)?;
///
/// // Two rows of 8 tokens: documents of 3 and 4 tokens, and one of 8. -1000 fills up the table.
/// let real = TensorData::new(vec![3_i64, 4, 8, -1000], [2, 2]);
/// let padded = TensorData::new(vec![4_i64, 4, 8, -1000], [2, 2]);
/// let batch = SequenceBatch::<B>::from_ids(TensorData::zeros::<i64, _>([2, 8]));
/// let step = sharder.shard(batch.with_seq_lens(&real, Some(&padded))?, vec![], &device)?;
/// assert_eq!(step.num_chunks(), 2);
/// assert_eq!(step.tables()?.cu_seqlens, [[0, 3, 7], [0, 8, -1000]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ThdSharder {
    cp: ContextParallel,
    config: ThdConfig,
}

impl ThdSharder {
    /// Shards over the group of `cp`. Moves nothing.
    ///
    /// # Errors
    /// A configuration with another layout than [`LayoutPolicy::DualChunkSwap`]; no chunk; images and videos with the same
    /// placeholder.
    pub fn new(cp: ContextParallel, config: ThdConfig) -> Result<Self, StepError> {
        let invalid = |what: &str, expected: &str, got: String| StepError::Invalid {
            what: what.into(),
            expected: expected.into(),
            got,
        };
        let layout = &cp.config().layout;
        if *layout != LayoutPolicy::DualChunkSwap {
            let got = format!("{layout:?}");
            return Err(invalid("layout", "\"dual-chunk-swap\"", got));
        }
        if config.num_chunks == 0 {
            return Err(invalid("num_chunks", "at least 1", "0".into()));
        }
        match (config.image_token_id, config.video_token_id) {
            (Some(image), Some(video)) if image == video => Err(invalid(
                "video_token_id",
                "another id than image_token_id",
                format!("{video} for both"),
            )),
            _ => Ok(Self { cp, config }),
        }
    }

    /// The run that streams are sharded for.
    pub fn context(&self) -> &ContextParallel {
        &self.cp
    }

    /// How batches are made into streams.
    pub fn config(&self) -> &ThdConfig {
        &self.config
    }

    /// Checks a packed batch, cuts it into chunks, plans each, and cuts out this rank's part. Every rank of the group must call
    /// it with the same batch and the same media.
    ///
    /// The batch has ids or embeddings, documents of its own rows ([`SequenceBatch::with_seq_lens`]), no placement and no media.
    /// Over several ranks the documents' extents cover the stream, and twice the number of ranks divides each. Labels and
    /// placeholders stand in real tokens only.
    ///
    /// A chunk of token ids consumes exactly one slot of `media`, in order; one of embeddings, as later stages of a pipeline are
    /// given, none. Where no token waits for anything, `media` may also be empty. Slots belong to their chunk from then on: running
    /// a chunk again, as recomputation does, finds the same media.
    ///
    /// Each chunk's differentiable collectives are chained in an order of their own, for chunks whose losses get a backward pass
    /// each; see [`Self::shard_in_order`]. A seed of dropout becomes another one in every chunk.
    ///
    /// # Errors
    /// [`ThdError`], and what [`ContextParallel::shard`] refuses (of one of several chunks as [`ThdError::Chunk`]), before anything
    /// is sent; ranks that disagree.
    pub fn shard<B: ContextParallelBackend>(
        &self,
        batch: SequenceBatch<B>,
        media: Vec<MediaSlot<B>>,
        device: &B::Device,
    ) -> Result<ThdStep<B>, StepError> {
        self.shard_each(&batch, media, device, ProgramOrder::new)
    }

    /// [`Self::shard`], chaining the collectives of all chunks in one order: for chunks whose losses are summed before one
    /// backward pass.
    ///
    /// # Errors
    /// As [`Self::shard`].
    pub fn shard_in_order<B: ContextParallelBackend>(
        &self,
        batch: SequenceBatch<B>,
        media: Vec<MediaSlot<B>>,
        device: &B::Device,
        order: &ProgramOrder,
    ) -> Result<ThdStep<B>, StepError> {
        self.shard_each(&batch, media, device, || order.clone())
    }

    fn shard_each<B: ContextParallelBackend>(
        &self,
        batch: &SequenceBatch<B>,
        media: Vec<MediaSlot<B>>,
        device: &B::Device,
        order: impl Fn() -> ProgramOrder,
    ) -> Result<ThdStep<B>, StepError> {
        let num_chunks = self.config.num_chunks;
        let documents = self.packed(batch)?;
        let size = [documents.batch_size() / num_chunks, documents.seq_len()];
        let masks = self.masks(batch, size[0] * size[1])?;
        let slots = self.slots(batch, media, &masks)?;
        let mut both = Sha256::new();
        let mut steps = Vec::with_capacity(num_chunks);
        for (chunk, (slot, masks)) in slots.into_iter().zip(&masks).enumerate() {
            let rows = chunk * size[0]..(chunk + 1) * size[0];
            let prepare = || -> Result<(CpStep<B>, [u8; 32]), StepError> {
                let declared = &self.cp.config().streams;
                let mut stream = batch.stream_of_rows(rows, documents, declared)?;
                stream.dropout_seed = stream.dropout_seed.map(|seed| seed_of(seed, chunk));
                stream.media = masks.media(slot, size)?;
                self.check_cover(&stream)?;
                self.cp.prepare(&stream, device, order())
            };
            let (step, digest) = prepare().map_err(|error| self.in_chunk(chunk, error))?;
            both.update(digest);
            steps.push(step);
        }
        self.cp.confirm(both.finalize().into())?;
        Ok(ThdStep::new(steps, masks, size))
    }

    /// The documents of a batch that is packed and can be cut into chunks.
    fn packed<'a, B: Backend>(
        &self,
        batch: &'a SequenceBatch<B>,
    ) -> Result<&'a Documents, StepError> {
        let size = batch.size()?;
        let (rows, got) = (size[0], self.config.num_chunks);
        if !rows.is_multiple_of(got) {
            return Err(ThdError::Remainder { rows, got }.into());
        }
        if let Some(placement) = &batch.placement {
            let got = placement.placed_size();
            return Err(ThdError::Placed { got }.into());
        }
        if !batch.media.is_empty() {
            let got = batch.media.len();
            return Err(ThdError::MediaInBatch { got }.into());
        }
        let Some(documents) = &batch.documents else {
            return Err(ThdError::NotPacked.into());
        };
        let got = [documents.batch_size(), documents.seq_len()];
        if got != size {
            return Err(BatchError::Documents {
                expected: size,
                got,
            }
            .into());
        }
        Ok(documents)
    }

    /// What the tokens of each chunk wait for, in streams of `num_tokens`; nothing for embeddings, which have their features.
    fn masks<B: Backend>(
        &self,
        batch: &SequenceBatch<B>,
        num_tokens: usize,
    ) -> Result<Vec<Masks>, BatchError> {
        let Primary::Ids(ids) = &batch.primary else {
            return Ok(vec![Masks::default(); self.config.num_chunks]);
        };
        let ids = HostInts::new("ids", ids)?.values;
        let config = &self.config;
        Ok(ids
            .chunks_exact(num_tokens)
            .map(|ids| {
                let of = |kind, id: Option<i64>| id.map(|id| MediaMask::from_ids(kind, ids, id));
                Masks {
                    images: of(MediaKind::Image, config.image_token_id),
                    videos: of(MediaKind::Video, config.video_token_id),
                }
            })
            .collect())
    }

    /// A slot for each chunk.
    fn slots<B: Backend>(
        &self,
        batch: &SequenceBatch<B>,
        media: Vec<MediaSlot<B>>,
        masks: &[Masks],
    ) -> Result<Vec<MediaSlot<B>>, ThdError> {
        let num_chunks = self.config.num_chunks;
        let got = media.len();
        let expected = match batch.primary {
            Primary::Ids(_) => num_chunks,
            Primary::Embeddings(_) => 0,
        };
        if got == 0 && !masks.iter().any(Masks::wait) {
            return Ok(vec![MediaSlot::none(); num_chunks]);
        }
        if got != expected {
            return Err(ThdError::MediaSlots { expected, got });
        }
        Ok(media)
    }

    /// Over several ranks, tokens that no document counts would be dealt out apart from it, and chunks would get unequal shares.
    fn check_cover<B: Backend>(&self, stream: &SequenceBatch<B>) -> Result<(), ThdError> {
        let Some(documents) = &stream.documents else {
            return Ok(());
        };
        let expected = documents.seq_len();
        let got = documents
            .row(0)
            .iter()
            .map(|document| document.extent.len());
        let got = got.sum();
        if self.cp.group().size() > 1 && got != expected {
            return Err(ThdError::Uncovered { expected, got });
        }
        Ok(())
    }

    fn in_chunk(&self, chunk: usize, error: StepError) -> StepError {
        if self.config.num_chunks == 1 {
            return error;
        }
        let source = Box::new(error);
        ThdError::Chunk { chunk, source }.into()
    }
}

/// Seeds of chunks, one step of a Weyl sequence apart (as SplitMix64 seeds: Steele, Lea and Flood, "Fast splittable
/// pseudorandom number generators", 2014).
fn seed_of(seed: u64, chunk: usize) -> u64 {
    seed.wrapping_add((chunk as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}
