//! Tensors of any kind, as collectives move them.

use std::ops::Range;

use burn::tensor::{
    BasicOps, Bool, DType, Float, FloatDType, Int, IntDType, Scalar, Shape, Slice, Tensor,
    TensorData, TensorMetadata, TensorPrimitive,
    backend::Backend,
    ops::{BoolTensor, FloatTensor, IntTensor},
};

/// The primitive of a tensor of any kind.
#[derive(Debug, Clone)]
pub enum Payload<B: Backend> {
    /// Floats: differentiable on autodiff backends.
    Float(FloatTensor<B>),
    /// Integers.
    Int(IntTensor<B>),
    /// Booleans.
    Bool(BoolTensor<B>),
}

/// Kinds of tensors that collectives move.
pub trait CollectiveElement<B: Backend>: BasicOps<B> {
    /// Takes the primitive out of a tensor.
    fn into_payload<const D: usize>(tensor: Tensor<B, D, Self>) -> Payload<B>;
    /// Wraps a primitive of this kind again.
    fn from_payload<const D: usize>(payload: Payload<B>) -> Tensor<B, D, Self>;
}

const KIND: &str = "a collective returns the kind that it was given";

impl<B: Backend> CollectiveElement<B> for Float {
    fn into_payload<const D: usize>(tensor: Tensor<B, D, Self>) -> Payload<B> {
        Payload::Float(tensor.into_primitive().tensor())
    }

    fn from_payload<const D: usize>(payload: Payload<B>) -> Tensor<B, D, Self> {
        match payload {
            Payload::Float(tensor) => Tensor::from_primitive(TensorPrimitive::Float(tensor)),
            _ => unreachable!("{KIND}"),
        }
    }
}

impl<B: Backend> CollectiveElement<B> for Int {
    fn into_payload<const D: usize>(tensor: Tensor<B, D, Self>) -> Payload<B> {
        Payload::Int(tensor.into_primitive())
    }

    fn from_payload<const D: usize>(payload: Payload<B>) -> Tensor<B, D, Self> {
        match payload {
            Payload::Int(tensor) => Tensor::from_primitive(tensor),
            _ => unreachable!("{KIND}"),
        }
    }
}

impl<B: Backend> CollectiveElement<B> for Bool {
    fn into_payload<const D: usize>(tensor: Tensor<B, D, Self>) -> Payload<B> {
        Payload::Bool(tensor.into_primitive())
    }

    fn from_payload<const D: usize>(payload: Payload<B>) -> Tensor<B, D, Self> {
        match payload {
            Payload::Bool(tensor) => Tensor::from_primitive(tensor),
            _ => unreachable!("{KIND}"),
        }
    }
}

/// A cast, for which a device has no kernel where there are no elements.
fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if tensor.shape().num_elements() == 0 {
        return B::float_empty(tensor.shape(), &B::float_device(&tensor), dtype);
    }
    B::float_cast(tensor, dtype)
}

fn slices(shape: &Shape, dim: usize, range: &Range<usize>) -> Vec<Slice> {
    (0..shape.num_dims())
        .map(|d| {
            if d == dim {
                Slice::from(range.clone())
            } else {
                Slice::from(0..shape[d])
            }
        })
        .collect()
}

impl<B: Backend> Payload<B> {
    /// Shape of the tensor.
    pub fn shape(&self) -> Shape {
        match self {
            Self::Float(tensor) => tensor.shape(),
            Self::Int(tensor) => tensor.shape(),
            Self::Bool(tensor) => tensor.shape(),
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Float(tensor) => tensor.dtype(),
            Self::Int(tensor) => tensor.dtype(),
            Self::Bool(tensor) => tensor.dtype(),
        }
    }

    /// Rows `range` of `dim`.
    pub(crate) fn rows(&self, dim: usize, range: &Range<usize>) -> Self {
        let shape = self.shape();
        if *range == (0..shape[dim]) {
            return self.clone();
        }
        if range.is_empty() || self.is_empty() {
            return self.zeros_like(dim, range.len());
        }
        let slices = slices(&shape, dim, range);
        match self {
            Self::Float(tensor) => Self::Float(B::float_slice(tensor.clone(), &slices)),
            Self::Int(tensor) => Self::Int(B::int_slice(tensor.clone(), &slices)),
            Self::Bool(tensor) => Self::Bool(B::bool_slice(tensor.clone(), &slices)),
        }
    }

    /// The same elements in another shape.
    pub(crate) fn reshape(self, shape: &[usize]) -> Self {
        let shape = Shape::from(shape.to_vec());
        // Devices copy nothing by a kernel without units, which CUDA refuses.
        if self.is_empty() {
            return self.without_elements(shape);
        }
        match self {
            Self::Float(tensor) => Self::Float(B::float_reshape(tensor, shape)),
            Self::Int(tensor) => Self::Int(B::int_reshape(tensor, shape)),
            Self::Bool(tensor) => Self::Bool(B::bool_reshape(tensor, shape)),
        }
    }

    /// Rows `indices` of `dim`, in their order.
    pub(crate) fn select(self, dim: usize, indices: &[usize]) -> Self {
        // CUDA refuses kernels without units, and then all that comes after them.
        if indices.is_empty() || self.is_empty() {
            return self.zeros_like(dim, indices.len());
        }
        #[allow(
            clippy::cast_possible_wrap,
            reason = "indices of a tensor that is there fit into 63 bits"
        )]
        let values: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let indices = |device: &B::Device| {
            let values = TensorData::new(values, [indices.len()]);
            Tensor::<B, 1, Int>::from_data(values, device).into_primitive()
        };
        match self {
            Self::Float(tensor) => {
                let indices = indices(&B::float_device(&tensor));
                Self::Float(B::float_select(tensor, dim, indices))
            }
            Self::Int(tensor) => {
                let indices = indices(&B::int_device(&tensor));
                Self::Int(B::int_select(tensor, dim, indices))
            }
            Self::Bool(tensor) => {
                // By way of integers: the selection of bools of Burn 0.21's Flex has another dtype than they had.
                let (indices, dtype) = (indices(&B::bool_device(&tensor)), tensor.dtype());
                let ints = B::int_select(B::bool_into_int(tensor, IntDType::I32), dim, indices);
                Self::Bool(B::int_not_equal_elem(ints, Scalar::Int(0), dtype.into()))
            }
        }
    }

    /// Where the tensor is.
    pub(crate) fn device(&self) -> B::Device {
        match self {
            Self::Float(tensor) => B::float_device(tensor),
            Self::Int(tensor) => B::int_device(tensor),
            Self::Bool(tensor) => B::bool_device(tensor),
        }
    }

    /// The same values without the graph that they came from.
    pub(crate) fn detached(self) -> Self {
        match self {
            // A detached leaf would be a leaf again.
            Self::Float(tensor) => {
                Self::Float(B::float_set_require_grad(B::float_detach(tensor), false))
            }
            other => other,
        }
    }

    /// Overwrites rows `range` of `dim`.
    pub(crate) fn with_rows(self, dim: usize, range: &Range<usize>, rows: Self) -> Self {
        let slices = slices(&self.shape(), dim, range);
        match (self, rows) {
            (Self::Float(tensor), Self::Float(rows)) => {
                Self::Float(B::float_slice_assign(tensor, &slices, rows))
            }
            (Self::Int(tensor), Self::Int(rows)) => {
                Self::Int(B::int_slice_assign(tensor, &slices, rows))
            }
            (Self::Bool(tensor), Self::Bool(rows)) => {
                Self::Bool(B::bool_slice_assign(tensor, &slices, rows))
            }
            _ => unreachable!("{KIND}"),
        }
    }

    /// Zeros (or `false`) like `self`, with `len` rows of `dim`.
    pub(crate) fn zeros_like(&self, dim: usize, len: usize) -> Self {
        let mut shape = self.shape();
        shape[dim] = len;
        if shape.num_elements() == 0 {
            return self.without_elements(shape);
        }
        match self {
            Self::Float(tensor) => Self::Float(B::float_zeros(
                shape,
                &B::float_device(tensor),
                tensor.dtype().into(),
            )),
            Self::Int(tensor) => Self::Int(B::int_zeros(
                shape,
                &B::int_device(tensor),
                tensor.dtype().into(),
            )),
            Self::Bool(tensor) => Self::Bool(B::bool_zeros(
                shape,
                &B::bool_device(tensor),
                tensor.dtype().into(),
            )),
        }
    }

    /// A tensor of this kind on this device, of other values.
    pub(super) fn with_values(&self, data: TensorData) -> Self {
        match self {
            Self::Float(tensor) => Self::Float(B::float_from_data(data, &B::float_device(tensor))),
            Self::Int(tensor) => Self::Int(B::int_from_data(data, &B::int_device(tensor))),
            Self::Bool(tensor) => Self::Bool(B::bool_from_data(data, &B::bool_device(tensor))),
        }
    }

    /// A tensor like `self` that has no elements. No kernel runs: devices refuse to launch one over nothing.
    fn without_elements(&self, shape: Shape) -> Self {
        match self {
            Self::Float(tensor) => {
                let device = B::float_device(tensor);
                Self::Float(B::float_empty(shape, &device, tensor.dtype().into()))
            }
            Self::Int(tensor) => {
                let device = B::int_device(tensor);
                Self::Int(B::int_empty(shape, &device, tensor.dtype().into()))
            }
            Self::Bool(tensor) => {
                let device = B::bool_device(tensor);
                Self::Bool(B::bool_empty(shape, &device, tensor.dtype().into()))
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.shape().num_elements() == 0
    }

    /// Concatenates along `dim`; parts without rows are left out, and `like` gives kind and shape where all are.
    pub(crate) fn concat(parts: Vec<Self>, dim: usize, like: &Self) -> Self {
        let mut parts: Vec<Self> = parts
            .into_iter()
            .filter(|part| part.shape()[dim] > 0)
            .collect();
        match parts.len() {
            0 => return like.zeros_like(dim, 0),
            1 => return parts.swap_remove(0),
            // Rows without columns.
            _ if parts.iter().all(Self::is_empty) => {
                return like.zeros_like(dim, parts.iter().map(|part| part.shape()[dim]).sum());
            }
            _ => {}
        }
        let (mut floats, mut ints, mut bools) = (Vec::new(), Vec::new(), Vec::new());
        for part in parts {
            match part {
                Self::Float(tensor) => floats.push(tensor),
                Self::Int(tensor) => ints.push(tensor),
                Self::Bool(tensor) => bools.push(tensor),
            }
        }
        // Held until the result stands in the graph; see `crate::cat`.
        let _held = floats.clone();
        match like {
            Self::Float(_) => Self::Float(B::float_cat(floats, dim)),
            Self::Int(_) => Self::Int(B::int_cat(ints, dim)),
            Self::Bool(_) => Self::Bool(B::bool_cat(bools, dim)),
        }
    }

    /// Element-wise sum.
    ///
    /// # Panics
    /// On booleans, which the public functions do not let through.
    pub(crate) fn add(self, other: Self) -> Self {
        if self.is_empty() {
            return self;
        }
        match (self, other) {
            (Self::Float(lhs), Self::Float(rhs)) => Self::Float(B::float_add(lhs, rhs)),
            (Self::Int(lhs), Self::Int(rhs)) => Self::Int(B::int_add(lhs, rhs)),
            _ => panic!("booleans have no sum"),
        }
    }

    /// The same values in the dtype that sums are made in: `f32` for `f16` and `bf16`.
    pub(crate) fn widened(self) -> Self {
        match self {
            Self::Float(tensor) if matches!(tensor.dtype(), DType::F16 | DType::BF16) => {
                Self::Float(cast::<B>(tensor, FloatDType::F32))
            }
            other => other,
        }
    }

    /// Back from [`Self::widened`] to a dtype.
    pub(crate) fn narrowed(self, dtype: DType) -> Self {
        match self {
            Self::Float(tensor) if tensor.dtype() != dtype => {
                Self::Float(cast::<B>(tensor, dtype.into()))
            }
            other => other,
        }
    }

    /// `num_rows` rows of `dim`, each the sum of the parts' rows that belong there, in the order of the parts: in `f32` at least, but
    /// for two rows, whose sum is rounded once in any dtype. Rows that no part names are 0; `like` says what is empty.
    pub(crate) fn sum_rows(
        parts: &[(Range<usize>, Self)],
        dim: usize,
        num_rows: usize,
        like: &Self,
    ) -> Self {
        let mut cuts: Vec<usize> = [0, num_rows]
            .into_iter()
            .chain(parts.iter().flat_map(|(range, _)| [range.start, range.end]))
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        let pieces = cuts.windows(2).map(|cut| {
            let of = |(range, rows): &(Range<usize>, Self)| {
                let covers = range.start <= cut[0] && cut[1] <= range.end;
                covers.then(|| rows.rows(dim, &(cut[0] - range.start..cut[1] - range.start)))
            };
            let mut rows: Vec<Self> = parts.iter().filter_map(of).collect();
            match (rows.pop(), rows.len()) {
                (None, _) => like.zeros_like(dim, cut[1] - cut[0]),
                (Some(last), 0) => last,
                (Some(last), 1) => rows.swap_remove(0).add(last),
                (Some(last), _) => {
                    let dtype = last.dtype();
                    let wide = rows.into_iter().chain([last]).map(Self::widened);
                    let sum = wide.reduce(Self::add);
                    sum.map_or_else(|| like.clone(), |sum| sum.narrowed(dtype))
                }
            }
        });
        Self::concat(pieces.collect(), dim, like)
    }

    /// The sum of `parts`, in their order. `None` where there is none.
    pub(crate) fn sum(parts: impl IntoIterator<Item = Self>) -> Option<Self> {
        let mut parts = parts.into_iter();
        let first = parts.next()?;
        if first.is_empty() {
            return Some(first);
        }
        let Some(second) = parts.next() else {
            return Some(first);
        };
        let dtype = first.dtype();
        let total = first.widened().add(second.widened());
        let total = parts.fold(total, |total, part| total.add(part.widened()));
        Some(total.narrowed(dtype))
    }
}
