//! Feed-forward layers made of experts, of which a router chooses some for each token (Shazeer et al., "Outrageously Large
//! Neural Networks", 2017).
//!
//! What a router chooses decides how many rows each expert is given, so it is read to the host: once per layer. Padding is
//! given to no router and to no expert.

use burn::{
    module::{Initializer, Module, Param, ParamId},
    tensor::{DType, Int, Tensor, TensorData, activation::sigmoid, backend::Backend},
};
use burn_cp::{attention::ContextParallelBackend, sharder::CpStep};

use super::config::MimoV2FlashConfig;
use crate::models::qwen3_vl::GatedMlp;

/// The tokens of a shard that are not padding. Made once per forward pass.
#[derive(Debug)]
pub(super) struct RealTokens<B: Backend> {
    /// Their places in the flattened shard, in order.
    rows: Vec<usize>,
    index: Option<Tensor<B, 1, Int>>,
    num_tokens: usize,
}

impl<B: ContextParallelBackend> RealTokens<B> {
    pub(super) fn of(step: &CpStep<B>) -> Self {
        let padding: Vec<bool> = step.padding_mask().into_data().iter::<bool>().collect();
        let places = padding.iter().enumerate();
        let rows: Vec<usize> = places
            .filter_map(|(row, &padding)| (!padding).then_some(row))
            .collect();
        Self {
            index: (!rows.is_empty()).then(|| index(&rows, step.device())),
            rows,
            num_tokens: padding.len(),
        }
    }
}

fn index<B: Backend>(rows: &[usize], device: &B::Device) -> Tensor<B, 1, Int> {
    let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    let len = rows.len();
    Tensor::from_data(TensorData::new(rows, [len]), device)
}

/// What a layer's router has said of this rank's tokens.
#[derive(Debug, Clone)]
pub(super) struct LayerRouting<B: Backend> {
    /// How many tokens each expert was given.
    pub(super) counts: Vec<u64>,
    /// Each expert's share of a token's scores, summed over tokens, `[experts]`; `None` without tokens.
    pub(super) shares: Option<Tensor<B, 1>>,
}

/// Scores experts for tokens.
#[derive(Module, Debug)]
pub struct Router<B: Backend> {
    /// `[experts, hidden_size]`.
    pub weight: Param<Tensor<B, 2>>,
    /// Joins the scores when experts are chosen, and does not weigh them, `[experts]`. Not trained by gradients (Wang et al.,
    /// "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024).
    pub e_score_correction_bias: Param<Tensor<B, 1>>,
}

/// Experts and their router.
#[derive(Module, Debug)]
pub struct Experts<B: Backend> {
    /// The router.
    pub gate: Router<B>,
    /// The experts.
    pub experts: Vec<GatedMlp<B>>,
    #[module(skip)]
    choice: Choice,
    #[module(skip)]
    normalize: bool,
    #[module(skip)]
    scale: f64,
}

impl<B: Backend> Experts<B> {
    /// A layer with lazy zeros; `config` is a valid one.
    pub(super) fn new(config: &MimoV2FlashConfig, device: &B::Device) -> Self {
        let (num_experts, hidden) = (config.n_routed_experts, config.hidden_size);
        let expert = |_| {
            GatedMlp::new(
                hidden,
                config.moe_intermediate_size,
                config.hidden_act,
                device,
            )
        };
        Self {
            gate: Router {
                weight: Initializer::Zeros.init([num_experts, hidden], device),
                e_score_correction_bias: Param::initialized(
                    ParamId::new(),
                    Tensor::zeros([num_experts], device),
                ),
            },
            experts: (0..num_experts).map(expert).collect(),
            choice: Choice {
                num_experts,
                num_chosen: config.num_experts_per_tok,
                num_groups: config.n_group,
                num_chosen_groups: config.topk_group,
            },
            normalize: config.norm_topk_prob,
            scale: config.routed_scaling_factor.unwrap_or(1.0),
        }
    }

    /// `x [batch, local_tokens, hidden_size]` to the same shape, zeros at padding, and what the router has said. Exchanges
    /// nothing: every rank holds all experts.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 3>,
        real: &RealTokens<B>,
    ) -> (Tensor<B, 3>, LayerRouting<B>) {
        let [batch, tokens, hidden] = x.dims();
        let Some(rows) = &real.index else {
            let routing = LayerRouting {
                counts: vec![0; self.experts.len()],
                shares: None,
            };
            return (x.zeros_like(), routing);
        };
        let device = x.device();
        let x = x.reshape([batch * tokens, hidden]).select(0, rows.clone());
        let scores = self.scores(x.clone());
        let chosen = self.choose(&scores);
        let k = self.choice.num_chosen;
        // Slot `token · k + i` is the i-th expert of a token.
        let mut slots_of = vec![Vec::new(); self.experts.len()];
        for (slot, &expert) in chosen.iter().enumerate() {
            slots_of[expert].push(slot);
        }
        let weights = self.weights(&scores, &chosen).cast(x.dtype());
        let mut outputs = Vec::new();
        for (expert, slots) in self.experts.iter().zip(&slots_of) {
            if slots.is_empty() {
                continue;
            }
            let tokens: Vec<usize> = slots.iter().map(|slot| slot / k).collect();
            let out = expert.forward(x.clone().select(0, index(&tokens, &device)));
            // One number a slot: a selected column beside a product is read wrongly by Burn 0.21's fusion.
            let weights = weights.clone().select(0, index(slots, &device));
            outputs.push(out * weights.unsqueeze_dim(1));
        }
        // What padding is given.
        outputs.push(Tensor::zeros([1, hidden], (&device, x.dtype())));
        let mut places = vec![chosen.len(); real.num_tokens * k];
        for (place, slot) in slots_of.iter().flatten().enumerate() {
            places[real.rows[slot / k] * k + slot % k] = place;
        }
        let out = burn_cp::cat(outputs, 0)
            .select(0, index(&places, &device))
            .reshape([batch, tokens, k, hidden])
            .sum_dim(2)
            .squeeze_dim(2);
        let shares = scores.clone() / scores.sum_dim(1);
        let routing = LayerRouting {
            counts: slots_of.iter().map(|slots| slots.len() as u64).collect(),
            shares: Some(shares.sum_dim(0).squeeze_dim(0)),
        };
        (out, routing)
    }

    /// Scores `[tokens, experts]` of `x [tokens, hidden_size]`, in f32, or in f64 if `x` is.
    fn scores(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let dtype = match x.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let weight = self.gate.weight.val().cast(dtype).transpose();
        sigmoid(x.cast(dtype).matmul(weight))
    }

    /// The experts of each token. Waits for the device.
    fn choose(&self, scores: &Tensor<B, 2>) -> Vec<usize> {
        let bias = self.gate.e_score_correction_bias.val();
        let bias = bias.detach().cast(scores.dtype()).unsqueeze::<2>();
        let ratings = (scores.clone().detach() + bias).into_data();
        let ratings: Vec<f64> = ratings.iter::<f64>().collect();
        let per_token = ratings.chunks_exact(self.choice.num_experts);
        per_token
            .flat_map(|ratings| self.choice.of_token(ratings))
            .collect()
    }

    /// What the output of each slot's expert is multiplied by, `[slots]`.
    fn weights(&self, scores: &Tensor<B, 2>, chosen: &[usize]) -> Tensor<B, 1> {
        let k = self.choice.num_chosen;
        let chosen = index(chosen, &scores.device()).reshape([chosen.len() / k, k]);
        let mut weights = scores.clone().gather(1, chosen);
        if self.normalize {
            weights = weights.clone() / (weights.sum_dim(1) + 1e-20);
        }
        (weights * self.scale).reshape([-1])
    }
}

/// How many experts a token is given, and out of which (groups: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024).
#[derive(Debug, Clone, Copy)]
struct Choice {
    num_experts: usize,
    num_chosen: usize,
    num_groups: usize,
    num_chosen_groups: usize,
}

impl Choice {
    /// The best-rated experts of the best-rated groups, the best first; the lower index among equals. A group is rated by the
    /// sum of its best two experts.
    fn of_token(&self, ratings: &[f64]) -> Vec<usize> {
        let size = self.num_experts / self.num_groups;
        let mut eligible: Vec<usize> = (0..self.num_experts).collect();
        if self.num_chosen_groups < self.num_groups {
            let rating = |group: &[f64]| {
                let best = best(group, (0..size).collect(), 2);
                best.into_iter().map(|expert| group[expert]).sum::<f64>()
            };
            let groups: Vec<f64> = ratings.chunks_exact(size).map(rating).collect();
            let chosen = best(
                &groups,
                (0..self.num_groups).collect(),
                self.num_chosen_groups,
            );
            eligible.retain(|expert| chosen.contains(&(expert / size)));
        }
        best(ratings, eligible, self.num_chosen)
    }
}

/// The `num` candidates of the highest values, the highest first. Sorting is stable, so the first among equals wins.
fn best(values: &[f64], mut candidates: Vec<usize>, num: usize) -> Vec<usize> {
    candidates.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    candidates.truncate(num);
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_chosen_and_the_first_among_equals() {
        let choice = Choice {
            num_experts: 4,
            num_chosen: 2,
            num_groups: 1,
            num_chosen_groups: 1,
        };
        assert_eq!(choice.of_token(&[0.1, 0.9, 0.4, 0.2]), [1, 2]);
        assert_eq!(choice.of_token(&[0.5, 0.1, 0.5, 0.5]), [0, 2]);
    }

    #[test]
    fn only_the_best_groups_take_part() {
        let choice = Choice {
            num_experts: 6,
            num_chosen: 2,
            num_groups: 3,
            num_chosen_groups: 1,
        };
        // The best expert stands in a group that is worse as a whole.
        assert_eq!(choice.of_token(&[0.9, 0.0, 0.5, 0.6, 0.1, 0.1]), [3, 2]);
        let two = Choice {
            num_chosen_groups: 2,
            ..choice
        };
        assert_eq!(two.of_token(&[0.9, 0.0, 0.5, 0.6, 0.1, 0.1]), [0, 3]);
    }
}
