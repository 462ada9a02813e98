//! A model directory, opened and checked as a whole.

use std::{fs, path::Path};

use burn::tensor::{FloatDType, backend::Backend};
use serde::de::DeserializeOwned;
use tokenizers::Tokenizer;

use super::{
    ChatTemplate, DirectoryError, DirectoryProblem, ImageProcessor, Processor, Published,
    PublishedModel, SaveError, VideoProcessor, WeightFiles, published::Files, save::io_error,
    save_weights,
};
use crate::models::qwen3_vl::{Qwen3Vl, Qwen3VlConfig};

/// The architecture that directories must be of.
pub const ARCHITECTURE: &str = Qwen3VlConfig::ARCHITECTURE;
/// Bytes of a file of weights beyond which another one is begun.
const MAX_FILE_BYTES: usize = 5_000_000_000;
/// Files that belong to a model beside its weights, and are copied with it.
const COMPANIONS: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
];

/// A directory of a Qwen3-VL model that was found usable: [`PublishedModel`] with what prepares text, pictures and videos for it.
#[derive(Debug, Clone)]
pub struct ModelDirectory {
    model: PublishedModel<Qwen3VlConfig>,
    processor: Processor,
}

impl ModelDirectory {
    /// Reads and checks everything but the values of weights.
    ///
    /// # Errors
    /// [`DirectoryError`] lists all that is missing, too much or does not fit.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        let mut files = Files::new(path)?;
        let model = files.model();
        let config = model.as_ref().map(PublishedModel::config);
        let processor = files.processor(config);
        match (model, processor) {
            (Some(model), Some(processor)) if files.problems.is_empty() => {
                Ok(Self { model, processor })
            }
            _ => Err(files.into_error()),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.model.path()
    }

    /// The model's configuration.
    pub fn config(&self) -> &Qwen3VlConfig {
        self.model.config()
    }

    /// Tokenizer, template and processors.
    pub fn processor(&self) -> &Processor {
        &self.processor
    }

    /// The files of weights.
    pub fn weights(&self) -> &WeightFiles {
        self.model.weights()
    }

    /// As [`PublishedModel::load`].
    ///
    /// # Errors
    /// As there.
    pub fn load<B: Backend>(
        &self,
        device: &B::Device,
        dtype: FloatDType,
    ) -> Result<Qwen3Vl<B>, DirectoryError> {
        self.model.load(device, dtype)
    }

    /// Writes a model of this directory's kind as a directory of its own: weights, configuration, tokenizer and processors.
    ///
    /// # Errors
    /// The file system refused.
    pub fn save<B: Backend>(
        &self,
        model: &Qwen3Vl<B>,
        target: &Path,
        bf16: bool,
    ) -> Result<(), SaveError> {
        save_weights(model, self.config(), target, bf16, MAX_FILE_BYTES)?;
        let mut config = self.model.raw_config().clone();
        let dtype = if bf16 { "bfloat16" } else { "float32" };
        if let Some(fields) = config.as_object_mut() {
            fields.remove("torch_dtype");
            fields.insert("dtype".into(), dtype.into());
        }
        let path = target.join("config.json");
        fs::write(&path, format!("{config:#}\n")).map_err(io_error(&path))?;
        for name in COMPANIONS {
            let from = self.path().join(name);
            if from.is_file() {
                let to = target.join(name);
                fs::copy(&from, &to).map_err(io_error(&to))?;
            }
        }
        Ok(())
    }
}

impl Files<'_> {
    fn processor(&mut self, config: Option<&Qwen3VlConfig>) -> Option<Processor> {
        let tokenizer = self.tokenizer();
        let template = self.template();
        let images: Option<ImageProcessor> =
            self.preprocessor("preprocessor_config.json", "image_processor");
        let videos: Option<VideoProcessor> =
            self.preprocessor("video_preprocessor_config.json", "video_processor");
        let config = config?;
        if let Some(images) = &images {
            let vision = &config.vision_config;
            images.check("preprocessor_config.json", vision, &mut self.problems);
        }
        if let Some(videos) = &videos {
            let (file, vision) = ("video_preprocessor_config.json", &config.vision_config);
            videos.images.check(file, vision, &mut self.problems);
        }
        let tokenizer = tokenizer?;
        for (token, id) in [
            ("<|image_pad|>", config.image_token_id),
            ("<|video_pad|>", config.video_token_id),
            ("<|vision_start|>", config.vision_start_token_id),
            ("<|vision_end|>", config.vision_end_token_id),
        ] {
            let got = tokenizer.token_to_id(token);
            if got.map(i64::from) != Some(id) {
                self.problems.push(DirectoryProblem::Field {
                    file: "tokenizer.json".into(),
                    field: token.into(),
                    expected: id.to_string(),
                    got: got.map_or("none".into(), |got| got.to_string()),
                });
            }
        }
        Some(Processor {
            tokenizer,
            template: template?,
            images: images?,
            videos: videos?,
            config: config.clone(),
        })
    }

    fn tokenizer(&mut self) -> Option<Tokenizer> {
        let file = "tokenizer.json";
        let path = self.path.join(file);
        if !path.is_file() {
            self.missing(file);
            return None;
        }
        match Tokenizer::from_file(path) {
            Ok(tokenizer) => Some(tokenizer),
            Err(error) => {
                self.unreadable(file, error);
                None
            }
        }
    }

    /// The template has stood in three places over time.
    fn template(&mut self) -> Option<ChatTemplate> {
        let file = "chat_template.jinja";
        let mut source = fs::read_to_string(self.path.join(file)).ok();
        for other in ["chat_template.json", "tokenizer_config.json"] {
            if source.is_none() && self.path.join(other).is_file() {
                let value = self.json(other)?;
                source = value["chat_template"].as_str().map(str::to_owned);
            }
        }
        let Some(source) = source else {
            self.missing("chat_template.jinja, nor a template in chat_template.json or tokenizer_config.json");
            return None;
        };
        match ChatTemplate::new(source) {
            Ok(template) => Some(template),
            Err(error) => {
                self.unreadable(file, error);
                None
            }
        }
    }

    /// A file of its own, or a section of `processor_config.json` in newer directories.
    fn preprocessor<T: DeserializeOwned>(&mut self, file: &str, section: &str) -> Option<T> {
        let joint = "processor_config.json";
        if !self.path.join(file).is_file() && self.path.join(joint).is_file() {
            let mut value = self.json(joint)?;
            if value[section].is_object() {
                return self.typed(joint, value[section].take());
            }
        }
        let value = self.json(file)?;
        self.typed(file, value)
    }
}
