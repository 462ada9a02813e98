//! Cases, inputs, textbook attention, and the accuracy rule.

use std::ops::Range;

use burn::{
    backend::{Autodiff, Flex, NdArray},
    tensor::{Bool, DType, Tensor, TensorData, activation::softmax, backend::Backend},
};
use burn_cp_kernels::{
    AttentionBackend, AttentionBackwardInput, AttentionInput, AttentionOptions, AttentionProblem,
    Dropout, Segment, Segments, Window, attention_backward, attention_forward_with_sinks,
    reference::{self, ReferenceInput},
};
use proptest::{
    prelude::RngExt,
    test_runner::{RngAlgorithm, TestRng},
};

/// A backend that is tested, on a device that any machine of its kind has.
pub(crate) trait Tested: AttentionBackend {
    fn test_device() -> Self::Device {
        Self::Device::default()
    }
}

impl Tested for Flex {}
impl Tested for NdArray<f32> {}
impl Tested for NdArray<f64> {}

/// A causal segment of row 0 over equal token and key ranges: a packed document.
pub(crate) fn document(tokens: Range<usize>) -> Segment {
    causal(tokens.clone(), tokens, 0)
}

/// A causal segment of row 0.
pub(crate) fn causal(q: Range<usize>, k: Range<usize>, k_position: usize) -> Segment {
    Segment {
        q_row: 0,
        q,
        k_row: 0,
        k,
        k_position,
        causal: true,
        window: None,
    }
}

pub(crate) fn full(segment: Segment) -> Segment {
    Segment {
        causal: false,
        ..segment
    }
}

pub(crate) fn window(segment: Segment, left: usize) -> Segment {
    Segment {
        window: Some(Window::left(left)),
        ..segment
    }
}

/// Packed documents of these lengths from token `start` on.
pub(crate) fn packed(lengths: &[usize], start: usize) -> Vec<Segment> {
    let mut end = start;
    lengths
        .iter()
        .map(|len| {
            end += len;
            document(end - len..end)
        })
        .collect()
}

/// One attention call on the host, with f64 values.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) segments: Segments,
    pub(crate) problem: AttentionProblem,
    pub(crate) options: AttentionOptions,
    pub(crate) q: Vec<f64>,
    pub(crate) k: Vec<f64>,
    pub(crate) v: Vec<f64>,
    pub(crate) dout: Vec<f64>,
    pub(crate) sinks: Option<Vec<f64>>,
}

/// Sizes besides those of the segments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) v_head_dim: usize,
}

pub(crate) const SMALL: Heads = Heads {
    num_heads: 2,
    num_kv_heads: 2,
    head_dim: 16,
    v_head_dim: 16,
};

impl Case {
    /// Normally distributed inputs that depend on the sizes only. The first query of each segment
    /// looks hard at one key, so that not every softmax is flat.
    pub(crate) fn new(
        segments: Vec<Segment>,
        q: (usize, usize),
        k: (usize, usize),
        heads: Heads,
    ) -> Self {
        let segments = Segments::new(segments, q, k).expect("legal segments");
        let q_shape = [q.0, heads.num_heads, q.1, heads.head_dim];
        let k_shape = [k.0, heads.num_kv_heads, k.1, heads.head_dim];
        let v_shape = [k.0, heads.num_kv_heads, k.1, heads.v_head_dim];
        let problem =
            AttentionProblem::new(q_shape, k_shape, v_shape, &segments).expect("shapes that fit");
        let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let mut normal = |shape: [usize; 4], size| normal(&mut rng, shape.iter().product(), size);
        Self {
            q: normal(q_shape, INPUT_SIZES[0]),
            k: normal(k_shape, INPUT_SIZES[1]),
            v: normal(v_shape, INPUT_SIZES[2]),
            dout: normal(problem.out_shape(), INPUT_SIZES[3]),
            options: AttentionOptions::new(),
            sinks: None,
            segments,
            problem,
        }
    }

    /// With a sink per head, of different weight.
    pub(crate) fn with_sinks(mut self) -> Self {
        let heads = 0..self.problem.num_heads;
        self.sinks = Some(heads.map(|head| head as f64 * 0.75 - 0.5).collect());
        self
    }

    pub(crate) fn with_softcap(mut self, softcap: f64) -> Self {
        self.options = self.options.with_softcap(softcap);
        self
    }

    pub(crate) fn with_dropout(mut self, p: f64) -> Self {
        self.options = self.options.with_dropout(Dropout::new(p, 7));
        self
    }

    pub(crate) fn packed(lengths: &[usize], heads: Heads) -> Self {
        let tokens = lengths.iter().sum();
        Self::new(packed(lengths, 0), (1, tokens), (1, tokens), heads)
    }

    /// Rounds the inputs to a dtype, so that the reference sees what the backend sees.
    pub(crate) fn rounded(mut self, dtype: DType) -> Self {
        let inputs = [&mut self.q, &mut self.k, &mut self.v, &mut self.dout];
        for values in inputs.into_iter().chain(&mut self.sinks) {
            let data = TensorData::new(values.clone(), [values.len()]).convert_dtype(dtype);
            *values = data.iter::<f64>().collect();
        }
        self
    }

    pub(crate) fn qkv<B: Tested>(&self, dtype: DType) -> [Tensor<B, 4>; 3] {
        self.qkv_on(dtype, &B::test_device())
    }

    pub(crate) fn qkv_on<B: Backend>(&self, dtype: DType, device: &B::Device) -> [Tensor<B, 4>; 3] {
        [
            tensor(&self.q, self.problem.q_shape(), dtype, device),
            tensor(&self.k, self.problem.k_shape(), dtype, device),
            tensor(&self.v, self.problem.v_shape(), dtype, device),
        ]
    }

    pub(crate) fn dout<B: Tested>(&self, dtype: DType) -> Tensor<B, 4> {
        self.dout_on(dtype, &B::test_device())
    }

    pub(crate) fn dout_on<B: Backend>(&self, dtype: DType, device: &B::Device) -> Tensor<B, 4> {
        tensor(&self.dout, self.problem.out_shape(), dtype, device)
    }

    pub(crate) fn sinks_on<B: Backend>(
        &self,
        dtype: DType,
        device: &B::Device,
    ) -> Option<Tensor<B, 1>> {
        let sinks = self.sinks.as_ref()?;
        Some(tensor(sinks, [sinks.len()], dtype, device))
    }

    /// The f64 reference.
    pub(crate) fn expected(&self) -> Results {
        let (p, s, o) = (&self.problem, &self.segments, &self.options);
        let input = ReferenceInput {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            sinks: self.sinks.as_deref(),
        };
        let output = reference::attention_forward(input, p, s, o);
        let grads = reference::attention_backward(input, &self.dout, p, s, o);
        Results {
            out: output.out,
            lse: output.lse,
            dq: grads.dq,
            dk: grads.dk,
            dv: grads.dv,
            dsinks: grads.dsinks,
        }
    }

    /// What is tested.
    pub(crate) fn actual<B: Tested>(&self, dtype: DType) -> Results {
        let [q, k, v] = self.qkv::<B>(dtype);
        let sinks = self.sinks_on::<B>(dtype, &B::test_device());
        let (s, o) = (&self.segments, &self.options);
        let input = AttentionInput::new(q.clone(), k.clone(), v.clone());
        let output = attention_forward_with_sinks(input.with_sinks(sinks.clone()), s, o);
        assert_eq!(output.out.dtype(), dtype);
        let (out, lse) = (values(&output.out), values(&output.lse));
        let input =
            AttentionBackwardInput::new(q, k, v, output.out, output.lse, self.dout::<B>(dtype));
        let grads = attention_backward(input.with_sinks(sinks), s, o);
        assert_eq!(grads.dk.dtype(), dtype);
        Results {
            out,
            lse,
            dq: values(&grads.dq),
            dk: values(&grads.dk),
            dv: values(&grads.dv),
            dsinks: grads.dsinks.map_or(vec![], |dsinks| values(&dsinks)),
        }
    }

    /// Textbook attention in Burn's operations, one segment at a time, gradients by autodiff.
    pub(crate) fn textbook<B: Tested>(&self, dtype: DType) -> Results {
        let device = B::test_device();
        let qkv = self.qkv_on::<Autodiff<B>>(dtype, &device);
        let [q, k, v] = qkv.map(Tensor::require_grad);
        let sinks = self.sinks_on::<Autodiff<B>>(dtype, &device);
        let sinks = sinks.map(Tensor::require_grad);
        let mut out = Tensor::zeros(self.problem.out_shape(), (&device, dtype));
        let mut lse = Tensor::full(
            self.problem.lse_shape(),
            f64::NEG_INFINITY,
            (&device, dtype),
        );
        for (index, segment) in self.segments.iter().enumerate() {
            let blind = segment.num_blind_queries();
            if blind == segment.num_q() {
                continue;
            }
            let rows = segment.q.start + blind..segment.q.end;
            let row = segment.q_row..segment.q_row + 1;
            let heads = 0..self.problem.num_heads;
            let (part, part_lse) = self.textbook_segment(index, [&q, &k, &v], sinks.as_ref());
            let dim = 0..self.problem.v_head_dim;
            out = out.slice_assign([row.clone(), heads.clone(), rows.clone(), dim], part);
            lse = lse.slice_assign([row, heads, rows], part_lse);
        }
        let dout = self.dout_on::<Autodiff<B>>(dtype, &device);
        let grads = (out.clone() * dout).sum().backward();
        let grad = |tensor: &Tensor<Autodiff<B>, 4>| match tensor.grad(&grads) {
            Some(grad) => values(&grad),
            None => vec![0.0; tensor.shape().num_elements()],
        };
        Results {
            out: values(&out),
            lse: values(&lse),
            dq: grad(&q),
            dk: grad(&k),
            dv: grad(&v),
            dsinks: sinks.map_or(vec![], |sinks| match sinks.grad(&grads) {
                Some(grad) => values(&grad),
                None => vec![0.0; self.problem.num_heads],
            }),
        }
    }

    fn textbook_segment<B: Backend>(
        &self,
        index: usize,
        [q, k, v]: [&Tensor<B, 4>; 3],
        sinks: Option<&Tensor<B, 1>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let segment = &self.segments.as_slice()[index];
        let [heads, kv_heads] = [self.problem.num_heads, self.problem.num_kv_heads];
        let blind = segment.num_blind_queries();
        let (num_q, num_k) = (segment.num_q() - blind, segment.num_k());
        let q = q.clone().slice([
            segment.q_row..segment.q_row + 1,
            0..heads,
            segment.q.start + blind..segment.q.end,
            0..self.problem.head_dim,
        ]);
        let keys = |tensor: &Tensor<B, 4>, dim: usize| {
            let row = segment.k_row..segment.k_row + 1;
            tensor
                .clone()
                .slice([row, 0..kv_heads, segment.k.clone(), 0..dim])
                .reshape([1, kv_heads, 1, num_k * dim])
                .repeat_dim(2, heads / kv_heads)
                .reshape([1, heads, num_k, dim])
        };
        let k = keys(k, self.problem.head_dim);
        let v = keys(v, self.problem.v_head_dim);
        let scale = self.options.scale_for(self.problem.head_dim);
        let hidden: Vec<bool> = (blind..segment.num_q())
            .flat_map(|t| (0..num_k).map(move |j| !segment.visible_keys(t).contains(&j)))
            .collect();
        let hidden = TensorData::new(hidden, [1, 1, num_q, num_k]);
        let hidden = Tensor::<B, 4, Bool>::from_data(hidden, &q.device());
        let mut scores = q.matmul(k.swap_dims(2, 3)) * scale;
        if let Some(softcap) = self.options.softcap {
            scores = (scores / softcap).tanh() * softcap;
        }
        let scores = scores.mask_fill(hidden, f64::NEG_INFINITY);
        let max = scores.clone().max_dim(3);
        let lse = max.clone() + (scores.clone() - max).exp().sum_dim(3).log();
        let mut weights = match sinks {
            None => softmax(scores, 3),
            Some(sinks) => {
                let sinks = sinks.clone().reshape([1, heads, 1, 1]);
                let all = Tensor::cat(vec![scores, sinks.expand([1, heads, num_q, 1])], 3);
                softmax(all, 3).slice([0..1, 0..heads, 0..num_q, 0..num_k])
            }
        };
        if let Some(dropout) = self.options.dropout {
            weights = weights * self.kept(index, dropout.p, &v);
        }
        (weights.matmul(v), lse.reshape([1, heads, num_q]).detach())
    }

    /// The factors of dropout on a segment's weights, `[1, heads, num_q, num_k]`, found by asking the reference for the
    /// output of values that name their key.
    fn kept<B: Backend>(&self, index: usize, p: f64, like: &Tensor<B, 4>) -> Tensor<B, 4> {
        let segment = &self.segments.as_slice()[index];
        let blind = segment.num_blind_queries();
        let (num_q, num_k) = (segment.num_q(), segment.num_k());
        let own = Segment {
            q_row: 0,
            q: 0..num_q,
            k_row: 0,
            k: 0..num_k,
            causal: false,
            window: None,
            ..segment.clone()
        };
        let heads = self.problem.num_heads;
        let segments = Segments::new(vec![own], (1, num_q), (1, num_k))
            .and_then(|s| s.with_dropout_places(vec![self.segments.places()[index]]))
            .expect("the same lengths");
        let (q, k, v) = ([1, heads, num_q, 1], [1, 1, num_k, 1], [1, 1, num_k, num_k]);
        let problem = AttentionProblem::new(q, k, v, &segments).expect("shapes that fit");
        let names: Vec<f64> = (0..num_k * num_k)
            .map(|cell| {
                if cell / num_k == cell % num_k {
                    1.0
                } else {
                    0.0
                }
            })
            .collect();
        let input = ReferenceInput {
            q: &vec![0.0; heads * num_q],
            k: &vec![0.0; num_k],
            v: &names,
            sinks: None,
        };
        let options = AttentionOptions::new();
        let options = options.with_dropout(self.options.dropout.expect("asked for dropout"));
        let out = reference::attention_forward(input, &problem, &segments, &options).out;
        let factor = |weight: f64| if weight > 0.0 { 1.0 / (1.0 - p) } else { 0.0 };
        let factors: Vec<f64> = (0..heads)
            .flat_map(|head| &out[(head * num_q + blind) * num_k..(head + 1) * num_q * num_k])
            .map(|weight| factor(*weight))
            .collect();
        let shape = [1, heads, num_q - blind, num_k];
        tensor(&factors, shape, like.dtype(), &like.device())
    }

    /// The accuracy rule: an error of at most twice the textbook's, plus 4 eps.
    ///
    /// On a few tokens the textbook is sometimes exact by luck: with nearly all weight on one of two keys it subtracts from
    /// `dout · v` the mean of the very same numbers, where a backward pass that accepts merged outputs subtracts
    /// `dout · out`. So a case that misses the rule is judged by it over [`NUM_DRAWS`] draws of its inputs together.
    pub(crate) fn check_accuracy<B: Tested>(&self, dtype: DType, eps: f64) {
        let mut errors = self.errors::<B>(dtype);
        if errors.iter().all(|error| error.is_within(eps)) {
            return;
        }
        for draw in 1..NUM_DRAWS {
            let more = self.redrawn(draw, dtype).errors::<B>(dtype);
            errors
                .iter_mut()
                .zip(more)
                .for_each(|(error, more)| error.add(&more));
        }
        for error in errors {
            assert!(error.is_within(eps), "{error:?}");
        }
    }

    /// The same case with other inputs.
    fn redrawn(&self, draw: u64, dtype: DType) -> Self {
        let seed = [draw.to_le_bytes(); 4].concat();
        let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let mut case = self.clone();
        let inputs = [&mut case.q, &mut case.k, &mut case.v, &mut case.dout];
        for (values, size) in inputs.into_iter().zip(INPUT_SIZES) {
            *values = normal(&mut rng, values.len(), size);
        }
        case.rounded(dtype)
    }

    /// Squared errors of every result, ours and the textbook's.
    fn errors<B: Tested>(&self, dtype: DType) -> Vec<Errors> {
        let expected = self.expected();
        let actual = self.actual::<B>(dtype);
        let textbook = self.textbook::<B>(dtype);
        let results = [
            ("out", &expected.out, &actual.out, &textbook.out),
            ("lse", &expected.lse, &actual.lse, &textbook.lse),
            ("dq", &expected.dq, &actual.dq, &textbook.dq),
            ("dk", &expected.dk, &actual.dk, &textbook.dk),
            ("dv", &expected.dv, &actual.dv, &textbook.dv),
            ("dsinks", &expected.dsinks, &actual.dsinks, &textbook.dsinks),
        ];
        let errors = results
            .into_iter()
            .map(|(name, expected, actual, textbook)| {
                for (index, (expected, actual)) in expected.iter().zip(actual).enumerate() {
                    let same = actual.is_finite() || actual == expected;
                    assert!(same, "{name}[{index}]: expected {expected}, got {actual}");
                    // Rows without keys: 0 and -inf, exactly.
                    assert_eq!(
                        expected.is_infinite(),
                        actual.is_infinite(),
                        "{name}[{index}]"
                    );
                }
                Errors {
                    name,
                    ours: distance(actual, expected).powi(2),
                    textbook: distance(textbook, expected).powi(2),
                    size: norm(expected).powi(2),
                }
            });
        errors.collect()
    }
}

/// Standard deviations of q, k, v and dout.
const INPUT_SIZES: [f64; 4] = [1.5, 1.0, 1.0, 1.0];

/// Draws of a case's inputs that are judged together where one alone misses the rule.
const NUM_DRAWS: u64 = 16;

/// Squares of what the accuracy rule compares.
#[derive(Debug)]
struct Errors {
    name: &'static str,
    ours: f64,
    textbook: f64,
    size: f64,
}

impl Errors {
    fn is_within(&self, eps: f64) -> bool {
        self.ours.sqrt() <= 2.0 * self.textbook.sqrt() + 4.0 * eps * self.size.sqrt()
    }

    fn add(&mut self, other: &Self) {
        assert_eq!(self.name, other.name);
        self.ours += other.ours;
        self.textbook += other.textbook;
        self.size += other.size;
    }
}

/// Nearly normal values of a standard deviation: sums of three uniforms.
fn normal(rng: &mut TestRng, len: usize, size: f64) -> Vec<f64> {
    (0..len)
        .map(|_| size * (0..3).map(|_| rng.random_range(-1.0..1.0f64)).sum::<f64>())
        .collect()
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Results {
    pub(crate) out: Vec<f64>,
    pub(crate) lse: Vec<f64>,
    pub(crate) dq: Vec<f64>,
    pub(crate) dk: Vec<f64>,
    pub(crate) dv: Vec<f64>,
    pub(crate) dsinks: Vec<f64>,
}

pub(crate) fn tensor<B: Backend, const D: usize>(
    values: &[f64],
    shape: [usize; D],
    dtype: DType,
    device: &B::Device,
) -> Tensor<B, D> {
    let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

pub(crate) fn values<B: Backend, const D: usize>(tensor: &Tensor<B, D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

fn finite(values: &[f64]) -> impl Iterator<Item = f64> {
    values.iter().map(|x| if x.is_finite() { *x } else { 0.0 })
}

pub(crate) fn norm(values: &[f64]) -> f64 {
    finite(values).map(|x| x * x).sum::<f64>().sqrt()
}

pub(crate) fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    finite(a)
        .zip(finite(b))
        .map(|(a, b)| (a - b).powi(2))
        .sum::<f64>()
        .sqrt()
}

/// Largest error relative to the norm of `expected`.
pub(crate) fn relative(actual: &[f64], expected: &[f64]) -> f64 {
    distance(actual, expected) / norm(expected).max(f64::MIN_POSITIVE)
}
