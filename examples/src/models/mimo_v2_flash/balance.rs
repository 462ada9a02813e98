//! The auxiliary loss that keeps experts equally busy.

use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_cp::{
    attention::ContextParallelBackend,
    collectives,
    loss::TokenLoss,
    sharder::{CpStep, StepError},
};

use super::experts::LayerRouting;

/// What the routers of a forward pass have said of this rank's tokens.
#[derive(Debug, Clone)]
pub struct Routing<B: Backend> {
    pub(super) layers: Vec<LayerRouting<B>>,
    pub(super) num_chosen: usize,
}

/// What expert counts and tokens come to over all ranks.
struct Totals {
    num_tokens: u64,
    /// Layer by layer.
    counts: Vec<u64>,
}

impl<B: ContextParallelBackend> Routing<B> {
    /// How many tokens of this rank each expert was given, by layer with experts. Each token counts as often as it has experts.
    pub fn counts(&self) -> impl Iterator<Item = &[u64]> {
        self.layers.iter().map(|layer| layer.counts.as_slice())
    }

    /// This rank's share `[1]` of the balance loss `Σ_e f_e · P_e`, summed over layers: `f_e` is an expert's part of all tokens,
    /// 1 where all are equally busy, and `P_e` the mean of its share of a token's scores (DeepSeek-AI, "DeepSeek-V3 Technical
    /// Report", 2024, equations 17 to 20, over the real tokens of all ranks instead of one sequence).
    ///
    /// Tokens are counted over the step's loss group, so the shares of all ranks sum to the loss of one, and so do their
    /// gradients. Every rank of that group must call it; host only.
    ///
    /// # Errors
    /// The ranks could not talk to each other.
    pub fn balance(&self, step: &CpStep<B>) -> Result<Tensor<B, 1>, StepError> {
        let totals = self.totals(step)?;
        let mut loss = Tensor::zeros([1], step.device());
        let mut at = 0;
        for layer in &self.layers {
            let num_experts = layer.counts.len();
            let counts = &totals.counts[at..at + num_experts];
            at += num_experts;
            let Some(shares) = &layer.shares else {
                continue;
            };
            #[allow(clippy::cast_precision_loss)]
            let factors: Vec<f64> = {
                let num_tokens = totals.num_tokens.max(1) as f64;
                let even = self.num_chosen as f64 * num_tokens / num_experts as f64;
                // The second division makes sums of shares means.
                let factor = |&count: &u64| count as f64 / even / num_tokens;
                counts.iter().map(factor).collect()
            };
            let factors = TensorData::new(factors, [num_experts]);
            let factors = Tensor::from_data(factors, (step.device(), shares.dtype()));
            loss = loss + (shares.clone() * factors).sum();
        }
        Ok(loss)
    }

    fn totals(&self, step: &CpStep<B>) -> Result<Totals, StepError> {
        let counts: Vec<u64> = self
            .layers
            .iter()
            .flat_map(|layer| layer.counts.clone())
            .collect();
        let all = step
            .loss_group()
            .host_all_gather("tokens by expert", counts)?;
        let mut totals = Totals {
            num_tokens: 0,
            counts: vec![0; all.first().map_or(0, Vec::len)],
        };
        for rank in &all {
            for (total, count) in totals.counts.iter_mut().zip(rank) {
                *total += count;
            }
        }
        let first = self.layers.first().map_or(0, |layer| layer.counts.len());
        let slots: u64 = totals.counts[..first].iter().sum();
        totals.num_tokens = slots / self.num_chosen.max(1) as u64;
        Ok(totals)
    }

    /// A token-mean loss with `factor` times the balance loss added, in what is differentiated and in what is reported.
    ///
    /// # Errors
    /// As [`Self::balance`].
    pub(super) fn join(
        &self,
        mut loss: TokenLoss<B>,
        factor: f64,
        step: &CpStep<B>,
    ) -> Result<TokenLoss<B>, StepError> {
        let share = (self.balance(step)? * factor).cast(loss.local.dtype());
        let all = collectives::all_reduce(share.clone().detach(), step.loss_group());
        loss.local = loss.local + share;
        loss.global = loss.global + all;
        Ok(loss)
    }
}
