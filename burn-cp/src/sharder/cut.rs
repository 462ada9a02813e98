//! This rank's part of every stream of a batch.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData, backend::Backend};

use super::{
    ContextParallelConfig, PrimaryStream,
    arrangement::Arrangement,
    check::CheckedBatch,
    media::{LocalPlaceholders, Placeholders},
    step::{LocalStreams, Primary},
};
use crate::{
    batch::{self, HostInts, IGNORED_LABEL, PadRule, SequenceBatch},
    collectives::Payload,
    layout::{Documents, TokenLayout},
};

/// Which tokens of the padded rows are cut out, for one rank.
pub(super) struct Cut<'a> {
    config: &'a ContextParallelConfig,
    documents: &'a Documents,
    arrangement: &'a Arrangement,
    ranges: &'a [Range<usize>],
    whole: Range<usize>,
    local_len: usize,
}

impl<'a> Cut<'a> {
    pub(super) fn new(
        config: &'a ContextParallelConfig,
        documents: &'a Documents,
        (arrangement, layout): (&'a Arrangement, &'a TokenLayout),
        rank: usize,
    ) -> Self {
        Self {
            config,
            documents,
            arrangement,
            ranges: layout.ranges(rank),
            whole: 0..layout.seq_len(),
            local_len: layout.local_len(rank),
        }
    }

    pub(super) fn streams<B: Backend>(
        &self,
        batch: &SequenceBatch<B>,
        checked: &CheckedBatch,
        device: &B::Device,
    ) -> LocalStreams<B> {
        let labels = checked.labels.as_ref().map(|labels| {
            let padded = self.arrangement.place_ints(labels, IGNORED_LABEL);
            padded.select(self.ranges).values
        });
        let deepstack_rows = self.placeholders(checked.deepstack.as_ref());
        let layers = batch.deepstack.iter().flat_map(|(_, layers)| layers);
        LocalStreams {
            primary: self.primary(batch, checked, device),
            labels,
            positions: Tensor::from_data(self.positions(checked).into_data(), device),
            padding: self.padding(),
            media_rows: self.placeholders(checked.media.as_ref()),
            deepstack: layers
                .map(|layer| deepstack_rows.scatter(layer.clone()))
                .collect(),
            streams: batch
                .streams
                .iter()
                .filter_map(|(name, stream)| Some((name.clone(), self.declared(name, &stream.0)?)))
                .collect(),
            dropout_seed: batch.dropout_seed,
            device: device.clone(),
        }
    }

    fn primary<B: Backend>(
        &self,
        batch: &SequenceBatch<B>,
        checked: &CheckedBatch,
        device: &B::Device,
    ) -> Primary<B> {
        let ranges = match self.config.primary {
            PrimaryStream::Sharded => self.ranges,
            PrimaryStream::Whole => std::slice::from_ref(&self.whole),
        };
        match (&batch.primary, &checked.ids) {
            (batch::Primary::Embeddings(embeddings), _) => {
                let payload = Payload::Float(embeddings.clone().into_primitive().tensor());
                Primary::Embeddings(self.arrangement.shard(&payload, 1, ranges, 0.0))
            }
            (_, ids) => {
                let pad = self.config.padding_token_id;
                let ids = ids
                    .as_ref()
                    .map(|ids| self.arrangement.place_ints(ids, pad).select(ranges));
                Primary::Ids(ids.map(|ids| Tensor::from_data(ids.into_data(), device)))
            }
        }
    }

    /// `[axes, batch, local_tokens]`: the batch's own, or those of its documents.
    fn positions(&self, checked: &CheckedBatch) -> HostInts {
        let positions = match &checked.positions {
            Some(positions) => self.arrangement.place_counting(positions),
            None => document_positions(self.documents),
        };
        positions.select(self.ranges)
    }

    /// Bool `[batch, local_tokens]`, true at padding.
    fn padding(&self) -> TensorData {
        let batch_size = self.documents.batch_size();
        let mut padding = Vec::with_capacity(batch_size * self.local_len);
        for row in 0..batch_size {
            let mask = self.documents.padding_mask(row);
            for range in self.ranges {
                padding.extend_from_slice(&mask[range.clone()]);
            }
        }
        TensorData::new(padding, [batch_size, self.local_len])
    }

    fn placeholders(&self, all: Option<&Placeholders>) -> LocalPlaceholders {
        match all {
            Some(all) => all.select(self.arrangement, self.ranges),
            None => LocalPlaceholders::none(self.documents.batch_size(), self.local_len),
        }
    }

    /// A further stream, cut by its declaration; checked to have one.
    fn declared<B: Backend>(&self, name: &str, stream: &Payload<B>) -> Option<Payload<B>> {
        let mut declared = self.config.streams.iter();
        let declared = declared.find(|declared| declared.name == name)?;
        let PadRule::Value(fill) = declared.pad;
        Some(
            self.arrangement
                .shard(stream, declared.dim, self.ranges, fill),
        )
    }
}

fn document_positions(documents: &Documents) -> HostInts {
    let (batch, seq) = (documents.batch_size(), documents.seq_len());
    #[allow(clippy::cast_possible_wrap)]
    let values = (0..batch)
        .flat_map(|row| documents.positions(row))
        .map(|position| position as i64)
        .collect();
    HostInts {
        values,
        shape: vec![1, batch, seq],
    }
}
