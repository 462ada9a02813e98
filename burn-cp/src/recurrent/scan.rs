//! States that cross ranks.

use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorData};

use super::{RankContext, Recurrence, recurrence::spread};
use crate::{
    attention::ContextParallelBackend,
    collectives::{ExchangePlan, Piece, exchange},
};

/// How a transition acts on a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transition {
    /// Element by element; dims of size 1 are repeated.
    Scale,
    /// As a matrix over the last two dims: `[.., m, m]` on `[.., m, n]`.
    Matrix,
}

impl Transition {
    fn apply<B: ContextParallelBackend, const D: usize>(
        self,
        transition: Tensor<B, D>,
        state: Tensor<B, D>,
    ) -> Tensor<B, D> {
        match self {
            Self::Scale => transition * state,
            Self::Matrix => transition.matmul(state),
        }
    }
}

/// Which ranks' summaries a rank takes, per row.
#[derive(Debug)]
pub(super) struct CarryPlan {
    /// `None` where no document is on several ranks.
    pub(super) exchange: Option<Arc<ExchangePlan>>,
    /// Per row how many summaries arrive, ascending by rank, the rows one behind the other.
    lens: Vec<usize>,
}

impl CarryPlan {
    pub(super) fn new(contexts: &[Vec<RankContext>], rank: usize) -> Self {
        let world_size = contexts.first().map_or(0, Vec::len);
        let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); world_size];
        for (row, contexts) in contexts.iter().enumerate() {
            for (list, context) in pieces.iter_mut().zip(contexts) {
                let sources = context.leading.iter().flat_map(|leading| &leading.ranks);
                list.extend(sources.map(|source| Piece {
                    source: *source,
                    range: row..row + 1,
                }));
            }
        }
        let travels = pieces.iter().any(|list| !list.is_empty());
        for (taker, list) in pieces
            .iter_mut()
            .enumerate()
            .filter(|(_, list)| list.is_empty())
        {
            // A row of its own, so that the rank stays on the graph and takes part in the adjoint.
            list.push(Piece {
                source: taker,
                range: 0..1,
            });
        }
        let exchange = travels.then(|| {
            let plan = ExchangePlan::new(&vec![contexts.len(); world_size], &pieces, rank);
            plan.expect("a summary per row on every rank").into()
        });
        let lens = contexts
            .iter()
            .map(|contexts| contexts[rank].num_ranks_before());
        Self {
            exchange,
            lens: lens.collect(),
        }
    }
}

impl<B: ContextParallelBackend> Recurrence<B> {
    /// The state in which each row's leading document enters this rank, zeros where none does: `[batch, ..]` like `state`.
    ///
    /// `state [batch, ..]` is the state in which this rank leaves its last document, computed from a state of zeros where the
    /// document began on an earlier rank, and `transition [batch, ..]` what carries an entering state to there: the product of the
    /// transitions of all of the document's tokens on this rank. Both count only where that document goes on behind this
    /// rank ([`RankContext::is_last`]), and the transition only where it also began before it. Steps of the recurrence are
    /// `s_t = a_t s_{t-1} + b_t`.
    ///
    /// Each rank takes the summaries of the earlier ranks of its document and combines them from left to right; the adjoint goes
    /// back the same way. Every rank of the group must call it with one shape but for `batch`; where no document is on several
    /// ranks nothing travels. Differentiable in both.
    ///
    /// # Panics
    /// Another number of rows; shapes that do not fit each other; different dtypes.
    pub fn carry<const D: usize>(
        &self,
        transition: Tensor<B, D>,
        state: Tensor<B, D>,
        kind: Transition,
    ) -> Tensor<B, D> {
        let batch = self.batch_size();
        let shapes = [transition.dims(), state.dims()];
        assert!(
            shapes.iter().all(|shape| shape[0] == batch),
            "carry: expected transition and state of {batch} rows, got {shapes:?}"
        );
        let plan = self.carry_plan();
        let Some(exchanged) = &plan.exchange else {
            return state.zeros_like();
        };
        let widths = shapes.map(|shape| shape[1..].iter().product::<usize>());
        let message = crate::cat(
            vec![
                transition.reshape([batch, widths[0]]),
                state.reshape([batch, widths[1]]),
            ],
            1,
        );
        let received = exchange(message, 0, exchanged, self.step().group());
        let num_received = received.dims()[0];
        let zero = Tensor::zeros(
            [1, widths[0] + widths[1]],
            (&received.device(), received.dtype()),
        );
        let summaries = crate::cat(vec![received, zero], 0);
        // Rows with fewer summaries start from zeros: a state of zeros stays one, whatever carries it.
        let longest = plan.lens.iter().copied().max().unwrap_or(0).max(1);
        let mut entering: Option<Tensor<B, D>> = None;
        for at in 0..longest {
            let mut end = 0;
            let index = plan.lens.iter().map(|len| {
                end += len;
                let left = longest - at;
                if left <= *len {
                    end - left
                } else {
                    num_received
                }
            });
            let summary = self.summaries(&summaries, index.collect());
            let of_rows = summary
                .clone()
                .narrow(1, widths[0], widths[1])
                .reshape(shapes[1]);
            entering = Some(match entering {
                None => of_rows,
                Some(before) => {
                    let transition = summary.narrow(1, 0, widths[0]).reshape(shapes[0]);
                    of_rows + kind.apply(transition, before)
                }
            });
        }
        entering.expect("at least one summary, if one of zeros")
    }

    fn summaries(&self, all: &Tensor<B, 2>, rows: Vec<usize>) -> Tensor<B, 2> {
        #[allow(
            clippy::cast_possible_wrap,
            reason = "rows of a tensor that is there fit into 63 bits"
        )]
        let index: Vec<i64> = rows.into_iter().map(|row| row as i64).collect();
        let data = TensorData::new(index, [self.batch_size()]);
        all.clone()
            .select(0, Tensor::<B, 1, Int>::from_data(data, &all.device()))
    }

    /// All states of `s_t = a_t s_{t-1} + b_t`, which starts from zeros in every document: `b [batch, local_tokens, ..]` and `a` of
    /// the same number of dims, of size 1 where it is repeated, -> the shape of `b`; 0 at padding.
    ///
    /// On each rank a scan of `log2(local_tokens)` passes over all tokens at once, then one exchange of the ranks' summaries
    /// ([`Self::carry`]). Holds a state per token: layers with large states keep a state per chunk of tokens instead, and use
    /// [`Self::carry`] themselves. Every rank of the group must call it. Differentiable in both.
    ///
    /// # Panics
    /// Another number of rows or tokens; shapes that do not fit each other; different dtypes.
    pub fn affine_scan<const D: usize>(&self, a: Tensor<B, D>, b: Tensor<B, D>) -> Tensor<B, D> {
        let (of_a, of_b) = (a.dims(), b.dims());
        let len = self.local_len();
        let expected = [self.batch_size(), len];
        assert!(
            D > 1 && of_a[..2] == expected && of_b[..2] == expected,
            "affine scan: expected [batch, local_tokens] = {expected:?}, got {of_a:?} and {of_b:?}"
        );
        let padding = self.padding_mask();
        let mut product = a.mask_fill(spread(padding.clone(), of_a), 1.0);
        let mut state = b.mask_fill(spread(padding.clone(), of_b), 0.0);
        let starts: Vec<Vec<usize>> = self.rows().iter().map(|row| row.starts()).collect();
        let longest = starts.iter().flat_map(|starts| {
            let lens = starts.iter().enumerate();
            lens.map(|(token, start)| token - start + 1)
        });
        let longest = longest.max().unwrap_or(1);
        // Each pass joins what a token has summed up with what the token so far before it has.
        let mut distance = 1;
        while distance < longest {
            let outside = self.mask(|row, _| {
                let starts = starts[row].iter().enumerate();
                starts
                    .map(|(token, start)| token < start + distance)
                    .collect()
            });
            let earlier_state =
                later(state.clone(), distance).mask_fill(spread(outside.clone(), of_b), 0.0);
            state = state + product.clone() * earlier_state;
            let earlier_product =
                later(product.clone(), distance).mask_fill(spread(outside, of_a), 1.0);
            product = product * earlier_product;
            distance *= 2;
        }
        if self.straddles() {
            let last = |tensor: &Tensor<B, D>| tensor.clone().narrow(1, len - 1, 1);
            let entering = self.carry(last(&product), last(&state), Transition::Scale);
            let others = spread(self.leading_mask().bool_not(), of_b);
            state = state + (product * entering).mask_fill(others, 0.0);
        }
        state.mask_fill(spread(padding, of_b), 0.0)
    }
}

/// Every token's value `distance` tokens later; the first ones hold zeros.
fn later<B: ContextParallelBackend, const D: usize>(
    tensor: Tensor<B, D>,
    distance: usize,
) -> Tensor<B, D> {
    let mut shape = tensor.dims();
    let len = shape[1];
    shape[1] = distance;
    let zeros = Tensor::zeros(shape, (&tensor.device(), tensor.dtype()));
    crate::cat(vec![zeros, tensor.narrow(1, 0, len - distance)], 1)
}
