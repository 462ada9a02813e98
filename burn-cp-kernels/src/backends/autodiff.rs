//! Attention as one op of Burn's autodiff graph.

use burn::{
    backend::Autodiff,
    tensor::{
        DType,
        ops::{Device, FloatTensor},
    },
};
use burn_autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};

use super::{AttentionBackend, VarlenAttentionBackend};
use crate::definition::{
    AttentionBackwardInput, AttentionError, AttentionInput, AttentionOptions, AttentionProblem,
    RoutineChoice, Segments,
};

/// The backward step. Its parents are q, k, v and, where there are sinks, those.
#[derive(Debug)]
struct VarlenAttention;

/// What the forward pass leaves for the backward step. The tensors are kept as they are rather
/// than checkpointed: the op is compute-bound, and recomputing its inputs for it would move work
/// that callers have placed on purpose.
#[derive(Debug, Clone)]
struct State<B: AttentionBackend> {
    input: AttentionInput<FloatTensor<B>>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    segments: Segments,
    options: AttentionOptions,
}

impl<B: AttentionBackend, const N: usize> Backward<B, N> for VarlenAttention {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dout = grads.consume::<B>(&ops.node);
        let state = ops.state;
        let AttentionInput { q, k, v, sinks } = state.input;
        let input = AttentionBackwardInput::new(q, k, v, state.out, state.lse, dout);
        let input = input.with_sinks(sinks);
        let gradients = B::attention_backward(input, &state.segments, &state.options);
        let all = [Some(gradients.dq), Some(gradients.dk), Some(gradients.dv)];
        let all = all.into_iter().chain([gradients.dsinks]);
        for (parent, gradient) in ops.parents.into_iter().zip(all) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

/// The op over `[q, k, v]` or `[q, k, v, sinks]`.
fn attend<B: AttentionBackend, C: CheckpointStrategy, const N: usize>(
    parents: [FloatTensor<Autodiff<B, C>>; N],
    segments: &Segments,
    options: &AttentionOptions,
) -> FloatTensor<Autodiff<B, C>> {
    let nodes = parents.each_ref().map(|parent| parent.node.clone());
    let [q, k, v] = [0, 1, 2].map(|index| parents[index].primitive.clone());
    let sinks = parents.get(3).map(|sinks| sinks.primitive.clone());
    let input = AttentionInput::new(q, k, v).with_sinks(sinks);
    let prepared = Backward::<B, N>::prepare::<C>(VarlenAttention, nodes);
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let output = B::attention_forward(input.clone(), segments, options);
            let state = State::<B> {
                input,
                out: output.out.clone(),
                lse: output.lse,
                segments: segments.clone(),
                options: options.clone(),
            };
            prep.finish(state, output.out)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::attention_forward(input, segments, options).out),
    }
}

impl<B: AttentionBackend, C: CheckpointStrategy> VarlenAttentionBackend for Autodiff<B, C> {
    fn varlen_attention(
        input: AttentionInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> FloatTensor<Self> {
        let AttentionInput { q, k, v, sinks } = input;
        match sinks {
            None => attend::<B, C, 3>([q, k, v], segments, options),
            Some(sinks) => attend::<B, C, 4>([q, k, v, sinks], segments, options),
        }
    }

    fn varlen_attention_routine(
        problem: &AttentionProblem,
        dtype: DType,
        device: &Device<Self>,
        options: &AttentionOptions,
    ) -> Result<RoutineChoice, AttentionError> {
        B::attention_routine(problem, dtype, device, options)
    }
}
