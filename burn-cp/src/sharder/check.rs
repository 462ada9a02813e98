//! The checks of a batch, on the host, before anything moves.

use burn::tensor::backend::Backend;

use super::{ContextParallelConfig, media::Placeholders};
use crate::{
    batch::{BatchError, HostInts, SequenceBatch, host_bools, num_merged_tokens},
    layout::Documents,
};

/// The label that marks a position without a target.
pub const IGNORED_LABEL: i64 = -100;

/// A checked batch: its integer streams read to the host, its documents known.
pub(super) struct CheckedBatch {
    pub(super) size: [usize; 2],
    pub(super) ids: Option<HostInts>,
    pub(super) labels: Option<HostInts>,
    /// `[axes, batch, seq]`; `None` where the documents' own positions are to be used.
    pub(super) positions: Option<HostInts>,
    pub(super) documents: Documents,
    pub(super) media: Option<Placeholders>,
    pub(super) deepstack: Option<Placeholders>,
}

pub(super) fn check<B: Backend>(
    batch: &SequenceBatch<B>,
    config: &ContextParallelConfig,
) -> Result<CheckedBatch, BatchError> {
    let size = batch.size()?;
    let ids = match &batch.primary {
        crate::batch::Primary::Ids(ids) => Some(HostInts::new("ids", ids)?),
        crate::batch::Primary::Embeddings(_) => None,
    };
    let documents = match &batch.documents {
        Some(documents) => documents.clone(),
        None => Documents::full(size[0], size[1])?,
    };
    let got = [documents.batch_size(), documents.seq_len()];
    if got != size {
        return Err(BatchError::Documents {
            expected: size,
            got,
        });
    }
    check_streams(batch, config, size)?;
    Ok(CheckedBatch {
        size,
        ids,
        labels: check_labels(batch, size)?,
        positions: check_positions(batch, size)?,
        documents,
        media: check_media(batch, size)?,
        deepstack: check_deepstack(batch, size)?,
    })
}

fn check_labels<B: Backend>(
    batch: &SequenceBatch<B>,
    size: [usize; 2],
) -> Result<Option<HostInts>, BatchError> {
    let Some(labels) = &batch.labels else {
        return Ok(None);
    };
    let labels = HostInts::new("labels", labels)?;
    if labels.shape != size {
        let expected = format!("{size:?} [batch, seq]");
        return Err(BatchError::Shape {
            what: "labels".into(),
            expected,
            got: labels.shape,
        });
    }
    if let Some(vocab_size) = batch.vocab_size {
        let inside = |label: i64| {
            label == IGNORED_LABEL || usize::try_from(label).is_ok_and(|label| label < vocab_size)
        };
        if let Some(i) = labels.values.iter().position(|&label| !inside(label)) {
            let (row, token) = (i / size[1], i % size[1]);
            return Err(BatchError::Label {
                row,
                token,
                label: labels.values[i],
                vocab_size,
            });
        }
    }
    Ok(Some(labels))
}

fn check_positions<B: Backend>(
    batch: &SequenceBatch<B>,
    size: [usize; 2],
) -> Result<Option<HostInts>, BatchError> {
    let Some(positions) = &batch.positions else {
        return Ok(None);
    };
    let mut positions = HostInts::new("positions", positions)?;
    let fits = match positions.shape[..] {
        [batch, seq] => [batch, seq] == size,
        [axes, batch, seq] => axes > 0 && [batch, seq] == size,
        _ => false,
    };
    if !fits {
        let expected = format!("{size:?} [batch, seq], or [axes, batch, seq]");
        return Err(BatchError::Shape {
            what: "positions".into(),
            expected,
            got: positions.shape,
        });
    }
    if positions.shape.len() == 2 {
        positions.shape.insert(0, 1);
    }
    Ok(Some(positions))
}

fn check_streams<B: Backend>(
    batch: &SequenceBatch<B>,
    config: &ContextParallelConfig,
    size: [usize; 2],
) -> Result<(), BatchError> {
    for (name, stream) in &batch.streams {
        let Some(declared) = config
            .streams
            .iter()
            .find(|declared| declared.name == *name)
        else {
            let declared = config
                .streams
                .iter()
                .map(|declared| declared.name.clone())
                .collect();
            return Err(BatchError::UnknownStream {
                name: name.clone(),
                declared,
            });
        };
        let shape = stream.0.shape().to_vec();
        if shape.get(declared.dim) != Some(&size[1]) {
            let expected = format!("{} tokens in dim {}", size[1], declared.dim);
            return Err(BatchError::Shape {
                what: format!("stream {name:?}"),
                expected,
                got: shape,
            });
        }
    }
    Ok(())
}

fn check_media<B: Backend>(
    batch: &SequenceBatch<B>,
    size: [usize; 2],
) -> Result<Option<Placeholders>, BatchError> {
    let mut owner: Vec<Option<usize>> = vec![None; size[0] * size[1]];
    let mut placeholders = Placeholders::none(size);
    for (index, media) in batch.media.iter().enumerate() {
        media.check()?;
        let mask = host_bools(&media.name, &media.placeholders, size)?;
        let embeddings = num_merged_tokens(&media.grids, media.spatial_merge_size);
        placeholders.mark(&media.name, &mask, embeddings)?;
        for (i, _) in mask.iter().enumerate().filter(|(_, marked)| **marked) {
            if let Some(first) = owner[i].replace(index) {
                return Err(BatchError::PlaceholderTwice {
                    row: i / size[1],
                    token: i % size[1],
                    first: batch.media[first].name.clone(),
                    second: media.name.clone(),
                });
            }
        }
    }
    Ok((!batch.media.is_empty()).then_some(placeholders))
}

fn check_deepstack<B: Backend>(
    batch: &SequenceBatch<B>,
    size: [usize; 2],
) -> Result<Option<Placeholders>, BatchError> {
    let Some((mask, layers)) = &batch.deepstack else {
        return Ok(None);
    };
    let mask = host_bools("deepstack", mask, size)?;
    let mut placeholders = Placeholders::none(size);
    let rows = mask.iter().filter(|marked| **marked).count();
    for (i, layer) in layers.iter().enumerate() {
        if layer.dims()[0] != rows {
            return Err(BatchError::Placeholders {
                what: format!("deepstack layer {i}"),
                placeholders: rows,
                embeddings: layer.dims()[0],
            });
        }
    }
    placeholders.mark("deepstack", &mask, rows)?;
    Ok(Some(placeholders))
}
