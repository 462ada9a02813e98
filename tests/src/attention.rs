//! Attention over whole sequences, twice: in plain `f64`, and as a textbook writes it in Burn's tensor operations.
//!
//! Both start from documents and a dense mask and share no code with burn-cp or its kernels.

use std::ops::Range;

use burn::tensor::{
    Bool, DType, Tensor, TensorData,
    activation::softmax,
    backend::{AutodiffBackend, Backend},
};
use burn_cp::{layout::Documents, plan::MaskKind};

use crate::host::floats;

/// Sizes of an attention call.
#[derive(Debug, Clone, Copy)]
pub struct Problem {
    /// Rows.
    pub batch: usize,
    /// Heads of the queries.
    pub num_heads: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Tokens of a row.
    pub tokens: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub v_head_dim: usize,
    /// Factor of the scores; `None`: `1/sqrt(head_dim)`.
    pub scale: Option<f64>,
}

impl Problem {
    /// Shapes of q, k, v and out.
    pub fn shapes(&self) -> [[usize; 4]; 4] {
        let shape = |heads, width| [self.batch, heads, self.tokens, width];
        [
            shape(self.num_heads, self.head_dim),
            shape(self.num_kv_heads, self.head_dim),
            shape(self.num_kv_heads, self.v_head_dim),
            shape(self.num_heads, self.v_head_dim),
        ]
    }

    fn scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt())
    }
}

/// What attention gives, and its gradients under a given gradient of `out`. Row-major values.
#[derive(Debug, Clone)]
pub struct Attention {
    /// `[batch, num_heads, tokens, v_head_dim]`, 0 where nothing is seen.
    pub out: Vec<f64>,
    /// `[batch, num_heads, tokens]`, −∞ where nothing is seen.
    pub lse: Vec<f64>,
    /// Gradient of q.
    pub dq: Vec<f64>,
    /// Gradient of k.
    pub dk: Vec<f64>,
    /// Gradient of v.
    pub dv: Vec<f64>,
}

/// Which key each query sees, `[batch][query · tokens + key]`, from the definition: both are real tokens of one document, and their
/// places among its real tokens suit the mask.
pub fn visible(documents: &Documents, mask: MaskKind) -> Vec<Vec<bool>> {
    let tokens = documents.seq_len();
    let see = |row: usize| {
        let mut place = vec![None; tokens];
        for (index, document) in documents.row(row).iter().enumerate() {
            for (position, token) in document.runs.iter().cloned().flatten().enumerate() {
                place[token] = Some((index, position));
            }
        }
        let sees = |query: usize, key: usize| match (place[query], place[key]) {
            (Some((a, q)), Some((b, k))) => a == b && suits(documents, mask, (row, a), (q, k)),
            _ => false,
        };
        (0..tokens * tokens)
            .map(|pair| sees(pair / tokens, pair % tokens))
            .collect()
    };
    (0..documents.batch_size()).map(see).collect()
}

/// Whether the token at position `q` of a document sees the one at position `k`.
fn suits(
    documents: &Documents,
    mask: MaskKind,
    (row, document): (usize, usize),
    (q, k): (usize, usize),
) -> bool {
    let holds_both = |tokens: &Range<usize>| tokens.contains(&q) && tokens.contains(&k);
    match mask {
        MaskKind::Full => true,
        MaskKind::Causal { window } => k <= q && window.is_none_or(|window| q - k <= window),
        MaskKind::CausalWithSpans { .. } => {
            k <= q || documents.spans(row, document).iter().any(holds_both)
        }
        MaskKind::Prefix { .. } => k <= q || holds_both(&(0..documents.prefix(row, document))),
        MaskKind::PerDocument { .. } => {
            let own = documents.mask(row, document).expect("masks of documents");
            suits(documents, own, (row, document), (q, k))
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(into: &mut [f64], factor: f64, from: &[f64]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into += factor * from;
    }
}

/// Attention and gradients in `f64`, one query at a time.
pub fn attention_in_f64(
    problem: &Problem,
    [q, k, v, dout]: [&[f64]; 4],
    visible: &[Vec<bool>],
) -> Attention {
    let [q_len, k_len, v_len, out_len] = problem
        .shapes()
        .map(|shape| shape.iter().product::<usize>());
    let &Problem {
        batch,
        num_heads,
        num_kv_heads,
        tokens,
        head_dim: d,
        v_head_dim: e,
        ..
    } = problem;
    let mut result = Attention {
        out: vec![0.0; out_len],
        lse: vec![f64::NEG_INFINITY; batch * num_heads * tokens],
        dq: vec![0.0; q_len],
        dk: vec![0.0; k_len],
        dv: vec![0.0; v_len],
    };
    let scale = problem.scale();
    for index in 0..batch * num_heads * tokens {
        let (row, head, token) = (
            index / tokens / num_heads,
            index / tokens % num_heads,
            index % tokens,
        );
        let first_key = (row * num_kv_heads + head / (num_heads / num_kv_heads)) * tokens;
        let keys: Vec<usize> = (0..tokens)
            .filter(|key| visible[row][token * tokens + key])
            .map(|key| first_key + key)
            .collect();
        if keys.is_empty() {
            continue;
        }
        let query = &q[index * d..][..d];
        let scores: Vec<f64> = keys
            .iter()
            .map(|key| scale * dot(query, &k[key * d..][..d]))
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        result.lse[index] = max + sum.ln();
        let p: Vec<f64> = scores
            .iter()
            .map(|score| (score - max).exp() / sum)
            .collect();
        let dout = &dout[index * e..][..e];
        let dp: Vec<f64> = keys
            .iter()
            .map(|key| dot(dout, &v[key * e..][..e]))
            .collect();
        let delta = dot(&p, &dp);
        for ((key, p), dp) in keys.iter().zip(&p).zip(&dp) {
            let ds = scale * p * (dp - delta);
            add(&mut result.out[index * e..][..e], *p, &v[key * e..][..e]);
            add(&mut result.dv[key * e..][..e], *p, dout);
            add(&mut result.dq[index * d..][..d], ds, &k[key * d..][..d]);
            add(&mut result.dk[key * d..][..d], ds, query);
        }
    }
    result
}

/// Attention as a textbook writes it: all scores, a mask, a softmax; gradients by autodiff.
pub fn attention_in_tensor_ops<B: AutodiffBackend>(
    problem: &Problem,
    inputs: [&[f64]; 4],
    visible: &[Vec<bool>],
    dtype: DType,
) -> Attention {
    let device = B::Device::default();
    let shapes = problem.shapes();
    let [q, k, v, dout]: [Tensor<B, 4>; 4] = std::array::from_fn(|i| {
        Tensor::from_data(
            TensorData::new(inputs[i].to_vec(), shapes[i]),
            (&device, dtype),
        )
    });
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let &Problem {
        batch,
        num_heads,
        num_kv_heads,
        tokens,
        ..
    } = problem;
    let hidden: Vec<bool> = visible.iter().flatten().map(|visible| !visible).collect();
    let hidden = Tensor::<B, 4, Bool>::from_data(
        TensorData::new(hidden, [batch, 1, tokens, tokens]),
        &device,
    );
    let hidden = hidden.expand([batch, num_heads, tokens, tokens]);
    let repeat = |x: Tensor<B, 4>| {
        let width = x.dims()[3];
        x.reshape([batch, num_kv_heads, 1, tokens, width])
            .expand([batch, num_kv_heads, num_heads / num_kv_heads, tokens, width])
            .reshape([batch, num_heads, tokens, width])
    };
    let scores = q
        .clone()
        .matmul(repeat(k.clone()).swap_dims(2, 3))
        .mul_scalar(problem.scale());
    // A large finite number: a query that sees nothing must not become NaN.
    let scores = scores.mask_fill(hidden.clone(), -1e30);
    // Zeroes the uniform weights of queries that see nothing, and nothing else.
    let weights = softmax(scores.clone(), 3).mask_fill(hidden, 0.0);
    let out = weights.matmul(repeat(v.clone()));
    let grads = (out.clone() * dout).sum().backward();
    let grad = |tensor: &Tensor<B, 4>| floats(&tensor.grad(&grads).expect("a leaf of the loss"));
    let scores = scores.inner();
    let max = scores.clone().max_dim(3);
    let lse = (scores - max.clone()).exp().sum_dim(3).log() + max;
    Attention {
        lse: lse_values(lse, visible, problem),
        out: floats(&out),
        dq: grad(&q),
        dk: grad(&k),
        dv: grad(&v),
    }
}

fn lse_values<B: Backend>(lse: Tensor<B, 4>, visible: &[Vec<bool>], problem: &Problem) -> Vec<f64> {
    let tokens = problem.tokens;
    let sees = |index: usize| {
        let (row, token) = (index / tokens / problem.num_heads, index % tokens);
        visible[row][token * tokens..][..tokens].contains(&true)
    };
    let values = floats(&lse).into_iter().enumerate();
    values
        .map(|(index, value)| {
            if sees(index) {
                value
            } else {
                f64::NEG_INFINITY
            }
        })
        .collect()
}
