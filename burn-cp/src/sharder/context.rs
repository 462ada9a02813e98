//! A rank's end of a context-parallel run.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData, backend::Backend};
use sha2::{Digest, Sha256};

use super::{
    ContextParallelConfig, CpStep, PrimaryStream, StepError,
    check::{CheckedBatch, IGNORED_LABEL, check},
    media::LocalPlaceholders,
    step::{LocalStreams, Primary, StepMedia},
};
use crate::{
    attention::ContextParallelBackend,
    batch::{self, HostInts, PadRule, SequenceBatch, shard_payload},
    comm::{CommError, Groups, ProcessGroup, ProgramOrder},
    layout::TokenLayout,
    plan::MaskKind,
};

/// A rank's end of a context-parallel run: its groups and how sequences are sharded over them. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ContextParallel {
    config: Arc<ContextParallelConfig>,
    cp: ProcessGroup,
    loss: ProcessGroup,
}

impl ContextParallel {
    /// Takes part in a run on the mesh that `groups` was bound to.
    ///
    /// # Errors
    /// An axis of the configuration that the mesh does not have.
    pub fn new(groups: &Groups, config: ContextParallelConfig) -> Result<Self, CommError> {
        let cp = groups.along(&[config.cp_axis.as_str()])?;
        let loss_axes: Vec<&str> = config.loss_axes.iter().map(String::as_str).collect();
        let loss = groups.along(&loss_axes)?;
        Ok(Self { config: Arc::new(config), cp, loss })
    }

    /// A run on one rank: attention is the packed varlen kernel, nothing is exchanged.
    pub fn solo(config: ContextParallelConfig) -> Self {
        Self { config: Arc::new(config), cp: ProcessGroup::solo(), loss: ProcessGroup::solo() }
    }

    /// How sequences are sharded.
    pub fn config(&self) -> &ContextParallelConfig {
        &self.config
    }

    /// The group over which sequences are sharded.
    pub fn group(&self) -> &ProcessGroup {
        &self.cp
    }

    /// The group over which the loss is averaged and gradients are summed.
    pub fn loss_group(&self) -> &ProcessGroup {
        &self.loss
    }

    /// Checks a batch, plans it, and cuts out this rank's part. Every rank of the group must call it with the same batch.
    ///
    /// No tensor travels; one host message confirms that all ranks have the same batch and plan. The step's differentiable
    /// collectives are chained in an order of its own; see [`Self::shard_in_order`] for several steps with one backward pass.
    ///
    /// # Errors
    /// A wrong batch, found before anything is sent; a layout that does not fit; ranks that disagree.
    pub fn shard<B: ContextParallelBackend>(
        &self,
        batch: SequenceBatch<B>,
        device: &B::Device,
    ) -> Result<CpStep<B>, StepError> {
        self.shard_in_order(batch, device, ProgramOrder::new())
    }

    /// [`Self::shard`], chaining the step's collectives in a given order: for steps whose losses are summed before one backward
    /// pass, so that their adjoints run in one order on all ranks.
    ///
    /// # Errors
    /// As [`Self::shard`].
    pub fn shard_in_order<B: ContextParallelBackend>(
        &self,
        batch: SequenceBatch<B>,
        device: &B::Device,
        order: ProgramOrder,
    ) -> Result<CpStep<B>, StepError> {
        let checked = check(&batch, &self.config)?;
        let layout = self.config.layout.layout(&checked.documents, self.cp.size())?;
        let documents = Arc::new(checked.documents.padded_to(layout.seq_len())?);
        let layout = Arc::new(layout);
        let local = self.local_streams(&batch, &checked, &documents, &layout, device);
        let media = batch.media.iter().map(StepMedia::new).collect();
        let digest = digest(&batch, &checked);
        let loss = self.loss.with_order(order.clone());
        let step = CpStep::new(
            self.config.clone(),
            [self.cp.with_order(order), loss],
            (documents, layout, checked.size),
            local,
            media,
        )?;
        // The causal plan is what nearly every model asks for first, so nothing is planned for the check alone.
        let plan = step.prepared(MaskKind::CAUSAL)?.plan().hash();
        let mut both = Sha256::new();
        both.update(plan);
        both.update(digest);
        both.update(format!("{:?}", self.config));
        let both: [u8; 32] = both.finalize().into();
        self.cp.agree("the plan of the step", both, |hash| hex(hash))?;
        Ok(step)
    }

    fn local_streams<B: Backend>(
        &self,
        batch: &SequenceBatch<B>,
        checked: &CheckedBatch,
        documents: &crate::layout::Documents,
        layout: &TokenLayout,
        device: &B::Device,
    ) -> LocalStreams<B> {
        let ranges = layout.ranges(self.cp.rank());
        let [batch_size, _] = checked.size;
        let padded_len = layout.seq_len();
        let whole = 0..padded_len;
        let primary_ranges = match self.config.primary {
            PrimaryStream::Sharded => ranges,
            PrimaryStream::Whole => std::slice::from_ref(&whole),
        };
        let pad_id = self.config.padding_token_id;
        let primary = match (&batch.primary, &checked.ids) {
            (batch::Primary::Embeddings(embeddings), _) => {
                let payload = crate::collectives::Payload::Float(embeddings.clone().into_primitive().tensor());
                Primary::Embeddings(shard_payload(&payload, 1, primary_ranges, 0.0))
            }
            (_, ids) => {
                let ids = ids.as_ref().map(|ids| ids.padded(padded_len, |_, _| pad_id).select(primary_ranges));
                Primary::Ids(ids.map(|ids| Tensor::from_data(ids.into_data(), device)))
            }
        };
        let labels = checked
            .labels
            .as_ref()
            .map(|labels| labels.padded(padded_len, |_, _| IGNORED_LABEL).select(ranges));
        let positions = match &checked.positions {
            #[allow(clippy::cast_possible_wrap)]
            Some(positions) => positions.padded(padded_len, |last, i| last + 1 + i as i64),
            None => document_positions(documents),
        };
        let padding: Vec<bool> = (0..batch_size)
            .flat_map(|row| {
                let mask = documents.padding_mask(row);
                ranges.iter().cloned().flatten().map(move |token| mask[token]).collect::<Vec<_>>()
            })
            .collect();
        let local_len = layout.local_len(self.cp.rank());
        let placeholders = |all: &Option<super::media::Placeholders>| match all {
            Some(all) => all.select(ranges),
            None => LocalPlaceholders::none(batch_size, local_len),
        };
        let streams = batch.streams.iter().filter_map(|(name, stream)| {
            let declared = self.config.streams.iter().find(|declared| declared.name == *name)?;
            let PadRule::Value(fill) = declared.pad;
            Some((name.clone(), shard_payload(&stream.0, declared.dim, ranges, fill)))
        });
        let deepstack_rows = placeholders(&checked.deepstack);
        LocalStreams {
            primary,
            labels: labels.map(|labels| labels.values),
            positions: Tensor::from_data(positions.select(ranges).into_data(), device),
            padding: TensorData::new(padding, [batch_size, local_len]),
            media_rows: placeholders(&checked.media),
            deepstack: batch
                .deepstack
                .iter()
                .flat_map(|(_, layers)| layers)
                .map(|layer| deepstack_rows.scatter(layer.clone()))
                .collect(),
            streams: streams.collect(),
            device: device.clone(),
        }
    }
}

fn document_positions(documents: &crate::layout::Documents) -> HostInts {
    let (batch, seq) = (documents.batch_size(), documents.seq_len());
    #[allow(clippy::cast_possible_wrap)]
    let values = (0..batch).flat_map(|row| documents.positions(row)).map(|position| position as i64).collect();
    HostInts { values, shape: vec![1, batch, seq] }
}

/// Hash of what the ranks of a group must hold alike, besides documents and layout.
fn digest<B: Backend>(batch: &SequenceBatch<B>, checked: &CheckedBatch) -> [u8; 32] {
    let mut hash = Sha256::new();
    for (name, ints) in [("ids", &checked.ids), ("labels", &checked.labels), ("positions", &checked.positions)] {
        hash.update(name);
        if let Some(ints) = ints {
            hash.update((ints.values.len() as u64).to_le_bytes());
            for value in &ints.values {
                hash.update(value.to_le_bytes());
            }
        }
    }
    for media in &batch.media {
        hash.update(format!("{} {:?} {}", media.name, media.grids, media.spatial_merge_size));
    }
    for (name, placeholders) in [("media", &checked.media), ("deepstack", &checked.deepstack)] {
        hash.update(name);
        for row in placeholders.iter().flat_map(super::media::Placeholders::rows) {
            hash.update(row.map_or(u64::MAX, |row| row as u64).to_le_bytes());
        }
    }
    hash.finalize().into()
}

fn hex(hash: &[u8; 32]) -> String {
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}
