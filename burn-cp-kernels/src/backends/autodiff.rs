//! Attention as one op of Burn's autodiff graph.

use burn::{backend::Autodiff, tensor::ops::FloatTensor};
use burn_autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};

use super::{AttentionBackend, VarlenAttentionBackend};
use crate::definition::{AttentionBackwardInput, AttentionOptions, Segments};

/// The backward step.
#[derive(Debug)]
struct VarlenAttention;

/// What the forward pass leaves for the backward step. The tensors are kept as they are rather
/// than checkpointed: the op is compute-bound, and recomputing its inputs for it would move work
/// that callers have placed on purpose.
#[derive(Debug, Clone)]
struct State<B: AttentionBackend> {
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    segments: Segments,
    options: AttentionOptions,
}

impl<B: AttentionBackend> Backward<B, 3> for VarlenAttention {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dout = grads.consume::<B>(&ops.node);
        let state = ops.state;
        let input =
            AttentionBackwardInput::new(state.q, state.k, state.v, state.out, state.lse, dout);
        let gradients = B::attention_backward(input, &state.segments, &state.options);
        let gradients = [gradients.dq, gradients.dk, gradients.dv];
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: AttentionBackend, C: CheckpointStrategy> VarlenAttentionBackend for Autodiff<B, C> {
    fn varlen_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> FloatTensor<Self> {
        let nodes = [q.node.clone(), k.node.clone(), v.node.clone()];
        let (q, k, v) = (q.primitive, k.primitive, v.primitive);
        match VarlenAttention
            .prepare::<C>(nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let output =
                    B::attention_forward(q.clone(), k.clone(), v.clone(), segments, options);
                let state = State::<B> {
                    q,
                    k,
                    v,
                    out: output.out.clone(),
                    lse: output.lse,
                    segments: segments.clone(),
                    options: options.clone(),
                };
                prep.finish(state, output.out)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::attention_forward(q, k, v, segments, options).out)
            }
        }
    }
}
