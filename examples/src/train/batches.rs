//! From packs to a batch.

use burn::tensor::{Element, Tensor, TensorData, backend::Backend};
use burn_cp::{
    batch::{Media, SequenceBatch},
    layout::{Documents, LayoutError},
};

use crate::data::{MediaKind, Pack, PatchShape};

/// One row per pack: ids below `vocab_size`, labels, three-axis positions, documents, images and videos. Packs must be of one length.
///
/// With an `alignment` the batch is placed in one row, in which every document is padded to a multiple of it.
///
/// # Errors
/// No pack, or packs whose documents do not fit their length.
pub fn to_batch<B: Backend>(
    packs: &[Pack],
    shape: &PatchShape,
    vocab_size: usize,
    alignment: Option<usize>,
    device: &B::Device,
) -> Result<SequenceBatch<B>, LayoutError> {
    let batch = to_batch_in_order(packs, shape, vocab_size, alignment, device)?;
    let size = [packs.len(), packs.first().map_or(0, Pack::num_tokens)];
    let mut positions = Vec::with_capacity(3 * size[0] * size[1]);
    for axis in 0..3 {
        let of_axis = axis * size[1]..(axis + 1) * size[1];
        for pack in packs {
            positions.extend_from_slice(&pack.positions[of_axis.clone()]);
        }
    }
    Ok(batch.with_positions(TensorData::new(positions, [3, size[0], size[1]])))
}

/// [`to_batch`] with positions that count the tokens of each document, whatever they are.
///
/// # Errors
/// As there.
pub fn to_batch_in_order<B: Backend>(
    packs: &[Pack],
    shape: &PatchShape,
    vocab_size: usize,
    alignment: Option<usize>,
    device: &B::Device,
) -> Result<SequenceBatch<B>, LayoutError> {
    let size = [packs.len(), packs.first().map_or(0, Pack::num_tokens)];
    let lengths: Vec<Vec<usize>> = packs
        .iter()
        .map(|pack| pack.document_lengths.clone())
        .collect();
    let documents = Documents::from_lengths(&lengths, size[1])?;
    let mut batch = SequenceBatch::from_ids(stacked(packs, size, |pack| &pack.ids))
        .with_labels(stacked(packs, size, |pack| &pack.labels))
        .with_vocab_size(vocab_size);
    batch = match alignment {
        Some(multiple) => batch.with_aligned_documents(documents.aligned(multiple)?.flattened()),
        None => batch.with_documents(documents),
    };
    for kind in [MediaKind::Image, MediaKind::Video] {
        if let Some(media) = media_of(packs, kind, shape, size, device) {
            batch = batch.with_media(media);
        }
    }
    Ok(batch)
}

/// The packs' values as rows.
fn stacked<T: Element>(packs: &[Pack], size: [usize; 2], of: impl Fn(&Pack) -> &[T]) -> TensorData {
    let values: Vec<T> = packs.iter().flat_map(|pack| of(pack).to_vec()).collect();
    TensorData::new(values, size)
}

fn media_of<B: Backend>(
    packs: &[Pack],
    kind: MediaKind,
    shape: &PatchShape,
    size: [usize; 2],
    device: &B::Device,
) -> Option<Media<B>> {
    let width = shape.patch_dim();
    let (mut pixels, mut grids) = (Vec::new(), Vec::new());
    for pack in packs {
        let mut at = 0;
        for medium in &pack.media {
            let end = at + medium.num_patches() * width;
            if medium.kind == kind {
                pixels.extend_from_slice(&pack.pixels[at..end]);
                grids.push(medium.grid);
            }
            at = end;
        }
    }
    if grids.is_empty() {
        return None;
    }
    let num_rows = pixels.len() / width;
    let placeholders = stacked(packs, size, |pack| match kind {
        MediaKind::Image => &pack.image_mask,
        MediaKind::Video => &pack.video_mask,
    });
    Some(Media {
        name: match kind {
            MediaKind::Image => "image".to_owned(),
            MediaKind::Video => "video".to_owned(),
        },
        pixels: Tensor::from_data(TensorData::new(pixels, [num_rows, width]), device),
        grids,
        spatial_merge_size: shape.merge_size,
        placeholders,
    })
}
