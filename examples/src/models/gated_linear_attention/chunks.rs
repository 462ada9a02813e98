//! Gated linear attention, chunk by chunk.

use burn::tensor::{Bool, Int, Tensor};
use burn_cp::{
    attention::ContextParallelBackend,
    recurrent::{Recurrence, Transition},
};

/// What a layer's recurrence reads, `[batch, num_heads, local_tokens, width]` each.
#[derive(Debug, Clone)]
pub struct GatedInputs<B: ContextParallelBackend> {
    /// Queries, of the keys' width.
    pub q: Tensor<B, 4>,
    /// Keys.
    pub k: Tensor<B, 4>,
    /// Values, of any width.
    pub v: Tensor<B, 4>,
    /// `ln α`, at most 0, of the keys' width.
    pub log_decay: Tensor<B, 4>,
}

/// Tokens cut into chunks: `[batch, num_heads, num_chunks, chunk, width]`.
struct Chunks<B: ContextParallelBackend> {
    q: Tensor<B, 5>,
    k: Tensor<B, 5>,
    v: Tensor<B, 5>,
    /// `ln` of the decay from the chunk's start up to and with each token.
    sums: Tensor<B, 5>,
    /// `[batch, 1, num_chunks, chunk]`: which of the rank's documents of its row.
    segments: Tensor<B, 4, Int>,
}

/// `o_t = q_tᵀ S_t` of `S_t = diag(α_t) S_{t-1} + k_t v_tᵀ`, which starts from zeros in every document; tokens are in the order of
/// the sequence. `[batch, num_heads, local_tokens, width of the values]`; at padding the state of the document before it is read.
///
/// Within a chunk tokens see each other as in attention; between chunks, and then between ranks, states are handed on. Every rank of
/// the step's group must call it.
pub fn gated_attention<B: ContextParallelBackend>(
    inputs: GatedInputs<B>,
    chunk: usize,
    recurrence: &Recurrence<B>,
) -> Tensor<B, 4> {
    let [batch, num_heads, len, _] = inputs.q.dims();
    let value_dim = inputs.v.dims()[3];
    // Padding neither decays a state nor adds to it.
    let padding = recurrence.padding_mask().reshape([batch, 1, len, 1]);
    let silent = |x: Tensor<B, 4>| {
        let shape = x.dims();
        x.mask_fill(padding.clone().expand(shape), 0.0)
    };
    let (k, log_decay) = (silent(inputs.k), silent(inputs.log_decay));
    let decay = log_decay.clone().cumsum(2);
    let chunks = Chunks::new(
        (inputs.q.clone(), k, inputs.v, log_decay),
        recurrence.segments(),
        chunk,
    );
    let (between, state) = chunks.between();
    let local = chunks.within() + between;
    let num_chunks = local.dims()[2];
    let local = local.reshape([batch, num_heads, num_chunks * chunk, value_dim]);
    let local = local.narrow(2, 0, len);
    if !recurrence.straddles() {
        return local;
    }
    // What the tokens of a document that began on earlier ranks read of the state that it brings.
    let total = decay.clone().narrow(2, len - 1, 1).exp().swap_dims(2, 3);
    let entering = recurrence.carry(total, state, Transition::Scale);
    let reading = inputs.q * decay.exp();
    let others = recurrence
        .leading_mask()
        .bool_not()
        .reshape([batch, 1, len, 1]);
    let reading = reading
        .clone()
        .mask_fill(others.expand(reading.dims()), 0.0);
    local + reading.matmul(entering)
}

impl<B: ContextParallelBackend> Chunks<B> {
    fn new(
        (q, k, v, log_decay): (Tensor<B, 4>, Tensor<B, 4>, Tensor<B, 4>, Tensor<B, 4>),
        segments: Tensor<B, 2, Int>,
        chunk: usize,
    ) -> Self {
        let [batch, _, len, _] = q.dims();
        let num_chunks = len.div_ceil(chunk);
        let missing = num_chunks * chunk - len;
        let cut = |x: Tensor<B, 4>| {
            let [batch, num_heads, _, width] = x.dims();
            let shape = [batch, num_heads, missing, width];
            let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
            let whole = if missing > 0 {
                burn_cp::cat(vec![x, zeros], 2)
            } else {
                x
            };
            whole.reshape([batch, num_heads, num_chunks, chunk, width])
        };
        let last = segments.clone().narrow(1, len - 1, 1);
        let segments = if missing > 0 {
            burn_cp::cat(vec![segments, last.expand([batch, missing])], 1)
        } else {
            segments
        };
        Self {
            q: cut(q),
            k: cut(k),
            v: cut(v),
            sums: cut(log_decay).cumsum(3),
            segments: segments.reshape([batch, 1, num_chunks, chunk]),
        }
    }

    /// What tokens read of tokens of their own chunk.
    fn within(&self) -> Tensor<B, 5> {
        let [batch, num_heads, num_chunks, chunk, width] = self.q.dims();
        let pairs = [batch, num_heads, num_chunks, chunk, chunk, width];
        let decay = self.sums.clone().unsqueeze_dim::<6>(4).expand(pairs)
            - self.sums.clone().unsqueeze_dim::<6>(3).expand(pairs);
        let later = Tensor::<B, 2, Bool>::tril_mask([chunk, chunk], 0, &self.q.device())
            .reshape([1, 1, 1, chunk, chunk]);
        let [rows, columns] = [4, 3].map(|dim| {
            let segments = self.segments.clone().unsqueeze_dim::<5>(dim);
            segments.expand([batch, 1, num_chunks, chunk, chunk])
        });
        let apart = rows.not_equal(columns);
        let hidden = apart.bool_or(later.expand([batch, 1, num_chunks, chunk, chunk]));
        // Masked ahead of the exponential, which would overflow for keys behind the query.
        let hidden = hidden.unsqueeze_dim::<6>(5).expand(pairs);
        let decay = decay.mask_fill(hidden, f64::NEG_INFINITY).exp();
        let products = self.q.clone().unsqueeze_dim::<6>(4).expand(pairs)
            * self.k.clone().unsqueeze_dim::<6>(3).expand(pairs);
        let scores = (products * decay).sum_dim(5).squeeze_dim::<5>(5);
        scores.matmul(self.v.clone())
    }

    /// What tokens read of the chunks of this rank before theirs, and the state behind the last one.
    fn between(&self) -> (Tensor<B, 5>, Tensor<B, 4>) {
        let [batch, num_heads, num_chunks, chunk, width] = self.q.dims();
        let value_dim = self.v.dims()[4];
        let device = self.q.device();
        // Of each chunk's last document the decay to the chunk's end, and its state there from zeros.
        let total = self.sums.clone().narrow(3, chunk - 1, 1);
        let last = self.segments.clone().narrow(3, chunk - 1, 1);
        let earlier = (self.segments.clone())
            .not_equal(last.clone().expand(self.segments.dims()))
            .unsqueeze_dim::<5>(4);
        let to_end = (total.clone() - self.sums.clone()).exp();
        let keys = (self.k.clone() * to_end).mask_fill(earlier.expand(self.k.dims()), 0.0);
        let added = keys.swap_dims(3, 4).matmul(self.v.clone());
        // A document that begins within a chunk has nothing of the chunk before.
        let mut before = vec![last.clone().narrow(2, 0, 1)];
        if num_chunks > 1 {
            before.push(last.clone().narrow(2, 0, num_chunks - 1));
        }
        let before = burn_cp::cat(before, 2);
        let begins = last.not_equal(before.clone()).unsqueeze_dim::<5>(4);
        let kept = total.exp();
        let kept = kept.clone().mask_fill(begins.expand(kept.dims()), 0.0);

        let shape = [batch, num_heads, width, value_dim];
        let mut state = Tensor::<B, 4>::zeros(shape, (&device, self.q.dtype()));
        let mut entering = Vec::with_capacity(num_chunks);
        for at in 0..num_chunks {
            entering.push(state.clone().unsqueeze_dim::<5>(2));
            let of = |x: &Tensor<B, 5>| x.clone().narrow(2, at, 1).squeeze_dim::<4>(2);
            state = of(&kept).swap_dims(2, 3) * state + of(&added);
        }
        let entering = burn_cp::cat(entering, 2);
        let others = (self.segments.clone())
            .not_equal(before.expand(self.segments.dims()))
            .unsqueeze_dim::<5>(4);
        let reading = self.q.clone() * self.sums.clone().exp();
        let reading = reading
            .clone()
            .mask_fill(others.expand(reading.dims()), 0.0);
        (reading.matmul(entering), state)
    }
}
