//! From packs to a batch.

use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_cp::{
    batch::{Media, SequenceBatch},
    layout::{Documents, LayoutError},
};

use crate::data::{MediaKind, Pack, PatchShape, vocabulary};

/// One row per pack: ids, labels, three-axis positions, documents, images and videos. Packs must be of one length.
///
/// # Errors
/// No pack, or packs whose documents do not fit their length.
pub fn to_batch<B: Backend>(
    packs: &[Pack],
    shape: &PatchShape,
    device: &B::Device,
) -> Result<SequenceBatch<B>, LayoutError> {
    let rows = packs.len();
    let tokens = packs.first().map_or(0, Pack::num_tokens);
    let ids: Vec<i64> = packs
        .iter()
        .flat_map(|pack| pack.ids.iter().copied())
        .collect();
    let labels: Vec<i64> = packs
        .iter()
        .flat_map(|pack| pack.labels.iter().copied())
        .collect();
    let positions: Vec<i64> = (0..3)
        .flat_map(|axis| {
            packs
                .iter()
                .flat_map(move |pack| &pack.positions[axis * tokens..(axis + 1) * tokens])
        })
        .copied()
        .collect();
    let lengths: Vec<Vec<usize>> = packs
        .iter()
        .map(|pack| pack.document_lengths.clone())
        .collect();
    let documents = Documents::from_lengths(&lengths, tokens)?;
    let mut batch = SequenceBatch::from_ids(TensorData::new(ids, [rows, tokens]))
        .with_labels(TensorData::new(labels, [rows, tokens]))
        .with_vocab_size(vocabulary::SIZE)
        .with_positions(TensorData::new(positions, [3, rows, tokens]))
        .with_documents(documents);
    for kind in [MediaKind::Image, MediaKind::Video] {
        if let Some(media) = media_of(packs, kind, shape, device) {
            batch = batch.with_media(media);
        }
    }
    Ok(batch)
}

fn media_of<B: Backend>(
    packs: &[Pack],
    kind: MediaKind,
    shape: &PatchShape,
    device: &B::Device,
) -> Option<Media<B>> {
    let width = shape.patch_dim();
    let (mut pixels, mut grids, mut placeholders) = (Vec::new(), Vec::new(), Vec::new());
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
        placeholders.extend_from_slice(match kind {
            MediaKind::Image => &pack.image_mask,
            MediaKind::Video => &pack.video_mask,
        });
    }
    if grids.is_empty() {
        return None;
    }
    let num_rows = pixels.len() / width;
    let num_tokens = placeholders.len();
    Some(Media {
        name: match kind {
            MediaKind::Image => "image".to_owned(),
            MediaKind::Video => "video".to_owned(),
        },
        pixels: Tensor::from_data(TensorData::new(pixels, [num_rows, width]), device),
        grids,
        spatial_merge_size: shape.merge_size,
        placeholders: TensorData::new(placeholders, [packs.len(), num_tokens / packs.len()]),
    })
}
