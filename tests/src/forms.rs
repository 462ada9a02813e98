//! The ways in which a batch can be told which tokens form which document.

use burn::tensor::{TensorData, backend::Backend};
use burn_cp::{
    batch::SequenceBatch,
    layout::{Document, Documents, SelfOnly},
    plan::MaskKind,
};

use crate::{Random, span_tokens, visible};

/// A way to tell a batch which tokens form which document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// The table itself.
    Table,
    /// An id per token; ids come back after a while.
    Ids,
    /// Bool `[batch, seq]`.
    Mask,
    /// Integers `[batch, seq]` of 0 and 1, or of ids.
    MaskValues,
    /// Bool `[batch, 1, seq, seq]`.
    DenseBools,
    /// Floats `[batch, 1, seq, seq]`, added to scores.
    DenseAdditive,
    /// Bool `[batch, 1, seq, seq]`, in which padding sees itself.
    DensePadding,
    /// Token ids, of which one stands for padding.
    TokenIds,
    /// Lengths, with absent entries.
    SeqLens,
    /// Real and padded lengths, with absent entries.
    PaddedSeqLens,
    /// Boundaries.
    CuSeqlens,
    /// A table without holes, and a padding mask.
    PaddingMask,
}

impl Form {
    /// All forms.
    pub const ALL: [Self; 12] = [
        Self::Table,
        Self::Ids,
        Self::Mask,
        Self::MaskValues,
        Self::DenseBools,
        Self::DenseAdditive,
        Self::DensePadding,
        Self::TokenIds,
        Self::SeqLens,
        Self::PaddedSeqLens,
        Self::CuSeqlens,
        Self::PaddingMask,
    ];

    /// One of the forms in which these documents can be said.
    pub fn random(random: &mut Random, documents: &Documents) -> Self {
        let mut forms = Self::ALL;
        random.shuffle(&mut forms);
        let expresses = |form: &Self| form.expresses(documents);
        forms.into_iter().find(expresses).unwrap_or(Self::Table)
    }

    /// Whether the batch's documents are then as many, in the same order, empty ones included.
    pub fn keeps_table(self) -> bool {
        matches!(
            self,
            Self::Table | Self::SeqLens | Self::PaddedSeqLens | Self::CuSeqlens | Self::PaddingMask
        )
    }

    /// Whether which tokens see each other can be said in this form.
    fn expresses(self, documents: &Documents) -> bool {
        let all = |holds: fn(&[Document]) -> bool| documents.rows().all(holds);
        match self {
            Self::Table | Self::PaddingMask => true,
            Self::Ids => all(|row| row.iter().all(|document| document.runs.len() <= 1)),
            Self::Mask => {
                all(|row| row.iter().filter(|document| !document.is_empty()).count() <= 1)
            }
            Self::MaskValues => Self::Mask.expresses(documents) || Self::Ids.expresses(documents),
            Self::DenseBools | Self::DenseAdditive => documents.seq_len() <= 64,
            // A document of one token is padding then.
            Self::DensePadding => {
                Self::DenseBools.expresses(documents)
                    && all(|row| row.iter().all(|document| document.len() != 1))
            }
            // Real tokens ahead of all padding.
            Self::TokenIds => {
                let from_the_start = |document: &Document| match &document.runs[..] {
                    [] => true,
                    [run] => run.start == 0,
                    _ => false,
                };
                documents.rows().flatten().all(from_the_start)
            }
            Self::SeqLens | Self::CuSeqlens => {
                Self::PaddedSeqLens.expresses(documents)
                    && all(|row| row.iter().all(|one| one.len() == one.extent.len()))
            }
            Self::PaddedSeqLens => all(|row| {
                let mut end = 0;
                row.iter().all(|document| {
                    let follows = document.extent.start == end;
                    end = document.extent.end;
                    let first = end - document.extent.len()..;
                    let packed = match &document.runs[..] {
                        [] => true,
                        [run] => run.start == first.start,
                        _ => false,
                    };
                    follows && packed
                })
            }),
        }
    }

    /// The batch, told in this form, with the spans of the documents and, where the form keeps the table, their prefixes and
    /// masks: as part of the table, or by the batch.
    ///
    /// # Panics
    /// The documents cannot be said in this form.
    pub fn tell_marked<B: Backend>(
        self,
        batch: SequenceBatch<B>,
        documents: &Documents,
    ) -> SequenceBatch<B> {
        let mut batch = self.tell(batch, documents);
        if self == Self::Table {
            return batch;
        }
        if documents.has_spans() {
            batch = batch.with_spans(span_tokens(documents));
        }
        if documents.has_prefixes() && self.keeps_table() {
            let prefixes = of_each(documents, |row, index| documents.prefix(row, index));
            batch = batch.with_prefixes(prefixes);
        }
        if documents.has_masks() && self.keeps_table() {
            let mask = |row, index| documents.mask(row, index).expect("masks of documents");
            batch = batch.with_masks(of_each(documents, mask));
        }
        batch
    }

    /// The batch, told in this form. Spans, prefixes and masks of the documents are told in form [`Self::Table`] only.
    ///
    /// # Panics
    /// The documents cannot be said in this form.
    pub fn tell<B: Backend>(
        self,
        batch: SequenceBatch<B>,
        documents: &Documents,
    ) -> SequenceBatch<B> {
        assert!(self.expresses(documents), "{self:?} of {documents:?}");
        let size = [documents.batch_size(), documents.seq_len()];
        let told = match self {
            Self::Table => Ok(batch.with_documents(documents.clone())),
            Self::Ids => batch.with_document_ids(&TensorData::new(ids(documents), size)),
            Self::Mask => batch.with_attention_mask(&TensorData::new(real(documents), size)),
            Self::MaskValues if Self::Mask.expresses(documents) => {
                let values: Vec<i32> = real(documents).into_iter().map(i32::from).collect();
                batch.with_attention_mask(&TensorData::new(values, size))
            }
            Self::MaskValues => {
                // A 2 says that these are ids; without one they would be a mask.
                let ids: Vec<i64> = ids(documents)
                    .into_iter()
                    .map(|id| if id == 0 { 0 } else { id + 1 })
                    .collect();
                batch.with_attention_mask(&TensorData::new(ids, size))
            }
            Self::DenseBools => {
                let mask = visible(documents, MaskKind::CAUSAL).concat();
                let mask = TensorData::new(mask, [size[0], 1, size[1], size[1]]);
                batch.with_dense_mask(&mask, SelfOnly::Document)
            }
            Self::DensePadding => {
                let mut masks = visible(documents, MaskKind::CAUSAL);
                for mask in &mut masks {
                    (0..size[1]).for_each(|token| mask[token * (size[1] + 1)] = true);
                }
                let mask = TensorData::new(masks.concat(), [size[0], 1, size[1], size[1]]);
                batch.with_dense_mask(&mask, SelfOnly::Padding)
            }
            Self::TokenIds => Ok(batch.with_documents(from_token_ids(documents))),
            Self::DenseAdditive => {
                let mask = visible(documents, MaskKind::CAUSAL).concat();
                let mask: Vec<f32> = mask
                    .into_iter()
                    .map(|sees| if sees { 0.0 } else { f32::NEG_INFINITY })
                    .collect();
                batch.with_attention_mask(&TensorData::new(mask, [size[0], 1, size[1], size[1]]))
            }
            Self::SeqLens => batch.with_seq_lens(&lengths(documents, Document::len), None),
            Self::PaddedSeqLens => batch.with_seq_lens(
                &lengths(documents, Document::len),
                Some(&lengths(documents, |document| document.extent.len())),
            ),
            Self::CuSeqlens => {
                let boundaries = |row: &[Document]| {
                    let ends = row.iter().map(|document| document.extent.end as i64);
                    std::iter::once(0).chain(ends).collect()
                };
                let boundaries: Vec<Vec<i64>> = documents.rows().map(boundaries).collect();
                let documents = Documents::from_cu_seqlens(&boundaries, size[1]);
                Ok(batch.with_documents(documents.expect("boundaries in order")))
            }
            Self::PaddingMask => {
                let filled = |row: &[Document]| {
                    let extents = row.iter().map(|document| document.extent.clone());
                    extents.map(Document::contiguous).collect()
                };
                let filled = Documents::from_runs(documents.rows().map(filled).collect(), size[1]);
                let padding: Vec<bool> = real(documents).into_iter().map(|real| !real).collect();
                Ok(batch
                    .with_documents(filled.expect("extents in order"))
                    .with_padding_mask(TensorData::new(padding, size)))
            }
        };
        told.unwrap_or_else(|error| panic!("{self:?} of {documents:?}: {error}"))
    }
}

fn of_each<T>(documents: &Documents, what: impl Fn(usize, usize) -> T) -> Vec<Vec<T>> {
    let rows = documents.rows().enumerate();
    rows.map(|(row, table)| (0..table.len()).map(|index| what(row, index)).collect())
        .collect()
}

fn from_token_ids(documents: &Documents) -> Documents {
    let tokens: Vec<i64> = real(documents).into_iter().map(i64::from).collect();
    let rows: Vec<Vec<i64>> = tokens
        .chunks(documents.seq_len())
        .map(<[i64]>::to_vec)
        .collect();
    Documents::from_token_ids(&rows, 0).expect("padding at the end")
}

fn real(documents: &Documents) -> Vec<bool> {
    let rows = 0..documents.batch_size();
    rows.flat_map(|row| documents.padding_mask(row))
        .map(|padding| !padding)
        .collect()
}

/// Ids 1 to 7 over and over: documents that touch have different ones.
fn ids(documents: &Documents) -> Vec<i64> {
    let mut ids = vec![0; documents.batch_size() * documents.seq_len()];
    for (row, table) in documents.rows().enumerate() {
        let real = table.iter().filter(|document| !document.is_empty());
        for (index, document) in real.enumerate() {
            for token in document.runs.iter().cloned().flatten() {
                ids[row * documents.seq_len() + token] = 1 + (index % 7) as i64;
            }
        }
    }
    ids
}

fn lengths(documents: &Documents, of: impl Fn(&Document) -> usize) -> TensorData {
    let longest = documents.rows().map(<[Document]>::len).max().unwrap_or(0);
    let mut table = Vec::with_capacity(documents.batch_size() * longest);
    for row in documents.rows() {
        table.extend(row.iter().map(|document| of(document) as i64));
        table.resize(table.len() + longest - row.len(), Documents::ABSENT_LENGTH);
    }
    TensorData::new(table, [documents.batch_size(), longest])
}
