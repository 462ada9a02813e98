//! Causal convolutions whose documents lie on several ranks.

use std::sync::{Arc, PoisonError};

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

use super::{
    Recurrence,
    context::{RankContext, tokens_at},
    recurrence::{LocalRow, Place},
};
use crate::{
    attention::ContextParallelBackend,
    collectives::{ExchangePlan, Piece, exchange},
    layout::{Documents, TokenLayout},
};

/// Which tokens of earlier ranks a rank needs to look so many tokens back.
#[derive(Debug)]
pub(super) struct HaloPlan {
    /// Of rows `batch · local_tokens`; `None` where no rank needs any.
    pub(super) exchange: Option<Arc<ExchangePlan>>,
    /// Per row the tokens that arrive: they are the last before the rank's own, the rows one behind the other.
    lens: Vec<usize>,
}

impl HaloPlan {
    pub(super) fn new(
        documents: &Documents,
        layout: &TokenLayout,
        contexts: &[Vec<RankContext>],
        (rank, reach): (usize, usize),
    ) -> Self {
        let input_lens: Vec<usize> = (0..layout.world_size())
            .map(|rank| contexts.len() * layout.local_len(rank))
            .collect();
        let mut lens = Vec::new();
        let mut pieces = vec![Vec::new(); layout.world_size()];
        for (row, contexts) in contexts.iter().enumerate() {
            for (taker, context) in contexts.iter().enumerate() {
                let Some(leading) = &context.leading else {
                    continue;
                };
                let first = leading.num_before.saturating_sub(reach);
                let document = &documents.row(row)[leading.document];
                let tokens = tokens_at(document, &(first..leading.num_before));
                for owned in tokens
                    .into_iter()
                    .flat_map(|range| layout.owned_ranges(range))
                {
                    let offset = row * layout.local_len(owned.rank);
                    pieces[taker].push(Piece {
                        source: owned.rank,
                        range: offset + owned.local.start..offset + owned.local.end,
                    });
                }
            }
            lens.push(contexts[rank].num_tokens_before().min(reach));
        }
        let travels = pieces.iter().any(|list| !list.is_empty());
        for (taker, list) in pieces
            .iter_mut()
            .enumerate()
            .filter(|(_, list)| list.is_empty())
        {
            // A row of its own: a tensor without rows would take the rank out of the graph, and so out of the adjoint.
            list.push(Piece {
                source: taker,
                range: 0..1,
            });
        }
        let exchange = travels.then(|| {
            let plan = ExchangePlan::new(&input_lens, &pieces, rank);
            plan.expect("tokens that their owners hold").into()
        });
        Self { exchange, lens }
    }
}

/// For each token of a row where the token `back` places before it in its document stands: among the rank's own, or `k` places
/// before the first own one of the document.
enum Source {
    Own(usize),
    Before(usize),
    Nowhere,
}

fn sources(row: &LocalRow, back: usize) -> Vec<Source> {
    let mut sources = Vec::with_capacity(row.places.len());
    // Own tokens of the current document.
    let mut own: Vec<usize> = Vec::new();
    let mut current = None;
    for (token, place) in row.places.iter().enumerate() {
        let Some(Place { document, position }) = place else {
            sources.push(Source::Nowhere);
            continue;
        };
        if current != Some(*document) {
            own.clear();
            current = Some(*document);
        }
        own.push(token);
        sources.push(if back < own.len() {
            Source::Own(own[own.len() - 1 - back])
        } else if back <= *position {
            Source::Before(back + 1 - own.len())
        } else {
            Source::Nowhere
        });
    }
    sources
}

/// A shard's tokens, those of earlier ranks that it reaches, and a row of zeros: `[rows, channels]`.
struct Reachable<B: Backend> {
    rows: Tensor<B, 2>,
    plan: Arc<HaloPlan>,
    num_own: usize,
    zero: usize,
}

impl<B: Backend> Reachable<B> {
    /// The token `before` places before the rank's own ones of the document that `row` leads with.
    fn before(&self, row: usize, before: usize) -> usize {
        let end: usize = self.plan.lens[..=row].iter().sum();
        self.num_own + end - before
    }

    fn select(&self, index: Vec<usize>, shape: [usize; 3]) -> Tensor<B, 3> {
        #[allow(
            clippy::cast_possible_wrap,
            reason = "rows of a tensor that is there fit into 63 bits"
        )]
        let index: Vec<i64> = index.into_iter().map(|row| row as i64).collect();
        let data = TensorData::new(index, [shape[0] * shape[1]]);
        let index = Tensor::<B, 1, Int>::from_data(data, &self.rows.device());
        self.rows.clone().select(0, index).reshape(shape)
    }
}

impl<B: ContextParallelBackend> Recurrence<B> {
    /// The `num_tokens` tokens before this rank's own, of the document that goes on here: a shard `[batch, local_tokens, channels]`
    /// -> `[batch, num_tokens, channels]`, the last one right before the rank's first real token; zeros beyond the document's start.
    ///
    /// They come from as many ranks as hold them. Every rank of the group must call it. Differentiable: a token's gradient is
    /// summed where the token is.
    ///
    /// # Panics
    /// Another number of rows or tokens; no token asked for.
    pub fn left_halo(&self, x: Tensor<B, 3>, num_tokens: usize) -> Tensor<B, 3> {
        assert!(num_tokens > 0, "left halo: expected at least 1 token");
        let channels = x.dims()[2];
        let reachable = self.reachable(x, num_tokens);
        let mut index = Vec::with_capacity(self.batch_size() * num_tokens);
        for (row, len) in reachable.plan.lens.iter().enumerate() {
            index.extend((1..=num_tokens).rev().map(|before| {
                if before <= *len {
                    reachable.before(row, before)
                } else {
                    reachable.zero
                }
            }));
        }
        reachable.select(index, [self.batch_size(), num_tokens, channels])
    }

    /// What a causal convolution of `kernel` taps reads: a shard `[batch, local_tokens, channels]` ->
    /// `[batch, kernel, local_tokens, channels]`, whose tap `j` holds for each token the one `kernel - 1 - j` places before it in its
    /// document, and zeros beyond the document's start and at padding.
    ///
    /// Every rank of the group must call it. Differentiable.
    ///
    /// # Panics
    /// Another number of rows or tokens; no tap.
    pub fn shifted(&self, x: Tensor<B, 3>, kernel: usize) -> Tensor<B, 4> {
        // Held until the result stands in the graph; see `crate::cat`.
        let taps = self.taps(x, kernel);
        Tensor::stack(taps.clone(), 1)
    }

    /// A causal depthwise convolution within documents: `x [batch, local_tokens, channels]`, `weight [kernel, channels]`, whose
    /// last tap is the token's own, `bias [channels]` -> `[batch, local_tokens, channels]`. At padding it is the bias.
    ///
    /// Every rank of the group must call it. Differentiable; the gradients of weight and bias are this rank's part.
    ///
    /// # Panics
    /// Another number of rows or tokens; shapes that do not fit; no tap.
    pub fn causal_conv1d(
        &self,
        x: Tensor<B, 3>,
        weight: Tensor<B, 2>,
        bias: Option<Tensor<B, 1>>,
    ) -> Tensor<B, 3> {
        let kernel = weight.dims()[0];
        let taps = self.taps(x, kernel).into_iter().enumerate();
        let products = taps.map(|(tap, x)| x * weight.clone().narrow(0, tap, 1).unsqueeze());
        let sum = products
            .reduce(|sum, product| sum + product)
            .expect("at least one tap");
        match bias {
            Some(bias) => sum + bias.unsqueeze(),
            None => sum,
        }
    }

    fn taps(&self, x: Tensor<B, 3>, kernel: usize) -> Vec<Tensor<B, 3>> {
        assert!(kernel > 0, "causal convolution: expected at least 1 tap");
        let shape = x.dims();
        let reachable = self.reachable(x, kernel - 1);
        let tap = |back: usize| {
            let mut index = Vec::with_capacity(shape[0] * shape[1]);
            for (at, row) in self.rows().iter().enumerate() {
                index.extend(sources(row, back).into_iter().map(|source| match source {
                    Source::Own(token) => at * shape[1] + token,
                    Source::Before(before) => reachable.before(at, before),
                    Source::Nowhere => reachable.zero,
                }));
            }
            reachable.select(index, shape)
        };
        (0..kernel).rev().map(tap).collect()
    }

    fn reachable(&self, x: Tensor<B, 3>, reach: usize) -> Reachable<B> {
        let [batch, len, channels] = x.dims();
        let expected = [self.batch_size(), self.local_len()];
        assert!(
            [batch, len] == expected,
            "causal convolution: expected [batch, local_tokens] = {expected:?}, got {:?}",
            [batch, len]
        );
        let plan = self.halo_plan(reach);
        let own = x.reshape([batch * len, channels]);
        let zero = Tensor::zeros([1, channels], (&own.device(), own.dtype()));
        let mut parts = vec![own.clone()];
        if let Some(plan) = &plan.exchange {
            parts.push(exchange(own, 0, plan, self.step().group()));
        }
        parts.push(zero);
        let rows = crate::cat(parts, 0);
        Reachable {
            zero: rows.dims()[0] - 1,
            num_own: batch * len,
            rows,
            plan,
        }
    }

    fn halo_plan(&self, reach: usize) -> Arc<HaloPlan> {
        let mut made = self.halos().lock().unwrap_or_else(PoisonError::into_inner);
        let step = self.step();
        let make = || {
            let at = (step.group().rank(), reach);
            HaloPlan::new(step.documents(), self.layout(), self.contexts(), at).into()
        };
        made.entry(reach).or_insert_with(make).clone()
    }
}
