//! The tensor core routine: what it serves, and the blueprint of its kernels for a device.

use burn::tensor::DType;

use crate::{
    components::{Features, matrix::MatrixBlueprint},
    definition::{AttentionError, AttentionOptions, AttentionProblem, Routine},
};

/// Sizes of vectors that the kernels serve.
const MIN_DIM: usize = 8;
const MAX_DIM: usize = 256;
const DIM_STEP: usize = 8;
/// Tokens of a batch row, beyond which distances do not fit.
const MAX_TOKENS: usize = 1 << 29;
/// Bytes of shared memory that barriers take, at most.
pub(crate) const BARRIERS: usize = 256;

/// Refuses what the kernels do not serve. The device is not looked at.
pub(crate) fn check(
    problem: &AttentionProblem,
    dtype: DType,
    options: &AttentionOptions,
) -> Result<(), AttentionError> {
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return Err(AttentionError::DType {
            what: "q",
            expected: "F16 or BF16 in routine tensor_core".into(),
            got: format!("{dtype:?}"),
        });
    }
    let dims = [
        ("head_dim", problem.head_dim),
        ("v_head_dim", problem.v_head_dim),
    ];
    for (what, got) in dims {
        if !(MIN_DIM..=MAX_DIM).contains(&got) || got % DIM_STEP != 0 {
            return Err(AttentionError::HeadDim {
                what,
                routine: Routine::TensorCore,
                expected: format!("a multiple of {DIM_STEP} from {MIN_DIM} to {MAX_DIM}"),
                got,
            });
        }
    }
    let refuse = |what, expected, got: String| {
        Err(AttentionError::Option {
            what,
            expected,
            got,
        })
    };
    if options.dropout.is_some_and(|dropout| dropout.p > 0.0) {
        return refuse(
            "dropout",
            "none in routine tensor_core",
            "dropout".to_owned(),
        );
    }
    let scale = options.scale_for(problem.head_dim);
    if scale <= 0.0 {
        return refuse(
            "scale",
            "greater than 0 in routine tensor_core",
            scale.to_string(),
        );
    }
    let tokens = problem.q_tokens.max(problem.k_tokens);
    if tokens >= MAX_TOKENS {
        return Err(AttentionError::Overflow {
            what: "number of tokens per batch row".into(),
            expected: MAX_TOKENS - 1,
            got: tokens.to_string(),
        });
    }
    Ok(())
}

/// The blueprint of a problem's kernels on a device with this much shared memory per cube; `adds` says whether its memory adds vectors of
/// four, which the kernel for all gradients is slow without.
///
/// # Errors
///
/// Too little shared memory.
pub(crate) fn blueprint(
    problem: &AttentionProblem,
    features: Features,
    shared_bytes: usize,
    adds: bool,
) -> Result<MatrixBlueprint, AttentionError> {
    let cut = |query_blocks, key_columns| MatrixBlueprint {
        head_dim: problem.head_dim,
        v_head_dim: problem.v_head_dim,
        query_blocks,
        key_blocks: 1,
        key_columns,
        key_parts: problem.head_dim + problem.v_head_dim > 256,
        joint: false,
        features,
    };
    // What a plane sums must fit its registers.
    let widest = problem.head_dim.max(problem.v_head_dim);
    let blocks: &[usize] = if widest > 128 { &[1] } else { &[2, 1] };
    let mut cuts = blocks
        .iter()
        .flat_map(|blocks| [64, 32].map(|columns| cut(*blocks, columns)));
    let needed = |blueprint: &MatrixBlueprint| {
        blueprint.shared_bytes().into_iter().max().unwrap_or(0) + BARRIERS
    };
    let least = needed(&cut(1, 32));
    let found = cuts.find(|blueprint| needed(blueprint) <= shared_bytes);
    let joint = |found: &MatrixBlueprint| {
        let bytes = found.joint_bytes();
        adds && bytes.is_some_and(|bytes| bytes + BARRIERS <= shared_bytes)
    };
    found
        .map(|found| MatrixBlueprint {
            joint: joint(&found),
            ..found
        })
        .ok_or_else(|| AttentionError::Routine {
            routine: Routine::TensorCore,
            expected: format!("at least {least} bytes of shared memory"),
            got: shared_bytes.to_string(),
        })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::definition::{Dropout, Segments};

    pub(crate) fn problem(head_dim: usize, v_head_dim: usize) -> AttentionProblem {
        let segments = Segments::new(vec![], (1, 4), (1, 4)).unwrap();
        let shape = |dim| [1, 2, 4, dim];
        let (q, v) = (shape(head_dim), shape(v_head_dim));
        AttentionProblem::new(q, q, v, &segments).unwrap()
    }

    #[test]
    fn what_has_no_kernel_is_refused() {
        let options = AttentionOptions::new();
        assert!(check(&problem(32, 256), DType::BF16, &options).is_ok());
        for (dim, v_dim) in [(4, 64), (64, 264), (36, 64), (64, 33)] {
            let error = check(&problem(dim, v_dim), DType::F16, &options).unwrap_err();
            assert!(matches!(error, AttentionError::HeadDim { .. }), "{error}");
        }
        let error = check(&problem(64, 64), DType::F32, &options).unwrap_err();
        assert!(matches!(error, AttentionError::DType { what: "q", .. }));
        for options in [
            options.clone().with_scale(-1.0),
            options.with_dropout(Dropout::new(0.1, 0)),
        ] {
            let error = check(&problem(64, 64), DType::F16, &options).unwrap_err();
            assert!(matches!(error, AttentionError::Option { .. }), "{error}");
        }
    }

    #[test]
    fn the_memory_of_ampere_and_ada_is_enough_for_the_usual_sizes() {
        for (dim, bytes) in [(64, 99 << 10), (128, 99 << 10), (256, 227 << 10)] {
            let blueprint = blueprint(&problem(dim, dim), Features::default(), bytes, false);
            let blueprint = blueprint.unwrap();
            assert!(blueprint.shared_bytes().iter().all(|used| *used <= bytes));
        }
        let error =
            blueprint(&problem(256, 256), Features::default(), 99 << 10, false).unwrap_err();
        assert!(matches!(error, AttentionError::Routine { .. }), "{error}");
    }
}
