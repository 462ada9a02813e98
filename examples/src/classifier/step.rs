//! One step of training the stock classifier on two ranks, as README shows it.

// README begins.
use std::error::Error;

use burn::{
    backend::{Autodiff, Flex},
    module::Module,
    optim::{AdamConfig, GradientsParams, Optimizer},
    tensor::TensorData,
};
use burn_cp::{
    batch::SequenceBatch,
    comm,
    launch::{self, LaunchError},
    layout::Documents,
    mesh::{DeviceMesh, MeshError},
    nn::check_parameters,
    optim::sync_gradients,
    sharder::{ContextParallel, ContextParallelConfig},
};

type B = Autodiff<Flex>;

// Texts stand one behind the other in `ids`; `labels` holds a text's class at its first token, and IGNORED_LABEL elsewhere.
pub fn train_step(
    model: &TextClassifier<B>,
    (ids, labels): (&[i64], &[i64]),
    lengths: &[usize],
) -> Result<Vec<(TextClassifier<B>, f64)>, LaunchError> {
    launch::threads(2, |rank| -> Result<_, Box<dyn Error + Send + Sync>> {
        let device = Default::default();
        let groups = comm::bind(&mesh()?, &rank)?;
        let cp = ContextParallel::new(&groups, ContextParallelConfig::default())?;
        let model = model.clone().fork(&device); // leaves of its own for each rank
        check_parameters::<B, _>(&model, cp.loss_group())?; // all ranks start alike
        let row = |values: &[i64]| TensorData::new(values.to_vec(), [1, values.len()]);
        let batch = SequenceBatch::from_ids(row(ids))
            .with_labels(row(labels))
            .with_documents(Documents::from_lengths(&[lengths.to_vec()], ids.len())?)
            .with_dropout_seed(0); // another one in each step
        let step = cp.shard(batch, &device)?; // checks, plans, cuts; moves no tensor
        let loss = step.cross_entropy(classify(&model, &step)?)?; // the mean over all texts
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grads = sync_gradients::<B, _>(grads, &model, &groups, &["dp", "cp"])?;
        let model = AdamConfig::new().init().step(1e-3, model, grads); // the same on every rank
        Ok((model, loss.global_value()))
    })
}

fn mesh() -> Result<DeviceMesh, MeshError> {
    DeviceMesh::new([("dp", 1), ("cp", 2)]) // two ranks that share every sequence
}
// README ends.
use super::{shard::classify, stock::TextClassifier};
