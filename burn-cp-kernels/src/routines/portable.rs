//! The portable routine: what it serves, and the blueprint of its kernels for a device.

use burn::tensor::DType;

use crate::{
    components::{Blueprint, Features},
    definition::{AttentionError, AttentionProblem, Routine},
};

/// Sizes of vectors that the kernels serve: multiples of a step.
const MAX_DIM: usize = 256;
const DIM_STEP: usize = 8;

/// Rows per unit, dims and rows per chunk, the fastest first. The later ones need less shared memory.
const CUTS: [(usize, usize, usize); 5] =
    [(4, 64, 64), (4, 32, 32), (4, 16, 16), (2, 16, 8), (2, 8, 4)];

/// Refuses sizes of vectors and dtypes that the kernels do not serve.
pub(crate) fn check(problem: &AttentionProblem, dtype: DType) -> Result<(), AttentionError> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(AttentionError::DType {
            what: "q",
            expected: "F32, F16 or BF16 in routine portable".into(),
            got: format!("{dtype:?}"),
        });
    }
    let dims = [
        ("head_dim", problem.head_dim),
        ("v_head_dim", problem.v_head_dim),
    ];
    for (what, got) in dims {
        if !(DIM_STEP..=MAX_DIM).contains(&got) || got % DIM_STEP != 0 {
            return Err(AttentionError::HeadDim {
                what,
                routine: Routine::Portable,
                expected: format!("a multiple of {DIM_STEP} from {DIM_STEP} to {MAX_DIM}"),
                got,
            });
        }
    }
    Ok(())
}

/// The blueprint of a problem's kernels on a device with this much shared memory per cube.
///
/// # Errors
///
/// Too little shared memory.
pub(crate) fn blueprint(
    problem: &AttentionProblem,
    features: Features,
    shared_bytes: usize,
) -> Result<Blueprint, AttentionError> {
    let cut = |(rows_per_unit, dim_chunk, row_chunk)| Blueprint {
        head_dim: problem.head_dim,
        v_head_dim: problem.v_head_dim,
        rows_per_unit,
        dim_chunk,
        row_chunk,
        features,
    };
    let mut blueprints = CUTS.into_iter().map(cut);
    let fitting = blueprints.find(|blueprint| blueprint.shared_bytes() <= shared_bytes);
    fitting.ok_or_else(|| AttentionError::Routine {
        routine: Routine::Portable,
        expected: format!(
            "at least {} bytes of shared memory",
            cut(CUTS[CUTS.len() - 1]).shared_bytes()
        ),
        got: shared_bytes.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::Segments;

    fn problem(head_dim: usize, v_head_dim: usize) -> AttentionProblem {
        let segments = Segments::new(vec![], (1, 4), (1, 4)).unwrap();
        let shape = |dim| [1, 2, 4, dim];
        AttentionProblem::new(
            shape(head_dim),
            shape(head_dim),
            shape(v_head_dim),
            &segments,
        )
        .unwrap()
    }

    #[test]
    fn sizes_and_dtypes_without_a_kernel_are_refused() {
        assert!(check(&problem(8, 256), DType::BF16).is_ok());
        for (dim, v_dim) in [(4, 64), (64, 264), (36, 64), (64, 33)] {
            let error = check(&problem(dim, v_dim), DType::F32).unwrap_err();
            assert!(matches!(error, AttentionError::HeadDim { .. }), "{error}");
        }
        let error = check(&problem(64, 64), DType::F64).unwrap_err();
        assert!(matches!(error, AttentionError::DType { what: "q", .. }));
    }

    #[test]
    fn every_size_has_a_blueprint_within_the_least_memory_of_webgpu() {
        for dim in (DIM_STEP..=MAX_DIM).step_by(DIM_STEP) {
            for v_dim in [8, 32, 72, 128, 256] {
                let problem = problem(dim, v_dim);
                for bytes in [16 << 10, 32 << 10, 48 << 10, 227 << 10] {
                    let blueprint = blueprint(&problem, Features::default(), bytes).unwrap();
                    assert!(blueprint.shared_bytes() <= bytes);
                    for dim in [dim, v_dim] {
                        let columns = blueprint.columns(dim);
                        assert!(columns.rows > 0 && 4 * columns.lanes * columns.vectors >= dim);
                    }
                }
            }
        }
        assert!(blueprint(&problem(64, 64), Features::default(), 8 << 10).is_err());
    }
}
