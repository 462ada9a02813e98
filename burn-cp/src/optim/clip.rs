//! Clipping by the norm of all gradients together.

use std::collections::HashSet;

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor, backend::AutodiffBackend},
};

use crate::{
    collectives::{Payload, read_to_host},
    comm::{CommError, FailureCause, ProcessGroup},
};

/// How far norms of the same gradients may be apart, whatever the order of their sums.
const MOST_APART: f64 = 1e-3;

/// Scales all gradients so that their common Euclidean norm is at most `max_norm`; returns them with the norm they had.
///
/// Every rank of the group must call it, with the same gradients: synchronised ones, of all ranks that hold the same parameters. All take
/// the norm of the group's first rank, since a device may add up in another order each time: ranks that scaled by their own would drift
/// apart. Waits for the device once, and exchanges one number on the host. A norm that is not finite scales nothing, so that the caller
/// can see and handle it.
///
/// # Errors
/// [`CommError::Disagreement`] on every rank, where one has another norm: its gradients have not been synchronised. Ranks that could not
/// talk to each other.
pub fn clip_by_global_norm<B, M>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
    group: &ProcessGroup,
) -> Result<(GradientsParams, f64), CommError>
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
    let norm = norm_of_all(squared.sqrt(), group)?;
    if !norm.is_finite() || norm <= max_norm {
        return Ok((grads, norm));
    }
    let mut scale = Scale {
        seen: HashSet::new(),
        grads,
        factor: max_norm / norm,
    };
    module.visit(&mut scale);
    Ok((scale.grads, norm))
}

/// The norm that every rank takes.
fn norm_of_all(norm: f64, group: &ProcessGroup) -> Result<f64, CommError> {
    const WHAT: &str = "the norm of the gradients";
    // As bits: what is not a number is not equal to itself.
    let all = group.host_all_gather(WHAT, norm.to_bits())?;
    let all: Vec<f64> = all.into_iter().map(f64::from_bits).collect();
    let first = all[0];
    let same = |other: f64| match (first.is_finite(), other.is_finite()) {
        (true, true) => (other - first).abs() <= MOST_APART * first,
        (one, another) => one == another,
    };
    let Some(odd) = all.iter().position(|other| !same(*other)) else {
        return Ok(first);
    };
    let rank = group.global_ranks()[odd];
    let error = CommError::Disagreement {
        group: group.name().to_owned(),
        what: WHAT.to_owned(),
        rank,
        expected: first.to_string(),
        got: format!("{} (have they been synchronised?)", all[odd]),
    };
    group.fail(rank, WHAT, FailureCause::Comm(error.clone()));
    Err(error)
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
