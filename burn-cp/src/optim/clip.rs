//! Clipping by the norm of all gradients together.

use std::collections::HashSet;

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor, backend::AutodiffBackend},
};

use crate::collectives::{Payload, read_to_host};

/// Scales all gradients so that their common Euclidean norm is at most `max_norm`; returns them with the norm they had.
///
/// Call it with synchronised gradients: every rank then has the same norm, and no communication is needed. Waits for the
/// device once. A norm that is not finite scales nothing, so that the caller can see and handle it.
pub fn clip_by_global_norm<B, M>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
) -> (GradientsParams, f64)
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let mut norm = SquaredNorm::<B> {
        seen: HashSet::new(),
        grads: &grads,
        sum: None,
    };
    module.visit(&mut norm);
    let squared = norm.sum.map_or(0.0, |sum| {
        let sum = Payload::Float(sum.into_primitive().tensor());
        let sum = read_to_host::<B::InnerBackend>(sum);
        sum.iter::<f64>().next().unwrap_or_default()
    });
    let norm = squared.sqrt();
    if !norm.is_finite() || norm <= max_norm {
        return (grads, norm);
    }
    let mut scale = Scale {
        seen: HashSet::new(),
        grads,
        factor: max_norm / norm,
    };
    module.visit(&mut scale);
    (scale.grads, norm)
}

// A parameter that stands at two places of the module has one gradient, which counts once.

struct SquaredNorm<'a, B: AutodiffBackend> {
    seen: HashSet<ParamId>,
    grads: &'a GradientsParams,
    sum: Option<Tensor<B::InnerBackend, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for SquaredNorm<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) else {
            return;
        };
        // Squares of small dtypes overflow, and sums of different dtypes do not add up.
        let grad = match grad.dtype() {
            DType::F64 => grad,
            _ => grad.cast(FloatDType::F32),
        };
        let squared = grad.clone().mul(grad).sum();
        self.sum = Some(match self.sum.take() {
            Some(sum) if sum.dtype() != squared.dtype() => {
                sum.cast(FloatDType::F64) + squared.cast(FloatDType::F64)
            }
            Some(sum) => sum + squared,
            None => squared,
        });
    }
}

struct Scale {
    seen: HashSet<ParamId>,
    grads: GradientsParams,
    factor: f64,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        if let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) {
            self.grads.register(param.id, grad.mul_scalar(self.factor));
        }
    }
}
