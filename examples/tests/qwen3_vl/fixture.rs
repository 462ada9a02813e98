//! Recorded cases.

use std::{collections::BTreeMap, fs, path::PathBuf};

use burn_cp_examples::{
    data::{Document, MediaKind},
    hf::{Message, ModelDirectory, Processor},
};
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::device::{Rounding, fixtures};

pub(crate) fn folder() -> PathBuf {
    fixtures("qwen3_vl")
}

pub(crate) fn directory(model: &str) -> ModelDirectory {
    ModelDirectory::open(&folder().join(model)).unwrap()
}

/// How the documents of a case stand in the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum How {
    Alone,
    Packed,
    Left,
    Right,
}

#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) messages: Vec<Vec<Message>>,
    pub(crate) how: How,
    pub(crate) prompts: Vec<String>,
    pub(crate) ids: Vec<Vec<i64>>,
    /// Not shifted.
    pub(crate) labels: Vec<Vec<i64>>,
    pub(crate) rounding: Rounding,
    #[serde(skip)]
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
}

impl Case {
    pub(crate) fn read(name: &str) -> Self {
        let text = fs::read_to_string(folder().join(format!("{name}.json"))).unwrap();
        let mut case: Self = serde_json::from_str(&text).unwrap();
        let bytes = fs::read(folder().join(format!("{name}.safetensors"))).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let words = tensor
                .data()
                .chunks_exact(4)
                .map(|word| word.try_into().unwrap());
            let values = match tensor.dtype() {
                safetensors::Dtype::F32 => words
                    .map(|word| f64::from(f32::from_le_bytes(word)))
                    .collect(),
                safetensors::Dtype::I32 => words
                    .map(|word| f64::from(i32::from_le_bytes(word)))
                    .collect(),
                other => panic!("{name}: {other:?}"),
            };
            case.tensors.insert(name, (tensor.shape().to_vec(), values));
        }
        case
    }

    pub(crate) fn tensor(&self, name: &str) -> Option<&[f64]> {
        self.tensors.get(name).map(|(_, values)| values.as_slice())
    }

    #[allow(clippy::cast_possible_truncation)]
    pub(crate) fn ints(&self, name: &str) -> Vec<i64> {
        self.tensor(name)
            .unwrap_or_default()
            .iter()
            .map(|&value| value as i64)
            .collect()
    }

    /// Gradients by parameter.
    pub(crate) fn gradients(&self) -> BTreeMap<&str, &[f64]> {
        self.tensors
            .iter()
            .filter_map(|(name, (_, values))| {
                Some((name.strip_prefix("grad.")?, values.as_slice()))
            })
            .collect()
    }

    pub(crate) fn documents(&self, processor: &Processor) -> Vec<Document> {
        let base = folder().join("pictures");
        self.messages
            .iter()
            .map(|messages| processor.document(messages, &base, false).unwrap())
            .collect()
    }
}

/// Patch rows of one kind, in order.
pub(crate) fn pixels_of(documents: &[Document], kind: MediaKind, patch_dim: usize) -> Vec<f32> {
    let mut found = Vec::new();
    for document in documents {
        let mut at = 0;
        for medium in &document.media {
            let end = at + medium.num_patches() * patch_dim;
            if medium.kind == kind {
                found.extend_from_slice(&document.pixels[at..end]);
            }
            at = end;
        }
    }
    found
}

/// Grids of one kind, in order, flat.
pub(crate) fn grids_of(documents: &[Document], kind: MediaKind) -> Vec<i64> {
    let media = documents.iter().flat_map(|document| &document.media);
    media
        .filter(|medium| medium.kind == kind)
        .flat_map(|medium| medium.grid)
        .map(|side| side as i64)
        .collect()
}
