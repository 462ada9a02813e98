//! The checks of a batch, on the host, before anything moves.

use burn::tensor::backend::Backend;

use super::{ContextParallelConfig, media::Placeholders};
use crate::{
    batch::{BatchError, HostInts, IGNORED_LABEL, SequenceBatch, host_bools, num_merged_tokens},
    layout::Documents,
};

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
    let documents = check_documents(batch, size)?;
    check_streams(batch, config, size)?;
    let labels = check_labels(batch, size)?;
    let media = check_media(batch, size)?;
    let deepstack = check_deepstack(batch, size)?;
    let documents = batch.marked(documents, size)?;
    check_placed(batch, &documents, |token| {
        let has_feature = [&media, &deepstack]
            .into_iter()
            .flatten()
            .any(|rows| rows.rows()[token].is_some());
        let has_label = || {
            let label = labels.as_ref().map(|labels| labels.values[token]);
            label.is_some_and(|label| label != IGNORED_LABEL)
        };
        has_feature
            .then_some("a feature")
            .or_else(|| has_label().then_some("a label"))
    })?;
    Ok(CheckedBatch {
        size,
        ids,
        labels,
        positions: check_positions(batch, size)?,
        documents,
        media,
        deepstack,
    })
}

/// The documents of the rows that are dealt out: those of the batch, or of its placement, without what is marked as padding.
fn check_documents<B: Backend>(
    batch: &SequenceBatch<B>,
    size: [usize; 2],
) -> Result<Documents, BatchError> {
    let placed = match &batch.placement {
        Some(placement) if placement.input_size() != size => {
            return Err(BatchError::Placement {
                expected: size,
                got: placement.input_size(),
            });
        }
        Some(placement) => placement.placed_size(),
        None => size,
    };
    let padding = batch.padding_mask.as_ref();
    let padding = padding.map(|mask| host_bools("padding mask", mask, size));
    let padding = match (padding.transpose()?, &batch.placement) {
        (Some(padding), Some(placement)) => Some(placement.place(&padding, true)?),
        (padding, _) => padding,
    };
    let padding: Option<Vec<Vec<bool>>> =
        padding.map(|padding| padding.chunks(placed[1]).map(<[bool]>::to_vec).collect());
    let Some(documents) = &batch.documents else {
        if let Some(placement) = &batch.placement {
            return Err(BatchError::NoDocuments {
                placed: placement.placed_size(),
            });
        }
        let real = padding.map(|padding| negated(&padding));
        return Ok(match real {
            Some(real) => Documents::from_mask(&real)?,
            None => Documents::full(size[0], size[1])?,
        });
    };
    let got = [documents.batch_size(), documents.seq_len()];
    if got != placed {
        return Err(BatchError::Documents {
            expected: placed,
            got,
        });
    }
    Ok(match padding {
        Some(padding) => documents.without_padding(&padding)?,
        None => documents.clone(),
    })
}

fn negated(mask: &[Vec<bool>]) -> Vec<Vec<bool>> {
    mask.iter()
        .map(|row| row.iter().map(|value| !value).collect())
        .collect()
}

/// A placement may drop padding, or move it out of documents, and nothing that counts. `what` says what a token has.
fn check_placed<B: Backend>(
    batch: &SequenceBatch<B>,
    documents: &Documents,
    what: impl Fn(usize) -> Option<&'static str>,
) -> Result<(), BatchError> {
    let Some(placement) = &batch.placement else {
        return Ok(());
    };
    let size = placement.input_size();
    let padding = batch.padding_mask.as_ref();
    let padding = padding.map(|mask| host_bools("padding mask", mask, size));
    let padding = padding.transpose()?;
    let outside: Vec<bool> = (0..documents.batch_size())
        .flat_map(|row| documents.padding_mask(row))
        .collect();
    for (token, target) in placement.targets().iter().enumerate() {
        let declared_real = || padding.as_ref().is_some_and(|padding| !padding[token]);
        let lost = match *target {
            Some(slot) if !outside[slot] => None,
            Some(_) => what(token),
            None => what(token).or_else(|| declared_real().then_some("no mark of padding")),
        };
        if let Some(what) = lost {
            return Err(BatchError::Dropped {
                what,
                row: token / size[1],
                token: token % size[1],
            });
        }
    }
    Ok(())
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
        let rows = declared
            .dim
            .checked_sub(1)
            .map(|dim| shape[dim.min(shape.len() - 1)]);
        let has_rows = batch.placement.is_none() || rows == Some(size[0]);
        if shape.get(declared.dim) != Some(&size[1]) || !has_rows {
            let mut expected = format!("{} tokens in dim {}", size[1], declared.dim);
            if !has_rows {
                let rows = format!(", and {} rows in the dim ahead, to be placed", size[0]);
                expected.push_str(&rows);
            }
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
