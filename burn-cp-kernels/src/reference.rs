//! Plain attention over segments in f64 on host slices, with gradients: what the routines are
//! tested against. Slow, and written for clarity: one query row at a time, all its scores at once.
//!
//! Buffers are row-major with the shapes of [`AttentionProblem`].

use crate::definition::{AttentionOptions, AttentionProblem, DropoutPlace, Segment, Segments};

/// Queries, keys, values and, where there are any, sinks, as slices.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceInput<'a> {
    /// `[q_batch, num_heads, q_tokens, head_dim]`
    pub q: &'a [f64],
    /// `[k_batch, num_kv_heads, k_tokens, head_dim]`
    pub k: &'a [f64],
    /// `[k_batch, num_kv_heads, k_tokens, v_head_dim]`
    pub v: &'a [f64],
    /// `[num_heads]`
    pub sinks: Option<&'a [f64]>,
}

/// Output of [`attention_forward`].
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceOutput {
    /// `[q_batch, num_heads, q_tokens, v_head_dim]`
    pub out: Vec<f64>,
    /// `[q_batch, num_heads, q_tokens]`, natural log, without the sink
    pub lse: Vec<f64>,
}

/// Output of [`attention_backward`].
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceGradients {
    /// `[q_batch, num_heads, q_tokens, head_dim]`
    pub dq: Vec<f64>,
    /// `[k_batch, num_kv_heads, k_tokens, head_dim]`
    pub dk: Vec<f64>,
    /// `[k_batch, num_kv_heads, k_tokens, v_head_dim]`
    pub dv: Vec<f64>,
    /// `[num_heads]`, or empty without sinks
    pub dsinks: Vec<f64>,
}

/// Attention of every segment.
///
/// # Panics
///
/// If a slice is shorter than its shape in `problem`.
#[must_use]
pub fn attention_forward(
    input: ReferenceInput<'_>,
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> ReferenceOutput {
    let mut output = ReferenceOutput {
        out: vec![0.0; problem.out_shape().iter().product()],
        lse: vec![f64::NEG_INFINITY; problem.lse_shape().iter().product()],
    };
    for_each_row(input, problem, segments, options, |row| {
        output.lse[row.index] = row.lse;
        let out = vector_mut(&mut output.out, row.index, problem.v_head_dim);
        for (weight, key) in row.weights().zip(row.keys()) {
            accumulate(out, weight, vector(input.v, key, problem.v_head_dim));
        }
    });
    output
}

/// Gradients of [`attention_forward`] under the gradient `dout` of its output.
///
/// # Panics
///
/// If a slice is shorter than its shape in `problem`.
#[must_use]
pub fn attention_backward(
    input: ReferenceInput<'_>,
    dout: &[f64],
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> ReferenceGradients {
    let mut grads = ReferenceGradients {
        dq: vec![0.0; problem.q_shape().iter().product()],
        dk: vec![0.0; problem.k_shape().iter().product()],
        dv: vec![0.0; problem.v_shape().iter().product()],
        dsinks: vec![0.0; input.sinks.map_or(0, <[f64]>::len)],
    };
    let (dim, v_dim) = (problem.head_dim, problem.v_head_dim);
    let scale = options.scale_for(dim);
    for_each_row(input, problem, segments, options, |row| {
        let dout = vector(dout, row.index, v_dim);
        let dp: Vec<f64> = row
            .keys()
            .zip(&row.factors)
            .map(|(key, factor)| factor * dot(dout, vector(input.v, key, v_dim)))
            .collect();
        let delta = dot(&row.probabilities, &dp);
        if input.sinks.is_some() {
            grads.dsinks[row.head] -= row.sink_probability * delta;
        }
        for (index, key) in row.keys().enumerate() {
            let ds = scale * row.slopes[index] * row.probabilities[index] * (dp[index] - delta);
            let weight = row.probabilities[index] * row.factors[index];
            accumulate(vector_mut(&mut grads.dv, key, v_dim), weight, dout);
            accumulate(
                vector_mut(&mut grads.dq, row.index, dim),
                ds,
                vector(input.k, key, dim),
            );
            accumulate(
                vector_mut(&mut grads.dk, key, dim),
                ds,
                vector(input.q, row.index, dim),
            );
        }
    });
    grads
}

/// One query row of one head that sees at least one key.
struct Row {
    /// Index of the query vector, counting over batch, head and token.
    index: usize,
    /// Index of the first key vector that it sees, counting likewise.
    first_key: usize,
    head: usize,
    /// Softmax over the visible keys and the sink.
    probabilities: Vec<f64>,
    sink_probability: f64,
    /// Derivatives of the scores by the scaled products: less than 1 under a softcap.
    slopes: Vec<f64>,
    /// Dropout.
    factors: Vec<f64>,
    lse: f64,
}

impl Row {
    fn keys(&self) -> std::ops::Range<usize> {
        self.first_key..self.first_key + self.probabilities.len()
    }

    fn weights(&self) -> impl Iterator<Item = f64> {
        self.probabilities
            .iter()
            .zip(&self.factors)
            .map(|(p, factor)| p * factor)
    }
}

fn for_each_row(
    input: ReferenceInput<'_>,
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
    mut visit: impl FnMut(Row),
) {
    for (segment, place) in segments.iter().zip(segments.places()) {
        for head in 0..problem.num_heads {
            for t in 0..segment.num_q() {
                let place = Place {
                    segment,
                    place: *place,
                    head,
                    t,
                };
                if let Some(row) = place.row(input, problem, options) {
                    visit(row);
                }
            }
        }
    }
}

struct Place<'a> {
    segment: &'a Segment,
    place: DropoutPlace,
    head: usize,
    t: usize,
}

impl Place<'_> {
    fn row(
        &self,
        input: ReferenceInput<'_>,
        problem: &AttentionProblem,
        options: &AttentionOptions,
    ) -> Option<Row> {
        let &Self {
            segment,
            place,
            head,
            t,
        } = self;
        let visible = segment.visible_keys(t);
        if visible.is_empty() {
            return None;
        }
        let index =
            (segment.q_row * problem.num_heads + head) * problem.q_tokens + segment.q.start + t;
        let kv_head = head / problem.group();
        let first_key = (segment.k_row * problem.num_kv_heads + kv_head) * problem.k_tokens
            + segment.k.start
            + visible.start;
        let dim = problem.head_dim;
        let scale = options.scale_for(dim);
        let query = vector(input.q, index, dim);
        let capped = |score: f64| {
            options
                .softcap
                .map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f64> = (first_key..first_key + visible.len())
            .map(|key| capped(scale * dot(query, vector(input.k, key, dim))))
            .collect();
        let slope = |score: f64| {
            options
                .softcap
                .map_or(1.0, |cap| 1.0 - (score / cap).powi(2))
        };
        let row = options
            .dropout
            .map(|dropout| dropout.row(segment, place, head, t));
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        let sink = input.sinks.map_or(0.0, |sinks| (sinks[head] - max).exp());
        Some(Row {
            index,
            first_key,
            head,
            probabilities: scores
                .iter()
                .map(|s| (s - max).exp() / (sum + sink))
                .collect(),
            sink_probability: sink / (sum + sink),
            slopes: scores.iter().map(|s| slope(*s)).collect(),
            factors: visible
                .map(|j| row.map_or(1.0, |row| row.factor(j)))
                .collect(),
            lse: max + sum.ln(),
        })
    }
}

fn vector(buffer: &[f64], index: usize, dim: usize) -> &[f64] {
    &buffer[index * dim..(index + 1) * dim]
}

fn vector_mut(buffer: &mut [f64], index: usize, dim: usize) -> &mut [f64] {
    &mut buffer[index * dim..(index + 1) * dim]
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn accumulate(into: &mut [f64], factor: f64, from: &[f64]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into += factor * from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::{Dropout, Window};

    /// Numbers in -1..1 from a linear congruential generator.
    fn noise(seed: u64, len: usize) -> Vec<f64> {
        let mut state = seed;
        (0..len)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
            })
            .collect()
    }

    fn segment(q: std::ops::Range<usize>, k: std::ops::Range<usize>) -> Segment {
        Segment {
            q_row: 0,
            q,
            k_row: 0,
            k,
            k_position: 0,
            causal: true,
            window: None,
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        let windowed = Segment {
            window: Some(Window::left(1)),
            ..segment(4..7, 0..4)
        };
        let full = Segment {
            q_row: 1,
            causal: false,
            ..segment(1..3, 2..6)
        };
        let both = Segment {
            window: Some(Window::new(1, 1)),
            q: 3..7,
            ..full.clone()
        };
        let list = vec![segment(0..4, 1..3), windowed, full, both];
        let segments = Segments::new(list, (2, 7), (1, 6)).unwrap();
        let shapes = ([2, 4, 7, 3], [1, 2, 6, 3], [1, 2, 6, 2]);
        let problem = AttentionProblem::new(shapes.0, shapes.1, shapes.2, &segments).unwrap();
        let plain = AttentionOptions::new().with_scale(0.7);
        let all = plain
            .clone()
            .with_softcap(0.8)
            .with_dropout(Dropout::new(0.3, 5));
        for (options, num_sinks) in [(plain, 0), (all, 4)] {
            check_gradients(&problem, &segments, &options, num_sinks);
        }
    }

    fn check_gradients(
        problem: &AttentionProblem,
        segments: &Segments,
        options: &AttentionOptions,
        num_sinks: usize,
    ) {
        let len = |shape: [usize; 4]| shape.iter().product::<usize>();
        let mut inputs = [
            noise(1, len(problem.q_shape())),
            noise(2, len(problem.k_shape())),
            noise(3, len(problem.v_shape())),
            noise(5, num_sinks),
        ];
        let dout = noise(4, len(problem.out_shape()));
        let loss = |inputs: &[Vec<f64>; 4]| {
            let output = attention_forward(input(inputs), problem, segments, options);
            dot(&output.out, &dout)
        };
        let grads = attention_backward(input(&inputs), &dout, problem, segments, options);
        let grads = [grads.dq, grads.dk, grads.dv, grads.dsinks];
        let step = 1e-5;
        for which in 0..4 {
            for index in 0..inputs[which].len() {
                let value = inputs[which][index];
                inputs[which][index] = value + step;
                let above = loss(&inputs);
                inputs[which][index] = value - step;
                let below = loss(&inputs);
                inputs[which][index] = value;
                let numeric = (above - below) / (2.0 * step);
                let error = (numeric - grads[which][index]).abs();
                assert!(error < 1e-8, "input {which}, element {index}: {error}");
            }
        }
    }

    fn input([q, k, v, sinks]: &[Vec<f64>; 4]) -> ReferenceInput<'_> {
        let sinks = (!sinks.is_empty()).then_some(&sinks[..]);
        ReferenceInput { q, k, v, sinks }
    }

    #[test]
    fn rows_without_keys_are_empty() {
        let segments = Segments::new(vec![segment(0..3, 0..1)], (1, 4), (1, 1)).unwrap();
        let problem =
            AttentionProblem::new([1, 1, 4, 1], [1, 1, 1, 1], [1, 1, 1, 1], &segments).unwrap();
        let inputs = [vec![2.0; 4], vec![3.0], vec![5.0], vec![]];
        let options = AttentionOptions::new();
        let output = attention_forward(input(&inputs), &problem, &segments, &options);
        let inf = f64::NEG_INFINITY;
        assert_eq!(output.out, [0.0, 0.0, 5.0, 0.0]);
        assert_eq!(output.lse, [inf, inf, 6.0, inf]);
    }
}
