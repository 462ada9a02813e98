//! Keys and values as rows.
//!
//! K and V travel in one message of rows `[batch · local_tokens, num_kv_heads · (head_dim + v_head_dim)]`, so that a token is
//! one run of memory and ranges of tokens are ranges of rows.

use std::ops::Range;

use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive, backend::Backend, ops::FloatTensor};

use crate::collectives::Payload;

pub(super) fn wrap<B: Backend, const D: usize>(tensor: &FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(tensor.clone()))
}

pub(super) fn unwrap<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

pub(super) fn to_payload<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Payload<B> {
    Payload::Float(unwrap(tensor))
}

pub(super) fn to_tensor<B: Backend, const D: usize>(payload: Payload<B>) -> Tensor<B, D> {
    match payload {
        Payload::Float(tensor) => Tensor::from_primitive(TensorPrimitive::Float(tensor)),
        _ => unreachable!("keys and values are floats"),
    }
}

/// How the rows of keys and values are read.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvRows {
    num_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
}

impl KvRows {
    /// Of keys `[.., num_kv_heads, .., head_dim]` and values `[.., num_kv_heads, .., v_head_dim]`.
    pub(super) fn of<B: Backend>(k: &FloatTensor<B>, v: &FloatTensor<B>) -> Self {
        let (k, v) = (k.shape(), v.shape());
        Self {
            num_heads: k[1],
            head_dim: k[3],
            v_head_dim: v[3],
        }
    }

    /// `[batch, num_kv_heads, tokens, ..]` twice -> `[batch · tokens, num_kv_heads · (head_dim + v_head_dim)]`: of each token all
    /// keys, then all values, so that both can be read where they are.
    pub(super) fn pack<B: Backend>(k: &FloatTensor<B>, v: &FloatTensor<B>) -> Payload<B> {
        let [k, v] = [k, v].map(|tensor| wrap::<B, 4>(tensor).swap_dims(1, 2));
        let [batch, tokens, heads, head_dim] = k.dims();
        let v_head_dim = v.dims()[3];
        let by_token = |tensor: Tensor<B, 4>, width: usize| tensor.reshape([batch * tokens, width]);
        to_payload(if head_dim == v_head_dim {
            // Each is copied once, to its place.
            by_token(Tensor::cat(vec![k, v], 2), 2 * heads * head_dim)
        } else {
            let (k, v) = (
                by_token(k, heads * head_dim),
                by_token(v, heads * v_head_dim),
            );
            Tensor::cat(vec![k, v], 1)
        })
    }

    /// The inverse of [`Self::pack`], of rows of `batch` equally long streams.
    pub(super) fn unpack<B: Backend>(
        &self,
        rows: Payload<B>,
        batch: usize,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let tokens = rows.shape()[0] / batch;
        let rows = to_tensor::<B, 2>(rows);
        let (heads, width) = (self.num_heads, self.num_heads * self.head_dim);
        let [k, v] = if self.head_dim == self.v_head_dim {
            let both = rows.reshape([batch, tokens, 2 * heads, self.head_dim]);
            [0, heads].map(|start| both.clone().narrow(2, start, heads))
        } else {
            let v_width = heads * self.v_head_dim;
            let k = rows.clone().narrow(1, 0, width);
            let v = rows.narrow(1, width, v_width);
            [
                k.reshape([batch, tokens, heads, self.head_dim]),
                v.reshape([batch, tokens, heads, self.v_head_dim]),
            ]
        };
        (unwrap(k.swap_dims(1, 2)), unwrap(v.swap_dims(1, 2)))
    }

    /// The keys and values of a buffer, one stream. Layers and devices fail on empty tensors: an empty buffer is one row that no
    /// segment names.
    pub(super) fn unpack_buffer<B: Backend>(
        &self,
        rows: Payload<B>,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let rows = if rows.shape()[0] == 0 {
            rows.zeros_like(0, 1)
        } else {
            rows
        };
        self.unpack(rows, 1)
    }
}

/// The rows of gradients of a buffer of `len` keys; an empty buffer stands as one row.
pub(super) fn pack_buffer<B: Backend>(
    dk: &FloatTensor<B>,
    dv: &FloatTensor<B>,
    len: usize,
) -> Payload<B> {
    let rows = KvRows::pack::<B>(dk, dv);
    if len == 0 {
        rows.zeros_like(0, 0)
    } else {
        rows
    }
}

/// Whether ranges are all of `num_rows` rows, in their order.
pub(super) fn are_all(ranges: &[Range<usize>], num_rows: usize) -> bool {
    let end = (ranges.iter()).try_fold(0, |at, range| (range.start == at).then_some(range.end));
    end == Some(num_rows)
}

/// The rows of `ranges`, in their order.
pub(super) fn take<'a, B: Backend>(
    rows: &Payload<B>,
    ranges: impl IntoIterator<Item = &'a Range<usize>>,
) -> Payload<B> {
    let parts = ranges.into_iter().map(|range| rows.rows(0, range));
    Payload::concat(parts.collect(), 0, rows)
}

/// The adjoint of [`take`]: rows go back to their ranges, all others are 0. No two ranges overlap.
pub(super) fn place<B: Backend>(
    rows: &Payload<B>,
    ranges: &[Range<usize>],
    len: usize,
) -> Payload<B> {
    let mut at = 0;
    let mut pieces: Vec<(&Range<usize>, Range<usize>)> = Vec::with_capacity(ranges.len());
    for range in ranges {
        pieces.push((range, at..at + range.len()));
        at += range.len();
    }
    pieces.sort_by_key(|(range, _)| range.start);
    let (mut parts, mut filled) = (Vec::new(), 0);
    for (range, from) in pieces {
        if range.start > filled {
            parts.push(rows.zeros_like(0, range.start - filled));
        }
        parts.push(rows.rows(0, &from));
        filled = range.end;
    }
    if filled < len {
        parts.push(rows.zeros_like(0, len - filled));
    }
    Payload::concat(parts, 0, rows)
}

/// The rows of `dim` that belong to each of some ranges, one behind the other in `rows`.
pub(super) fn rows_of<B: Backend>(
    rows: &Payload<B>,
    dim: usize,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> Vec<(Range<usize>, Payload<B>)> {
    let mut at = 0;
    let part = |range: Range<usize>| {
        let part = rows.rows(dim, &(at..at + range.len()));
        at += range.len();
        (range, part)
    };
    ranges.into_iter().map(part).collect()
}

/// `total` with rows added to its rows `ranges`, of which no two overlap.
pub(super) fn add_rows<B: Backend>(
    total: Payload<B>,
    rows: Payload<B>,
    ranges: &[Range<usize>],
) -> Payload<B> {
    let start = ranges.iter().map(|range| range.start).min();
    let end = ranges.iter().map(|range| range.end).max();
    let (Some(start), Some(end)) = (start, end) else {
        return total;
    };
    let shifted: Vec<_> = (ranges.iter())
        .map(|range| range.start - start..range.end - start)
        .collect();
    let rows = place(&rows.widened(), &shifted, end - start);
    let sum = total.rows(0, &(start..end)).add(rows);
    if end - start == total.shape()[0] {
        return sum;
    }
    total.with_rows(0, &(start..end), sum)
}
