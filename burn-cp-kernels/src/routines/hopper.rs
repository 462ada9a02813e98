//! The hopper routine: what it serves.

use burn::tensor::DType;

use crate::definition::{AttentionError, AttentionOptions, AttentionProblem, Routine};

/// `(head_dim, v_head_dim)` of the forward kernels.
pub(crate) const FORWARD_DIMS: [(usize, usize); 4] = [(64, 64), (128, 128), (192, 128), (256, 256)];
/// `(head_dim, v_head_dim)` of the backward kernels.
pub(crate) const BACKWARD_DIMS: [(usize, usize); 2] = [(64, 64), (128, 128)];

/// One of the two passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// Refuses what the kernels do not serve. The device is not looked at.
pub(crate) fn check(
    problem: &AttentionProblem,
    dtype: DType,
    options: &AttentionOptions,
    pass: Pass,
) -> Result<(), AttentionError> {
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return Err(AttentionError::DType {
            what: "q",
            expected: "F16 or BF16 in routine hopper".into(),
            got: format!("{dtype:?}"),
        });
    }
    let dims = match pass {
        Pass::Forward => &FORWARD_DIMS[..],
        Pass::Backward => &BACKWARD_DIMS[..],
    };
    if !dims.contains(&(problem.head_dim, problem.v_head_dim)) {
        return Err(AttentionError::HeadDim {
            what: "head_dim",
            routine: Routine::Hopper,
            expected: format!(
                "(head_dim, v_head_dim) one of {dims:?}, v_head_dim being {}",
                problem.v_head_dim
            ),
            got: problem.head_dim,
        });
    }
    let refuse = |what, expected, got: String| {
        Err(AttentionError::Option {
            what,
            expected,
            got,
        })
    };
    if options.dropout.is_some_and(|dropout| dropout.p > 0.0) {
        return refuse("dropout", "none in routine hopper", "dropout".into());
    }
    let scale = options.scale_for(problem.head_dim);
    if scale <= 0.0 {
        return refuse(
            "scale",
            "greater than 0 in routine hopper",
            scale.to_string(),
        );
    }
    if problem.q_tokens.max(problem.k_tokens) >= 1 << 30 {
        return Err(AttentionError::Overflow {
            what: "number of tokens per batch row".into(),
            expected: (1 << 30) - 1,
            got: problem.q_tokens.max(problem.k_tokens).to_string(),
        });
    }
    Ok(())
}
