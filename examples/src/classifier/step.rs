//! Training the stock classifier and asking it, as README shows it.

// README begins.
use std::{error::Error, slice::from_ref};

use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module},
    optim::{AdamConfig, GradientsParams, Optimizer},
    tensor::{Tensor, TensorData, backend::Backend},
};
use burn_cp::{
    batch::SequenceBatch,
    comm,
    launch::{self, LaunchError},
    layout::{Documents, LayoutError},
    mesh::DeviceMesh,
    nn::check_parameters,
    optim::sync_gradients,
    sharder::{ContextParallel, ContextParallelConfig, Coordinates},
};

type B = Autodiff<Flex>;

/// Texts one behind the other; `labels` holds a text's class at its first token, elsewhere `burn_cp::batch::IGNORED_LABEL` (-100).
pub struct Texts {
    pub ids: Vec<i64>,
    pub labels: Vec<i64>,
    pub lengths: Vec<usize>,
}

fn batch<B: Backend>(texts: &Texts) -> Result<SequenceBatch<B>, LayoutError> {
    let row = |values: &[i64]| TensorData::new(values.to_vec(), [1, values.len()]);
    // Of one row; what the lengths leave of it is padding.
    let documents = Documents::from_lengths(from_ref(&texts.lengths), texts.ids.len())?;
    Ok(SequenceBatch::from_ids(row(&texts.ids))
        .with_labels(row(&texts.labels))
        .with_documents(documents))
}

/// The trained model, the loss of its last step, and its logits of all tokens, `[1, seq, classes]`.
pub type Trained = (TextClassifier<B>, f64, Tensor<Flex, 3>);

/// The same from every rank.
///
/// # Errors
/// The first failure of a rank.
pub fn train(
    model: &TextClassifier<B>,
    texts: &Texts,
    ranks: usize,
) -> Result<Vec<Trained>, LaunchError> {
    launch::threads(ranks, |rank| -> Result<_, Box<dyn Error + Send + Sync>> {
        let device = Default::default();
        let mesh = DeviceMesh::new([("dp", 1), ("cp", ranks)])?; // all ranks share every row
        let groups = comm::bind(&mesh, &rank)?;
        let cp = ContextParallel::new(&groups, ContextParallelConfig::default())?;
        let mut model = model.clone().fork(&device); // parameters of its own: ranks that share them wait for each other for ever
        check_parameters::<B, _>(&model, cp.loss_group())?; // finds that, and ranks that do not start alike
        let (mut optimizer, mut last) = (AdamConfig::new().init(), 0.0);
        for seed in 0..3 {
            let batch = batch(texts)?.with_dropout_seed(seed);
            let step = cp.shard(batch, &device)?; // checks, plans, cuts; moves no tensor
            let loss = step.cross_entropy(classify(&model, &step)?)?; // the mean over all texts
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let grads = sync_gradients::<B, _>(grads, &model, &groups, &["dp", "cp"])?;
            model = optimizer.step(1e-3, model, grads); // the same on every rank
            last = loss.global_value();
        }
        let step = cp.shard(batch::<Flex>(texts)?, &device)?; // without gradients, and without a seed for dropout
        let logits = classify(&model.valid(), &step)?; // of this rank's tokens
        let logits = step.gather_tokens(logits, 1, Coordinates::Input, None); // of all; every rank must call it
        Ok((model, last, logits))
    })
}
// README ends.
use super::{shard::classify, stock::TextClassifier};
