//! Checkpoints that are either whole or not there.
//!
//! A checkpoint is a folder `step-N` with the weights, the optimizer's state and `state.json`, which names the run and the
//! hashes of the other two. It is written under another name and renamed when complete; the newest two are kept.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use burn::{
    module::AutodiffModule,
    optim::Optimizer,
    record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder},
    tensor::backend::AutodiffBackend,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::TrainConfig;

const FORMAT: &str = "burn-cp train-vlm checkpoint";
const VERSION: u32 = 1;
const KEPT: usize = 2;

/// A checkpoint that cannot be written or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: String,
        /// The system's reason.
        source: io::Error,
    },
    /// There is nothing to continue from.
    #[error("{path}: expected a checkpoint of train-vlm, found none")]
    Missing {
        /// Folder of checkpoints.
        path: String,
    },
    /// The folder holds something else, or a checkpoint of another version.
    #[error("{path}: expected {expected}, got {got}")]
    Foreign {
        /// The file.
        path: String,
        /// What it should hold.
        expected: String,
        /// What it holds.
        got: String,
    },
    /// A file is not what was written.
    #[error("{path}: the file is truncated or was changed: expected SHA-256 {expected}, got {got}")]
    Damaged {
        /// The file.
        path: String,
        /// Hash on record.
        expected: String,
        /// Hash of what is there.
        got: String,
    },
    /// It belongs to a run that would go on differently.
    #[error("{path}: the checkpoint is of another run: {field} was {expected}, now {got}")]
    OtherRun {
        /// The file.
        path: String,
        /// Configuration field that differs.
        field: String,
        /// Its value in the checkpoint.
        expected: String,
        /// Its value now.
        got: String,
    },
    /// Weights or optimizer state cannot be turned into a record or back.
    #[error("{path}: {reason}")]
    Record {
        /// The file.
        path: String,
        /// The recorder's reason.
        reason: String,
    },
}

/// Where a run stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainState {
    /// Steps done.
    pub step: u64,
    /// Their losses.
    pub losses: Vec<f64>,
    /// Frames that each rank's vision tower encoded.
    pub vision_frames_per_rank: Vec<u64>,
    /// K/V tokens that each rank received from others in the attention of one layer.
    pub kv_tokens_received: Vec<u64>,
    config: TrainConfig,
}

impl TrainState {
    /// The state of a run that has done nothing yet.
    pub fn new(config: &TrainConfig) -> Self {
        Self {
            step: 0,
            losses: Vec::new(),
            vision_frames_per_rank: vec![0; config.ranks],
            kv_tokens_received: vec![0; config.ranks],
            config: config.clone(),
        }
    }

    /// Counts a step.
    pub fn advance(&mut self, loss: f64) {
        self.step += 1;
        self.losses.push(loss);
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: String,
    version: u32,
    model_sha256: String,
    optimizer_sha256: String,
    state: TrainState,
}

/// The checkpoints of one run.
#[derive(Debug, Clone)]
pub(super) struct Checkpoints {
    folder: PathBuf,
}

fn recorder() -> NamedMpkBytesRecorder<FullPrecisionSettings> {
    NamedMpkBytesRecorder::default()
}

impl Checkpoints {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Writes a checkpoint of a state, and removes those that are too old.
    ///
    /// # Errors
    /// The file system refused, or the weights cannot be recorded.
    pub(super) fn save<B, M, O>(
        &self,
        model: &M,
        optimizer: &O,
        state: &TrainState,
    ) -> Result<(), CheckpointError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let name = format!("step-{:08}", state.step);
        let partial = self.folder.join(format!(".{name}.partial"));
        let record = |reason: String| CheckpointError::Record {
            path: partial.display().to_string(),
            reason,
        };
        let model = Recorder::<B>::record(&recorder(), model.clone().into_record(), ())
            .map_err(|error| record(error.to_string()))?;
        let optimizer = Recorder::<B>::record(&recorder(), optimizer.to_record(), ())
            .map_err(|error| record(error.to_string()))?;
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            model_sha256: sha256(&model),
            optimizer_sha256: sha256(&optimizer),
            state: state.clone(),
        };
        let manifest =
            serde_json::to_vec_pretty(&manifest).map_err(|error| record(error.to_string()))?;
        self.remove_partial()?;
        fs::create_dir_all(&partial).map_err(io_error(&partial))?;
        for (file, bytes) in [
            ("model.mpk", &model),
            ("optimizer.mpk", &optimizer),
            ("state.json", &manifest),
        ] {
            write_synced(&partial.join(file), bytes)?;
        }
        let target = self.folder.join(&name);
        if target.exists() {
            // Only a run that resumes and is stopped at once gets here. The old one gives way last.
            let old = self.folder.join(format!(".{name}-old.partial"));
            fs::rename(&target, &old).map_err(io_error(&target))?;
            fs::rename(&partial, &target).map_err(io_error(&target))?;
            return fs::remove_dir_all(&old).map_err(io_error(&old));
        }
        fs::rename(&partial, &target).map_err(io_error(&target))?;
        for old in self.names()?.iter().rev().skip(KEPT) {
            fs::remove_dir_all(self.folder.join(old)).map_err(io_error(&self.folder.join(old)))?;
        }
        Ok(())
    }

    /// Complete checkpoints by name, oldest first.
    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io_error(&self.folder)(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry
                .map_err(io_error(&self.folder))?
                .file_name()
                .to_string_lossy()
                .into_owned();
            if step_of(&name).is_some() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// The newest checkpoint's state, checked against the run that wants to continue it.
    ///
    /// # Errors
    /// There is none; it is truncated, foreign or of another run.
    pub(super) fn latest(&self, config: &TrainConfig) -> Result<TrainState, CheckpointError> {
        let (folder, manifest) = self.manifest()?;
        check_same_run(&folder.join("state.json"), &manifest.state.config, config)?;
        for (file, hash) in [
            ("model.mpk", &manifest.model_sha256),
            ("optimizer.mpk", &manifest.optimizer_sha256),
        ] {
            read_checked(&folder.join(file), hash)?;
        }
        Ok(manifest.state)
    }

    /// Removes the checkpoints of an earlier run, complete or not, and nothing else.
    pub(super) fn remove(&self) -> Result<(), CheckpointError> {
        for name in self.names()? {
            let folder = self.folder.join(name);
            let manifest = fs::read(folder.join("state.json")).unwrap_or_default();
            if String::from_utf8_lossy(&manifest).contains(FORMAT) {
                fs::remove_dir_all(&folder).map_err(io_error(&folder))?;
            }
        }
        self.remove_partial()
    }

    /// Removes what a killed run had begun to write.
    fn remove_partial(&self) -> Result<(), CheckpointError> {
        let Ok(entries) = fs::read_dir(&self.folder) else {
            return Ok(());
        };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let step = name
                .strip_prefix('.')
                .and_then(|name| name.strip_suffix(".partial"));
            if step.and_then(step_of).is_some() {
                fs::remove_dir_all(entry.path()).map_err(io_error(&entry.path()))?;
            }
        }
        Ok(())
    }

    fn manifest(&self) -> Result<(PathBuf, Manifest), CheckpointError> {
        let Some(name) = self.names()?.pop() else {
            return Err(CheckpointError::Missing {
                path: self.folder.display().to_string(),
            });
        };
        let folder = self.folder.join(name);
        let path = folder.join("state.json");
        let text = fs::read(&path).map_err(io_error(&path))?;
        let foreign = |got: String| CheckpointError::Foreign {
            path: path.display().to_string(),
            expected: format!("a {FORMAT}, version {VERSION}"),
            got,
        };
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|error| foreign(error.to_string()))?;
        if (manifest.format.as_str(), manifest.version) != (FORMAT, VERSION) {
            return Err(foreign(format!(
                "{}, version {}",
                manifest.format, manifest.version
            )));
        }
        Ok((folder, manifest))
    }

    /// Loads the newest checkpoint into a model and an optimizer of the same configuration.
    ///
    /// # Errors
    /// As [`Self::latest`].
    pub(super) fn load<B, M, O>(
        &self,
        model: M,
        optimizer: O,
        config: &TrainConfig,
        device: &B::Device,
    ) -> Result<(M, O, TrainState), CheckpointError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let (folder, manifest) = self.manifest()?;
        check_same_run(&folder.join("state.json"), &manifest.state.config, config)?;
        let path = folder.join("model.mpk");
        let bytes = read_checked(&path, &manifest.model_sha256)?;
        let record = |path: &Path| {
            let path = path.display().to_string();
            move |error: burn::record::RecorderError| CheckpointError::Record {
                path,
                reason: error.to_string(),
            }
        };
        let model = model
            .load_record(Recorder::<B>::load(&recorder(), bytes, device).map_err(record(&path))?);
        let path = folder.join("optimizer.mpk");
        let bytes = read_checked(&path, &manifest.optimizer_sha256)?;
        let optimizer = optimizer
            .load_record(Recorder::<B>::load(&recorder(), bytes, device).map_err(record(&path))?);
        Ok((model, optimizer, manifest.state))
    }
}

/// Continuing changes nothing that decides what is trained or how; only what is measured, and how often, may differ.
fn check_same_run(
    path: &Path,
    old: &TrainConfig,
    new: &TrainConfig,
) -> Result<(), CheckpointError> {
    // The learning rate follows from the number of steps, so that one belongs to the run too.
    let neutral = |config: &TrainConfig| {
        let fresh = TrainConfig::default();
        TrainConfig {
            heldout_packs: fresh.heldout_packs,
            eval_every: fresh.eval_every,
            checkpoint_every: fresh.checkpoint_every,
            deadline_seconds: fresh.deadline_seconds,
            ..config.clone()
        }
    };
    let json = |config: &TrainConfig| serde_json::to_value(neutral(config)).unwrap_or_default();
    let (old, new) = (json(old), json(new));
    let fields = old.as_object().into_iter().flatten();
    for (field, expected) in fields {
        let got = &new[field];
        if got != expected {
            return Err(CheckpointError::OtherRun {
                path: path.display().to_string(),
                field: field.clone(),
                expected: expected.to_string(),
                got: got.to_string(),
            });
        }
    }
    Ok(())
}

/// The step of a checkpoint's folder; `None` for other names.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    (digits.len() == 8).then(|| digits.parse().ok()).flatten()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn read_checked(path: &Path, expected: &str) -> Result<Vec<u8>, CheckpointError> {
    let bytes = fs::read(path).map_err(io_error(path))?;
    let got = sha256(&bytes);
    if got != expected {
        return Err(CheckpointError::Damaged {
            path: path.display().to_string(),
            expected: expected.to_owned(),
            got,
        });
    }
    Ok(bytes)
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    use io::Write;
    let mut file = fs::File::create(path).map_err(io_error(path))?;
    file.write_all(bytes)
        .and_then(|()| file.sync_all())
        .map_err(io_error(path))
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.display().to_string();
    move |source| CheckpointError::Io { path, source }
}
