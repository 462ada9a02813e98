//! The vision tower: patches of frames in, tokens out. A frame knows nothing of the others.

use burn::{
    module::{Initializer, Module, ModuleVisitor, Param},
    nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig},
    tensor::{DType, Int, Tensor, TensorData, backend::Backend},
};
use burn_cp::{
    nn::RotaryTables,
    vision::{TowerError, VisionFeatures, VisionTower},
};
use burn_cp_kernels::{
    AttentionOptions, Segment, Segments, VarlenAttentionBackend, varlen_attention,
};

use super::{
    config::{Activation, VisionConfig},
    geometry::PatchGeometry,
};

/// Epsilon of every layer norm of the tower; no field of the configuration.
const NORM_EPSILON: f64 = 1e-6;
/// Base of the 2-D rotary frequencies; no field of published configurations.
const ROTARY_THETA: f64 = 1e4;

/// What all blocks of one forward pass share.
struct Frames<B: Backend> {
    segments: Segments,
    tables: RotaryTables<B>,
}

/// The vision tower of Qwen3-VL. Field names are those of published weights.
#[derive(Module, Debug)]
pub struct Qwen3VlVision<B: Backend> {
    /// Patches to hidden states.
    pub patch_embed: PatchEmbed<B>,
    /// Learned position embeddings, a square grid `[side², hidden_size]`.
    pub pos_embed: Embedding<B>,
    /// Transformer blocks.
    pub blocks: Vec<VisionBlock<B>>,
    /// Squares of patches to tokens, behind the last block.
    pub merger: PatchMerger<B>,
    /// The same behind earlier blocks.
    pub deepstack_merger_list: Vec<PatchMerger<B>>,
    #[module(skip)]
    config: VisionConfig,
}

impl<B: Backend> Qwen3VlVision<B> {
    /// A tower with lazy parameters; `config` is a valid one.
    pub(in crate::models) fn new(config: &VisionConfig, device: &B::Device) -> Self {
        let hidden = config.hidden_size;
        let pos_embed = EmbeddingConfig::new(config.num_position_embeddings, hidden)
            .with_initializer(Initializer::Zeros);
        let merger = |post_shuffle| PatchMerger::new(config, post_shuffle, device);
        Self {
            patch_embed: PatchEmbed {
                proj: linear(config.patch_dim(), hidden, device),
            },
            pos_embed: pos_embed.init(device),
            blocks: (0..config.depth)
                .map(|_| VisionBlock::new(config, device))
                .collect(),
            merger: merger(false),
            deepstack_merger_list: config
                .deepstack_visual_indexes
                .iter()
                .map(|_| merger(true))
                .collect(),
            config: config.clone(),
        }
    }

    /// `[rows, hidden_size]`: the learned grid read at each patch's place.
    fn position_embeddings(&self, geometry: &PatchGeometry, dtype: DType) -> Tensor<B, 2> {
        let grid = self.pos_embed.weight.val();
        let (device, rows) = (grid.device(), geometry.num_rows());
        let corners: Vec<i64> = geometry
            .corners
            .iter()
            .flatten()
            .map(|&corner| corner as i64)
            .collect();
        let corners = TensorData::new(corners, [rows * 4]);
        let weights = TensorData::new(geometry.weights.concat(), [rows, 4, 1]);
        let read = grid
            .select(0, Tensor::<B, 1, Int>::from_data(corners, &device))
            .reshape([rows, 4, self.config.hidden_size]);
        let weights = Tensor::<B, 3>::from_data(weights, (&device, dtype));
        (read * weights).sum_dim(1).squeeze_dim(1)
    }

    fn frames(&self, geometry: &PatchGeometry, dtype: DType, device: &B::Device) -> Frames<B> {
        let rows = geometry.num_rows();
        let segments = geometry
            .frames
            .iter()
            .map(|frame| Segment {
                q_row: 0,
                q: frame.clone(),
                k_row: 0,
                k: frame.clone(),
                k_position: 0,
                causal: false,
                window: None,
            })
            .collect();
        let segments =
            Segments::new(segments, (1, rows), (1, rows)).expect("frames tile the rows of patches");
        let angles = geometry.angles(self.config.head_dim(), ROTARY_THETA);
        let table = |function: fn(f64) -> f64| {
            let values: Vec<f64> = angles.iter().copied().map(function).collect();
            let data = TensorData::new(values, [1, rows, self.config.head_dim() / 2]);
            // Half precision is rotated in f32.
            let dtype = if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            };
            Tensor::<B, 3>::from_data(data, (device, dtype))
        };
        Frames {
            segments,
            tables: RotaryTables::from_cos_sin(table(f64::cos), table(f64::sin)),
        }
    }
}

impl<B: VarlenAttentionBackend> VisionTower<B> for Qwen3VlVision<B> {
    fn spatial_merge_size(&self) -> usize {
        self.config.spatial_merge_size
    }

    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn is_trainable(&self) -> bool {
        let mut found = Trainable(false);
        self.visit(&mut found);
        found.0
    }

    fn forward(
        &self,
        pixels: Tensor<B, 2>,
        grids: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, TowerError> {
        let config = &self.config;
        let geometry = PatchGeometry::new(grids, config.spatial_merge_size, config.grid_side());
        let (expected, got) = ([geometry.num_rows(), config.patch_dim()], pixels.dims());
        if expected != got {
            return Err(format!(
                "pixels [rows, patch_dim] of grids {grids:?}: expected {expected:?}, got {got:?}"
            )
            .into());
        }
        let dtype = self.patch_embed.proj.weight.val().dtype();
        let device = pixels.device();
        let frames = self.frames(&geometry, dtype, &device);

        let mut x = self.patch_embed.proj.forward(pixels.cast(dtype))
            + self.position_embeddings(&geometry, dtype);
        let mut deepstack = Vec::with_capacity(self.deepstack_merger_list.len());
        for (index, block) in self.blocks.iter().enumerate() {
            x = block.forward(x, &frames);
            let place = config
                .deepstack_visual_indexes
                .iter()
                .position(|&at| at == index);
            if let Some(place) = place {
                deepstack.push(self.deepstack_merger_list[place].forward(x.clone()));
            }
        }
        Ok(VisionFeatures {
            embeddings: self.merger.forward(x),
            deepstack,
        })
    }
}

/// Finds out whether any parameter requires a gradient.
struct Trainable(bool);

impl<B: Backend> ModuleVisitor<B> for Trainable {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0 |= param.val().is_require_grad();
    }
}

fn linear<B: Backend>(d_input: usize, d_output: usize, device: &B::Device) -> Linear<B> {
    LinearConfig::new(d_input, d_output)
        .with_initializer(Initializer::Zeros)
        .init(device)
}

fn layer_norm<B: Backend>(width: usize, device: &B::Device) -> LayerNorm<B> {
    LayerNormConfig::new(width)
        .with_epsilon(NORM_EPSILON)
        .init(device)
}

/// Patch rows `[rows, patch_dim]` to `[rows, hidden_size]`. Published weights are those of a 3-D convolution whose kernel is
/// its stride, `[hidden_size, channels, frames, height, width]`; flattened and transposed they are this matrix.
#[derive(Module, Debug)]
pub struct PatchEmbed<B: Backend> {
    /// `patch_dim -> hidden_size`.
    pub proj: Linear<B>,
}

/// A transformer block over the patches of frames, norms first.
#[derive(Module, Debug)]
pub struct VisionBlock<B: Backend> {
    /// Before attention.
    pub norm1: LayerNorm<B>,
    /// Before the feed-forward layer.
    pub norm2: LayerNorm<B>,
    /// Attention within each frame.
    pub attn: VisionAttention<B>,
    /// Feed-forward layer.
    pub mlp: VisionMlp<B>,
}

impl<B: Backend> VisionBlock<B> {
    fn new(config: &VisionConfig, device: &B::Device) -> Self {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Self {
            norm1: layer_norm(hidden, device),
            norm2: layer_norm(hidden, device),
            attn: VisionAttention {
                qkv: linear(hidden, 3 * hidden, device),
                proj: linear(hidden, hidden, device),
                num_heads: config.num_heads,
            },
            mlp: VisionMlp {
                linear_fc1: linear(hidden, inner, device),
                linear_fc2: linear(inner, hidden, device),
                activation: config.hidden_act,
            },
        }
    }
}

impl<B: VarlenAttentionBackend> VisionBlock<B> {
    fn forward(&self, x: Tensor<B, 2>, frames: &Frames<B>) -> Tensor<B, 2> {
        let x = x.clone() + self.attn.forward(self.norm1.forward(x), frames);
        x.clone() + self.mlp.forward(self.norm2.forward(x))
    }
}

/// Full attention within each frame, with 2-D rotary positions.
#[derive(Module, Debug)]
pub struct VisionAttention<B: Backend> {
    /// `hidden_size -> 3 · hidden_size`: queries, keys, values, each head after head.
    pub qkv: Linear<B>,
    /// `hidden_size -> hidden_size`.
    pub proj: Linear<B>,
    num_heads: usize,
}

impl<B: VarlenAttentionBackend> VisionAttention<B> {
    fn forward(&self, x: Tensor<B, 2>, frames: &Frames<B>) -> Tensor<B, 2> {
        let [rows, hidden] = x.dims();
        let head_dim = hidden / self.num_heads;
        let qkv = self.qkv.forward(x);
        let part = |index: usize| {
            qkv.clone()
                .narrow(1, index * hidden, hidden)
                .reshape([1, rows, self.num_heads, head_dim])
                .swap_dims(1, 2)
        };
        let q = frames.tables.rotate(part(0));
        let k = frames.tables.rotate(part(1));
        let out = varlen_attention(q, k, part(2), &frames.segments, &AttentionOptions::new());
        self.proj
            .forward(out.swap_dims(1, 2).reshape([rows, hidden]))
    }
}

/// Two linear layers with an activation between them.
#[derive(Module, Debug)]
pub struct VisionMlp<B: Backend> {
    /// `hidden_size -> intermediate_size`.
    pub linear_fc1: Linear<B>,
    /// `intermediate_size -> hidden_size`.
    pub linear_fc2: Linear<B>,
    #[module(skip)]
    activation: Activation,
}

impl<B: Backend> VisionMlp<B> {
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.linear_fc2
            .forward(self.activation.forward(self.linear_fc1.forward(x)))
    }
}

/// `merge²` consecutive patches `[rows, hidden_size]` to one token `[rows / merge², out_hidden_size]`.
#[derive(Module, Debug)]
pub struct PatchMerger<B: Backend> {
    /// Over a patch, or over a whole square for deepstack.
    pub norm: LayerNorm<B>,
    /// `merge² · hidden_size` to itself.
    pub linear_fc1: Linear<B>,
    /// `merge² · hidden_size -> out_hidden_size`.
    pub linear_fc2: Linear<B>,
    post_shuffle: bool,
    patches: usize,
}

impl<B: Backend> PatchMerger<B> {
    /// `post_shuffle`: the norm is over the square instead of the patch.
    fn new(config: &VisionConfig, post_shuffle: bool, device: &B::Device) -> Self {
        let patches = config.spatial_merge_size.pow(2);
        let wide = patches * config.hidden_size;
        Self {
            norm: layer_norm(
                if post_shuffle {
                    wide
                } else {
                    config.hidden_size
                },
                device,
            ),
            linear_fc1: linear(wide, wide, device),
            linear_fc2: linear(wide, config.out_hidden_size, device),
            post_shuffle,
            patches,
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let [rows, hidden] = x.dims();
        let square = [rows / self.patches, self.patches * hidden];
        let x = if self.post_shuffle {
            self.norm.forward(x.reshape(square))
        } else {
            self.norm.forward(x).reshape(square)
        };
        self.linear_fc2
            .forward(Activation::Gelu.forward(self.linear_fc1.forward(x)))
    }
}
