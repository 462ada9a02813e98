//! The reference: each document alone, with nothing of burn-cp. It multiplies where it could divide, since Burn rounds the
//! gradient of a division by a scalar to f32.

use burn::{
    optim::GradientsParams,
    tensor::{
        Bool, Int, Tensor, TensorData,
        activation::{log_softmax, softmax},
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    Document, IGNORED, Outcome, SEED,
    decoder::{Decoder, HEAD_DIM, NUM_HEADS, THETA, VOCAB},
    read,
};

/// Rotates `[1, heads, tokens, head_dim]` by the tokens' places in their document.
fn rotate<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let [_, _, tokens, head_dim] = x.dims();
    let half = head_dim / 2;
    let angle =
        |i: usize| (i / half) as f64 * THETA.powf(-2.0 * (i % half) as f64 / head_dim as f64);
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f64> = (0..tokens * half).map(|i| f(angle(i))).collect();
        Tensor::<B, 4>::from_data(
            TensorData::new(values, [1, 1, tokens, half]),
            (&x.device(), x.dtype()),
        )
    };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let (a, b) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
    let first = a.clone() * cos.clone() - b.clone() * sin.clone();
    Tensor::cat(vec![first, b * cos + a * sin], 3)
}

/// Each head of `[1, kv heads, tokens, head_dim]` as often as it has query heads.
fn repeated<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let [_, num_heads, tokens, head_dim] = x.dims();
    let groups = NUM_HEADS / num_heads;
    x.reshape([num_heads, 1, tokens, head_dim])
        .repeat_dim(1, groups)
        .reshape([1, NUM_HEADS, tokens, head_dim])
}

fn plain_attention<B: Backend>([q, k, v]: [Tensor<B, 4>; 3]) -> Tensor<B, 4> {
    let tokens = q.dims()[2];
    let (k, v) = (repeated(k), repeated(v));
    let scores = q
        .matmul(k.transpose())
        .mul_scalar((HEAD_DIM as f64).powf(-0.5));
    let hidden: Vec<bool> = (0..tokens * tokens)
        .map(|i| i % tokens > i / tokens)
        .collect();
    let hidden = Tensor::<B, 4, Bool>::from_data(
        TensorData::new(hidden, [1, 1, tokens, tokens]),
        &v.device(),
    );
    let hidden = hidden.expand([1, NUM_HEADS, tokens, tokens]);
    softmax(scores.mask_fill(hidden, f64::NEG_INFINITY), 3).matmul(v)
}

/// The sum of the losses of one document's labels; `None` without any.
fn plain_loss<B: Backend>(model: &Decoder<B>, document: &Document) -> Option<Tensor<B, 1>> {
    let device = B::Device::default();
    let tokens = document.ids.len();
    let labelled: Vec<i64> = (0..tokens)
        .filter(|&i| document.labels[i] != IGNORED)
        .map(|i| i as i64)
        .collect();
    if labelled.is_empty() {
        return None;
    }
    let targets: Vec<i64> = labelled
        .iter()
        .map(|&i| document.labels[i as usize])
        .collect();
    let ids =
        Tensor::<B, 2, Int>::from_data(TensorData::new(document.ids.clone(), [1, tokens]), &device);
    let mut hidden = model.embedding.forward(ids);
    for block in &model.blocks {
        let [q, k, v] = block.heads(&hidden);
        hidden = block.rest(hidden, plain_attention([rotate(q), rotate(k), v]));
    }
    let logits = model.head(hidden).reshape([tokens, VOCAB]);
    let num = labelled.len();
    let rows = Tensor::<B, 1, Int>::from_data(TensorData::new(labelled, [num]), &device);
    let targets = Tensor::<B, 2, Int>::from_data(TensorData::new(targets, [num, 1]), &device);
    Some(
        log_softmax(logits.select(0, rows), 1)
            .gather(1, targets)
            .sum()
            .neg(),
    )
}

/// Loss and gradients of the mean over the labels of all documents.
pub(super) fn alone<B: AutodiffBackend>(documents: &[Document]) -> Outcome {
    let model = Decoder::<B>::new(SEED);
    let num_labels = documents
        .iter()
        .flat_map(|document| &document.labels)
        .filter(|label| **label != IGNORED)
        .count();
    let losses = documents
        .iter()
        .filter_map(|document| plain_loss(&model, document));
    let sum = losses
        .reduce(|sum, loss| sum + loss)
        .expect("some document has a label");
    let loss = sum.mul_scalar(1.0 / num_labels as f64);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let loss = loss.into_data().iter::<f64>().next().expect("one number");
    Outcome {
        loss,
        grads: read::<B, _>(&model, &grads),
    }
}
