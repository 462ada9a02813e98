//! The hopper routine: what it serves.

use burn::tensor::DType;

use crate::definition::{AttentionError, AttentionOptions, AttentionProblem, Routine};

/// `(head_dim, v_head_dim)` of the kernels, the smallest first. Smaller vectors are filled up with zeros as they are loaded.
const DIMS: [(usize, usize); 4] = [(64, 64), (128, 128), (192, 128), (256, 256)];
/// Sizes of vectors are multiples of this: the copy engine's rows are multiples of 16 bytes.
const DIM_STEP: usize = 8;

/// The problem with the sizes of vectors that the kernels compute with.
pub(crate) fn padded(problem: &AttentionProblem) -> Option<AttentionProblem> {
    let fits = |dims: &&(usize, usize)| dims.0 >= problem.head_dim && dims.1 >= problem.v_head_dim;
    let (head_dim, v_head_dim) = *DIMS.iter().find(fits)?;
    Some(AttentionProblem {
        head_dim,
        v_head_dim,
        ..*problem
    })
}

/// Refuses what the kernels do not serve. The device is not looked at.
pub(crate) fn check(
    problem: &AttentionProblem,
    dtype: DType,
    options: &AttentionOptions,
) -> Result<(), AttentionError> {
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return Err(AttentionError::DType {
            what: "q",
            expected: "F16 or BF16 in routine hopper".into(),
            got: format!("{dtype:?}"),
        });
    }
    let dims = [
        ("head_dim", problem.head_dim),
        ("v_head_dim", problem.v_head_dim),
    ];
    for (what, got) in dims {
        if !got.is_multiple_of(DIM_STEP) || padded(problem).is_none() {
            return Err(AttentionError::HeadDim {
                what,
                routine: Routine::Hopper,
                expected: format!("a multiple of {DIM_STEP} from {DIM_STEP} to 256"),
                got,
            });
        }
    }
    if problem.q_batch * problem.q_tokens == 0 || problem.k_batch * problem.k_tokens == 0 {
        // The copy engine takes no empty tensor.
        return Err(AttentionError::Shape {
            what: "q and k",
            expected: "tokens, in routine hopper".into(),
            got: format!("{:?} and {:?}", problem.q_shape(), problem.k_shape()),
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
