//! Summing gradients, and giving all ranks one rank's parameters.

use std::collections::{HashMap, HashSet};

use burn::{
    module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{Tensor, backend::AutodiffBackend},
};

use crate::{
    collectives::{self, CollectiveBackend},
    comm::{CommError, Groups, ProcessGroup},
};

/// How gradients are packed into messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientSync {
    /// Elements of a message at most; a larger parameter is a message of its own.
    pub bucket_elements: usize,
}

impl Default for GradientSync {
    /// 8 Mi elements, 32 MiB in `f32`.
    fn default() -> Self {
        Self {
            bucket_elements: 8 << 20,
        }
    }
}

/// Sums gradients over mesh axes. Every rank of that group must call it with the same module structure.
///
/// A trained parameter without a gradient on this rank takes part with zeros, so that all ranks run the same collectives;
/// afterwards every trained parameter has a gradient. Summed in rank order (between GPUs in NCCL's), `f16` and `bf16` in `f32`.
///
/// # Errors
/// An axis that the mesh does not have. A failure between ranks ends this one with a typed panic.
pub fn sync_gradients<B, M>(
    grads: GradientsParams,
    module: &M,
    groups: &Groups,
    axes: &[&str],
) -> Result<GradientsParams, CommError>
where
    B: AutodiffBackend,
    B::InnerBackend: CollectiveBackend,
    M: AutodiffModule<B>,
{
    Ok(GradientSync::default().sync::<B, M>(grads, module, &groups.along(axes)?))
}

/// A run of one parameter's gradient within a message.
struct Slot {
    id: ParamId,
    shape: Vec<usize>,
    len: usize,
}

impl GradientSync {
    /// [`sync_gradients`] over a given group, each of whose ranks must call it.
    ///
    /// # Panics
    /// With a typed panic where the exchange fails.
    pub fn sync<B, M>(
        &self,
        grads: GradientsParams,
        module: &M,
        group: &ProcessGroup,
    ) -> GradientsParams
    where
        B: AutodiffBackend,
        B::InnerBackend: CollectiveBackend,
        M: AutodiffModule<B>,
    {
        let mut flatten = Flatten::<B> {
            seen: HashSet::new(),
            grads,
            slots: Vec::new(),
            flat: Vec::new(),
        };
        module.visit(&mut flatten);
        let Flatten { slots, flat, .. } = flatten;
        let mut synced: Vec<Tensor<B::InnerBackend, 1>> = Vec::with_capacity(slots.len());
        let mut start = 0;
        while start < slots.len() {
            let end = self.bucket_end(&slots, &flat, start);
            let bucket = flat[start..end].to_vec();
            let bucket = if bucket.len() == 1 {
                bucket[0].clone()
            } else {
                Tensor::cat(bucket, 0)
            };
            let bucket = collectives::all_reduce(bucket, group);
            let mut at = 0;
            for slot in &slots[start..end] {
                synced.push(bucket.clone().narrow(0, at, slot.len));
                at += slot.len;
            }
            start = end;
        }
        let by_id = slots
            .into_iter()
            .zip(synced)
            .map(|(slot, flat)| (slot.id, (slot.shape, flat)))
            .collect();
        let mut unflatten = Unflatten::<B> {
            by_id,
            grads: GradientsParams::new(),
        };
        module.visit(&mut unflatten);
        unflatten.grads
    }

    fn bucket_end<B: CollectiveBackend>(
        &self,
        slots: &[Slot],
        flat: &[Tensor<B, 1>],
        start: usize,
    ) -> usize {
        let mut elements = slots[start].len;
        let mut end = start + 1;
        while end < slots.len()
            && elements + slots[end].len <= self.bucket_elements
            && flat[end].dtype() == flat[start].dtype()
        {
            elements += slots[end].len;
            end += 1;
        }
        end
    }
}

struct Flatten<B: AutodiffBackend> {
    seen: HashSet<ParamId>,
    grads: GradientsParams,
    slots: Vec<Slot>,
    flat: Vec<Tensor<B::InnerBackend, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Flatten<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        // A parameter that stands at two places of the module has one gradient.
        if !self.seen.insert(param.id) {
            return;
        }
        let tensor = param.val();
        let grad = self.grads.remove::<B::InnerBackend, D>(param.id);
        if grad.is_none() && !tensor.is_require_grad() {
            return;
        }
        let grad = grad.unwrap_or_else(|| tensor.inner().zeros_like());
        let shape = grad.shape().to_vec();
        let len = grad.shape().num_elements();
        self.slots.push(Slot {
            id: param.id,
            shape,
            len,
        });
        self.flat.push(grad.reshape([len]));
    }
}

struct Unflatten<B: AutodiffBackend> {
    by_id: HashMap<ParamId, (Vec<usize>, Tensor<B::InnerBackend, 1>)>,
    grads: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Unflatten<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some((shape, flat)) = self.by_id.remove(&param.id) {
            let grad: Tensor<B::InnerBackend, D> = flat.reshape(burn::tensor::Shape::from(shape));
            self.grads.register(param.id, grad);
        }
    }
}

/// Gives every rank of a group the parameters of its rank `root`. Every rank must call it with the same module structure.
///
/// The result's parameters are autodiff leaves of their own, trained where they were before.
pub fn broadcast_parameters<B, M>(module: M, root: usize, group: &ProcessGroup) -> M
where
    B: CollectiveBackend,
    M: Module<B>,
{
    module.map(&mut Broadcast { root, group })
}

struct Broadcast<'a> {
    root: usize,
    group: &'a ProcessGroup,
}

impl<B: CollectiveBackend> ModuleMapper<B> for Broadcast<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let trained = tensor.is_require_grad();
            // Not `detach`, which leaves a parameter trained, so that what is received would not be a leaf.
            let values =
                collectives::broadcast(tensor.set_require_grad(false), self.root, self.group);
            values.set_require_grad(trained)
        })
    }
}
