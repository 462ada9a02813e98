//! The check of a call's tensors: shapes, dtypes, devices.

use burn::tensor::{DType, TensorMetadata, backend::Backend, ops::FloatTensor};

#[cfg(feature = "cubecl")]
use crate::definition::Routine;
use crate::definition::{
    AttentionBackwardInput, AttentionError, AttentionInput, AttentionOptions, AttentionOutput,
    AttentionProblem, Segments,
};

/// Checks the inputs of a forward pass and derives its sizes.
pub(crate) fn check_inputs<B: Backend>(
    input: &AttentionInput<FloatTensor<B>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    let AttentionInput { q, k, v, sinks } = input;
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
    if let Some(sinks) = sinks {
        check_tensor::<B>("sinks", sinks, &[problem.num_heads], q)?;
    }
    Ok(problem)
}

/// Checks the inputs of a backward pass and derives its sizes.
pub(crate) fn check_backward<B: Backend>(
    input: &AttentionBackwardInput<FloatTensor<B>>,
    segments: &Segments,
    options: &AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    let AttentionBackwardInput { q, k, v, .. } = input.clone();
    let forward = AttentionInput::new(q, k, v).with_sinks(input.sinks.clone());
    let problem = check_inputs::<B>(&forward, segments, options)?;
    let (out_shape, lse_shape) = (problem.out_shape(), problem.lse_shape());
    check_tensor::<B>("out", &input.out, &out_shape, &input.q)?;
    check_tensor::<B>("lse", &input.lse, &lse_shape, &input.q)?;
    check_tensor::<B>("dout", &input.dout, &out_shape, &input.q)?;
    Ok(problem)
}

/// Checks that a forced routine reads these dtypes, of q, out and dout: merged outputs may be wider than the inputs, which hopper's
/// kernels do not read.
#[cfg(feature = "cubecl")]
pub(crate) fn check_outputs(
    routine: Routine,
    [q, out, dout]: [DType; 3],
    options: &AttentionOptions,
) -> Result<(), AttentionError> {
    if routine == Routine::Hopper && options.routine.is_some() && (out != q || dout != q) {
        return Err(AttentionError::DType {
            what: "out and dout in routine hopper",
            expected: format!("{q:?}, as q"),
            got: format!("{out:?} and {dout:?}"),
        });
    }
    Ok(())
}

/// Checks that two results are of the same queries.
pub(crate) fn check_merge<B: Backend>(
    first: &AttentionOutput<FloatTensor<B>>,
    second: &AttentionOutput<FloatTensor<B>>,
) -> Result<(), AttentionError> {
    let shape = dims::<B>("the first out", &first.out)?;
    let like = &first.out;
    check_float("the first out", like.dtype())?;
    check_tensor::<B>("the first lse", &first.lse, &shape[..3], like)?;
    check_tensor::<B>("the second out", &second.out, &shape, like)?;
    check_tensor::<B>("the second lse", &second.lse, &shape[..3], like)
}

/// Checks a tensor of any float dtype.
fn check_tensor<B: Backend>(
    what: &'static str,
    tensor: &FloatTensor<B>,
    expected: &[usize],
    q: &FloatTensor<B>,
) -> Result<(), AttentionError> {
    let got = tensor.shape().to_vec();
    if got != expected {
        return Err(AttentionError::Shape {
            what,
            expected: format!("{expected:?}"),
            got: format!("{got:?}"),
        });
    }
    check_float(what, tensor.dtype())?;
    check_device::<B>(what, tensor, q)
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
