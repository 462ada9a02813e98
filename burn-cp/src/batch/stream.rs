//! Token-aligned tensors, and how they are padded and cut.

use std::ops::Range;

use burn::tensor::{
    Bool, DType, Scalar, Shape, Tensor, TensorData, TensorPrimitive, backend::Backend,
};
use serde::{Deserialize, Serialize};

use super::BatchError;
use crate::collectives::Payload;

/// A further token-aligned tensor of a batch.
#[derive(Debug, Clone)]
pub struct Stream<B: Backend>(pub(crate) Payload<B>);

impl<B: Backend> Stream<B> {
    /// A stream of any kind of element and any number of dims.
    pub fn new<const D: usize, K: crate::collectives::CollectiveElement<B>>(
        tensor: Tensor<B, D, K>,
    ) -> Self {
        Self(K::into_payload(tensor))
    }
}

/// What stands in the tokens that a layout adds behind a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PadRule {
    /// This value; in bool streams anything but 0 is true.
    Value(f64),
}

/// A stream that batches may carry: its name, where its tokens run, and how it is padded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamDeclaration {
    /// Name under which batches carry it and models read it.
    pub name: String,
    /// Dim along which its tokens run.
    pub dim: usize,
    /// What stands in added tokens.
    pub pad: PadRule,
}

/// Integers on the host, widened to 64 bits.
#[derive(Debug, Clone)]
pub(crate) struct HostInts {
    pub(crate) values: Vec<i64>,
    pub(crate) shape: Vec<usize>,
}

impl HostInts {
    pub(crate) fn new(what: &str, data: &TensorData) -> Result<Self, BatchError> {
        if !(data.dtype.is_int() || data.dtype.is_uint()) {
            let got = format!("{:?}", data.dtype);
            return Err(BatchError::Dtype {
                what: what.to_owned(),
                expected: "integer",
                got,
            });
        }
        Ok(Self {
            values: data.iter::<i64>().collect(),
            shape: data.shape.to_vec(),
        })
    }

    /// The tokens of `ranges` along the last dim, in their order.
    pub(crate) fn select(&self, ranges: &[Range<usize>]) -> Self {
        let len = self.shape.last().copied().unwrap_or_default().max(1);
        let local: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let mut values = Vec::with_capacity(self.values.len() / len * local);
        for row in self.values.chunks_exact(len) {
            for range in ranges {
                values.extend_from_slice(&row[range.clone()]);
            }
        }
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = local;
        }
        Self { values, shape }
    }

    pub(crate) fn into_data(self) -> TensorData {
        TensorData::new(self.values, self.shape)
    }
}

/// Bools on the host, from bool or integer data, of shape `[batch, seq]`.
pub(crate) fn host_bools(
    what: &str,
    data: &TensorData,
    size: [usize; 2],
) -> Result<Vec<bool>, BatchError> {
    if data.shape.to_vec() != size {
        return Err(BatchError::Shape {
            what: what.to_owned(),
            expected: format!("{size:?} [batch, seq]"),
            got: data.shape.to_vec(),
        });
    }
    match data.dtype {
        DType::Bool(_) => Ok(data.iter::<bool>().collect()),
        dtype if dtype.is_int() || dtype.is_uint() => {
            Ok(data.iter::<i64>().map(|value| value != 0).collect())
        }
        other => Err(BatchError::Dtype {
            what: what.to_owned(),
            expected: "bool or integer",
            got: format!("{other:?}"),
        }),
    }
}

/// The rows of `ranges` along `dim`, where rows past the tensor's end hold `fill`. Differentiable on autodiff backends.
pub(crate) fn shard_payload<B: Backend>(
    payload: &Payload<B>,
    dim: usize,
    ranges: &[Range<usize>],
    fill: f64,
) -> Payload<B> {
    let len = payload.shape()[dim];
    let mut parts = Vec::new();
    let mut num_real = 0;
    for range in ranges {
        let real = range.start.min(len)..range.end.min(len);
        num_real += real.len();
        if !real.is_empty() {
            parts.push(payload.rows(dim, &real));
        }
        if range.len() > real.len() {
            parts.push(filled(payload, dim, range.len() - real.len(), fill));
        }
    }
    if let (Payload::Float(_), 0, Some(first)) = (payload, num_real, parts.first_mut()) {
        let num_rows = first.shape()[dim];
        let mut rows = vec![anchored(payload, dim, fill)];
        if num_rows > 1 {
            rows.push(first.rows(dim, &(1..num_rows)));
        }
        *first = Payload::concat(rows, dim, payload);
    }
    Payload::concat(parts, dim, payload)
}

/// One row of `fill` that is a function of the tensor, with a gradient of 0: a rank that holds none of its rows must be on its
/// graph all the same, as the other ranks are.
fn anchored<B: Backend>(payload: &Payload<B>, dim: usize, fill: f64) -> Payload<B> {
    let row = payload.rows(dim, &(0..1));
    let shape = row.shape();
    let Payload::Float(row) = row else { return row };
    let flat = B::float_reshape(row, Shape::new([shape.num_elements()]));
    let flat = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat));
    let all = Tensor::<B, 1, Bool>::ones(flat.shape(), &flat.device());
    let filled = flat.mask_fill(all, fill).into_primitive().tensor();
    Payload::Float(B::float_reshape(filled, shape))
}

/// `len` rows of `fill` along `dim`.
pub(crate) fn filled<B: Backend>(
    like: &Payload<B>,
    dim: usize,
    len: usize,
    fill: f64,
) -> Payload<B> {
    let mut shape = like.shape();
    shape[dim] = len;
    match like {
        Payload::Float(tensor) => Payload::Float(B::float_full(
            shape,
            Scalar::Float(fill),
            &B::float_device(tensor),
            like.dtype().into(),
        )),
        Payload::Int(tensor) => {
            // Pad values of integer streams are small integers, exact in f64.
            #[allow(clippy::cast_possible_truncation)]
            let fill = Scalar::Int(fill as i64);
            Payload::Int(B::int_full(
                shape,
                fill,
                &B::int_device(tensor),
                like.dtype().into(),
            ))
        }
        Payload::Bool(tensor) => {
            let device = B::bool_device(tensor);
            let dtype = like.dtype().into();
            Payload::Bool(if fill == 0.0 {
                B::bool_zeros(shape, &device, dtype)
            } else {
                B::bool_ones(shape, &device, dtype)
            })
        }
    }
}

/// Zeros (or `false`) of a shape and dtype.
pub(crate) fn zeros_payload<B: Backend>(
    shape: Shape,
    dtype: DType,
    device: &B::Device,
) -> Payload<B> {
    match dtype {
        DType::Bool(_) => Payload::Bool(B::bool_zeros(shape, device, dtype.into())),
        dtype if dtype.is_float() => Payload::Float(B::float_zeros(shape, device, dtype.into())),
        dtype => Payload::Int(B::int_zeros(shape, device, dtype.into())),
    }
}
