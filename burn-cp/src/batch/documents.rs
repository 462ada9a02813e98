//! The documents of a batch, from the tensors that data loaders make.

use burn::tensor::{DType, TensorData, backend::Backend};

use super::{BatchError, HostInts, SequenceBatch};
use crate::layout::{DenseMask, Documents, SelfOnly};

impl<B: Backend> SequenceBatch<B> {
    /// Documents, and with them the padding mask, from an attention mask over the batch's own rows. (A batch with a placement
    /// takes the documents of its placed rows, by [`with_documents`](Self::with_documents).)
    ///
    /// - `[batch, seq]`, bool: true is a real token; one document per row, which padding inside does not split.
    /// - `[batch, seq]`, integers of 0 and 1: the same. With a value above 1: ids of documents, of which every run is one.
    /// - `[batch, 1, seq, seq]` (query, key), bool, or floats that are added to scores: causal within documents. A token that
    ///   sees itself only and that no other sees is a document of one token; see [`with_dense_mask`](Self::with_dense_mask).
    ///
    /// # Errors
    /// Another shape or dtype, integers of four dims among them (they occur with 0 for "keep" as well as with 1); a mask that
    /// is not causal within documents; what [`Documents::from_mask_values`] refuses.
    pub fn with_attention_mask(self, mask: &TensorData) -> Result<Self, BatchError> {
        if mask.shape.len() == 4 {
            return self.with_dense_mask(mask, SelfOnly::Document);
        }
        let documents = match mask.dtype {
            DType::Bool(_) => Documents::from_mask(&rows(mask, mask.iter::<bool>())?)?,
            _ => Documents::from_mask_values(&int_rows("attention mask", mask)?)?,
        };
        Ok(self.with_documents(documents))
    }

    /// Documents from an attention mask `[batch, 1, seq, seq]` (query, key), bool or additive floats, whose padding may have
    /// been given itself as key: `self_only` says what a token is that sees itself only and that no other token sees.
    ///
    /// # Errors
    /// As [`with_attention_mask`](Self::with_attention_mask).
    pub fn with_dense_mask(
        self,
        mask: &TensorData,
        self_only: SelfOnly,
    ) -> Result<Self, BatchError> {
        let Ok(shape) = <[usize; 4]>::try_from(mask.shape.to_vec()) else {
            return Err(wrong_shape("attention mask", "[batch, 1, seq, seq]", mask));
        };
        let read = match mask.dtype {
            DType::Bool(_) => {
                let mask: Vec<bool> = mask.iter::<bool>().collect();
                DenseMask::from_bools(&mask, shape, self_only)?
            }
            dtype if dtype.is_float() => {
                let mask: Vec<f32> = mask.iter::<f32>().collect();
                DenseMask::from_additive(&mask, shape, self_only)?
            }
            other => {
                return Err(BatchError::Dtype {
                    what: "attention mask of 4 dims".into(),
                    expected: "bool or float",
                    got: format!("{other:?}"),
                });
            }
        };
        if !read.is_causal {
            return Err(BatchError::NotCausal);
        }
        Ok(self.with_documents(read.documents))
    }

    /// Documents of the batch's own rows from an id per token, `[batch, seq]`, integers: every run of equal ids is a document, 0 is padding.
    ///
    /// # Errors
    /// Another shape or dtype, negative ids.
    pub fn with_document_ids(self, ids: &TensorData) -> Result<Self, BatchError> {
        let documents = Documents::from_ids(&int_rows("document ids", ids)?)?;
        Ok(self.with_documents(documents))
    }

    /// Documents of the batch's own rows that follow each other, from tables `[batch, most documents]` of real and (if given) padded lengths, in which
    /// [`Documents::ABSENT_LENGTH`] fills up rows with fewer documents.
    ///
    /// # Errors
    /// Another shape or dtype, and what [`Documents::from_seq_lens`] refuses.
    pub fn with_seq_lens(
        self,
        seq_lens: &TensorData,
        seq_lens_padded: Option<&TensorData>,
    ) -> Result<Self, BatchError> {
        let seq_len = self.size()?[1];
        let real = int_rows("seq_lens", seq_lens)?;
        let padded = seq_lens_padded.map(|padded| int_rows("seq_lens_padded", padded));
        let documents = Documents::from_seq_lens(&real, padded.transpose()?.as_deref(), seq_len)?;
        Ok(self.with_documents(documents))
    }
}

fn int_rows(what: &str, data: &TensorData) -> Result<Vec<Vec<i64>>, BatchError> {
    let ints = HostInts::new(what, data)?;
    if data.shape.len() != 2 {
        return Err(wrong_shape(what, "[batch, seq]", data));
    }
    rows(data, ints.values.into_iter())
}

fn rows<T: Clone>(
    data: &TensorData,
    values: impl Iterator<Item = T>,
) -> Result<Vec<Vec<T>>, BatchError> {
    let shape = data.shape.to_vec();
    let [num_rows, len] = shape[..] else {
        return Err(wrong_shape("attention mask", "[batch, seq]", data));
    };
    let values: Vec<T> = values.collect();
    Ok((0..num_rows)
        .map(|row| values[row * len..(row + 1) * len].to_vec())
        .collect())
}

fn wrong_shape(what: &str, expected: &str, got: &TensorData) -> BatchError {
    BatchError::Shape {
        what: what.to_owned(),
        expected: expected.to_owned(),
        got: got.shape.to_vec(),
    }
}
