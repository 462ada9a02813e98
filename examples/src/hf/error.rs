//! What can be wrong with a model directory, a picture or a prompt.

use crate::models::qwen3_vl::PositionError;

/// A model directory that cannot be used, with everything that is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: not a model that can be used: {}", list(.problems))]
pub struct DirectoryError {
    /// The directory.
    pub path: String,
    /// At least one.
    pub problems: Vec<DirectoryProblem>,
}

fn list(problems: &[DirectoryProblem]) -> String {
    problems
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}

/// One thing that is wrong with a model directory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryProblem {
    /// A file is not there.
    #[error("no {file}")]
    MissingFile {
        /// Its name, or the names that would do.
        file: String,
    },
    /// A file cannot be read or understood.
    #[error("{file}: {reason}")]
    Unreadable {
        /// Its name.
        file: String,
        /// Why.
        reason: String,
    },
    /// The model is of another kind.
    #[error("config.json: expected architecture {expected}, got {got}")]
    Architecture {
        /// The one that is known.
        expected: String,
        /// The one found.
        got: String,
    },
    /// A file of weights has not the length that its header says.
    #[error("{file}: the file is truncated or was changed: expected {expected} bytes, got {got}")]
    Length {
        /// Its name.
        file: String,
        /// Bytes by its header.
        expected: u64,
        /// Bytes found.
        got: u64,
    },
    /// The model needs a tensor that is in no file, or not in the one that the index names.
    #[error("tensor {name}: missing{}", .file.as_ref().map(|file| format!(" from {file}")).unwrap_or_default())]
    MissingTensor {
        /// Its name.
        name: String,
        /// The file that the index names.
        file: Option<String>,
    },
    /// A file holds a tensor that the model has no place for.
    #[error("tensor {name}: no part of this model")]
    ExtraTensor {
        /// Its name.
        name: String,
    },
    /// A tensor has another shape.
    #[error("tensor {name}: expected shape {expected:?}, got {got:?}")]
    Shape {
        /// Its name.
        name: String,
        /// By the configuration.
        expected: Vec<usize>,
        /// In the file.
        got: Vec<usize>,
    },
    /// A tensor has a dtype that weights do not come in.
    #[error("tensor {name}: expected F32, F16 or BF16, got {got}")]
    Dtype {
        /// Its name.
        name: String,
        /// In the file.
        got: String,
    },
    /// Two files say different things.
    #[error("{file}: {field}: expected {expected}, got {got}")]
    Field {
        /// The file.
        file: String,
        /// The field.
        field: String,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
}

/// A picture or video that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// It cannot be read or decoded.
    #[error("{path}: cannot be decoded: {reason}")]
    Decode {
        /// The file.
        path: String,
        /// The decoder's or the system's reason.
        reason: String,
    },
    /// Its form is outside of what the model was made for.
    #[error("{path}: {what}: expected {expected}, got {got}")]
    Form {
        /// File or folder.
        path: String,
        /// What is wrong.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
}

/// Messages that cannot be turned into a document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PromptError {
    /// The chat template refuses them.
    #[error("chat template: {reason}")]
    Template {
        /// The template engine's reason.
        reason: String,
    },
    /// The tokenizer refuses the text.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// Its reason.
        reason: String,
    },
    /// A picture or video cannot be used.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The prompt has placeholders for more or fewer media than the messages have; a text that contains the marker does that.
    #[error("{marker} in the prompt: expected {expected}, as many as entries, got {got}")]
    Placeholders {
        /// The marker.
        marker: &'static str,
        /// Media of the messages.
        expected: usize,
        /// Markers in the rendered prompt.
        got: usize,
    },
    /// Placeholders and grids do not fit.
    #[error(transparent)]
    Positions(#[from] PositionError),
}

/// A checkpoint that cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The weights cannot be written in this form.
    #[error("{path}: {reason}")]
    Weights {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
}
