//! What a model can be given, and the refusal of what it cannot.
//!
//! A model that is handed several documents, or images, that it does not know of trains on something else than its owner
//! thinks, without an error. So a model declares what it supports, and the step and its configuration are held against that.
//!
//! Layouts, exchanges and masks are not declared, since there nothing can be missing. The plan of attention is derived from
//! the documents and from the ranges that each rank owns, whichever policy dealt them out, so every layout keeps documents
//! apart; and the mask, with its window, is the model's own request with each call of attention, from which the plan is made:
//! the exchange and the segments are those of that mask, or there is an error. A window without a causal mask has no
//! representation ([`MaskKind`](crate::plan::MaskKind)). What a batch says for masks to ask (spans, prefixes, masks of its
//! documents) is declared, since a model whose calls do not ask would ignore it.

use super::{ContextParallelConfig, CpStep, PrimaryStream};
use crate::{attention::ContextParallelBackend, layout::Documents, vision::VisionDelivery};

/// What a model declares to support.
///
/// ```
/// use burn_cp::sharder::{ContextParallelConfig, ModelCapabilities};
///
/// // Reads images with a tower that cannot be split by frames: the default configuration would split it.
/// let model = ModelCapabilities::text().with_media();
/// let error = model.check_config(&ContextParallelConfig::default(), 2).unwrap_err();
/// assert!(error.to_string().contains("vision.enabled = false"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ModelCapabilities {
    /// Several documents in a row: tokens meet in attention only, or in layers that know where documents begin.
    pub packed_documents: bool,
    /// Bidirectional spans, prefixes and masks of documents that the batch brings: attention asks for them.
    pub document_masks: bool,
    /// Images and videos: the model encodes a batch's media.
    pub media: bool,
    /// A vision tower that may be split by frames: no frame's features depend on another frame.
    pub vision_sharding: bool,
    /// Vision features of its own shard's tokens only: it asks for no other row of them.
    pub local_media: bool,
    /// Deepstack features that the batch brings, rather than the model's own tower.
    pub deepstack: bool,
    /// A primary stream that is left whole: the model cuts its hidden states itself.
    pub whole_stream: bool,
}

impl ModelCapabilities {
    /// Packed documents, and nothing else: a language model whose tokens meet in [`CpStep::attention`] only.
    pub const fn text() -> Self {
        Self {
            packed_documents: true,
            document_masks: false,
            media: false,
            vision_sharding: false,
            local_media: false,
            deepstack: false,
            whole_stream: false,
        }
    }

    /// The same for a model whose layers take a row for one document, such as recurrences and convolutions over it.
    ///
    /// Layers through which tokens meet outside of attention need the tokens of other ranks: [`recurrent`](crate::recurrent) has
    /// what they need and knows documents. That a model uses it is nothing that could be checked here.
    #[must_use]
    pub const fn without_packed_documents(mut self) -> Self {
        self.packed_documents = false;
        self
    }

    /// The same for a model whose attention asks for the spans, prefixes or masks that come with a batch's documents.
    #[must_use]
    pub const fn with_document_masks(mut self) -> Self {
        self.document_masks = true;
        self
    }

    /// The same for a model that encodes a batch's media.
    #[must_use]
    pub const fn with_media(mut self) -> Self {
        self.media = true;
        self
    }

    /// The same for a model whose vision tower treats each frame alone.
    #[must_use]
    pub const fn with_vision_sharding(mut self) -> Self {
        self.vision_sharding = true;
        self
    }

    /// The same for a model that takes the features of its own shard's tokens, in their order, and needs no others: one that
    /// hands what [`CpStep::encode_media`] returns to [`CpStep::scatter_media`].
    #[must_use]
    pub const fn with_local_media(mut self) -> Self {
        self.local_media = true;
        self
    }

    /// The same for a model that reads the deepstack features of a batch.
    #[must_use]
    pub const fn with_deepstack(mut self) -> Self {
        self.deepstack = true;
        self
    }

    /// The same for a model that can be given the whole primary stream.
    #[must_use]
    pub const fn with_whole_stream(mut self) -> Self {
        self.whole_stream = true;
        self
    }

    /// Can a model with these capabilities run with `config` over `world_size` ranks? Pure host.
    ///
    /// # Errors
    /// Everything that it does not support.
    pub fn check_config(
        &self,
        config: &ContextParallelConfig,
        world_size: usize,
    ) -> Result<(), CapabilityError> {
        CapabilityError::unless_empty(self.of_config(config, world_size, self.media))
    }

    /// Can a model with these capabilities be given this step? Pure host, and the same answer on every rank, since documents
    /// and media are what the ranks of a group have agreed on.
    ///
    /// # Errors
    /// Everything that it does not support, of the batch and of the configuration.
    pub fn check_step<B: ContextParallelBackend>(
        &self,
        step: &CpStep<B>,
    ) -> Result<(), CapabilityError> {
        let mut violations = Vec::new();
        let num_documents = |row: &[crate::layout::Document]| {
            row.iter().filter(|document| !document.is_empty()).count()
        };
        let mut rows = step.documents().rows().map(num_documents).enumerate();
        if let Some((row, num_documents)) = rows
            .find(|(_, num_documents)| *num_documents > 1)
            .filter(|_| !self.packed_documents)
        {
            violations.push(Violation::PackedDocuments { row, num_documents });
        }
        if let Some(what) = asked_of(step.documents()).filter(|_| !self.document_masks) {
            violations.push(Violation::DocumentMasks { what });
        }
        let num_media = step.num_media();
        if num_media > 0 && !self.media {
            violations.push(Violation::Media { num_media });
        }
        let num_layers = step.deepstack().len();
        if num_layers > 0 && !self.deepstack {
            violations.push(Violation::Deepstack { num_layers });
        }
        violations.extend(self.of_config(
            step.config(),
            step.group().size(),
            self.media && num_media > 0,
        ));
        CapabilityError::unless_empty(violations)
    }

    fn of_config(
        &self,
        config: &ContextParallelConfig,
        world_size: usize,
        reads_media: bool,
    ) -> Vec<Violation> {
        let mut violations = Vec::new();
        if reads_media && config.vision.enabled && world_size > 1 && !self.vision_sharding {
            violations.push(Violation::VisionSharding { world_size });
        }
        if reads_media && config.vision.delivery == VisionDelivery::ToConsumers && !self.local_media
        {
            violations.push(Violation::VisionDelivery);
        }
        if config.primary == PrimaryStream::Whole && !self.whole_stream {
            violations.push(Violation::WholeStream);
        }
        violations
    }
}

/// What the documents say for masks to ask, if anything: an empty list says nothing.
fn asked_of(documents: &Documents) -> Option<&'static str> {
    let any = |says: fn(&Documents, usize, usize) -> bool| {
        let rows = documents.rows().enumerate();
        rows.flat_map(|(row, table)| (0..table.len()).map(move |index| (row, index)))
            .any(|(row, index)| says(documents, row, index))
    };
    if documents.has_masks() {
        Some("masks of documents")
    } else if any(|documents, row, index| !documents.spans(row, index).is_empty()) {
        Some("bidirectional spans")
    } else if any(|documents, row, index| documents.prefix(row, index) > 0) {
        Some("prefixes")
    } else {
        None
    }
}

/// Something that a model is asked for and does not support; the message says what to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A row holds several documents.
    #[error(
        "row {row} packs {num_documents} documents, which the model would mix: give every row one document, or declare \
         packed_documents if tokens meet in attention only"
    )]
    PackedDocuments {
        /// The first such row.
        row: usize,
        /// Documents with tokens in it.
        num_documents: usize,
    },
    /// The batch says of its documents what attention does not ask.
    #[error(
        "the batch brings {what}, which the model would ignore: leave them out, or declare document_masks in a model whose \
         attention asks for them"
    )]
    DocumentMasks {
        /// Spans, prefixes or masks.
        what: &'static str,
    },
    /// The batch carries media.
    #[error(
        "the batch carries images or videos ({num_media} sets), which the model would ignore: leave them out, or declare \
         media in a model that encodes them"
    )]
    Media {
        /// How many the batch added.
        num_media: usize,
    },
    /// The vision tower would be split by frames.
    #[error(
        "the vision tower would be split by frames over {world_size} ranks, which the model does not declare to allow: set \
         vision.enabled = false so that every rank encodes all frames, or declare vision_sharding if no frame depends on \
         another"
    )]
    VisionSharding {
        /// Ranks of the group.
        world_size: usize,
    },
    /// Vision features would go to the ranks whose tokens they are.
    #[error(
        "vision features would go only to the ranks whose shards hold their tokens, which the model does not declare to \
         allow: set vision.delivery = \"gathered\" so that every rank is given all of them, or declare local_media in a model \
         that takes those of its own tokens"
    )]
    VisionDelivery,
    /// The batch brings deepstack features.
    #[error(
        "the batch brings deepstack features for {num_layers} layers, which the model would ignore: leave them out, or \
         declare deepstack in a model that adds them"
    )]
    Deepstack {
        /// Layers for which it does.
        num_layers: usize,
    },
    /// The primary stream is left whole.
    #[error(
        "the model would be given the whole primary stream, which it does not declare to cut: set primary = \"sharded\", or \
         declare whole_stream in a model that shards its hidden states"
    )]
    WholeStream,
}

/// A model is asked for what it does not support: all that is wrong at once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the model does not support what it is asked for: {}", numbered(.violations))]
#[non_exhaustive]
pub struct CapabilityError {
    /// At least one.
    pub violations: Vec<Violation>,
}

impl CapabilityError {
    fn unless_empty(violations: Vec<Violation>) -> Result<(), Self> {
        if violations.is_empty() {
            Ok(())
        } else {
            Err(Self { violations })
        }
    }
}

fn numbered(violations: &[Violation]) -> String {
    let items = violations.iter().enumerate();
    items
        .map(|(i, violation)| format!("({}) {violation}", i + 1))
        .collect::<Vec<_>>()
        .join("; ")
}
