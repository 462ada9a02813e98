//! Gradients for collectives and attention, over any backend that has them.
//!
//! Burn runs backward steps by depth of the graph. Ranks whose graphs differ in depth could swap two independent adjoints,
//! so each operation here takes the previous one of its [`ProgramOrder`] as a further parent, to which it contributes a
//! gradient of zero: an ancestor's step runs after its descendants' on every rank. All operations are declared compute-bound,
//! so that gradient checkpointing never runs a collective again.

use std::any::Any;

use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
    },
    tensor::{DType, Shape, TensorMetadata, backend::Backend, ops::FloatTensor},
};

use crate::{
    attention::{
        AttentionCall, AttentionInput, AttentionState, ContextParallelBackend, InnerAttention,
        attend_with_state, attention_gradients,
    },
    collectives::{Call, Collective, CollectiveBackend, Payload, Pending},
    comm::{ProcessGroup, ProgramOrder, WeakProgramOrder},
};

/// What a [`ProgramOrder`] holds for an autodiff backend: the latest operation's output, as a parent for the next one.
struct Latest<B: Backend, C: CheckpointStrategy> {
    /// Starts over when a backward pass has consumed the chain.
    generation: u64,
    link: Option<Link<B, C>>,
}

struct Link<B: Backend, C: CheckpointStrategy> {
    /// The output, with a placeholder for its values. It keeps the graph alive until the next operation or the end of the
    /// order: whether there is a predecessor must not depend on what a rank still holds of it.
    tensor: FloatTensor<Autodiff<B, C>>,
    like: Like,
}

/// Shape and dtype of a gradient of zeros.
#[derive(Debug, Clone)]
struct Like {
    shape: Shape,
    dtype: DType,
}

impl Like {
    fn zeros<B: Backend>(&self, device: &B::Device) -> FloatTensor<B> {
        let (shape, dtype) = (self.shape.clone(), self.dtype.into());
        // A kernel without units, which CUDA refuses.
        if shape.num_elements() == 0 {
            return B::float_empty(shape, device, dtype);
        }
        B::float_zeros(shape, device, dtype)
    }
}

fn latest<B: Backend, C: CheckpointStrategy>(
    slot: &mut Option<Box<dyn Any + Send>>,
) -> &mut Latest<B, C> {
    // Another backend type in the same order starts a chain of its own.
    if slot
        .as_ref()
        .is_none_or(|latest| !latest.is::<Latest<B, C>>())
    {
        *slot = Some(Box::new(Latest::<B, C> {
            generation: 0,
            link: None,
        }));
    }
    slot.as_mut()
        .and_then(|latest| latest.downcast_mut())
        .expect("just made of this type")
}

/// The place of an operation in its program order, kept by its backward step.
#[derive(Debug, Clone)]
struct Place {
    /// Weak, since Burn keeps the step of an operation for as long as the order refers to its output.
    order: WeakProgramOrder,
    generation: u64,
    previous: Option<Like>,
}

/// The previous operation's node, if no backward pass has consumed it, and this operation's place. A group of one has no order.
fn enter<B: Backend, C: CheckpointStrategy>(
    group: &ProcessGroup,
) -> (Option<FloatTensor<Autodiff<B, C>>>, Place) {
    let order = group.order();
    order.with(|slot| {
        let latest = latest::<B, C>(slot);
        let link = latest.link.as_ref().filter(|_| group.size() > 1);
        let place = Place {
            order: order.downgrade(),
            generation: latest.generation,
            previous: link.map(|link| link.like.clone()),
        };
        (link.map(|link| link.tensor.clone()), place)
    })
}

fn leave<B: Backend, C: CheckpointStrategy>(
    group: &ProcessGroup,
    output: &FloatTensor<Autodiff<B, C>>,
) {
    if group.size() == 1 {
        return;
    }
    let mut tensor = output.clone();
    let like = Like {
        shape: output.shape(),
        dtype: output.dtype(),
    };
    let device = B::float_device(&tensor.primitive);
    tensor.primitive = B::float_zeros(Shape::new([1]), &device, tensor.primitive.dtype().into());
    group
        .order()
        .with(|slot| latest::<B, C>(slot).link = Some(Link { tensor, like }));
}

impl Place {
    /// A backward pass walks this chain: what comes next starts a new one.
    fn consume<B: Backend, C: CheckpointStrategy>(&self) {
        let Some(order) = self.order.upgrade() else {
            return;
        };
        order.with(|slot| {
            let latest = latest::<B, C>(slot);
            if latest.generation == self.generation {
                latest.generation += 1;
                latest.link = None;
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
        place.consume::<B, C>();
        let grad = grads.consume::<B>(&ops.node);
        let device = B::float_device(&grad);
        let adjoint = Call::adjoint(&group, call.label, call.number);
        let Payload::Float(grad) =
            B::collective(Payload::Float(grad), &op.adjoint(), &group, adjoint)
        else {
            unreachable!("a collective returns the kind that it was given");
        };
        let [input, previous] = ops.parents;
        if let Some(node) = input {
            grads.register::<B>(node.id, grad);
        }
        if let (Some(node), Some(like)) = (previous, place.previous) {
            grads.register::<B>(node.id, like.zeros::<B>(&device));
        }
    }
}

impl<B: CollectiveBackend, C: CheckpointStrategy> CollectiveBackend for Autodiff<B, C> {
    fn collective_start(
        payload: Payload<Self>,
        op: &Collective,
        group: &ProcessGroup,
        call: Call,
    ) -> Pending<Self> {
        Pending::ready(Self::collective(payload, op, group, call))
    }

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

    fn moves_any_rows(
        tensor: (&[usize], DType),
        device: &Self::Device,
        op: &Collective,
        group: &ProcessGroup,
    ) -> bool {
        B::moves_any_rows(tensor, device, op, group)
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
    let (previous, place) = enter::<B, C>(group);
    // An operation without a predecessor names its input twice: the second parent then receives nothing.
    let previous = previous.unwrap_or_else(|| tensor.clone());
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
                // An adjoint has no place in the order; a handle on it would keep it alive for ever.
                group: group.with_order(ProgramOrder::new()),
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

impl<B: InnerAttention, C: CheckpointStrategy, const N: usize> Backward<B, N> for AttentionStep<C> {
    type State = AttentionStepState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let AttentionStepState { saved, call, place } = ops.state;
        place.consume::<B, C>();
        let dout = grads.consume::<B>(&ops.node);
        let device = B::float_device(&dout);
        // Runs on every rank, also where a parent is not tracked: the others wait for its part.
        let gradients = attention_gradients::<B>(saved, dout, &call);
        let previous = place.previous.map(|like| like.zeros::<B>(&device));
        let own = [gradients.dq, gradients.dk, gradients.dv].map(Some);
        let all = [previous].into_iter().chain(own).chain([gradients.dsinks]);
        for (node, grad) in ops.parents.into_iter().zip(all) {
            if let (Some(node), Some(grad)) = (node, grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

impl<B: InnerAttention, C: CheckpointStrategy> ContextParallelBackend for Autodiff<B, C> {
    fn context_attention(
        input: AttentionInput<FloatTensor<Self>>,
        call: &AttentionCall,
    ) -> FloatTensor<Self> {
        let AttentionInput { q, k, v, sinks, .. } = input;
        match sinks {
            None => attend::<B, C, 4>([q, k, v], None, call),
            Some(sinks) => attend::<B, C, 5>([q, k, v], Some(sinks), call),
        }
    }
}

/// The operation, whose `N` parents are the previous one of its order, q, k, v, and the sinks where there are any.
fn attend<B: InnerAttention, C: CheckpointStrategy, const N: usize>(
    qkv: [FloatTensor<Autodiff<B, C>>; 3],
    sinks: Option<FloatTensor<Autodiff<B, C>>>,
    call: &AttentionCall,
) -> FloatTensor<Autodiff<B, C>> {
    let tracked = (qkv.iter().chain(&sinks)).any(|tensor| tensor.is_tracked());
    let call = call.tracked(tracked);
    let [q, k, v] = qkv.each_ref().map(|tensor| tensor.primitive.clone());
    let inner_sinks = sinks.as_ref().map(|sinks| sinks.primitive.clone());
    let input = AttentionInput::new(q, k, v).with_sinks(inner_sinks);
    let (output, saved) = attend_with_state::<B>(input, &call);
    if !tracked {
        return <Autodiff<B, C> as burn::tensor::backend::AutodiffBackend>::from_inner(output);
    }
    // Attention that moves nothing runs no adjoint between ranks, so its place does not matter.
    let solo = ProcessGroup::solo();
    let group = if call.communicates() {
        call.group()
    } else {
        &solo
    };
    let (previous, place) = enter::<B, C>(group);
    // An operation without a predecessor names its queries twice: the first parent then receives nothing.
    let previous = previous.unwrap_or_else(|| qkv[0].clone());
    let step = AttentionStep::<C> {
        strategy: std::marker::PhantomData,
    };
    let mut parents = [&previous].into_iter().chain(&qkv).chain(&sinks);
    let nodes = std::array::from_fn(|_| {
        let parent = parents.next().expect("as many parents as the step has");
        parent.node.clone()
    });
    let output = match Backward::<B, N>::prepare::<C>(step, nodes)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(
            AttentionStepState {
                saved,
                call: call.outside_order(),
                place,
            },
            output,
        ),
        OpsKind::UnTracked(prep) => prep.finish(output),
    };
    leave::<B, C>(group, &output);
    output
}
