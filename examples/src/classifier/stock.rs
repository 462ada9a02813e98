//! A text classifier as anyone would write it with Burn: nothing here knows of ranks, and the file imports `burn` only.

use burn::{
    config::Config,
    module::Module,
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{Bool, Int, Tensor, backend::Backend},
};

/// Configuration of [`TextClassifier`].
#[derive(Config, Debug)]
pub struct TextClassifierConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Longest text, in tokens.
    pub max_len: usize,
    /// Number of classes.
    pub num_classes: usize,
    /// The encoder.
    pub encoder: TransformerEncoderConfig,
}

/// Token and position embeddings, an encoder, and a linear layer: a class for each text.
#[derive(Module, Debug)]
pub struct TextClassifier<B: Backend> {
    /// Embeddings of the token ids.
    pub tokens: Embedding<B>,
    /// Embeddings of the positions.
    pub positions: Embedding<B>,
    /// The encoder; every token of a text sees all of it.
    pub encoder: TransformerEncoder<B>,
    /// `d_model -> num_classes`.
    pub output: Linear<B>,
}

impl TextClassifierConfig {
    /// A classifier with random weights.
    pub fn init<B: Backend>(&self, device: &B::Device) -> TextClassifier<B> {
        let width = self.encoder.d_model;
        TextClassifier {
            tokens: EmbeddingConfig::new(self.vocab_size, width).init(device),
            positions: EmbeddingConfig::new(self.max_len, width).init(device),
            encoder: self.encoder.init(device),
            output: LinearConfig::new(width, self.num_classes).init(device),
        }
    }
}

impl<B: Backend> TextClassifier<B> {
    /// Ids and padding (true) of one text a row, both `[batch, seq]`, to logits `[batch, num_classes]`: what the first token
    /// says.
    pub fn forward(&self, ids: Tensor<B, 2, Int>, padding: Tensor<B, 2, Bool>) -> Tensor<B, 2> {
        let [batch, seq] = ids.dims();
        let positions = Tensor::arange(0..seq as i64, &ids.device())
            .unsqueeze::<2>()
            .expand([batch, seq]);
        let x = self.tokens.forward(ids) + self.positions.forward(positions);
        let x = self
            .encoder
            .forward(TransformerEncoderInput::new(x).mask_pad(padding));
        self.output.forward(x).narrow(1, 0, 1).squeeze_dim(1)
    }
}
