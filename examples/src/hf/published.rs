//! Configuration and weights of a model directory, for every architecture that is known.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::{
    module::Module,
    tensor::{FloatDType, backend::Backend},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    DirectoryError, DirectoryProblem, WeightFiles, load_weights,
    names::{check_weights, weight_names},
};
use crate::models::{
    mimo_v2_flash::{MimoV2Flash, MimoV2FlashConfig},
    qwen3_vl::{ConfigError, Qwen3Vl, Qwen3VlConfig, VisionConfig},
};

/// An architecture that is published as a directory; it is what `config.json` holds.
pub trait Published: Clone + DeserializeOwned {
    /// Its name among the `architectures` of `config.json`.
    const ARCHITECTURE: &'static str;
    /// Its `model_type`.
    const MODEL_TYPE: &'static str;
    /// How the names of tensors begin that the model has no use for.
    const UNREAD: &'static [&'static str];

    /// The model.
    type Model<B: Backend>: Module<B>;

    /// Checks every field.
    ///
    /// # Errors
    /// All that is wrong.
    fn validate(&self) -> Result<(), ConfigError>;

    /// A model of lazy zeros.
    ///
    /// # Errors
    /// As [`Self::validate`].
    fn build<B: Backend>(&self, device: &B::Device) -> Result<Self::Model<B>, ConfigError>;

    /// The vision tower, if the model has one.
    fn vision(&self) -> Option<&VisionConfig>;
}

impl Published for Qwen3VlConfig {
    const ARCHITECTURE: &'static str = "Qwen3VLForConditionalGeneration";
    const MODEL_TYPE: &'static str = "qwen3_vl";
    const UNREAD: &'static [&'static str] = &[];

    type Model<B: Backend> = Qwen3Vl<B>;

    fn validate(&self) -> Result<(), ConfigError> {
        self.validate()
    }

    fn build<B: Backend>(&self, device: &B::Device) -> Result<Qwen3Vl<B>, ConfigError> {
        self.build(device)
    }

    fn vision(&self) -> Option<&VisionConfig> {
        Some(&self.vision_config)
    }
}

impl Published for MimoV2FlashConfig {
    const ARCHITECTURE: &'static str = "MiMoV2FlashForCausalLM";
    const MODEL_TYPE: &'static str = "mimo_v2_flash";
    // Layers that predict several tokens at once; the reference leaves them out too.
    const UNREAD: &'static [&'static str] = &["model.mtp."];

    type Model<B: Backend> = MimoV2Flash<B>;

    fn validate(&self) -> Result<(), ConfigError> {
        self.validate()
    }

    fn build<B: Backend>(&self, device: &B::Device) -> Result<MimoV2Flash<B>, ConfigError> {
        self.build(device)
    }

    fn vision(&self) -> Option<&VisionConfig> {
        None
    }
}

/// Configuration and weights of a directory that were found usable.
#[derive(Debug, Clone)]
pub struct PublishedModel<C> {
    path: PathBuf,
    config: C,
    raw_config: Value,
    weights: WeightFiles,
}

impl<C: Published> PublishedModel<C> {
    /// Reads `config.json`, and the headers of the files of weights. Nothing else needs to be there.
    ///
    /// # Errors
    /// [`DirectoryError`] lists all that is missing, too much or does not fit.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        let mut files = Files::new(path)?;
        match files.model() {
            Some(model) if files.problems.is_empty() => Ok(model),
            _ => Err(files.into_error()),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration.
    pub fn config(&self) -> &C {
        &self.config
    }

    /// `config.json` as it stands.
    pub(super) fn raw_config(&self) -> &Value {
        &self.raw_config
    }

    /// The files of weights.
    pub fn weights(&self) -> &WeightFiles {
        &self.weights
    }

    /// The model with its weights as `dtype`. Every parameter exists when this returns; those that training changes require a
    /// gradient.
    ///
    /// # Errors
    /// A file changed or became unreadable since the directory was opened.
    pub fn load<B: Backend>(
        &self,
        device: &B::Device,
        dtype: FloatDType,
    ) -> Result<C::Model<B>, DirectoryError> {
        let problem = |problems| DirectoryError {
            path: self.path.display().to_string(),
            problems,
        };
        let model = self.config.build::<B>(device).map_err(|error| {
            problem(vec![DirectoryProblem::Unreadable {
                file: "config.json".into(),
                reason: error.to_string(),
            }])
        })?;
        let (model, problems) = load_weights::<B, _>(model, &self.config, &self.weights, dtype);
        if problems.is_empty() {
            Ok(model)
        } else {
            Err(problem(problems))
        }
    }
}

/// Parameters stay lazy where only their names are asked for, so any backend does.
#[cfg(feature = "flex")]
type Names = burn::backend::Flex;
#[cfg(not(feature = "flex"))]
type Names = burn::backend::NdArray;

/// A directory while it is read, and what was found wrong so far.
pub(super) struct Files<'a> {
    pub(super) path: &'a Path,
    pub(super) problems: Vec<DirectoryProblem>,
}

impl<'a> Files<'a> {
    /// # Errors
    /// There is no such directory.
    pub(super) fn new(path: &'a Path) -> Result<Self, DirectoryError> {
        let mut files = Self {
            path,
            problems: Vec::new(),
        };
        if !path.is_dir() {
            files.unreadable(&path.display().to_string(), "no directory");
            return Err(files.into_error());
        }
        Ok(files)
    }

    pub(super) fn into_error(self) -> DirectoryError {
        DirectoryError {
            path: self.path.display().to_string(),
            problems: self.problems,
        }
    }

    pub(super) fn unreadable(&mut self, file: &str, reason: impl ToString) {
        self.problems.push(DirectoryProblem::Unreadable {
            file: file.to_owned(),
            reason: reason.to_string(),
        });
    }

    pub(super) fn missing(&mut self, file: &str) {
        let file = file.to_owned();
        self.problems.push(DirectoryProblem::MissingFile { file });
    }

    pub(super) fn json(&mut self, file: &str) -> Option<Value> {
        let path = self.path.join(file);
        if !path.is_file() {
            self.missing(file);
            return None;
        }
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => {
                self.unreadable(file, error);
                return None;
            }
        };
        match serde_json::from_str(&text) {
            Ok(value) => Some(value),
            Err(error) => {
                self.unreadable(file, error);
                None
            }
        }
    }

    /// A value as a type, with the path of a field that does not fit.
    pub(super) fn typed<T: DeserializeOwned>(&mut self, file: &str, value: Value) -> Option<T> {
        match serde_path_to_error::deserialize(value) {
            Ok(typed) => Some(typed),
            Err(error) => {
                self.unreadable(file, format!("{}: {}", error.path(), error.inner()));
                None
            }
        }
    }

    /// Configuration and weights. What is there but wrong is among the problems.
    pub(super) fn model<C: Published>(&mut self) -> Option<PublishedModel<C>> {
        let raw_config = self.json("config.json");
        let config: Option<C> = raw_config.as_ref().and_then(|raw| self.config(raw));
        let weights = WeightFiles::scan(self.path, &mut self.problems);
        if let Some(config) = &config
            && let Ok(model) = config.build::<Names>(&Default::default())
        {
            let names = weight_names::<Names, _>(&model, config);
            // Without files every tensor is missing, which is said already.
            if !weights.tensors().is_empty() {
                check_weights(&names, C::UNREAD, &weights, &mut self.problems);
            }
        }
        Some(PublishedModel {
            path: self.path.to_owned(),
            config: config?,
            raw_config: raw_config?,
            weights,
        })
    }

    fn config<C: Published>(&mut self, raw: &Value) -> Option<C> {
        let named = raw["architectures"][0].as_str();
        let got = named.or(raw["model_type"].as_str()).unwrap_or("none");
        if got != C::ARCHITECTURE && got != C::MODEL_TYPE {
            self.problems.push(DirectoryProblem::Architecture {
                expected: C::ARCHITECTURE.to_owned(),
                got: got.to_owned(),
            });
            return None;
        }
        let config: C = self.typed("config.json", raw.clone())?;
        if let Err(error) = config.validate() {
            for problem in error.problems {
                self.unreadable("config.json", problem);
            }
            return None;
        }
        Some(config)
    }
}
