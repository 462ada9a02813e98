//! Decoding with keys and values kept.

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use burn_cp::{
    attention::ContextParallelBackend,
    nn::{ContextParallelAttention, RotaryTables, rms_norm},
    vision::{TowerError, VisionTower},
};
use burn_cp_kernels::{AttentionOptions, Segment, Segments, varlen_attention};

use crate::{
    data::{Document, MediaKind},
    models::qwen3_vl::{Qwen3Vl, Qwen3VlConfig},
};

/// Keys and values of one layer, `[1, num_kv_heads, tokens, head_dim]`, keys rotated.
type Kept<B> = (Tensor<B, 4>, Tensor<B, 4>);

/// A model in the middle of an answer. The same layers as in training; only attention reads what is kept.
#[derive(Debug)]
pub struct Generator<'a, B: Backend> {
    model: &'a Qwen3Vl<B>,
    config: &'a Qwen3VlConfig,
    device: B::Device,
    /// One entry a layer; empty before the prompt.
    kept: Vec<Kept<B>>,
    next_position: i64,
}

impl<'a, B: ContextParallelBackend> Generator<'a, B> {
    /// A generator that has read nothing.
    pub fn new(model: &'a Qwen3Vl<B>, config: &'a Qwen3VlConfig, device: B::Device) -> Self {
        Self {
            model,
            config,
            device,
            kept: Vec::new(),
            next_position: 0,
        }
    }

    /// Reads a prompt, and returns the logits `[tokens, vocab]` of all its tokens. What was read before is forgotten.
    ///
    /// # Errors
    /// The tower cannot encode the pictures.
    pub fn prompt(&mut self, document: &Document) -> Result<Tensor<B, 2>, TowerError> {
        self.kept.clear();
        let mut x = self.embed(&document.ids);
        let mut deepstack = Vec::new();
        if !document.media.is_empty() {
            let (features, rows) = self.features(document)?;
            let mask = self.scattered(
                rows.iter().map(|_| 1.0_f32).collect::<Vec<_>>(),
                &rows,
                document.len(),
            );
            let place = |features: Tensor<B, 2>| self.at_rows(features, &rows, document.len());
            // Media tokens hold features instead of the placeholder's embedding.
            let mask = mask.cast(x.dtype());
            x = x.clone() - x * mask + place(features[0].clone());
            deepstack = features[1..]
                .iter()
                .map(|layer| place(layer.clone()))
                .collect();
        }
        let positions: Vec<i64> = document.positions.concat();
        self.next_position = document.next_position();
        Ok(self.run(x, positions, deepstack))
    }

    /// Reads one more token, and returns the logits `[vocab]` behind it.
    pub fn token(&mut self, id: i64) -> Tensor<B, 1> {
        let x = self.embed(&[id]);
        let at = self.next_position;
        self.next_position += 1;
        self.run(x, vec![at; 3], Vec::new()).squeeze_dim(0)
    }

    fn embed(&self, ids: &[i64]) -> Tensor<B, 3> {
        let ids = Tensor::<B, 2, Int>::from_data(
            TensorData::new(ids.to_vec(), [1, ids.len()]),
            &self.device,
        );
        self.model.model.language_model.embed_tokens.forward(ids)
    }

    /// Features of all media, embeddings first, in the order of the tokens, and those tokens.
    fn features(&self, document: &Document) -> Result<(Vec<Tensor<B, 2>>, Vec<i64>), TowerError> {
        let width = self.config.vision_config.patch_dim();
        let grids: Vec<[usize; 3]> = document.media.iter().map(|medium| medium.grid).collect();
        let rows = document.pixels.len() / width;
        let pixels = Tensor::<B, 2>::from_data(
            TensorData::new(document.pixels.clone(), [rows, width]),
            &self.device,
        );
        let features = self.model.model.visual.forward(pixels, &grids)?;
        debug_assert!(
            document
                .media
                .iter()
                .all(|medium| matches!(medium.kind, MediaKind::Image | MediaKind::Video))
        );
        let placeholders = [self.config.image_token_id, self.config.video_token_id];
        let tokens = (0_i64..)
            .zip(&document.ids)
            .filter(|(_, id)| placeholders.contains(id))
            .map(|(at, _)| at)
            .collect();
        Ok((
            std::iter::once(features.embeddings)
                .chain(features.deepstack)
                .collect(),
            tokens,
        ))
    }

    /// `[1, tokens, 1]` with values at some rows and 0 elsewhere.
    fn scattered(&self, values: Vec<f32>, rows: &[i64], tokens: usize) -> Tensor<B, 3> {
        let mut all = vec![0.0_f32; tokens];
        for (&row, value) in rows.iter().zip(values) {
            if let Some(place) = usize::try_from(row).ok().and_then(|row| all.get_mut(row)) {
                *place = value;
            }
        }
        Tensor::from_data(TensorData::new(all, [1, tokens, 1]), &self.device)
    }

    /// `[rows, hidden]` as `[1, tokens, hidden]`, 0 elsewhere.
    fn at_rows(&self, features: Tensor<B, 2>, rows: &[i64], tokens: usize) -> Tensor<B, 3> {
        let mut source = vec![0_i64; tokens];
        for (from, &row) in (0_i64..).zip(rows) {
            if let Some(place) = usize::try_from(row)
                .ok()
                .and_then(|row| source.get_mut(row))
            {
                *place = from;
            }
        }
        let source =
            Tensor::<B, 1, Int>::from_data(TensorData::new(source, [tokens]), &self.device);
        let mask = self.scattered(vec![1.0; rows.len()], rows, tokens);
        let mask = mask.cast(features.dtype());
        features.select(0, source).unsqueeze::<3>() * mask
    }

    /// Layers over new tokens `[1, tokens, hidden]` at `[3 · tokens]` positions.
    fn run(
        &mut self,
        mut x: Tensor<B, 3>,
        positions: Vec<i64>,
        deepstack: Vec<Tensor<B, 3>>,
    ) -> Tensor<B, 2> {
        let tokens = x.dims()[1];
        let text = &self.config.text_config;
        let positions = Tensor::<B, 3, Int>::from_data(
            TensorData::new(positions, [3, 1, tokens]),
            &self.device,
        );
        let tables = RotaryTables::new(positions, &text.rotary(), text.head_dim);
        let decoder = &self.model.model.language_model;
        let mut deepstack = deepstack.into_iter();
        let mut kept = std::mem::take(&mut self.kept).into_iter();
        for layer in &decoder.layers {
            let normed = rms_norm(&layer.input_layernorm, x.clone());
            let (attended, now) = attend(
                &layer.self_attn,
                normed,
                &tables,
                kept.next(),
                text.head_dim,
            );
            self.kept.push(now);
            x = x + attended;
            x = x.clone()
                + layer
                    .mlp
                    .forward(rms_norm(&layer.post_attention_layernorm, x));
            if let Some(features) = deepstack.next() {
                x = x + features;
            }
        }
        self.model.logits(rms_norm(&decoder.norm, x)).squeeze_dim(0)
    }
}

/// Attention of new tokens to those kept and to each other; what is kept now.
fn attend<B: ContextParallelBackend>(
    layer: &ContextParallelAttention<B>,
    x: Tensor<B, 3>,
    tables: &RotaryTables<B>,
    kept: Option<Kept<B>>,
    head_dim: usize,
) -> (Tensor<B, 3>, Kept<B>) {
    let [_, tokens, _] = x.dims();
    let heads = |x: Tensor<B, 3>| {
        let width = x.dims()[2];
        x.reshape([1, tokens, width / head_dim, head_dim])
    };
    let normed = |x: Tensor<B, 4>, norm: &Option<burn::nn::RmsNorm<B>>| match norm {
        Some(norm) => rms_norm(norm, x),
        None => x,
    };
    let q = normed(heads(layer.q_proj.forward(x.clone())), &layer.q_norm).swap_dims(1, 2);
    let k = normed(heads(layer.k_proj.forward(x.clone())), &layer.k_norm).swap_dims(1, 2);
    let v = heads(layer.v_proj.forward(x)).swap_dims(1, 2);
    let (q, mut k, mut v) = (tables.rotate(q), tables.rotate(k), v);
    if let Some((keys, values)) = kept {
        k = Tensor::cat(vec![keys, k], 2);
        v = Tensor::cat(vec![values, v], 2);
    }
    let num_keys = k.dims()[2];
    // The last query and the last key belong together, so new tokens see all that is kept.
    let segment = Segment {
        q_row: 0,
        q: 0..tokens,
        k_row: 0,
        k: 0..num_keys,
        k_position: 0,
        causal: true,
        window: None,
    };
    let segments = Segments::new(vec![segment], (1, tokens), (1, num_keys))
        .expect("one segment covers both buffers");
    let out = varlen_attention(q, k.clone(), v.clone(), &segments, &AttentionOptions::new());
    let width = out.dims()[1] * head_dim;
    let out = layer
        .o_proj
        .forward(out.swap_dims(1, 2).reshape([1, tokens, width]));
    (out, (k, v))
}
