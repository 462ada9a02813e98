//! Checkpoints that are model directories, with the optimizer beside the weights.

use std::path::Path;

use burn::{
    optim::Optimizer,
    record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder},
    tensor::FloatDType,
};
use burn_cp::nn::SequenceSharded;

use super::{
    FinetuneConfig,
    precision::{parameter_ids, with_ids},
};
use crate::{
    hf::ModelDirectory,
    models::qwen3_vl::Qwen3Vl,
    train::{CheckpointError, Checkpoints, TrainBackend, TrainState},
};

const OPTIMIZER: &str = "optimizer.mpk";
const IDS: &str = "parameter_ids.json";

fn recorder() -> NamedMpkBytesRecorder<FullPrecisionSettings> {
    NamedMpkBytesRecorder::default()
}

fn failed(path: &Path) -> impl Fn(String) -> CheckpointError {
    let path = path.display().to_string();
    move |reason| CheckpointError::Record {
        path: path.clone(),
        reason,
    }
}

/// Writes weights, everything else of the model's directory, and the optimizer.
pub(super) fn save<B: TrainBackend, O: Optimizer<SequenceSharded<Qwen3Vl<B>>, B>>(
    checkpoints: &Checkpoints<FinetuneConfig>,
    directory: &ModelDirectory,
    model: &SequenceSharded<Qwen3Vl<B>>,
    optimizer: &O,
    state: &TrainState<FinetuneConfig>,
) -> Result<(), CheckpointError> {
    checkpoints.save_files(state, |folder| {
        let failed = failed(folder);
        directory
            .save(model.inner(), folder, false)
            .map_err(|error| failed(error.to_string()))?;
        let record = Recorder::<B>::record(&recorder(), optimizer.to_record(), ())
            .map_err(|error| failed(error.to_string()))?;
        let ids = serde_json::to_vec(&parameter_ids::<B, _>(model.inner()))
            .map_err(|error| failed(error.to_string()))?;
        for (file, bytes) in [(OPTIMIZER, record), (IDS, ids)] {
            std::fs::write(folder.join(file), bytes).map_err(|error| failed(error.to_string()))?;
        }
        Ok(())
    })
}

/// The newest checkpoint's model, with the ids that its optimizer knows.
pub(super) fn load_model<B: TrainBackend>(
    checkpoints: &Checkpoints<FinetuneConfig>,
    config: &FinetuneConfig,
    device: &B::Device,
) -> Result<(Qwen3Vl<B>, TrainState<FinetuneConfig>), CheckpointError> {
    let (folder, state) = checkpoints.load_files(config)?;
    let failed = failed(&folder);
    let directory = ModelDirectory::open(&folder).map_err(|error| failed(error.to_string()))?;
    let model = directory
        .load::<B>(device, FloatDType::F32)
        .map_err(|error| failed(error.to_string()))?;
    let ids = std::fs::read(folder.join(IDS)).map_err(|error| failed(error.to_string()))?;
    let ids: Vec<String> =
        serde_json::from_slice(&ids).map_err(|error| failed(error.to_string()))?;
    Ok((with_ids::<B, _>(model, &ids), state))
}

/// The newest checkpoint's optimizer.
pub(super) fn load_optimizer<B: TrainBackend, O: Optimizer<SequenceSharded<Qwen3Vl<B>>, B>>(
    checkpoints: &Checkpoints<FinetuneConfig>,
    config: &FinetuneConfig,
    optimizer: O,
    device: &B::Device,
) -> Result<O, CheckpointError> {
    let (folder, _) = checkpoints.load_files(config)?;
    let failed = failed(&folder);
    let bytes = std::fs::read(folder.join(OPTIMIZER)).map_err(|error| failed(error.to_string()))?;
    let record = Recorder::<B>::load(&recorder(), bytes, device)
        .map_err(|error| failed(error.to_string()))?;
    Ok(optimizer.load_record(record))
}
