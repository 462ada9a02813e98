//! Recorded cases.

use std::{collections::BTreeMap, fs, path::PathBuf};

use burn_cp_examples::{hf::PublishedModel, models::mimo_v2_flash::MimoV2FlashConfig};
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::device::{Rounding, fixtures};

pub(crate) fn folder() -> PathBuf {
    fixtures("mimo_v2_flash")
}

pub(crate) fn published() -> PublishedModel<MimoV2FlashConfig> {
    PublishedModel::open(&folder().join("model")).unwrap()
}

/// How the documents of a case stand in the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum How {
    Packed,
    Left,
    Right,
}

#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) how: How,
    pub(crate) ids: Vec<Vec<i64>>,
    /// Not shifted.
    pub(crate) labels: Vec<Vec<i64>>,
    pub(crate) rounding: Rounding,
    #[serde(skip)]
    tensors: BTreeMap<String, Vec<f64>>,
}

impl Case {
    pub(crate) fn read(name: &str) -> Self {
        let text = fs::read_to_string(folder().join(format!("{name}.json"))).unwrap();
        let mut case: Self = serde_json::from_str(&text).unwrap();
        let bytes = fs::read(folder().join(format!("{name}.safetensors"))).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
            let (words, _) = tensor.data().as_chunks::<4>();
            let values = words
                .iter()
                .map(|&word| f64::from(f32::from_le_bytes(word)));
            case.tensors.insert(name, values.collect());
        }
        case
    }

    /// One document of which nothing is recorded.
    pub(crate) fn of_row(ids: Vec<i64>, labels: Vec<i64>) -> Self {
        Self {
            how: How::Right,
            ids: vec![ids],
            labels: vec![labels],
            rounding: Rounding::default(),
            tensors: BTreeMap::new(),
        }
    }

    pub(crate) fn tensor(&self, name: &str) -> &[f64] {
        &self.tensors[name]
    }

    /// Gradients by parameter.
    pub(crate) fn gradients(&self) -> BTreeMap<&str, &[f64]> {
        let named = self.tensors.iter();
        named
            .filter_map(|(name, values)| Some((name.strip_prefix("grad.")?, values.as_slice())))
            .collect()
    }
}
