//! A rank's end of a context-parallel run.

use std::sync::Arc;

use burn::tensor::backend::Backend;
use sha2::{Digest, Sha256};

use super::{
    ContextParallelConfig, CpStep, PrimaryStream, StepError,
    arrangement::Arrangement,
    broadcast::{on_another_device, tensors_of, wrong_device},
    check::{CheckedBatch, check},
    cut::Cut,
    step::StepMedia,
};
use crate::{
    attention::ContextParallelBackend,
    batch::SequenceBatch,
    comm::{CommError, Groups, ProcessGroup, ProgramOrder},
    plan::{MaskKind, PlanError},
    vision::VisionDelivery,
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
    /// An axis of the configuration that the mesh does not have; loss axes without the axis that sequences are sharded over,
    /// whose ranks hold parts of one loss; a stream that is declared twice; vision features for their consumers only where
    /// every rank embeds all tokens.
    pub fn new(groups: &Groups, config: ContextParallelConfig) -> Result<Self, StepError> {
        if !config.loss_axes.contains(&config.cp_axis) {
            return Err(StepError::Invalid {
                what: "loss_axes".into(),
                expected: format!("axes that include cp_axis = {:?}", config.cp_axis),
                got: format!("{:?}", config.loss_axes),
            });
        }
        for (i, stream) in config.streams.iter().enumerate() {
            if config.streams[..i]
                .iter()
                .any(|other| other.name == stream.name)
            {
                return Err(StepError::Invalid {
                    what: "streams".into(),
                    expected: "each name declared once".into(),
                    got: format!("{:?} twice", stream.name),
                });
            }
        }
        if config.primary == PrimaryStream::Whole
            && config.vision.delivery == VisionDelivery::ToConsumers
        {
            return Err(StepError::Invalid {
                what: "vision.delivery".into(),
                expected:
                    "\"gathered\" where primary = \"whole\", since every rank embeds all tokens"
                        .into(),
                got: "\"to-consumers\"".into(),
            });
        }
        let cp = groups.along(&[config.cp_axis.as_str()])?;
        let loss_axes: Vec<&str> = config.loss_axes.iter().map(String::as_str).collect();
        let loss = groups.along(&loss_axes)?;
        Ok(Self {
            config: Arc::new(config),
            cp,
            loss,
        })
    }

    /// A run on one rank: attention is the packed varlen kernel, nothing is exchanged.
    pub fn solo(config: ContextParallelConfig) -> Self {
        Self {
            config: Arc::new(config),
            cp: ProcessGroup::solo(),
            loss: ProcessGroup::solo(),
        }
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

    /// Whether the configured exchange serves attention of so many heads over the group: what can be asked before a model is
    /// built. Pure host.
    ///
    /// # Errors
    /// [`PlanError::HeadDivisibility`] for the exchange of heads where the number of ranks does not divide one of them.
    pub fn check_heads(&self, num_heads: usize, num_kv_heads: usize) -> Result<(), PlanError> {
        let (exchange, ranks) = (self.config.exchange, self.cp.size());
        exchange.check_heads(ranks, num_heads, num_kv_heads)
    }

    /// Checks a batch, plans it, and cuts out this rank's part. Every rank of the group must call it with the same batch, whose tensors
    /// are on `device`.
    ///
    /// No tensor travels; one host message confirms that all ranks have the same ids, labels, positions, documents, media
    /// grids and placeholders, tensors of the same shapes and dtypes, and the same plan. The values of tensors are not compared. The step's differentiable
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
        let (step, digest) = self.prepare(&batch, device, order)?;
        self.confirm(digest)?;
        Ok(step)
    }

    /// Everything of a step that needs no other rank, and the hash of what all ranks must have alike.
    pub(super) fn prepare<B: ContextParallelBackend>(
        &self,
        batch: &SequenceBatch<B>,
        device: &B::Device,
        order: ProgramOrder,
    ) -> Result<(CpStep<B>, [u8; 32]), StepError> {
        let checked = check(batch, &self.config)?;
        // Burn would copy them by ways of its own between devices, which know nothing of what ranks wait for.
        if let Some((expected, got)) = on_another_device(&tensors_of(batch), device) {
            return Err(wrong_device(expected, got));
        }
        let layout = self
            .config
            .layout
            .layout(&checked.documents, self.cp.size())?;
        let documents = Arc::new(checked.documents.padded_to(layout.seq_len())?);
        let layout = Arc::new(layout);
        let arrangement =
            Arrangement::new(checked.size, batch.placement.as_ref(), layout.seq_len())?;
        let places = (&arrangement, &*layout);
        let cut = Cut::new(&self.config, &documents, places, self.cp.rank());
        let local = cut.streams(batch, &checked, device);
        let media = batch.media.iter().map(StepMedia::new).collect();
        let digest = digest(batch, &checked);
        let loss = self.loss.with_order(order.clone());
        let step = CpStep::new(
            self.config.clone(),
            [self.cp.with_order(order), loss],
            (documents, layout, arrangement),
            local,
            media,
        );
        // The causal plan is what nearly every model asks for first, so nothing is planned for the check alone.
        let plan = step.prepared(MaskKind::CAUSAL)?.plan().hash();
        let mut both = Sha256::new();
        both.update(plan);
        both.update(digest);
        // Ranks may leave different numbers of multiprocessors free.
        let alike = ContextParallelConfig {
            sm_margin: 0,
            ..(*self.config).clone()
        };
        both.update(format!("{alike:?}"));
        Ok((step, both.finalize().into()))
    }

    /// One host message: do all ranks have what this rank has?
    pub(super) fn confirm(&self, digest: [u8; 32]) -> Result<(), CommError> {
        self.cp.agree("the plan of the step", digest, hex)
    }
}

/// Hash of what the ranks of a group must hold alike, besides documents and layout.
fn digest<B: Backend>(batch: &SequenceBatch<B>, checked: &CheckedBatch) -> [u8; 32] {
    let mut hash = Sha256::new();
    for (name, ints) in [
        ("ids", &checked.ids),
        ("labels", &checked.labels),
        ("positions", &checked.positions),
    ] {
        hash.update(name);
        if let Some(ints) = ints {
            hash.update((ints.values.len() as u64).to_le_bytes());
            for value in &ints.values {
                hash.update(value.to_le_bytes());
            }
        }
    }
    if let Some(placement) = &batch.placement {
        hash.update(format!("placement {:?}", placement.placed_size()));
        for target in placement.targets() {
            hash.update(target.map_or(u64::MAX, |slot| slot as u64).to_le_bytes());
        }
    }
    for tensor in tensors_of(batch) {
        hash.update(format!("{:?} {:?}", tensor.shape(), tensor.dtype()));
    }
    for name in batch.streams.keys() {
        hash.update(format!("stream {name:?}"));
    }
    hash.update(format!("dropout {:?}", batch.dropout_seed));
    for media in &batch.media {
        hash.update(format!(
            "{} {:?} {}",
            media.name, media.grids, media.spatial_merge_size
        ));
    }
    for (name, placeholders) in [("media", &checked.media), ("deepstack", &checked.deepstack)] {
        hash.update(name);
        for row in placeholders
            .iter()
            .flat_map(super::media::Placeholders::rows)
        {
            hash.update(row.map_or(u64::MAX, |row| row as u64).to_le_bytes());
        }
    }
    hash.finalize().into()
}

fn hex(hash: &[u8; 32]) -> String {
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}
