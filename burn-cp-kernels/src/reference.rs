//! Plain attention over segments in f64 on host slices, with gradients: what the routines are
//! tested against. Slow, and written for clarity: one query row at a time, all its scores at once.
//!
//! Buffers are row-major with the shapes of [`AttentionProblem`].

use crate::definition::{AttentionOptions, AttentionProblem, Segment, Segments};

/// Output of [`attention_forward`].
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceOutput {
    /// `[q_batch, num_heads, q_tokens, v_head_dim]`
    pub out: Vec<f64>,
    /// `[q_batch, num_heads, q_tokens]`, natural log
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
}

/// Attention of every segment.
///
/// # Panics
///
/// If a slice is shorter than its shape in `problem`.
#[must_use]
pub fn attention_forward(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> ReferenceOutput {
    let mut output = ReferenceOutput {
        out: vec![0.0; problem.out_shape().iter().product()],
        lse: vec![f64::NEG_INFINITY; problem.lse_shape().iter().product()],
    };
    for_each_row(q, k, problem, segments, options, |row| {
        output.lse[row.index] = row.lse;
        let out = vector_mut(&mut output.out, row.index, problem.v_head_dim);
        for (p, key) in row.probabilities.iter().zip(row.keys()) {
            accumulate(out, *p, vector(v, key, problem.v_head_dim));
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
    [q, k, v]: [&[f64]; 3],
    dout: &[f64],
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
) -> ReferenceGradients {
    let mut grads = ReferenceGradients {
        dq: vec![0.0; problem.q_shape().iter().product()],
        dk: vec![0.0; problem.k_shape().iter().product()],
        dv: vec![0.0; problem.v_shape().iter().product()],
    };
    let (dim, v_dim) = (problem.head_dim, problem.v_head_dim);
    let scale = options.scale_for(dim);
    for_each_row(q, k, problem, segments, options, |row| {
        let dout = vector(dout, row.index, v_dim);
        let dp: Vec<f64> = row
            .keys()
            .map(|key| dot(dout, vector(v, key, v_dim)))
            .collect();
        let delta = dot(&row.probabilities, &dp);
        for ((p, dp), key) in row.probabilities.iter().zip(&dp).zip(row.keys()) {
            let ds = scale * p * (dp - delta);
            accumulate(vector_mut(&mut grads.dv, key, v_dim), *p, dout);
            accumulate(
                vector_mut(&mut grads.dq, row.index, dim),
                ds,
                vector(k, key, dim),
            );
            accumulate(
                vector_mut(&mut grads.dk, key, dim),
                ds,
                vector(q, row.index, dim),
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
    probabilities: Vec<f64>,
    lse: f64,
}

impl Row {
    fn keys(&self) -> std::ops::Range<usize> {
        self.first_key..self.first_key + self.probabilities.len()
    }
}

fn for_each_row(
    q: &[f64],
    k: &[f64],
    problem: &AttentionProblem,
    segments: &Segments,
    options: &AttentionOptions,
    mut visit: impl FnMut(Row),
) {
    for segment in segments {
        for head in 0..problem.num_heads {
            for t in 0..segment.num_q() {
                if let Some(row) = row(q, k, problem, options, segment, [head, t]) {
                    visit(row);
                }
            }
        }
    }
}

fn row(
    q: &[f64],
    k: &[f64],
    problem: &AttentionProblem,
    options: &AttentionOptions,
    segment: &Segment,
    [head, t]: [usize; 2],
) -> Option<Row> {
    let visible = segment.visible_keys(t);
    if visible.is_empty() {
        return None;
    }
    let index = (segment.q_row * problem.num_heads + head) * problem.q_tokens + segment.q.start + t;
    let kv_head = head / problem.group();
    let first_key = (segment.k_row * problem.num_kv_heads + kv_head) * problem.k_tokens
        + segment.k.start
        + visible.start;
    let dim = problem.head_dim;
    let scale = options.scale_for(dim);
    let query = vector(q, index, dim);
    let scores: Vec<f64> = (first_key..first_key + visible.len())
        .map(|key| scale * dot(query, vector(k, key, dim)))
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    Some(Row {
        index,
        first_key,
        probabilities: scores.iter().map(|s| (s - max).exp() / sum).collect(),
        lse: max + sum.ln(),
    })
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
            window: Some(1),
            ..segment(4..7, 0..4)
        };
        let full = Segment {
            q_row: 1,
            causal: false,
            ..segment(1..3, 2..6)
        };
        let list = vec![segment(0..4, 1..3), windowed, full];
        let segments = Segments::new(list, (2, 7), (1, 6)).unwrap();
        let shapes = ([2, 4, 7, 3], [1, 2, 6, 3], [1, 2, 6, 2]);
        let problem = AttentionProblem::new(shapes.0, shapes.1, shapes.2, &segments).unwrap();
        let options = AttentionOptions::new().with_scale(0.7);
        let len = |shape: [usize; 4]| shape.iter().product::<usize>();
        let mut inputs = [
            noise(1, len(shapes.0)),
            noise(2, len(shapes.1)),
            noise(3, len(shapes.2)),
        ];
        let dout = noise(4, len(problem.out_shape()));
        let loss = |[q, k, v]: &[Vec<f64>; 3]| {
            let output = attention_forward(q, k, v, &problem, &segments, &options);
            dot(&output.out, &dout)
        };
        let [q, k, v] = &inputs;
        let grads = attention_backward([q, k, v], &dout, &problem, &segments, &options);
        let grads = [grads.dq, grads.dk, grads.dv];
        let step = 1e-5;
        for which in 0..3 {
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

    #[test]
    fn rows_without_keys_are_empty() {
        let segments = Segments::new(vec![segment(0..3, 0..1)], (1, 4), (1, 1)).unwrap();
        let problem =
            AttentionProblem::new([1, 1, 4, 1], [1, 1, 1, 1], [1, 1, 1, 1], &segments).unwrap();
        let (q, k, v) = (vec![2.0; 4], vec![3.0], vec![5.0]);
        let options = AttentionOptions::new();
        let output = attention_forward(&q, &k, &v, &problem, &segments, &options);
        let inf = f64::NEG_INFINITY;
        assert_eq!(output.out, [0.0, 0.0, 5.0, 0.0]);
        assert_eq!(output.lse, [inf, inf, 6.0, inf]);
    }
}
