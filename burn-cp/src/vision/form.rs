//! What the outputs of all ranks' towers must have in common, and which rank breaks it.

use std::fmt;

use burn::tensor::{DType, backend::Backend};

use serde::{Deserialize, Serialize};

use super::{TowerFault, VisionFeatures};
use crate::comm::odd_one_out;

/// What the outputs of all towers must have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OutputForm {
    /// Of the embeddings, then of each deepstack layer.
    pub(super) widths: Vec<usize>,
    dtype: DType,
    trainable: bool,
}

impl OutputForm {
    /// The form of well-formed features of `num_tokens` tokens.
    pub(super) fn of<B: Backend>(
        features: &VisionFeatures<B>,
        num_tokens: usize,
        trainable: bool,
    ) -> Result<Self, TowerFault> {
        let dtype = features.embeddings.dtype();
        let mut widths = Vec::with_capacity(1 + features.deepstack.len());
        for (i, part) in std::iter::once(&features.embeddings)
            .chain(&features.deepstack)
            .enumerate()
        {
            let what = || {
                if i == 0 {
                    "embeddings".to_owned()
                } else {
                    format!("deepstack layer {}", i - 1)
                }
            };
            let [rows, width] = part.dims();
            if rows != num_tokens {
                return Err(TowerFault::NumTokens {
                    what: what(),
                    expected: num_tokens,
                    got: rows,
                });
            }
            if part.dtype() != dtype {
                return Err(TowerFault::Dtype {
                    what: what(),
                    expected: dtype,
                    got: part.dtype(),
                });
            }
            widths.push(width);
        }
        Ok(Self {
            widths,
            dtype,
            trainable,
        })
    }
}

impl fmt::Display for OutputForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (embeddings, layers) = self.widths.split_at(1);
        let trainable = if self.trainable {
            "trainable"
        } else {
            "frozen"
        };
        let num_layers = layers.len();
        write!(
            f,
            "embeddings of width {embeddings:?} and {num_layers} deepstack layers of widths {layers:?}"
        )?;
        write!(f, ", {:?}, {trainable}", self.dtype)
    }
}

/// The first rank, by index in the group, whose tower failed or whose output differs from that of most ranks.
pub(super) fn first_fault(
    reports: &[Result<OutputForm, TowerFault>],
) -> Option<(usize, TowerFault)> {
    if let Some(fault) = reports
        .iter()
        .enumerate()
        .find_map(|(i, report)| Some((i, report.clone().err()?)))
    {
        return Some(fault);
    }
    let forms: Vec<&OutputForm> = reports.iter().flatten().collect();
    let (odd, expected) = odd_one_out(&forms)?;
    Some((
        odd,
        TowerFault::Form {
            expected: forms[expected].to_string(),
            got: forms[odd].to_string(),
        },
    ))
}
