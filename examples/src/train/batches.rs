//! From packs to a batch.

use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_cp::{
    batch::{Media, SequenceBatch},
    layout::{AlignedDocuments, Documents, LayoutError},
};

use crate::data::{IGNORED_LABEL, MediaKind, Pack, PatchShape, vocabulary};

/// One row per pack: ids, labels, three-axis positions, documents, images and videos. Packs must be of one length.
///
/// With an `alignment` the packs become one row behind each other, in which every document is padded to a multiple of it.
///
/// # Errors
/// No pack, or packs whose documents do not fit their length.
pub fn to_batch<B: Backend>(
    packs: &[Pack],
    shape: &PatchShape,
    alignment: Option<usize>,
    device: &B::Device,
) -> Result<SequenceBatch<B>, LayoutError> {
    let tokens = packs.first().map_or(0, Pack::num_tokens);
    let lengths: Vec<Vec<usize>> = packs
        .iter()
        .map(|pack| pack.document_lengths.clone())
        .collect();
    let documents = Documents::from_lengths(&lengths, tokens)?;
    let rows = Rows::new(&documents, alignment)?;
    let ids = rows.ints(packs, vocabulary::PAD, |pack| &pack.ids)?;
    let labels = rows.ints(packs, IGNORED_LABEL, |pack| &pack.labels)?;
    let mut positions = Vec::with_capacity(3 * rows.size[0] * rows.size[1]);
    for axis in 0..3 {
        let of_axis = axis * tokens..(axis + 1) * tokens;
        positions.extend(rows.positions(packs, |pack| &pack.positions[of_axis.clone()])?);
    }
    let positions = TensorData::new(positions, [3, rows.size[0], rows.size[1]]);
    let mut batch = SequenceBatch::from_ids(ids)
        .with_labels(labels)
        .with_vocab_size(vocabulary::SIZE)
        .with_positions(positions)
        .with_documents(rows.documents.clone());
    for kind in [MediaKind::Image, MediaKind::Video] {
        if let Some(media) = media_of(packs, kind, shape, &rows, device)? {
            batch = batch.with_media(media);
        }
    }
    Ok(batch)
}

/// Where the tokens of the packs stand in the batch.
struct Rows {
    documents: Documents,
    /// Rows and tokens of the batch.
    size: [usize; 2],
    aligned: Option<AlignedDocuments>,
}

impl Rows {
    fn new(documents: &Documents, alignment: Option<usize>) -> Result<Self, LayoutError> {
        let aligned = alignment
            .map(|multiple| documents.aligned(multiple))
            .transpose()?;
        let documents = match &aligned {
            Some(aligned) => aligned.documents.flattened(),
            None => documents.clone(),
        };
        let size = [documents.batch_size(), documents.seq_len()];
        Ok(Self {
            documents,
            size,
            aligned,
        })
    }

    /// The packs' values one behind the other, moved to where the documents are.
    fn place<T: Copy>(
        &self,
        packs: &[Pack],
        fill: T,
        of: impl Fn(&Pack) -> &[T],
    ) -> Result<Vec<T>, LayoutError> {
        let mut placed = Vec::with_capacity(self.size[0] * self.size[1]);
        for (row, pack) in packs.iter().enumerate() {
            match &self.aligned {
                Some(aligned) => placed.extend(aligned.place(row, of(pack), fill)?),
                None => placed.extend_from_slice(of(pack)),
            }
        }
        Ok(placed)
    }

    fn ints(
        &self,
        packs: &[Pack],
        fill: i64,
        of: impl Fn(&Pack) -> &[i64],
    ) -> Result<TensorData, LayoutError> {
        Ok(TensorData::new(self.place(packs, fill, of)?, self.size))
    }

    /// Like [`Self::place`], continued through the padding.
    fn positions(
        &self,
        packs: &[Pack],
        of: impl Fn(&Pack) -> &[i64],
    ) -> Result<Vec<i64>, LayoutError> {
        let mut positions = self.place(packs, PADDED, of)?;
        let mut next = 0;
        for position in &mut positions {
            if *position == PADDED {
                *position = next;
            }
            next = *position + 1;
        }
        Ok(positions)
    }
}

/// Stands for the position of a token that no pack has.
const PADDED: i64 = -1;

fn media_of<B: Backend>(
    packs: &[Pack],
    kind: MediaKind,
    shape: &PatchShape,
    rows: &Rows,
    device: &B::Device,
) -> Result<Option<Media<B>>, LayoutError> {
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
        return Ok(None);
    }
    let num_rows = pixels.len() / width;
    let placeholders = rows.place(packs, false, |pack| match kind {
        MediaKind::Image => &pack.image_mask,
        MediaKind::Video => &pack.video_mask,
    })?;
    Ok(Some(Media {
        name: match kind {
            MediaKind::Image => "image".to_owned(),
            MediaKind::Video => "video".to_owned(),
        },
        pixels: Tensor::from_data(TensorData::new(pixels, [num_rows, width]), device),
        grids,
        spatial_merge_size: shape.merge_size,
        placeholders: TensorData::new(placeholders, rows.size),
    }))
}
