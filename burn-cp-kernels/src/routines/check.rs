//! The check of a call's tensors: shapes, dtypes, devices.

use burn::tensor::{DType, TensorMetadata, backend::Backend, ops::FloatTensor};

use crate::definition::{
    AttentionBackwardInput, AttentionError, AttentionOptions, AttentionProblem, Segments,
};

/// Checks the inputs of a forward pass and derives its sizes.
pub(crate) fn check_inputs<B: Backend>(
    q: &FloatTensor<B>,
    k: &FloatTensor<B>,
    v: &FloatTensor<B>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    options.check()?;
    let problem = AttentionProblem::new(
        dims::<B>("q", q)?,
        dims::<B>("k", k)?,
        dims::<B>("v", v)?,
        segments,
    )?;
    check_float("q", q.dtype())?;
    for (what, tensor) in [("k", k), ("v", v)] {
        if tensor.dtype() != q.dtype() {
            return Err(AttentionError::DType {
                what,
                expected: format!("{:?}, as q", q.dtype()),
                got: format!("{:?}", tensor.dtype()),
            });
        }
        check_device::<B>(what, tensor, q)?;
    }
    Ok(problem)
}

/// Checks the inputs of a backward pass and derives its sizes.
pub(crate) fn check_backward<B: Backend>(
    input: &AttentionBackwardInput<FloatTensor<B>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    let problem = check_inputs::<B>(&input.q, &input.k, &input.v, segments, options)?;
    let out_shape = problem.out_shape();
    let lse_shape = problem.lse_shape();
    for (what, tensor, expected) in [
        ("out", &input.out, &out_shape[..]),
        ("lse", &input.lse, &lse_shape[..]),
        ("dout", &input.dout, &out_shape[..]),
    ] {
        let got = tensor.shape().to_vec();
        if got != expected {
            return Err(AttentionError::Shape {
                what,
                expected: format!("{expected:?}"),
                got: format!("{got:?}"),
            });
        }
        check_float(what, tensor.dtype())?;
        check_device::<B>(what, tensor, &input.q)?;
    }
    Ok(problem)
}

fn dims<B: Backend>(
    what: &'static str,
    tensor: &FloatTensor<B>,
) -> Result<[usize; 4], AttentionError> {
    let dims = tensor.shape().to_vec();
    <[usize; 4]>::try_from(dims.as_slice()).map_err(|_| AttentionError::Shape {
        what,
        expected: "four dims: [batch, heads, tokens, head_dim]".into(),
        got: format!("{dims:?}"),
    })
}

fn check_float(what: &'static str, dtype: DType) -> Result<(), AttentionError> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(AttentionError::DType {
        what,
        expected: "a float dtype".into(),
        got: format!("{dtype:?}"),
    })
}

fn check_device<B: Backend>(
    what: &'static str,
    tensor: &FloatTensor<B>,
    q: &FloatTensor<B>,
) -> Result<(), AttentionError> {
    let (expected, got) = (B::float_device(q), B::float_device(tensor));
    if expected == got {
        return Ok(());
    }
    Err(AttentionError::Device {
        what,
        expected: format!("{expected:?}, as q"),
        got: format!("{got:?}"),
    })
}
