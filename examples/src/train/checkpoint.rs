//! Checkpoints that are either whole or not there.
//!
//! A checkpoint is a folder `step-N` with the weights, the optimizer's state and `state.json`, which names the run and the
//! hashes of all other files. It is written under another name and renamed when complete; the newest two are kept.

use std::{
    collections::BTreeMap,
    fs, io,
    marker::PhantomData,
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

use super::state::{RunConfig, TrainState, check_same_run};

const VERSION: u32 = 2;
const KEPT: usize = 2;
const STATE: &str = "state.json";
const MODEL: &str = "model.mpk";
const OPTIMIZER: &str = "optimizer.mpk";

fn format<R: RunConfig>() -> String {
    format!("burn-cp {} checkpoint", R::PROGRAM)
}

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
    #[error("{path}: expected a checkpoint of {program}, found none")]
    Missing {
        /// The program that continues.
        program: &'static str,
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

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest<R> {
    format: String,
    version: u32,
    /// SHA-256 by file.
    files: BTreeMap<String, String>,
    state: TrainState<R>,
}

/// The checkpoints of one run.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoints<R> {
    folder: PathBuf,
    run: PhantomData<fn() -> R>,
}

fn recorder() -> NamedMpkBytesRecorder<FullPrecisionSettings> {
    NamedMpkBytesRecorder::default()
}

impl<R: RunConfig> Checkpoints<R> {
    /// Writes a checkpoint of a state, and removes those that are too old.
    ///
    /// # Errors
    /// The file system refused, or the weights cannot be recorded.
    pub(super) fn save<B, M, O>(
        &self,
        model: &M,
        optimizer: &O,
        state: &TrainState<R>,
    ) -> Result<(), CheckpointError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        self.save_files(state, |folder| {
            let record = |reason: String| CheckpointError::Record {
                path: folder.display().to_string(),
                reason,
            };
            let model = Recorder::<B>::record(&recorder(), model.clone().into_record(), ())
                .map_err(|error| record(error.to_string()))?;
            let optimizer = Recorder::<B>::record(&recorder(), optimizer.to_record(), ())
                .map_err(|error| record(error.to_string()))?;
            for (file, bytes) in [(MODEL, &model), (OPTIMIZER, &optimizer)] {
                let path = folder.join(file);
                fs::write(&path, bytes).map_err(io_error(&path))?;
            }
            Ok(())
        })
    }

    /// Loads the newest checkpoint into a model and an optimizer of the same configuration.
    ///
    /// # Errors
    /// As [`Self::latest`].
    pub(super) fn load<B, M, O>(
        &self,
        model: M,
        optimizer: O,
        config: &R,
        device: &B::Device,
    ) -> Result<(M, O, TrainState<R>), CheckpointError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let (folder, state) = self.load_files(config)?;
        let bytes = |file: &str| {
            let path = folder.join(file);
            fs::read(&path).map_err(io_error(&path))
        };
        let record = |file: &str| {
            let path = folder.join(file).display().to_string();
            move |error: burn::record::RecorderError| CheckpointError::Record {
                path,
                reason: error.to_string(),
            }
        };
        let weights = Recorder::<B>::load(&recorder(), bytes(MODEL)?, device);
        let model = model.load_record(weights.map_err(record(MODEL))?);
        let moments = Recorder::<B>::load(&recorder(), bytes(OPTIMIZER)?, device);
        let optimizer = optimizer.load_record(moments.map_err(record(OPTIMIZER))?);
        Ok((model, optimizer, state))
    }
}

impl<R: RunConfig> Checkpoints<R> {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            run: PhantomData,
        }
    }

    /// Writes a checkpoint of a state, whose files `write` puts into the folder that it is given, and removes those that are too old.
    ///
    /// # Errors
    /// The file system refused, or what `write` returns.
    pub(crate) fn save_files(
        &self,
        state: &TrainState<R>,
        write: impl FnOnce(&Path) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let name = format!("step-{:08}", state.step);
        let partial = self.folder.join(format!(".{name}.partial"));
        self.remove_partial()?;
        fs::create_dir_all(&partial).map_err(io_error(&partial))?;
        write(&partial)?;
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&partial).map_err(io_error(&partial))? {
            let path = entry.map_err(io_error(&partial))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            files.insert(name.into_owned(), synced_hash(&path)?);
        }
        let manifest = Manifest {
            format: format::<R>(),
            version: VERSION,
            files,
            state: state.clone(),
        };
        let manifest =
            serde_json::to_vec_pretty(&manifest).map_err(|error| CheckpointError::Record {
                path: partial.display().to_string(),
                reason: error.to_string(),
            })?;
        write_synced(&partial.join(STATE), &manifest)?;
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
    pub(crate) fn latest(&self, config: &R) -> Result<TrainState<R>, CheckpointError> {
        Ok(self.load_files(config)?.1)
    }

    /// The newest checkpoint's folder and state, all its files checked.
    ///
    /// # Errors
    /// As [`Self::latest`].
    pub(crate) fn load_files(
        &self,
        config: &R,
    ) -> Result<(PathBuf, TrainState<R>), CheckpointError> {
        let (folder, manifest) = self.manifest()?;
        check_same_run(&folder.join(STATE), &manifest.state.config, config)?;
        for (file, expected) in &manifest.files {
            let path = folder.join(file);
            let got = synced_hash(&path)?;
            if got != *expected {
                return Err(CheckpointError::Damaged {
                    path: path.display().to_string(),
                    expected: expected.clone(),
                    got,
                });
            }
        }
        Ok((folder, manifest.state))
    }

    /// Removes the checkpoints of an earlier run, complete or not, and nothing else.
    pub(super) fn remove(&self) -> Result<(), CheckpointError> {
        for name in self.names()? {
            let folder = self.folder.join(name);
            let manifest = fs::read(folder.join(STATE)).unwrap_or_default();
            if String::from_utf8_lossy(&manifest).contains(&format::<R>()) {
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

    fn manifest(&self) -> Result<(PathBuf, Manifest<R>), CheckpointError> {
        let Some(name) = self.names()?.pop() else {
            return Err(CheckpointError::Missing {
                program: R::PROGRAM,
                path: self.folder.display().to_string(),
            });
        };
        let folder = self.folder.join(name);
        let path = folder.join(STATE);
        let text = fs::read(&path).map_err(io_error(&path))?;
        let foreign = |got: String| CheckpointError::Foreign {
            path: path.display().to_string(),
            expected: format!("a {}, version {VERSION}", format::<R>()),
            got,
        };
        let manifest: Manifest<R> =
            serde_json::from_slice(&text).map_err(|error| foreign(error.to_string()))?;
        if (manifest.format.as_str(), manifest.version) != (format::<R>().as_str(), VERSION) {
            return Err(foreign(format!(
                "{}, version {}",
                manifest.format, manifest.version
            )));
        }
        Ok((folder, manifest))
    }
}

/// The step of a checkpoint's folder; `None` for other names.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    (digits.len() == 8).then(|| digits.parse().ok()).flatten()
}

/// SHA-256 of a file whose bytes have reached the disk.
fn synced_hash(path: &Path) -> Result<String, CheckpointError> {
    let mut file = fs::File::open(path).map_err(io_error(path))?;
    let mut hash = Sha256::new();
    file.sync_all()
        .and_then(|()| io::copy(&mut file, &mut hash))
        .map_err(io_error(path))?;
    let hash = hash.finalize();
    Ok(hash.iter().map(|byte| format!("{byte:02x}")).collect())
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
