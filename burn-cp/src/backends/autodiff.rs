//! Gradients for collectives and attention, over any backend that has them.
//!
//! Burn runs backward steps by depth of the graph, deepest first. Ranks whose graphs differ in depth could swap two independent
//! adjoints, so each operation here is made deeper than the previous one of its [`ProgramOrder`]: a node of the previous one's
//! depth is named beside the inputs, one that asks for no gradient. Such a node counts for the depth and is no parent, so that
//! the operations share no graph: a loss runs the adjoints of the operations that it depends on, and each loss may have
//! a backward pass of its own. All operations are declared compute-bound, so that gradient checkpointing never runs a
//! collective again.

use std::{any::Any, sync::Arc};

use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
    },
    tensor::{Shape, backend::Backend, ops::FloatTensor},
};

use crate::{
    attention::{
        AttentionCall, AttentionState, ContextParallelBackend, InnerAttention, attend_with_state,
        attention_gradients,
    },
    collectives::{Call, Collective, CollectiveBackend, Payload},
    comm::{ProcessGroup, ProgramOrder},
};

/// What a [`ProgramOrder`] holds for an autodiff backend: how deep its latest operation lies.
#[derive(Default)]
struct Latest {
    /// Starts over when a backward pass has begun, so that depths do not grow from step to step.
    generation: u64,
    depth: Option<usize>,
}

fn latest(slot: &mut Option<Box<dyn Any + Send>>) -> &mut Latest {
    if slot.as_ref().is_none_or(|latest| !latest.is::<Latest>()) {
        *slot = Some(Box::<Latest>::default());
    }
    slot.as_mut()
        .and_then(|latest| latest.downcast_mut())
        .expect("just made of this type")
}

/// The place of an operation in its program order, kept by its backward step.
#[derive(Debug, Clone)]
struct Place {
    order: ProgramOrder,
    generation: u64,
}

/// A stand-in for the previous operation, and the place of the new one. A group of one has no order.
fn enter<B: Backend, C: CheckpointStrategy>(
    group: &ProcessGroup,
    device: &B::Device,
) -> (FloatTensor<Autodiff<B, C>>, Place) {
    let order = group.order();
    let (depth, generation) = order.with(|slot| {
        let latest = latest(slot);
        (latest.depth.filter(|_| group.size() > 1), latest.generation)
    });
    let placeholder = B::float_zeros(Shape::new([1]), device, burn::tensor::FloatDType::F32);
    let mut stand_in =
        <Autodiff<B, C> as burn::tensor::backend::AutodiffBackend>::from_inner(placeholder);
    let node = Arc::get_mut(&mut stand_in.node).expect("a new tensor's node has one owner");
    node.order = depth.unwrap_or_default();
    (
        stand_in,
        Place {
            order: order.clone(),
            generation,
        },
    )
}

fn leave<B: Backend, C: CheckpointStrategy>(
    group: &ProcessGroup,
    output: &FloatTensor<Autodiff<B, C>>,
) {
    if group.size() > 1 {
        group
            .order()
            .with(|slot| latest(slot).depth = Some(output.node.order));
    }
}

impl Place {
    /// A backward pass walks this chain: what comes next starts a new one.
    fn consume(&self) {
        self.order.with(|slot| {
            let latest = latest(slot);
            if latest.generation == self.generation {
                latest.generation += 1;
                latest.depth = None;
            }
        });
    }
}

#[derive(Debug)]
struct CollectiveStep<C> {
    strategy: std::marker::PhantomData<fn() -> C>,
}

#[derive(Debug, Clone)]
struct CollectiveState {
    op: Collective,
    group: ProcessGroup,
    call: Call,
    place: Place,
}

impl<B: CollectiveBackend, C: CheckpointStrategy> Backward<B, 2> for CollectiveStep<C> {
    type State = CollectiveState;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let CollectiveState {
            op,
            group,
            call,
            place,
        } = ops.state;
        place.consume();
        let grad = grads.consume::<B>(&ops.node);
        let adjoint = Call::adjoint(&group, call.label, call.number);
        let Payload::Float(grad) =
            B::collective(Payload::Float(grad), &op.adjoint(), &group, adjoint)
        else {
            unreachable!("a collective returns the kind that it was given");
        };
        let [input, _previous] = ops.parents;
        if let Some(node) = input {
            grads.register::<B>(node.id, grad);
        }
    }
}

impl<B: CollectiveBackend, C: CheckpointStrategy> CollectiveBackend for Autodiff<B, C> {
    fn collective(
        payload: Payload<Self>,
        op: &Collective,
        group: &ProcessGroup,
        call: Call,
    ) -> Payload<Self> {
        match payload {
            Payload::Float(tensor) => {
                Payload::Float(collective_with_gradient::<B, C>(tensor, op, group, call))
            }
            Payload::Int(tensor) => match B::collective(Payload::Int(tensor), op, group, call) {
                Payload::Int(tensor) => Payload::Int(tensor),
                _ => unreachable!("a collective returns the kind that it was given"),
            },
            Payload::Bool(tensor) => match B::collective(Payload::Bool(tensor), op, group, call) {
                Payload::Bool(tensor) => Payload::Bool(tensor),
                _ => unreachable!("a collective returns the kind that it was given"),
            },
        }
    }

    fn leaf_id(tensor: &FloatTensor<Self>) -> Option<u64> {
        tensor.is_tracked().then_some(tensor.node.id.value)
    }
}

fn collective_with_gradient<B: CollectiveBackend, C: CheckpointStrategy>(
    tensor: FloatTensor<Autodiff<B, C>>,
    op: &Collective,
    group: &ProcessGroup,
    call: Call,
) -> FloatTensor<Autodiff<B, C>> {
    let call = Call {
        tracked: tensor.is_tracked(),
        ..call
    };
    let Payload::Float(output) =
        B::collective(Payload::Float(tensor.primitive.clone()), op, group, call)
    else {
        unreachable!("a collective returns the kind that it was given");
    };
    if !call.tracked {
        return <Autodiff<B, C> as burn::tensor::backend::AutodiffBackend>::from_inner(output);
    }
    let (previous, place) = enter::<B, C>(group, &B::float_device(&tensor.primitive));
    let step = CollectiveStep::<C> {
        strategy: std::marker::PhantomData,
    };
    let nodes = [tensor.node.clone(), previous.node.clone()];
    let output = match Backward::<B, 2>::prepare::<C>(step, nodes)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => {
            let state = CollectiveState {
                op: op.clone(),
                group: group.clone(),
                call,
                place,
            };
            prep.finish(state, output)
        }
        OpsKind::UnTracked(prep) => prep.finish(output),
    };
    leave::<B, C>(group, &output);
    output
}

#[derive(Debug)]
struct AttentionStep<C> {
    strategy: std::marker::PhantomData<fn() -> C>,
}

#[derive(Debug, Clone)]
struct AttentionStepState<B: Backend> {
    saved: AttentionState<B>,
    call: AttentionCall,
    place: Place,
}

impl<B: InnerAttention, C: CheckpointStrategy> Backward<B, 4> for AttentionStep<C> {
    type State = AttentionStepState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 4>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let AttentionStepState { saved, call, place } = ops.state;
        place.consume();
        let dout = grads.consume::<B>(&ops.node);
        // Runs on every rank, also where a parent is not tracked: the others wait for its part.
        let gradients = attention_gradients::<B>(saved, dout, &call);
        let [q, k, v, _previous] = ops.parents;
        for (node, grad) in [(q, gradients.dq), (k, gradients.dk), (v, gradients.dv)] {
            if let Some(node) = node {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

impl<B: InnerAttention, C: CheckpointStrategy> ContextParallelBackend for Autodiff<B, C> {
    fn context_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: &AttentionCall,
    ) -> FloatTensor<Self> {
        let tracked = [&q, &k, &v].iter().any(|tensor| tensor.is_tracked());
        let call = call.tracked(tracked);
        let (output, saved) = attend_with_state::<B>(
            q.primitive.clone(),
            k.primitive.clone(),
            v.primitive.clone(),
            &call,
        );
        if !tracked {
            return <Self as burn::tensor::backend::AutodiffBackend>::from_inner(output);
        }
        // Attention that moves nothing runs no adjoint between ranks, so its place does not matter.
        let solo = ProcessGroup::solo();
        let group = if call.communicates() {
            call.group()
        } else {
            &solo
        };
        let (previous, place) = enter::<B, C>(group, &B::float_device(&q.primitive));
        let step = AttentionStep::<C> {
            strategy: std::marker::PhantomData,
        };
        let nodes = [
            q.node.clone(),
            k.node.clone(),
            v.node.clone(),
            previous.node.clone(),
        ];
        let output = match Backward::<B, 4>::prepare::<C>(step, nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(
                AttentionStepState {
                    saved,
                    call: call.clone(),
                    place,
                },
                output,
            ),
            OpsKind::UnTracked(prep) => prep.finish(output),
        };
        leave::<B, C>(group, &output);
        output
    }
}
