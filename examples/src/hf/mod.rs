//! Model directories as Hugging Face lays them out: opened, checked, loaded, and written back.
//!
//! Holds the directory and its check ([`ModelDirectory`]), weights in safetensors ([`WeightFiles`], [`load_weights`],
//! [`save_weights`]), pictures and videos as the reference processor cuts them ([`ImageProcessor`], [`VideoProcessor`]), and chat
//! messages turned into documents ([`Processor`]). It knows the architectures that are [`Published`]: dense Qwen3-VL with all of
//! this, and the text part of MiMo-V2-Flash, of which it reads configuration and weights ([`PublishedModel`]). It trains nothing,
//! and knows nothing of ranks.

mod chat;
mod directory;
mod error;
mod images;
mod names;
mod prompt;
mod published;
mod resize;
mod save;
mod videos;
mod weights;

pub use chat::{ChatTemplate, Content, Message, Part};
pub use directory::{ARCHITECTURE, ModelDirectory};
pub use error::{DirectoryError, DirectoryProblem, MediaError, PromptError, SaveError};
pub use images::{ImageProcessor, PixelLimits, Pixels, smart_resize};
pub use names::{WeightForm, WeightName, load_weights, weight_names};
pub use prompt::Processor;
pub use published::{Published, PublishedModel};
pub use save::save_weights;
pub use videos::{Video, VideoProcessor, sample_frames, timestamps};
pub use weights::{WeightFiles, WeightInfo};
