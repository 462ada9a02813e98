//! The forward pass.

use std::ops::Range;

use burn::tensor::{FloatDType, Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};

use super::{
    block_rows, compute_dtype, load, lowest,
    mask::{Masks, Meeting},
    pieces::Pieces,
    scores::{Dropping, cap},
    store, tiniest, transposed, walk,
};
use crate::{
    definition::{
        AttentionInput, AttentionOptions, AttentionOutput, AttentionProblem, Segment, Segments,
    },
    routines::{check_inputs, sinks},
};

/// See [`AttentionBackend::attention_forward`](crate::AttentionBackend::attention_forward).
pub(crate) fn forward<B: Backend>(
    input: AttentionInput<FloatTensor<B>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> AttentionOutput<FloatTensor<B>> {
    let problem =
        check_inputs::<B>(&input, segments, options).unwrap_or_else(|error| panic!("{error}"));
    let AttentionInput { q, k, v, sinks } = input;
    let out_dtype = FloatDType::from(q.dtype());
    let dtype = compute_dtype(q.dtype());
    let q: Tensor<B, 4> = load(q, dtype);
    if segments
        .iter()
        .all(|segment| segment.num_blind_queries() == segment.num_q())
    {
        let options = (&q.device(), q.dtype());
        return AttentionOutput::new(
            store(
                Tensor::<B, 4>::zeros(problem.out_shape(), options),
                out_dtype,
            ),
            store(
                Tensor::<B, 3>::full(problem.lse_shape(), f64::NEG_INFINITY, options),
                dtype,
            ),
        );
    }

    let k_scaled = transposed(load(k, dtype), options.scale_for(problem.head_dim));
    let mut pass = Forward {
        masks: Masks::new(segments, &q.device()),
        v_one: append_ones(load(v, dtype)),
        sinks: sinks.map(|sinks| load(sinks, dtype)),
        softcap: options.softcap,
        q,
        k_scaled,
        problem,
        dtype,
    };
    let (mut sums, mut maxima) = (Pieces::new(), Pieces::new());
    for (segment, place) in segments.iter().zip(segments.places()) {
        let dropping = Dropping {
            segment,
            place: *place,
            dropout: options.dropout,
        };
        for block in walk::blocks(segment) {
            let start = segment.q.start + block.start;
            let (sum, max) = pass.block(&dropping, block);
            sums.add(segment.q_row, start, sum);
            maxima.add(segment.q_row, start, max);
        }
    }
    let (out, lse) = pass.normalise(sums, maxima);
    AttentionOutput::new(store(out, out_dtype), store(lse, dtype))
}

struct Forward<B: Backend> {
    /// `[q_batch, num_heads, q_tokens, head_dim]`
    q: Tensor<B, 4>,
    /// `[k_batch, num_kv_heads, head_dim, k_tokens]`
    k_scaled: Tensor<B, 4>,
    /// `[k_batch, num_kv_heads, k_tokens, v_head_dim + 1]`, the last column all ones.
    v_one: Tensor<B, 4>,
    /// `[num_heads]`
    sinks: Option<Tensor<B, 1>>,
    softcap: Option<f64>,
    masks: Masks<B>,
    problem: AttentionProblem,
    dtype: FloatDType,
}

impl<B: Backend> Forward<B> {
    /// One block of queries against all the keys it sees: the sums of `exp(score - max) · v` and,
    /// in the last column, of `exp(score - max)`, `[1, num_heads, rows, v_head_dim + 1]`; and the
    /// maxima, `[1, num_heads, rows, 1]`.
    fn block(
        &mut self,
        dropping: &Dropping<'_>,
        block: Range<usize>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let segment = dropping.segment;
        let tokens = segment.q.start + block.start..segment.q.start + block.end;
        let mut q = block_rows(&self.q, &self.problem, segment.q_row, tokens);
        let [_, num_kv_heads, rows, head_dim] = q.dims();
        if rows == 1 {
            // Flex multiplies a single row by another kernel, which adds in another order.
            q = q.expand([1, num_kv_heads, 2, head_dim]);
        }
        let mut state = None;
        for tile in walk::tiles(segment, walk::keys(segment, &block)) {
            let seen = Seen {
                meeting: Meeting::new(segment, &block, &tile),
                factors: dropping.factors(&self.problem, &block, &tile, &self.q),
                tile,
            };
            state = Some(self.tile(state, q.clone(), segment, seen));
        }
        let (sum, max) = state.expect("a block has a key, so it has a tile");
        let unfold = |tensor: Tensor<B, 4>| {
            let dim = tensor.dims()[3];
            let tensor = match rows {
                1 => tensor.slice([0..1, 0..num_kv_heads, 0..1, 0..dim]),
                _ => tensor,
            };
            tensor.reshape([1, self.problem.num_heads, block.len(), dim])
        };
        (unfold(sum), unfold(max))
    }

    /// One step of the online softmax.
    fn tile(
        &mut self,
        state: Option<(Tensor<B, 4>, Tensor<B, 4>)>,
        q: Tensor<B, 4>,
        segment: &Segment,
        seen: Seen<B>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let Seen {
            tile,
            meeting,
            factors,
        } = seen;
        let (row, heads) = (segment.k_row, self.problem.num_kv_heads);
        let keys = segment.k.start + tile.start..segment.k.start + tile.end;
        let k = self.k_scaled.clone().slice([
            row..row + 1,
            0..heads,
            0..self.problem.head_dim,
            keys.clone(),
        ]);
        let v = self.v_one.clone().slice([
            row..row + 1,
            0..heads,
            keys,
            0..self.problem.v_head_dim + 1,
        ]);
        let scores = cap(q.matmul(k), self.softcap);
        let scores = self.masks.apply(scores, &meeting);
        let mut max = scores.clone().max_dim(3);
        if meeting.leaves_rows_behind() {
            // Rows that see nothing here need a finite maximum: `-inf - -inf` is NaN. What they
            // add is 0, and the next tile that they do see sets their maximum.
            max = max.clamp_min(lowest(self.dtype));
        }
        match state {
            None => (sums((scores - max.clone()).exp(), v, factors), max),
            Some((sum, earlier)) => {
                let max = earlier.clone().max_pair(max);
                let shrink = (earlier - max.clone()).exp();
                let new = sums((scores - max.clone()).exp(), v, factors);
                (sum * shrink + new, max)
            }
        }
    }

    /// Divides the sums by the normaliser, for all blocks at once.
    fn normalise(&self, sums: Pieces<B>, maxima: Pieces<B>) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let [batch, heads, tokens, dim] = self.problem.out_shape();
        let sums = sums.assemble([batch, heads, tokens, dim + 1], 0.0, &self.q);
        let maxima = maxima.assemble([batch, heads, tokens, 1], f64::NEG_INFINITY, &self.q);
        let part = |dims: Range<usize>| sums.clone().slice([0..batch, 0..heads, 0..tokens, dims]);
        // A row with a key has a normaliser of about 1 or more; the others have 0 and get 0 / tiny
        // and -inf + log(tiny).
        let normaliser = part(dim..dim + 1).clamp_min(tiniest(self.dtype));
        let lse = maxima + normaliser.clone().log();
        let mut out = part(0..dim) / normaliser;
        if let Some(sinks) = &self.sinks {
            out = sinks::apply(out, lse.clone(), sinks.clone());
        }
        (out, lse.reshape([batch, heads, tokens]))
    }
}

/// A tile of keys, how a block of queries sees it, and the factors on its weights.
struct Seen<B: Backend> {
    tile: Range<usize>,
    meeting: Meeting,
    factors: Option<Tensor<B, 4>>,
}

/// The weighted sums of values and, in the last column, of ones. Factors are on the former alone:
/// dropout follows the softmax.
fn sums<B: Backend>(
    weights: Tensor<B, 4>,
    v_one: Tensor<B, 4>,
    factors: Option<Tensor<B, 4>>,
) -> Tensor<B, 4> {
    let all = weigh(weights.clone(), v_one.clone());
    let Some(factors) = factors else {
        return all;
    };
    let [batch, heads, rows, columns] = all.dims();
    let part = |sums: Tensor<B, 4>, dims| sums.slice([0..batch, 0..heads, 0..rows, dims]);
    let kept = weigh(weights * factors, v_one);
    Tensor::cat(
        vec![part(kept, 0..columns - 1), part(all, columns - 1..columns)],
        3,
    )
}

/// The weighted sum of values, `[.., rows, keys]` by `[.., keys, dim]`.
fn weigh<B: Backend>(weights: Tensor<B, 4>, v: Tensor<B, 4>) -> Tensor<B, 4> {
    let [batch, heads, rows, keys] = weights.dims();
    if keys != 2 {
        return weights.matmul(v);
    }
    // Flex has a kernel of its own for sums of two, which rounds otherwise. A key with weight 0
    // makes them three.
    let zeros = |dims| Tensor::zeros(dims, (&v.device(), v.dtype()));
    let weights = Tensor::cat(vec![weights, zeros([batch, heads, rows, 1])], 3);
    let dim = v.dims()[3];
    let v = Tensor::cat(vec![v.clone(), zeros([batch, heads, 1, dim])], 2);
    weights.matmul(v)
}

/// Appends a column of ones along the last dim.
fn append_ones<B: Backend>(v: Tensor<B, 4>) -> Tensor<B, 4> {
    let [batch, heads, tokens, _] = v.dims();
    let ones = Tensor::ones([batch, heads, tokens, 1], (&v.device(), v.dtype()));
    Tensor::cat(vec![v, ones], 3)
}
