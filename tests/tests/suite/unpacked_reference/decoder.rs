//! The decoder that both sides run: its parameters, and what it does token by token. Written with Burn only.

use burn::{
    module::{Module, ModuleMapper, Param},
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig},
    tensor::{Tensor, TensorData, activation::silu, backend::Backend},
};
use burn_cp_tests::Random;

pub(super) const VOCAB: usize = 13;
const WIDTH: usize = 16;
pub(super) const NUM_HEADS: usize = 4;
const NUM_KV_HEADS: usize = 2;
pub(super) const HEAD_DIM: usize = 8;
pub(super) const THETA: f64 = 100.0;

#[derive(Module, Debug)]
pub(super) struct Block<B: Backend> {
    attention_norm: RmsNorm<B>,
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    out: Linear<B>,
    mlp_norm: RmsNorm<B>,
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

/// Two blocks of attention and SwiGLU; the embedding is the head too.
#[derive(Module, Debug)]
pub(super) struct Decoder<B: Backend> {
    pub(super) embedding: Embedding<B>,
    pub(super) blocks: Vec<Block<B>>,
    norm: RmsNorm<B>,
}

impl<B: Backend> Decoder<B> {
    /// The decoder whose parameters follow from a seed, equal in every dtype up to rounding.
    pub(super) fn new(seed: u64) -> Self {
        let device = B::Device::default();
        let linear = |from: usize, to: usize| LinearConfig::new(from, to).init(&device);
        let norm = || RmsNormConfig::new(WIDTH).init(&device);
        let block = || Block {
            attention_norm: norm(),
            q: linear(WIDTH, NUM_HEADS * HEAD_DIM),
            k: linear(WIDTH, NUM_KV_HEADS * HEAD_DIM),
            v: linear(WIDTH, NUM_KV_HEADS * HEAD_DIM),
            out: linear(NUM_HEADS * HEAD_DIM, WIDTH),
            mlp_norm: norm(),
            gate: linear(WIDTH, 24),
            up: linear(WIDTH, 24),
            down: linear(24, WIDTH),
        };
        let embedding = EmbeddingConfig::new(VOCAB, WIDTH).init(&device);
        let model = Self {
            embedding,
            blocks: vec![block(), block()],
            norm: norm(),
        };
        model.map(&mut Draw(Random::new(seed)))
    }

    pub(super) fn head(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        self.norm
            .forward(hidden)
            .matmul(self.embedding.weight.val().transpose().unsqueeze())
    }
}

struct Draw(Random);

impl<B: Backend> ModuleMapper<B> for Draw {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let shape = tensor.shape();
            let values = self
                .0
                .floats(shape.num_elements())
                .into_iter()
                .map(|value| 0.3 * value + 0.1)
                .collect();
            let data = TensorData::new::<f64, _>(values, shape);
            Tensor::from_data(data, (&tensor.device(), tensor.dtype())).require_grad()
        })
    }
}

impl<B: Backend> Block<B> {
    /// Normed hidden states as heads `[batch, heads, tokens, head_dim]`.
    pub(super) fn heads(&self, hidden: &Tensor<B, 3>) -> [Tensor<B, 4>; 3] {
        let normed = self.attention_norm.forward(hidden.clone());
        [
            (&self.q, NUM_HEADS),
            (&self.k, NUM_KV_HEADS),
            (&self.v, NUM_KV_HEADS),
        ]
        .map(|(linear, num_heads)| {
            let flat = linear.forward(normed.clone());
            let [batch, tokens, _] = flat.dims();
            flat.reshape([batch, tokens, num_heads, HEAD_DIM])
                .swap_dims(1, 2)
        })
    }

    pub(super) fn rest(&self, hidden: Tensor<B, 3>, attended: Tensor<B, 4>) -> Tensor<B, 3> {
        let [batch, _, tokens, _] = attended.dims();
        let flat = attended
            .swap_dims(1, 2)
            .reshape([batch, tokens, NUM_HEADS * HEAD_DIM]);
        let hidden = hidden + self.out.forward(flat);
        let normed = self.mlp_norm.forward(hidden.clone());
        hidden
            + self
                .down
                .forward(silu(self.gate.forward(normed.clone())) * self.up.forward(normed))
    }
}
