//! Fused backends: attention is one custom operation of the stream, on the inner backend's tensors.
//!
//! Everything is checked before the operation is registered, since it runs later and elsewhere.

use std::{fmt, marker::PhantomData};

use burn::tensor::{
    DType, Shape, TensorMetadata,
    ops::{Device, FloatTensor},
};
use burn_fusion::{
    Fusion, FusionBackend, FusionRuntime,
    stream::{Operation, OperationStreams},
};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};

use super::AttentionBackend;
use crate::{
    definition::{
        AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput,
        AttentionOptions, AttentionOutput, AttentionProblem, RoutineChoice, Segments,
    },
    routines::{check_backward, check_inputs, check_merge, check_outputs},
};

type Handles<B> =
    HandleContainer<<<B as FusionBackend>::FusionRuntime as FusionRuntime>::FusionHandle>;

/// Attention on the inner backend: tensors in, tensors out, in the order of the description.
struct Attention<B, K> {
    description: CustomOpIr,
    pass: K,
    backend: PhantomData<fn() -> B>,
}

impl<B, K> fmt::Debug for Attention<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.description.fmt(f)
    }
}

/// One of the operations, with what it needs beside tensors.
trait Pass: Send + Sync + 'static {
    const NAME: &'static str;

    fn run<B: AttentionBackend>(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>>;
}

/// `q, k, v` and perhaps sinks to `out, lse`.
struct Forward {
    segments: Segments,
    options: AttentionOptions,
}

impl Pass for Forward {
    const NAME: &'static str = "varlen_attention";

    fn run<B: AttentionBackend>(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("described with three inputs");
        let input = AttentionInput::new(next(), next(), next()).with_sinks(inputs.next());
        let output = B::attention_forward(input, &self.segments, &self.options);
        vec![output.out, output.lse]
    }
}

/// `q, k, v, out, lse, dout` and perhaps sinks to `dq, dk, dv` and perhaps `dsinks`.
struct BackwardPass {
    segments: Segments,
    options: AttentionOptions,
}

impl Pass for BackwardPass {
    const NAME: &'static str = "varlen_attention_backward";

    fn run<B: AttentionBackend>(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("described with six inputs");
        let input = AttentionBackwardInput::new(next(), next(), next(), next(), next(), next());
        let input = input.with_sinks(inputs.next());
        let gradients = B::attention_backward(input, &self.segments, &self.options);
        let AttentionGradients { dq, dk, dv, dsinks } = gradients;
        [Some(dq), Some(dk), Some(dv), dsinks]
            .into_iter()
            .flatten()
            .collect()
    }
}

/// `out, lse` twice to `out, lse`.
struct Merge {
    dtype: DType,
}

impl Pass for Merge {
    const NAME: &'static str = "merge_attention";

    fn run<B: AttentionBackend>(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("described with four inputs");
        let first = AttentionOutput::new(next(), next());
        let second = AttentionOutput::new(next(), next());
        let merged = B::merge_attention(first, second, self.dtype);
        vec![merged.out, merged.lse]
    }
}

impl<B: FusionBackend + AttentionBackend, K: Pass> Operation<B::FusionRuntime> for Attention<B, K> {
    fn execute(&self, handles: &mut Handles<B>) {
        let inputs = self.description.inputs.iter();
        let inputs = inputs
            .map(|input| handles.get_float_tensor::<B>(input))
            .collect();
        let outputs = self.pass.run::<B>(inputs);
        for (description, output) in self.description.outputs.iter().zip(outputs) {
            handles.register_float_tensor::<B>(&description.id, output);
        }
    }
}

/// Registers an operation on these inputs, whose outputs have these shapes and dtypes.
fn register<B: FusionBackend + AttentionBackend, K: Pass>(
    inputs: Vec<FloatTensor<Fusion<B>>>,
    outputs: &[(Shape, DType)],
    pass: K,
) -> Vec<FloatTensor<Fusion<B>>> {
    let client = inputs[0].client.clone();
    let streams = OperationStreams::with_inputs(inputs.iter());
    let inputs: Vec<TensorIr> = inputs.into_iter().map(|input| input.into_ir()).collect();
    let outputs: Vec<TensorIr> = outputs
        .iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape.clone(), *dtype))
        .collect();
    let description = CustomOpIr::new(K::NAME, &inputs, &outputs);
    let operation = Attention::<B, K> {
        description: description.clone(),
        pass,
        backend: PhantomData,
    };
    client.register(streams, OperationIr::Custom(description), operation)
}

impl<B: FusionBackend + AttentionBackend> AttentionBackend for Fusion<B> {
    fn attention_forward(
        input: AttentionInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionOutput<FloatTensor<Self>> {
        let checked = || -> Result<AttentionProblem, AttentionError> {
            let problem = check_inputs::<Self>(&input, segments, options)?;
            let device = input.q.client.device();
            B::attention_routine(&problem, input.q.dtype(), device, options)?;
            Ok(problem)
        };
        let problem = checked().unwrap_or_else(|error| panic!("{error}"));
        let outputs = [
            (Shape::from(problem.out_shape()), input.q.dtype()),
            (Shape::from(problem.lse_shape()), lse_dtype(input.q.dtype())),
        ];
        let AttentionInput { q, k, v, sinks } = input;
        let inputs = [q, k, v].into_iter().chain(sinks).collect();
        let pass = Forward {
            segments: segments.clone(),
            options: options.clone(),
        };
        let mut outputs = register::<B, Forward>(inputs, &outputs, pass).into_iter();
        let mut next = || outputs.next().expect("described with two outputs");
        AttentionOutput::new(next(), next())
    }

    fn attention_backward(
        input: AttentionBackwardInput<FloatTensor<Self>>,
        segments: &Segments,
        options: &AttentionOptions,
    ) -> AttentionGradients<FloatTensor<Self>> {
        let checked = || -> Result<AttentionProblem, AttentionError> {
            let problem = check_backward::<Self>(&input, segments, options)?;
            let device = input.q.client.device();
            let choice = B::attention_routine(&problem, input.q.dtype(), device, options)?;
            let dtypes = [input.q.dtype(), input.out.dtype(), input.dout.dtype()];
            check_outputs(choice.routine, dtypes, options)?;
            Ok(problem)
        };
        let problem = checked().unwrap_or_else(|error| panic!("{error}"));
        let dtype = input.q.dtype();
        let mut outputs = vec![
            (Shape::from(problem.q_shape()), dtype),
            (Shape::from(problem.k_shape()), dtype),
            (Shape::from(problem.v_shape()), dtype),
        ];
        let sinks = input.sinks.as_ref();
        outputs.extend(sinks.map(|sinks| (sinks.shape(), sinks.dtype())));
        let AttentionBackwardInput {
            q,
            k,
            v,
            out,
            lse,
            dout,
            sinks,
        } = input;
        let inputs = [q, k, v, out, lse, dout].into_iter().chain(sinks).collect();
        let pass = BackwardPass {
            segments: segments.clone(),
            options: options.clone(),
        };
        let outputs = register::<B, BackwardPass>(inputs, &outputs, pass);
        let mut outputs = outputs.into_iter();
        let mut next = || outputs.next().expect("described with three outputs");
        AttentionGradients::new(next(), next(), next()).with_dsinks(outputs.next())
    }

    fn merge_attention(
        first: AttentionOutput<FloatTensor<Self>>,
        second: AttentionOutput<FloatTensor<Self>>,
        dtype: DType,
    ) -> AttentionOutput<FloatTensor<Self>> {
        check_merge::<Self>(&first, &second).unwrap_or_else(|error| panic!("{error}"));
        let lse_dtype = lse_dtype(first.lse.dtype());
        let outputs = [(first.out.shape(), dtype), (first.lse.shape(), lse_dtype)];
        let inputs = vec![first.out, first.lse, second.out, second.lse];
        let mut outputs = register::<B, Merge>(inputs, &outputs, Merge { dtype }).into_iter();
        let mut next = || outputs.next().expect("described with two outputs");
        AttentionOutput::new(next(), next())
    }

    fn attention_routine(
        problem: &AttentionProblem,
        dtype: DType,
        device: &Device<Self>,
        options: &AttentionOptions,
    ) -> Result<RoutineChoice, AttentionError> {
        B::attention_routine(problem, dtype, device, options)
    }
}

/// The dtype of the log-sum-exp, as [`AttentionOutput::lse`] says.
fn lse_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
