//! Masks that say which tokens count in the loss.

use burn::tensor::{DType, TensorData, backend::Backend};

use super::{BatchError, HostInts, SequenceBatch};

/// The label that marks a position without a target.
pub const IGNORED_LABEL: i64 = -100;

impl<B: Backend> SequenceBatch<B> {
    /// Leaves tokens out of the loss, by a mask of the labels' shape: those with 0 or false. The same as labels of −100 there,
    /// which is what becomes of them; labels must have been given before.
    ///
    /// # Errors
    /// No labels yet, labels that are not integers, another shape, a value that is neither 0 nor 1 (a loss that is weighted by token has no
    /// representation).
    pub fn with_loss_mask(mut self, mask: &TensorData) -> Result<Self, BatchError> {
        let Some(labels) = &self.labels else {
            return Err(BatchError::NoLabels);
        };
        let mut labels = HostInts::new("labels", labels)?;
        if mask.shape.to_vec() != labels.shape {
            return Err(BatchError::Shape {
                what: "loss mask".into(),
                expected: format!("{:?} as the labels", labels.shape),
                got: mask.shape.to_vec(),
            });
        }
        let mask: Vec<f64> = match mask.dtype {
            DType::Bool(_) => mask.iter::<bool>().map(f64::from).collect(),
            _ => mask.iter::<f64>().collect(),
        };
        for (token, (label, counts)) in labels.values.iter_mut().zip(mask).enumerate() {
            #[allow(
                clippy::float_cmp,
                reason = "a mask holds these two values and no others"
            )]
            if counts == 0.0 {
                *label = IGNORED_LABEL;
            } else if counts != 1.0 {
                return Err(BatchError::LossMask { token, got: counts });
            }
        }
        self.labels = Some(labels.into_data());
        Ok(self)
    }
}
