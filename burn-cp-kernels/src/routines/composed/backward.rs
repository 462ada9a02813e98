//! The backward pass, with the gradients of Dao et al., 2022 (arXiv:2205.14135, appendix B):
//! `p = exp(score - lse)`, `dv = pᵀ dout`, `ds = p (dout vᵀ - delta)`, `dq = scale ds k`,
//! `dk = scale dsᵀ q` with `delta = rowsum(dout · out)`.
//!
//! No normaliser is recomputed, so `out` and `lse` may be merged ones. Sums over blocks and over
//! segments that share keys run in a fixed order.

use std::ops::Range;

use burn::tensor::{
    Bool, FloatDType, Tensor, TensorData, TensorMetadata, backend::Backend, ops::FloatTensor,
};

use super::{
    block_rows, compute_dtype, load,
    mask::{Masks, Meeting},
    pieces::{KeyCuts, Pieces},
    scores::{Dropping, cap, cap_slope},
    store, transposed, walk,
};
use crate::{
    definition::{
        AttentionBackwardInput, AttentionGradients, AttentionOptions, AttentionProblem, Segment,
        Segments,
    },
    routines::{check_backward, sinks},
};

/// See [`AttentionBackend::attention_backward`](crate::AttentionBackend::attention_backward).
pub(crate) fn backward<B: Backend>(
    input: AttentionBackwardInput<FloatTensor<B>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> AttentionGradients<FloatTensor<B>> {
    let problem =
        check_backward::<B>(&input, segments, options).unwrap_or_else(|error| panic!("{error}"));
    let out_dtype = FloatDType::from(input.q.dtype());
    let dtype = compute_dtype(input.q.dtype());
    let q: Tensor<B, 4> = load(input.q, dtype);
    let scale = options.scale_for(problem.head_dim);
    let mut sums = Sums::new();
    let sinks_dtype = input.sinks.as_ref().map(|sinks| sinks.dtype());
    let sinks: Option<Tensor<B, 1>> = input.sinks.map(|sinks| load(sinks, dtype));
    let mut dsinks = sinks.clone().map(|sinks| sinks.zeros_like());

    let sees = |segment: &Segment| segment.num_blind_queries() < segment.num_q();
    let any = segments.iter().any(sees);
    // The gradient of sinks is that of the whole call, whose other keys may be elsewhere.
    if any || (sinks.is_some() && problem.lse_shape().iter().product::<usize>() > 0) {
        let dout: Tensor<B, 4> = load(input.dout, dtype);
        let lse: Tensor<B, 3> = load(input.lse, dtype);
        let delta = row_products(dout.clone(), load(input.out, dtype));
        let mut lse: Tensor<B, 4> = lse.unsqueeze_dim(3);
        if let Some(sinks) = sinks {
            let total = sinks::with_sinks(lse.clone(), sinks.clone());
            dsinks = Some(sinks::gradient(sinks, lse, total.clone(), delta.clone()));
            lse = total;
        }
        let cuts = KeyCuts::new(segments);
        let mut pass = Backward {
            masks: Masks::new(segments, &q.device()),
            k_scaled: transposed(load(input.k, dtype), scale),
            v: transposed(load(input.v, dtype), 1.0),
            delta,
            lse,
            dout,
            q: q.clone(),
            softcap: options.softcap,
            problem,
        };
        for (segment, place) in segments.iter().zip(segments.places()) {
            if !sees(segment) {
                continue;
            }
            let dropping = Dropping {
                segment,
                place: *place,
                dropout: options.dropout,
            };
            pass.segment(&dropping, &cuts, &mut sums);
        }
    }
    let Sums { dq, dk, dv } = sums;
    let dsinks = dsinks.zip(sinks_dtype);
    AttentionGradients::new(
        store(dq.assemble(problem.q_shape(), 0.0, &q), out_dtype),
        store(dk.assemble(problem.k_shape(), 0.0, &q) * scale, out_dtype),
        store(dv.assemble(problem.v_shape(), 0.0, &q), out_dtype),
    )
    .with_dsinks(dsinks.map(|(dsinks, dtype)| store(dsinks, dtype.into())))
}

/// The gradients so far; `dk` yet without the scale.
struct Sums<B: Backend> {
    dq: Pieces<B>,
    dk: Pieces<B>,
    dv: Pieces<B>,
}

impl<B: Backend> Sums<B> {
    fn new() -> Self {
        Self {
            dq: Pieces::new(),
            dk: Pieces::new(),
            dv: Pieces::new(),
        }
    }
}

struct Backward<B: Backend> {
    /// `[q_batch, num_heads, q_tokens, head_dim]`
    q: Tensor<B, 4>,
    /// `[k_batch, num_kv_heads, head_dim, k_tokens]`
    k_scaled: Tensor<B, 4>,
    /// `[k_batch, num_kv_heads, v_head_dim, k_tokens]`
    v: Tensor<B, 4>,
    /// `[q_batch, num_heads, q_tokens, v_head_dim]`
    dout: Tensor<B, 4>,
    /// `[q_batch, num_heads, q_tokens, 1]`
    lse: Tensor<B, 4>,
    /// `[q_batch, num_heads, q_tokens, 1]`
    delta: Tensor<B, 4>,
    masks: Masks<B>,
    softcap: Option<f64>,
    problem: AttentionProblem,
}

/// A block of queries with what belongs to its rows, `[1, num_kv_heads, group * rows, ..]`.
struct Block<B: Backend> {
    /// Counted within the segment.
    rows: Range<usize>,
    /// Keys that it sees, counted within the segment.
    keys: Range<usize>,
    q: Tensor<B, 4>,
    dout: Tensor<B, 4>,
    lse: Tensor<B, 4>,
    delta: Tensor<B, 4>,
    dq: Option<Tensor<B, 4>>,
}

impl<B: Backend> Backward<B> {
    fn blocks(&self, segment: &Segment) -> Vec<Block<B>> {
        walk::blocks(segment)
            .map(|rows| {
                let tokens = segment.q.start + rows.start..segment.q.start + rows.end;
                let take = |tensor: &Tensor<B, 4>| {
                    block_rows(tensor, &self.problem, segment.q_row, tokens.clone())
                };
                Block {
                    keys: walk::keys(segment, &rows),
                    q: take(&self.q),
                    dout: take(&self.dout),
                    lse: take(&self.lse),
                    delta: take(&self.delta),
                    rows,
                    dq: None,
                }
            })
            .collect()
    }

    /// Adds a segment's gradients.
    fn segment(&mut self, dropping: &Dropping<'_>, cuts: &KeyCuts, sums: &mut Sums<B>) {
        let segment = dropping.segment;
        let mut blocks = self.blocks(segment);
        for tile in walk::tiles(segment, walk::all_keys(segment)) {
            let (dk, dv) = self.tile(dropping, &tile, &mut blocks);
            let keys = segment.k.start + tile.start..segment.k.start + tile.end;
            for part in cuts.parts(segment.k_row, keys.clone()) {
                let within = part.start - keys.start..part.end - keys.start;
                sums.dk
                    .add(segment.k_row, part.start, tokens(&dk, within.clone()));
                sums.dv.add(segment.k_row, part.start, tokens(&dv, within));
            }
        }
        for block in blocks {
            let start = segment.q.start + block.rows.start;
            let [_, _, _, head_dim] = block.q.dims();
            let rows = [1, self.problem.num_heads, block.rows.len(), head_dim];
            let sum = block.dq.expect("a block sees a key of some tile");
            sums.dq.add(segment.q_row, start, sum.reshape(rows));
        }
    }

    /// One tile of keys against every block that sees some of it: `dk` (yet without the scale) and
    /// `dv` of the tile. Adds to the `dq` of the blocks.
    fn tile(
        &mut self,
        dropping: &Dropping<'_>,
        tile: &Range<usize>,
        blocks: &mut [Block<B>],
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let segment = dropping.segment;
        let (row, heads) = (segment.k_row, self.problem.num_kv_heads);
        let keys = segment.k.start + tile.start..segment.k.start + tile.end;
        let dim = self.problem.head_dim;
        let k = self
            .k_scaled
            .clone()
            .slice([row..row + 1, 0..heads, 0..dim, keys.clone()]);
        let v = self
            .v
            .clone()
            .slice([row..row + 1, 0..heads, 0..self.problem.v_head_dim, keys]);
        let (mut dk, mut dv) = (None, None);
        let seeing = blocks
            .iter_mut()
            .filter(|block| block.keys.start < tile.end && tile.start < block.keys.end);
        for block in seeing {
            let capped = cap(block.q.clone().matmul(k.clone()), self.softcap);
            let meeting = Meeting::new(segment, &block.rows, tile);
            let scores = self.masks.apply(capped.clone(), &meeting);
            let p = (scores - block.lse.clone()).exp();
            let mut dp = value_products(block.dout.clone(), v.clone());
            let mut kept = p.clone();
            if let Some(factors) = dropping.factors(&self.problem, &block.rows, tile, &self.q) {
                dp = dp * factors.clone();
                kept = kept * factors;
            }
            let mut ds = (dp - block.delta.clone()) * p;
            if let Some(softcap) = self.softcap {
                ds = ds * cap_slope(capped, softcap);
            }
            add(&mut dv, kept.swap_dims(2, 3).matmul(block.dout.clone()));
            add(&mut block.dq, ds.clone().matmul(k.clone().swap_dims(2, 3)));
            add(&mut dk, ds.swap_dims(2, 3).matmul(block.q.clone()));
        }
        (
            dk.expect("a tile is seen by some block"),
            dv.expect("a tile is seen by some block"),
        )
    }
}

/// Rows per group in [`row_products`].
const GROUP: usize = 8;

/// `delta`: the products of the rows of `dout` and `out`, `[batch, heads, tokens, 1]`.
///
/// They are taken from the diagonals of small matmuls and not from `sum_dim`, so that they add in
/// the order of [`value_products`]: where a query has all its weight on one key, `out` is that
/// key's value, and the gradient of its scores is 0 exactly, as it should be, not noise.
fn row_products<B: Backend>(dout: Tensor<B, 4>, out: Tensor<B, 4>) -> Tensor<B, 4> {
    let [batch, heads, tokens, dim] = out.dims();
    let (device, dtype) = (out.device(), out.dtype());
    let padded = tokens.next_multiple_of(GROUP);
    let groups = |tensor: Tensor<B, 4>| {
        let filler = [batch, heads, padded - tokens, dim];
        let tensor = match padded - tokens {
            0 => tensor,
            _ => Tensor::cat(vec![tensor, Tensor::zeros(filler, (&device, dtype))], 2),
        };
        tensor.reshape([1, batch * heads * (padded / GROUP), GROUP, dim])
    };
    let products = groups(dout).matmul(transposed(groups(out), 1.0));
    let others = (0..GROUP * GROUP).map(|cell| cell / GROUP != cell % GROUP);
    let others = TensorData::new(others.collect::<Vec<bool>>(), [1, 1, GROUP, GROUP]);
    let others = Tensor::<B, 4, Bool>::from_data(others, &device);
    products
        .mask_fill(others, 0.0)
        .sum_dim(3)
        .reshape([batch, heads, padded, 1])
        .slice([0..batch, 0..heads, 0..tokens, 0..1])
}

/// `dout vᵀ` of a block and a tile, `[.., rows, dim]` by `[.., dim, keys]`. A single row or column
/// is doubled: backends multiply it by another kernel, which may add in another order.
fn value_products<B: Backend>(dout: Tensor<B, 4>, v: Tensor<B, 4>) -> Tensor<B, 4> {
    let ([_, heads, rows, dim], [.., keys]) = (dout.dims(), v.dims());
    if rows > 1 && keys > 1 {
        return dout.matmul(v);
    }
    let dout = dout.expand([1, heads, rows.max(2), dim]);
    let v = v.expand([1, heads, dim, keys.max(2)]);
    dout.matmul(v).slice([0..1, 0..heads, 0..rows, 0..keys])
}

fn add<B: Backend>(sum: &mut Option<Tensor<B, 4>>, term: Tensor<B, 4>) {
    *sum = Some(match sum.take() {
        Some(earlier) => earlier + term,
        None => term,
    });
}

/// A run of tokens of a tensor `[1, heads, tokens, dim]`.
fn tokens<B: Backend>(tensor: &Tensor<B, 4>, range: Range<usize>) -> Tensor<B, 4> {
    let [_, heads, len, dim] = tensor.dims();
    if range == (0..len) {
        return tensor.clone();
    }
    tensor.clone().slice([0..1, 0..heads, range, 0..dim])
}
