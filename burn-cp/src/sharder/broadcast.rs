//! A batch that one rank of a group has read, on all of them.

use std::{collections::BTreeMap, sync::Arc};

use burn::tensor::{DType, Shape, Tensor, TensorData, TensorPrimitive, backend::Backend};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{ContextParallel, StepError};
use crate::{
    attention::ContextParallelBackend,
    batch::{Marks, Media, Primary, SequenceBatch, Stream, zeros_payload},
    collectives::{Call, Collective, Payload},
    layout::{Documents, Placement},
};

/// What travels on the host, and what the tensors that follow look like.
#[derive(Debug, Serialize, Deserialize)]
struct Parcel {
    ids: Option<TensorData>,
    labels: Option<TensorData>,
    vocab_size: Option<usize>,
    positions: Option<TensorData>,
    documents: Option<Documents>,
    padding_mask: Option<TensorData>,
    marks: Marks,
    placement: Option<Placement>,
    /// Name, grids, merge size, placeholders.
    media: Vec<(String, Vec<[usize; 3]>, usize, TensorData)>,
    deepstack: Option<TensorData>,
    streams: Vec<String>,
    dropout_seed: Option<u64>,
    tensors: Vec<Form>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Form {
    shape: Shape,
    dtype: DType,
}

/// A parcel that ranks which share memory do not copy.
#[derive(Debug, Clone)]
struct Shared(Arc<Parcel>);

impl Serialize for Shared {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(to)
    }
}

impl<'de> Deserialize<'de> for Shared {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Parcel::deserialize(from).map(|parcel| Self(Arc::new(parcel)))
    }
}

impl ContextParallel {
    /// The batch that rank `root` of the group has read, on every rank of it: for loaders that read on one rank.
    ///
    /// Every rank of the group must call it: `root` with the batch, the others with `None`. Streams that live on the host travel
    /// there, tensors by collectives; they arrive on `device`. Gradients do not flow back to the batch of `root`.
    ///
    /// # Errors
    /// A `root` outside the group, or not the same on every rank; a batch missing at `root`, or given elsewhere, or with tensors on another device than
    /// `device`: the same error on every rank. Ranks that cannot
    /// talk to each other.
    ///
    /// # Panics
    /// With a [`CommError`](crate::comm::CommError) when a tensor cannot be sent.
    pub fn broadcast_batch<B: ContextParallelBackend>(
        &self,
        batch: Option<SequenceBatch<B>>,
        root: usize,
        device: &B::Device,
    ) -> Result<SequenceBatch<B>, StepError> {
        let group = self.group();
        let tensors = batch.as_ref().map(tensors_of).unwrap_or_default();
        let parcel = batch.map(|batch| Shared(Arc::new(Parcel::new(batch, &tensors))));
        let elsewhere = on_another_device(&tensors, device);
        // Everything that could be wrong is compared by all ranks alike.
        let messages = group.host_all_gather("broadcast_batch", (root, parcel, elsewhere))?;
        let roots: Vec<usize> = messages.iter().map(|(root, ..)| *root).collect();
        if root >= group.size() || roots.iter().any(|other| *other != root) {
            return Err(StepError::Invalid {
                what: "root of broadcast_batch".into(),
                expected: format!("one rank below {} on all ranks", group.size()),
                got: format!("{roots:?}"),
            });
        }
        let holders: Vec<usize> = (0..messages.len())
            .filter(|&rank| messages[rank].1.is_some())
            .collect();
        let (Some(Shared(parcel)), [_]) = (&messages[root].1, &holders[..]) else {
            return Err(StepError::Invalid {
                what: "ranks that give broadcast_batch a batch".into(),
                expected: format!("{:?}", [root]),
                got: format!("{holders:?}"),
            });
        };
        if let Some((expected, got)) = messages[root].2.clone() {
            return Err(wrong_device(expected, got));
        }
        let received: Vec<Payload<B>> = (parcel.tensors.iter().enumerate())
            .map(|(i, form)| {
                let payload = match tensors.get(i) {
                    Some(own) => own.clone().detached(),
                    None => zeros_payload(form.shape.clone(), form.dtype, device),
                };
                // Devices refuse to move nothing.
                if form.shape.num_elements() == 0 {
                    return payload;
                }
                let call = Call::forward(group, "broadcast_batch");
                B::collective(payload, &Collective::Broadcast { root }, group, call)
            })
            .collect();
        Ok(parcel.unpack(received))
    }
}

/// The device asked for, and that of the first tensor that is on another one.
pub(super) fn on_another_device<B: Backend>(
    tensors: &[Payload<B>],
    device: &B::Device,
) -> Option<(String, String)> {
    let mut devices = tensors.iter().map(Payload::device);
    let other = devices.find(|other| other != device)?;
    Some((format!("{device:?}"), format!("{other:?}")))
}

pub(super) fn wrong_device(expected: String, got: String) -> StepError {
    StepError::Invalid {
        what: "device of the batch's tensors".into(),
        expected,
        got,
    }
}

/// The tensors of a batch, in the order in which they travel.
pub(super) fn tensors_of<B: Backend>(batch: &SequenceBatch<B>) -> Vec<Payload<B>> {
    fn float<B: Backend, const D: usize>(tensor: &Tensor<B, D>) -> Payload<B> {
        Payload::Float(tensor.clone().into_primitive().tensor())
    }
    let primary = match &batch.primary {
        Primary::Ids(_) => None,
        Primary::Embeddings(embeddings) => Some(float(embeddings)),
    };
    let media = batch.media.iter().map(|media| float(&media.pixels));
    let deepstack = batch.deepstack.iter().flat_map(|(_, layers)| layers);
    (primary.into_iter())
        .chain(media)
        .chain(deepstack.map(float))
        .chain(batch.streams.values().map(|stream| stream.0.clone()))
        .collect()
}

impl Parcel {
    fn new<B: Backend>(batch: SequenceBatch<B>, tensors: &[Payload<B>]) -> Self {
        let form = |payload: &Payload<B>| Form {
            shape: payload.shape(),
            dtype: payload.dtype(),
        };
        Self {
            ids: match batch.primary {
                Primary::Ids(ids) => Some(ids),
                Primary::Embeddings(_) => None,
            },
            labels: batch.labels,
            vocab_size: batch.vocab_size,
            positions: batch.positions,
            documents: batch.documents,
            padding_mask: batch.padding_mask,
            marks: batch.marks,
            placement: batch.placement,
            media: (batch.media.into_iter())
                .map(|media| {
                    let Media {
                        name,
                        grids,
                        spatial_merge_size,
                        placeholders,
                        ..
                    } = media;
                    (name, grids, spatial_merge_size, placeholders)
                })
                .collect(),
            deepstack: batch.deepstack.map(|(mask, _)| mask),
            streams: batch.streams.into_keys().collect(),
            dropout_seed: batch.dropout_seed,
            tensors: tensors.iter().map(form).collect(),
        }
    }

    /// The batch of which these are the tensors.
    fn unpack<B: Backend>(&self, tensors: Vec<Payload<B>>) -> SequenceBatch<B> {
        fn float<B: Backend, const D: usize>(payload: Option<Payload<B>>) -> Tensor<B, D> {
            match payload {
                Some(Payload::Float(tensor)) => {
                    Tensor::from_primitive(TensorPrimitive::Float(tensor))
                }
                other => unreachable!("a float was packed here, got {other:?}"),
            }
        }
        let mut rest = tensors.into_iter();
        let primary = match &self.ids {
            Some(ids) => Primary::Ids(ids.clone()),
            None => Primary::Embeddings(float(rest.next())),
        };
        let media = (self.media.iter())
            .map(|(name, grids, merge, placeholders)| Media {
                name: name.clone(),
                pixels: float(rest.next()),
                grids: grids.clone(),
                spatial_merge_size: *merge,
                placeholders: placeholders.clone(),
            })
            .collect();
        let num_layers = rest.len() - self.streams.len();
        let layers = (0..num_layers).map(|_| float(rest.next())).collect();
        let streams: BTreeMap<_, _> = (self.streams.iter().cloned())
            .zip(rest.map(Stream))
            .collect();
        SequenceBatch {
            primary,
            labels: self.labels.clone(),
            vocab_size: self.vocab_size,
            positions: self.positions.clone(),
            documents: self.documents.clone(),
            padding_mask: self.padding_mask.clone(),
            marks: self.marks.clone(),
            placement: self.placement.clone(),
            media,
            deepstack: self.deepstack.clone().map(|mask| (mask, layers)),
            streams,
            dropout_seed: self.dropout_seed,
        }
    }
}
