//! Exchanges whose rows go from the input straight to their place in the result.

use std::ops::Range;

use burn::tensor::{DType, Shape, TensorMetadata};

use super::{Plain, Run, Tensor, contiguous, empty, tensor_of, with_tensor};
use crate::{
    collectives::{Collective, Combine, Decomposition, Later, Payload},
    comm::{Block, CommError, Move, Moves, Steps},
};

/// So many pieces at most go from rank to rank as messages of their own; more are put together first.
const MOST_RUNS: usize = 8;

/// Bytes from one rank to another from which on an operation is large. NCCL moves fewer sooner, with one call. In tests all are: theirs are
/// small, and NCCL moves the rows of processes.
const SMALLEST_LARGE: usize = if cfg!(test) { 1 } else { 16 << 20 };

impl Collective {
    /// The most elements that one rank takes from another at once, of a payload of this shape. The same answer on every rank.
    pub(super) fn largest_message(&self, shape: &[usize]) -> usize {
        let (dim, rows) = match self {
            Self::AllGather { dim, sizes } | Self::ReduceScatter { dim, sizes } => {
                (*dim, sizes.iter().copied().max().unwrap_or(0))
            }
            Self::Exchange { dim, plan } | Self::ExchangeReverse { dim, plan } => {
                (*dim, plan.most_rows())
            }
            Self::AllReduce | Self::Broadcast { .. } | Self::Reduce { .. } => {
                (0, shape.first().copied().unwrap_or(1))
            }
        };
        let others = shape[..dim].iter().chain(shape.iter().skip(dim + 1));
        rows * others.product::<usize>()
    }

    /// Whether rows need no copy before or behind the message: those of dim 0, and where `copies` move them those of any. The same answer
    /// on every rank.
    pub(super) fn moves_blocks(&self, copies: bool) -> bool {
        match self {
            Self::AllGather { dim, .. } => copies || *dim == 0,
            Self::Exchange { dim, plan } => (copies || *dim == 0) && plan.most_runs() <= MOST_RUNS,
            _ => false,
        }
    }
}

/// Whether an operation moves so much from rank to rank that copies are faster than NCCL, and that it is worth to let it begin before later
/// kernels do. The same answer on every rank.
pub(super) fn is_large(op: &Collective, shape: &[usize], dtype: DType) -> bool {
    op.largest_message(shape) * dtype.size() >= SMALLEST_LARGE
}

/// Where rows of `dim` are in a tensor, whose elements stand side by side in one of two orders.
pub(super) struct Order {
    dim: usize,
    /// Whether the dims before `dim` stand between a row's elements, as those of a tensor whose dims were swapped.
    pub(super) rows_first: bool,
    /// Bytes of a row's elements that stand side by side.
    num_bytes: usize,
    /// Number of indices of the dims before `dim`.
    num_outer: usize,
}

impl Order {
    /// `None` for a tensor in any other order, and one with gaps.
    pub(super) fn of(tensor: &Tensor, dim: usize) -> Option<Self> {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let inner: usize = shape[dim + 1..].iter().product();
        let outer: usize = shape[..dim].iter().product();
        let dense = |dims: Vec<usize>| {
            let mut next = 1;
            dims.into_iter().rev().all(|dim| {
                let fits = shape[dim] == 1 || strides[dim] == next;
                next *= shape[dim];
                fits
            })
        };
        let rest = || dim + 1..shape.num_dims();
        // Nothing is read of a tensor without elements, which may have been given a pitch.
        let as_written = shape.num_elements() == 0 || dense((0..shape.num_dims()).collect());
        if !as_written && !dense(std::iter::once(dim).chain(0..dim).chain(rest()).collect()) {
            return None;
        }
        Some(Self {
            dim,
            rows_first: !as_written,
            num_bytes: inner * tensor.dtype.size(),
            num_outer: outer,
        })
    }

    /// Rows from `start` on, of `num_rows`; the address counts from the start of the tensor.
    fn block(&self, start: usize, len: usize, num_rows: usize) -> Block {
        let num_bytes = self.num_bytes;
        let (row, outer) = match self.rows_first {
            false => (num_bytes, num_rows * num_bytes),
            true => (self.num_outer * num_bytes, num_bytes),
        };
        Block {
            address: (start * row) as u64,
            num_bytes,
            rows: Steps {
                count: len,
                stride: row,
            },
            outer: Steps {
                count: self.num_outer,
                stride: outer,
            },
        }
    }

    /// A tensor in this order that has not been written yet.
    fn empty(&self, like: &Tensor, shape: Shape) -> Tensor {
        if !self.rows_first {
            return empty(like, shape);
        }
        let dims: Vec<usize> = shape.iter().copied().collect();
        let first = [
            &dims[self.dim..=self.dim],
            &dims[..self.dim],
            &dims[self.dim + 1..],
        ];
        let mut tensor = empty(like, Shape::from(first.concat()));
        // Row by row in memory; the dim goes to its place.
        for dim in 0..self.dim {
            tensor.meta.swap(dim, dim + 1);
        }
        tensor
    }
}

impl Run<'_> {
    /// Moves rows, which have elements, without copies between; `work` puts what it takes one behind the other. The result's elements are in the order of
    /// the payload's.
    pub(super) fn in_place(
        &self,
        payload: Payload<Plain>,
        work: &Decomposition,
    ) -> Result<Later<Payload<Plain>>, CommError> {
        debug_assert!(work.combine == Combine::Concat);
        let dim = work.dim;
        let (from, order) = match Order::of(tensor_of(&payload), dim) {
            Some(order) => (tensor_of(&payload).clone(), order),
            None => {
                let copied = contiguous(&payload);
                let order = Order::of(&copied, dim);
                (copied, order.expect("its elements stand side by side"))
            }
        };
        let mut shape = from.shape();
        let num_given = shape[dim];
        let num_taken = work.takes.iter().map(|piece| piece.range.len()).sum();
        shape[dim] = num_taken;
        let to = match payload.zeros_like(dim, 0) {
            nothing if num_taken == 0 => tensor_of(&nothing).clone(),
            _ => order.empty(&from, shape),
        };
        let rank = self.group.rank();
        let given = |peer, range: &Range<usize>| Move {
            peer,
            block: order.block(range.start, range.len(), num_given),
        };
        // Addresses count from the start of the input, and of the output.
        let mut moves = Moves::default();
        for give in (work.gives.iter()).filter(|give| !give.range.is_empty()) {
            moves.gives.push(given(give.destination, &give.range));
        }
        let mut end = 0;
        for piece in (work.takes.iter()).filter(|piece| !piece.range.is_empty()) {
            if piece.source == rank {
                // A rank's own rows are copied while those of others are on their way.
                moves.gives.push(given(rank, &piece.range));
            }
            moves.takes.push(Move {
                peer: piece.source,
                block: order.block(end, piece.range.len(), num_taken),
            });
            end += piece.range.len();
        }
        // Nothing to read from, or to write to: the device has no buffer for it.
        let named: Vec<_> = [&from, &to]
            .into_iter()
            .filter(|tensor| tensor.shape().num_elements() > 0)
            .cloned()
            .collect();
        if named.is_empty() {
            return Ok(Box::new(move || Ok(with_tensor(&payload, to))));
        }
        let on_its_way = self.exchange(named, move |addresses| {
            let input = addresses.first().copied().unwrap_or_default();
            let output = addresses.last().copied().unwrap_or_default();
            let add = |one: &mut Move, start: u64| one.block.address += start;
            moves.gives.iter_mut().for_each(|one| add(one, input));
            moves.takes.iter_mut().for_each(|one| add(one, output));
            moves
        });
        Ok(Box::new(move || {
            on_its_way.arrive();
            Ok(with_tensor(&payload, to))
        }))
    }
}
