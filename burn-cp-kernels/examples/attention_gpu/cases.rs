//! Inputs.

use std::ops::Range;

use burn::tensor::{
    DType, TensorData,
    backend::Backend,
    ops::{FloatTensor, FloatTensorOps},
};
use burn_cp_kernels::{
    AttentionBackend, AttentionBackwardInput, AttentionInput, AttentionOptions, AttentionOutput,
    AttentionProblem, Segment, Segments, Window,
    reference::{self, ReferenceInput},
};

use crate::Device;

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

/// Packed documents.
pub(crate) fn documents(lengths: &[usize]) -> Segments {
    let mut end = 0;
    let list = lengths.iter().map(|len| {
        end += len;
        causal(end - len..end, end - len..end, 0)
    });
    let list = list.collect();
    let tokens = lengths.iter().sum();
    Segments::new(list, (1, tokens), (1, tokens)).expect("packed documents")
}

/// Named lists of segments that together have every kind of mask and length.
pub(crate) fn lists() -> Vec<(&'static str, Segments)> {
    let full = |segment| Segment {
        causal: false,
        ..segment
    };
    let windowed = |segment, window| Segment {
        window: Some(window),
        ..segment
    };
    let new = |list, q, k| Segments::new(list, (1, q), (1, k)).expect("legal segments");
    vec![
        ("packed", documents(&[1, 37, 0, 100, 64, 193, 5])),
        (
            "lengths",
            new(
                vec![
                    causal(3..103, 0..233, 70),
                    causal(103..143, 240..247, 0),
                    causal(150..278, 250..561, 1000),
                    causal(278..283, 561..561, 0),
                    full(causal(283..300, 570..700, 9)),
                ],
                310,
                703,
            ),
        ),
        (
            "windows, shared keys",
            new(
                vec![
                    windowed(causal(0..300, 10..400, 33), Window::left(100)),
                    windowed(full(causal(300..420, 200..400, 0)), Window::new(30, 9)),
                    causal(420..550, 0..400, 0),
                    windowed(causal(550..551, 0..300, 0), Window::left(0)),
                ],
                560,
                420,
            ),
        ),
    ]
}

/// Lists whose segments are long enough for the kernel that computes all gradients at once.
pub(crate) fn long_lists() -> Vec<(&'static str, Segments)> {
    let shared = vec![
        Segment {
            window: Some(Window::left(300)),
            ..causal(0..600, 10..900, 33)
        },
        Segment {
            causal: false,
            window: Some(Window::new(70, 9)),
            ..causal(600..830, 200..800, 0)
        },
        Segment {
            q_row: 1,
            ..causal(5..640, 0..700, 77)
        },
        Segment {
            q_row: 1,
            k_row: 1,
            ..causal(640..830, 100..901, 1000)
        },
    ];
    let shared = Segments::new(shared, (2, 830), (2, 910)).expect("legal segments");
    vec![
        ("long", documents(&[700, 1, 0, 533, 900])),
        ("long, shared keys, windows, two rows", shared),
    ]
}

/// A call on the host.
pub(crate) struct Case {
    pub(crate) segments: Segments,
    pub(crate) problem: AttentionProblem,
    pub(crate) options: AttentionOptions,
    values: [Vec<f32>; 4],
    sinks: Option<Vec<f32>>,
    pub(crate) dtype: DType,
    /// Segments of calls over parts of the keys, whose results are merged in this dtype.
    pub(crate) parts: Option<([Segments; 2], DType)>,
}

/// Everything that a call returns, on the host.
pub(crate) struct Results {
    pub(crate) all: Vec<(&'static str, Vec<f64>)>,
}

fn noise(seed: u64, len: usize, dtype: DType) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..len)
        .map(|_| uniform() + uniform() + uniform())
        .collect();
    let rounded = TensorData::new(values, [len]).convert_dtype(dtype);
    rounded.iter::<f32>().collect()
}

impl Case {
    pub(crate) fn new(
        segments: Segments,
        heads: (usize, usize),
        dims: (usize, usize),
        options: AttentionOptions,
        dtype: DType,
    ) -> Self {
        let ((batch, tokens), (k_batch, k_tokens)) = (segments.q_shape(), segments.k_shape());
        let q = [batch, heads.0, tokens, dims.0];
        let k = [k_batch, heads.1, k_tokens, dims.0];
        let v = [k_batch, heads.1, k_tokens, dims.1];
        let problem = AttentionProblem::new(q, k, v, &segments).expect("shapes that fit");
        let len = |shape: [usize; 4]| shape.iter().product();
        let values = [
            noise(1, len(q), dtype),
            noise(2, len(k), dtype),
            noise(3, len(v), dtype),
            noise(4, len(problem.out_shape()), dtype),
        ];
        Self {
            segments,
            problem,
            options,
            values,
            sinks: None,
            dtype,
            parts: None,
        }
    }

    pub(crate) fn with_sinks(mut self) -> Self {
        self.sinks = Some(
            (0..self.problem.num_heads)
                .map(|h| h as f32 * 0.5 - 0.5)
                .collect(),
        );
        self
    }

    /// The case with NaN in all rows that no segment names.
    pub(crate) fn poisoned(mut self) -> Self {
        let p = self.problem;
        let named_q: Vec<_> = self
            .segments
            .iter()
            .map(|s| (s.q_row, s.q.clone()))
            .collect();
        let named_k: Vec<_> = self
            .segments
            .iter()
            .map(|s| (s.k_row, s.k.clone()))
            .collect();
        let mut poison = |index: usize, shape: [usize; 4], named: &[(usize, Range<usize>)]| {
            let [_, heads, tokens, dim] = shape;
            for (at, value) in self.values[index].iter_mut().enumerate() {
                let token = at / dim % tokens;
                let batch = at / dim / tokens / heads;
                if !named
                    .iter()
                    .any(|(row, run)| *row == batch && run.contains(&token))
                {
                    *value = f32::NAN;
                }
            }
        };
        poison(0, p.q_shape(), &named_q);
        poison(1, p.k_shape(), &named_k);
        poison(2, p.v_shape(), &named_k);
        poison(3, p.out_shape(), &named_q);
        self
    }

    pub(crate) fn tensors(&self) -> ([FloatTensor<Device>; 4], Option<FloatTensor<Device>>) {
        let device = <Device as burn::tensor::backend::BackendTypes>::Device::default();
        let load = |values: &[f32], shape: Vec<usize>, dtype| {
            let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
            <Device as FloatTensorOps<Device>>::float_from_data(data, &device)
        };
        let p = &self.problem;
        let shapes = [p.q_shape(), p.k_shape(), p.v_shape(), p.out_shape()];
        let tensors = [0, 1, 2, 3].map(|i| load(&self.values[i], shapes[i].into(), self.dtype));
        let sinks = self.sinks.as_ref();
        (
            tensors,
            sinks.map(|sinks| load(sinks, vec![sinks.len()], DType::F32)),
        )
    }

    pub(crate) fn run(&self, backward: bool) -> Results {
        if let Some((parts, merged)) = &self.parts {
            return self.run_in_parts(parts, *merged);
        }
        let ([q, k, v, dout], sinks) = self.tensors();
        let input = AttentionInput::new(q.clone(), k.clone(), v.clone());
        let input = input.with_sinks(sinks.clone());
        let AttentionOutput { out, lse, .. } =
            Device::attention_forward(input, &self.segments, &self.options);
        let mut all = vec![("out", read(out.clone())), ("lse", read(lse.clone()))];
        if backward {
            let input = AttentionBackwardInput::new(q, k, v, out, lse, dout).with_sinks(sinks);
            let grads = Device::attention_backward(input, &self.segments, &self.options);
            all.push(("dq", read(grads.dq)));
            all.push(("dk", read(grads.dk)));
            all.push(("dv", read(grads.dv)));
            all.extend(grads.dsinks.map(|dsinks| ("dsinks", read(dsinks))));
        }
        Results { all }
    }

    /// The case without softcap and dropout, which the textbook does not know.
    pub(crate) fn plain(&self) -> Self {
        let mut plain = AttentionOptions::new();
        plain.scale = self.options.scale;
        Self {
            segments: self.segments.clone(),
            problem: self.problem,
            options: plain,
            values: self.values.clone(),
            sinks: self.sinks.clone(),
            dtype: self.dtype,
            parts: None,
        }
    }

    /// Attention as a textbook writes it, every number in f32, on the host. For a [`Self::plain`] case.
    pub(crate) fn textbook(&self) -> Results {
        let p = &self.problem;
        let [q, k, v, dout] = &self.values;
        let mut out = vec![0.0f32; p.out_shape().iter().product()];
        let mut lse = vec![f32::NEG_INFINITY; p.lse_shape().iter().product()];
        let mut dq = vec![0.0f32; q.len()];
        let (mut dk, mut dv) = (vec![0.0f32; k.len()], vec![0.0f32; v.len()]);
        let mut dsinks = vec![0.0f32; p.num_heads];
        let (d, e) = (p.head_dim, p.v_head_dim);
        let scale = self.options.scale_for(d) as f32;
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        for (s, head) in self
            .segments
            .iter()
            .flat_map(|s| (0..p.num_heads).map(move |h| (s, h)))
        {
            for t in s.num_blind_queries()..s.num_q() {
                let row = (s.q_row * p.num_heads + head) * p.q_tokens + s.q.start + t;
                let first = (s.k_row * p.num_kv_heads + head / p.group()) * p.k_tokens + s.k.start;
                let keys: Vec<usize> = s.visible_keys(t).map(|j| first + j).collect();
                let query = &q[row * d..(row + 1) * d];
                let scores = keys
                    .iter()
                    .map(|key| scale * dot(query, &k[key * d..(key + 1) * d]));
                let scores: Vec<f32> = scores.collect();
                let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = scores.iter().map(|score| (score - max).exp()).sum();
                lse[row] = max + sum.ln();
                let sink = self
                    .sinks
                    .as_ref()
                    .map_or(0.0, |sinks| (sinks[head] - max).exp());
                let grad = &dout[row * e..(row + 1) * e];
                let weights = scores
                    .iter()
                    .map(|score| (score - max).exp() / (sum + sink));
                let weights: Vec<f32> = weights.collect();
                let dp = keys.iter().map(|key| dot(grad, &v[key * e..(key + 1) * e]));
                let dp: Vec<f32> = dp.collect();
                let delta = dot(&weights, &dp);
                dsinks[head] -= sink / (sum + sink) * delta;
                for ((key, weight), dp) in keys.iter().zip(&weights).zip(&dp) {
                    let ds = scale * weight * (dp - delta);
                    for x in 0..e {
                        out[row * e + x] += weight * v[key * e + x];
                        dv[key * e + x] += weight * grad[x];
                    }
                    for x in 0..d {
                        dq[row * d + x] += ds * k[key * d + x];
                        dk[key * d + x] += ds * query[x];
                    }
                }
            }
        }
        let mut all = vec![
            ("out", out),
            ("lse", lse),
            ("dq", dq),
            ("dk", dk),
            ("dv", dv),
        ];
        if self.sinks.is_some() {
            all.push(("dsinks", dsinks));
        }
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
        Results {
            all: all
                .into_iter()
                .map(|(name, values)| (name, wide(values)))
                .collect(),
        }
    }

    pub(crate) fn expected(&self) -> Results {
        let wide = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let [q, k, v, dout] = self.values.each_ref().map(|values| wide(values));
        let sinks = self.sinks.as_ref().map(|sinks| wide(sinks));
        let input = ReferenceInput {
            q: &q,
            k: &k,
            v: &v,
            sinks: sinks.as_deref(),
        };
        let (p, s, o) = (&self.problem, &self.segments, &self.options);
        let output = reference::attention_forward(input, p, s, o);
        let grads = reference::attention_backward(input, &dout, p, s, o);
        let mut all = vec![("out", output.out), ("lse", output.lse)];
        all.extend([("dq", grads.dq), ("dk", grads.dk), ("dv", grads.dv)]);
        if self.sinks.is_some() {
            all.push(("dsinks", grads.dsinks));
        }
        Results { all }
    }
}

/// The numbers of a tensor.
pub(crate) fn read(tensor: FloatTensor<Device>) -> Vec<f64> {
    let data = <Device as FloatTensorOps<Device>>::float_into_data(tensor);
    let data = burn::tensor::try_read_sync(data)
        .and_then(Result::ok)
        .expect("a readable tensor");
    data.iter::<f64>().collect()
}

/// Waits for the device.
pub(crate) fn sync() {
    Device::sync(&Default::default()).expect("a device without errors");
}
