//! A small decoder and a small vision tower whose forward and backward passes can be made to fail.

use std::{fmt, sync::Arc};

use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::NoCheckpointing},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
    },
    module::{Module, ModuleMapper, Param},
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig},
    tensor::{Device, Tensor, TensorPrimitive, backend::Backend},
};
use burn_cp::{
    attention::AttentionOptions,
    nn::SequenceModel,
    sharder::{CpStep, StepError},
    vision::{TowerError, VisionFeatures, VisionTower},
};
use burn_cp_tests::{OTHER_DTYPE, TestBackend, faults::HEAD_DIM};

/// The backend without gradients.
pub(crate) type Inner = TestBackend;
/// The backend of the scenarios.
pub(crate) type B = Autodiff<Inner>;

pub(crate) const VOCAB: usize = 11;
pub(crate) const WIDTH: usize = 16;

/// What happens to one layer's input on one rank; the default leaves it alone.
#[derive(Clone, Default)]
pub(crate) struct Fault {
    /// Before the second layer.
    pub(crate) forward: Option<Arc<Run>>,
    /// When the gradient comes back to that place.
    pub(crate) backward: Option<Arc<Run>>,
    /// How the second layer's attention differs.
    pub(crate) attention: Twist,
}

/// Something to do in the middle of a pass.
pub(crate) type Run = dyn Fn() + Send + Sync;

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fault").finish_non_exhaustive()
    }
}

/// How one call of attention differs from that of the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Twist {
    #[default]
    None,
    /// Heads of half the width.
    HeadDim,
    /// Another dtype than `f32`.
    Dtype,
    /// No gradient is tracked.
    Detached,
    /// Another mask, hence another plan.
    Window,
}

#[derive(Module, Debug)]
struct Layer<B: Backend> {
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    out: Linear<B>,
}

/// Two layers of attention with residuals, and a tied head.
#[derive(Module, Debug)]
pub(crate) struct Decoder<B: Backend> {
    embedding: Embedding<B>,
    layers: Vec<Layer<B>>,
}

impl<B: Backend> Decoder<B> {
    /// Lazy parameters, as Burn makes them; so many heads of queries, and of keys and values.
    pub(crate) fn lazy([num_heads, num_kv_heads]: [usize; 2], device: &B::Device) -> Self {
        let linear = |num_heads: usize| {
            LinearConfig::new(WIDTH, num_heads * HEAD_DIM)
                .with_bias(false)
                .init(device)
        };
        let layer = || Layer {
            q: linear(num_heads),
            k: linear(num_kv_heads),
            v: linear(num_kv_heads),
            out: LinearConfig::new(num_heads * HEAD_DIM, WIDTH)
                .with_bias(false)
                .init(device),
        };
        Self {
            embedding: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            layers: (0..2).map(|_| layer()).collect(),
        }
    }

    /// The same with every parameter drawn.
    pub(crate) fn materialised(heads: [usize; 2], device: &B::Device) -> Self {
        let model = Self::lazy(heads, device);
        // Counting parameters looks at each.
        assert!(model.num_params() > 0);
        model
    }
}

impl Decoder<B> {
    /// The same with an embedding that is not trained.
    pub(crate) fn with_frozen_embedding(mut self) -> Self {
        self.embedding = self.embedding.no_grad();
        self
    }

    /// Logits `[batch, local_tokens, vocab]`. `features` are added to the embedded tokens.
    pub(crate) fn run(
        &self,
        step: &CpStep<B>,
        features: Option<Tensor<B, 3>>,
        fault: &Fault,
    ) -> Result<Tensor<B, 3>, StepError> {
        let mut hidden = self.embedding.forward(step.ids()?);
        if let Some(features) = features {
            hidden = hidden + features;
        }
        hidden = attend(&self.layers[0], hidden, step, Twist::None);
        if let Some(run) = &fault.forward {
            run();
        }
        if let Some(run) = &fault.backward {
            hidden = when_backward(hidden, run.clone());
        }
        hidden = attend(&self.layers[1], hidden, step, fault.attention);
        let head = self.embedding.weight.val().transpose();
        Ok(hidden.matmul(head.unsqueeze()))
    }
}

impl SequenceModel<B> for Decoder<B> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        self.run(step, None, &Fault::default())
    }
}

fn attend(layer: &Layer<B>, hidden: Tensor<B, 3>, step: &CpStep<B>, twist: Twist) -> Tensor<B, 3> {
    let [batch, tokens, _] = hidden.dims();
    let heads = |linear: &Linear<B>| {
        let flat = linear.forward(hidden.clone());
        let num_heads = flat.dims()[2] / HEAD_DIM;
        let heads = flat
            .reshape([batch, tokens, num_heads, HEAD_DIM])
            .swap_dims(1, 2);
        match twist {
            Twist::HeadDim => heads.narrow(3, 0, HEAD_DIM / 2),
            Twist::Dtype => heads.cast(OTHER_DTYPE),
            Twist::Detached => heads.detach(),
            Twist::None | Twist::Window => heads,
        }
    };
    let options = match twist {
        Twist::Window => AttentionOptions::causal().with_window(1),
        _ => AttentionOptions::causal(),
    };
    let out = step.attention(heads(&layer.q), heads(&layer.k), heads(&layer.v), &options);
    // Where an exchange does not refuse it at once, nothing but the exchange does.
    let out = match twist {
        Twist::HeadDim => Tensor::cat(vec![out.clone(), out], 3),
        Twist::Dtype => out.cast(hidden.dtype()),
        _ => out,
    };
    let [_, num_heads, _, head_dim] = out.dims();
    hidden
        + layer.out.forward(
            out.swap_dims(1, 2)
                .reshape([batch, tokens, num_heads * head_dim]),
        )
}

/// A module of the same parameters on another device, with leaves of its own. The copies are made on the host: between devices the
/// backend would use a transport of its own.
pub(crate) fn fork<M: Module<B>>(module: M, device: &Device<B>) -> M {
    module.map(&mut ThroughHost(device))
}

struct ThroughHost<'a>(&'a Device<B>);

impl ModuleMapper<B> for ThroughHost<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let copy = Tensor::from_data(tensor.to_data(), (self.0, tensor.dtype()));
            copy.set_require_grad(tensor.is_require_grad())
        })
    }
}

#[derive(Debug)]
struct WhenBackward;

#[derive(Clone)]
struct Action(Arc<Run>);

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Action")
    }
}

impl Backward<Inner, 1> for WhenBackward {
    type State = Action;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<Inner>(&ops.node);
        (ops.state.0)();
        if let [Some(parent)] = ops.parents {
            grads.register::<Inner>(parent.id, grad);
        }
    }
}

/// The identity, whose backward step also runs `run`.
pub(crate) fn when_backward<const D: usize>(tensor: Tensor<B, D>, run: Arc<Run>) -> Tensor<B, D> {
    let tensor = tensor.into_primitive().tensor();
    let output = match WhenBackward
        .prepare::<NoCheckpointing>([tensor.node.clone()])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(Action(run), tensor.primitive.clone()),
        OpsKind::UnTracked(prep) => prep.finish(tensor.primitive.clone()),
    };
    Tensor::from_primitive(TensorPrimitive::Float(output))
}

/// Embeds each patch on its own; merge size 1.
#[derive(Module, Debug)]
pub(crate) struct Patches<B: Backend> {
    linear: Linear<B>,
}

impl Patches<B> {
    pub(crate) fn new(device: &Device<B>) -> Self {
        Self {
            linear: LinearConfig::new(3, WIDTH).init(device),
        }
    }
}

/// What a tower returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// What it should.
    Right,
    /// One row more.
    Row,
    /// Features for a decoder layer, too.
    Deepstack,
    /// Another dtype than `f32`.
    Dtype,
    /// An error.
    Error,
}

/// A tower that fails on one rank.
#[derive(Debug)]
pub(crate) struct FaultyTower {
    pub(crate) patches: Patches<B>,
    pub(crate) fault: Fault,
    pub(crate) output: Output,
}

impl VisionTower<B> for FaultyTower {
    fn spatial_merge_size(&self) -> usize {
        1
    }

    fn hidden_size(&self) -> usize {
        WIDTH
    }

    fn is_trainable(&self) -> bool {
        true
    }

    fn forward(
        &self,
        pixels: Tensor<B, 2>,
        _grids: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, TowerError> {
        let embeddings = self.patches.linear.forward(pixels);
        if let Some(run) = &self.fault.forward {
            run();
        }
        let embeddings = match &self.fault.backward {
            Some(run) => when_backward(embeddings, run.clone()),
            None => embeddings,
        };
        if self.output == Output::Error {
            return Err("the tower ran dry".into());
        }
        let deepstack = match self.output {
            Output::Deepstack => vec![embeddings.clone()],
            _ => Vec::new(),
        };
        let embeddings = match self.output {
            Output::Row => Tensor::cat(vec![embeddings.clone().narrow(0, 0, 1), embeddings], 0),
            Output::Dtype => embeddings.cast(OTHER_DTYPE),
            _ => embeddings,
        };
        Ok(VisionFeatures {
            embeddings,
            deepstack,
        })
    }
}
