//! Arrays of three dims on the host, and what tests read out of tensors.

use std::ops::Range;

use burn::tensor::{BasicOps, Bool, DType, Int, Tensor, TensorData, backend::Backend};

use crate::device;

/// A row-major array of three dims.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Sizes of the dims.
    pub shape: [usize; 3],
    /// Values, the last dim fastest.
    pub values: Vec<f64>,
}

impl Host {
    /// An array whose value at an index is `f(index)`.
    pub fn from_fn(shape: [usize; 3], mut f: impl FnMut([usize; 3]) -> f64) -> Self {
        let mut values = Vec::with_capacity(shape.iter().product());
        for i in 0..shape[0] {
            for j in 0..shape[1] {
                values.extend((0..shape[2]).map(|k| f([i, j, k])));
            }
        }
        Self { shape, values }
    }

    /// The value at an index.
    pub fn at(&self, [i, j, k]: [usize; 3]) -> f64 {
        self.values[(i * self.shape[1] + j) * self.shape[2] + k]
    }

    /// Rows `range` of `dim`.
    pub fn rows(&self, dim: usize, range: &Range<usize>) -> Self {
        let mut shape = self.shape;
        shape[dim] = range.len();
        Self::from_fn(shape, |mut index| {
            index[dim] += range.start;
            self.at(index)
        })
    }

    /// The parts one behind the other along `dim`; at least one.
    pub fn cat(parts: &[Self], dim: usize) -> Self {
        let mut shape = parts[0].shape;
        shape[dim] = parts.iter().map(|part| part.shape[dim]).sum();
        Self::from_fn(shape, |mut index| {
            let mut part = parts.iter();
            loop {
                let part = part.next().expect("the index lies within some part");
                if index[dim] < part.shape[dim] {
                    return part.at(index);
                }
                index[dim] -= part.shape[dim];
            }
        })
    }

    /// The element-wise sum, in order; at least one part.
    pub fn sum(parts: &[Self]) -> Self {
        Self::from_fn(parts[0].shape, |index| {
            parts.iter().map(|part| part.at(index)).sum()
        })
    }

    /// Zeros of this shape.
    pub fn zeros(shape: [usize; 3]) -> Self {
        Self {
            shape,
            values: vec![0.0; shape.iter().product()],
        }
    }

    /// The sum of the products of two arrays' values.
    pub fn dot(&self, other: &Self) -> f64 {
        assert_eq!(self.shape, other.shape, "arrays of one shape");
        self.values
            .iter()
            .zip(&other.values)
            .map(|(a, b)| a * b)
            .sum()
    }

    /// A float tensor of this dtype.
    pub fn tensor<B: Backend>(&self, dtype: DType) -> Tensor<B, 3> {
        let device = device::<B::Device>();
        // CubeCL's CUDA runtime cannot be given what has no elements.
        if self.values.is_empty() {
            return Tensor::empty(self.shape, (&device, dtype));
        }
        Tensor::from_data(self.data(), (&device, dtype))
    }

    /// An integer tensor, values rounded towards 0.
    pub fn int_tensor<B: Backend>(&self) -> Tensor<B, 3, Int> {
        #[allow(clippy::cast_possible_truncation)]
        let values: Vec<i64> = self.values.iter().map(|value| *value as i64).collect();
        if values.is_empty() {
            return Tensor::empty(self.shape, &device::<B::Device>());
        }
        Tensor::from_data(TensorData::new(values, self.shape), &device::<B::Device>())
    }

    /// A tensor of which values are not 0.
    pub fn bool_tensor<B: Backend>(&self) -> Tensor<B, 3, Bool> {
        // Not from integers: Burn's CubeCL backends cannot compare tensors without elements.
        let values: Vec<bool> = self.values.iter().map(|value| *value != 0.0).collect();
        if values.is_empty() {
            return Tensor::empty(self.shape, &device::<B::Device>());
        }
        Tensor::from_data(TensorData::new(values, self.shape), &device::<B::Device>())
    }

    /// What a tensor holds.
    pub fn of<B: Backend, K: BasicOps<B>>(tensor: &Tensor<B, 3, K>) -> Self {
        let shape = tensor.dims();
        // Devices cannot read what has no elements.
        let read = |tensor: &Tensor<B, 3, K>| tensor.to_data().iter::<f64>().collect();
        let values = if shape.contains(&0) {
            Vec::new()
        } else {
            read(tensor)
        };
        Self { shape, values }
    }

    fn data(&self) -> TensorData {
        TensorData::new(self.values.clone(), self.shape)
    }
}

/// The values of a tensor, widened.
pub fn floats<B: Backend, const D: usize>(tensor: &Tensor<B, D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// The values of an integer tensor.
pub fn ints<B: Backend, const D: usize>(tensor: &Tensor<B, D, Int>) -> Vec<i64> {
    tensor.to_data().iter::<i64>().collect()
}

/// Booleans as integers. Burn's CubeCL backends launch a kernel without units on what has no elements, which CUDA refuses, and then
/// everything that comes after it.
pub fn bools_as_ints<B: Backend, const D: usize>(bools: Tensor<B, D, Bool>) -> Tensor<B, D, Int> {
    let shape = bools.dims();
    if shape.contains(&0) {
        return Tensor::empty(shape, &bools.device());
    }
    bools.int()
}

/// The bits of the values: equal only where the values are the same to the last bit.
pub fn to_bits<B: Backend, const D: usize>(tensor: &Tensor<B, D>) -> Vec<u64> {
    floats(tensor).into_iter().map(f64::to_bits).collect()
}

/// `‖got - want‖ / ‖want‖`; 0 where both are 0, infinite where only `want` is, or where a value is not finite.
pub fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "as many values as wanted");
    let norm = |values: &mut dyn Iterator<Item = f64>| {
        values.map(|value| value * value).sum::<f64>().sqrt()
    };
    let error = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
    if error == 0.0 {
        return 0.0;
    }
    let error = error / norm(&mut want.iter().copied());
    if error.is_nan() { f64::INFINITY } else { error }
}
