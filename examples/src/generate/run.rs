//! The program behind its flags.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use burn::tensor::{FloatDType, Tensor, backend::Backend};
use burn_cp::{
    launch::{DeviceError, RankDevice},
    vision::TowerError,
};
use clap::Parser;
use safetensors::{Dtype, tensor::TensorView};

use super::{Chooser, Generator, Sampling, SamplingError};
use crate::{
    hf::{Content, DirectoryError, Message, ModelDirectory, Part, PromptError},
    train::{Checkpointing, Device, DeviceProgram, TrainBackend, on_device},
};

/// Answer a prompt about pictures with a published Qwen3-VL, on one device.
#[derive(Debug, Clone, Parser)]
#[command(name = "generate-qwen3-vl", version)]
pub struct GenerateArgs {
    /// Model directory
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// What is asked
    #[arg(long)]
    pub prompt: String,
    /// A picture; may be given several times
    #[arg(long, value_name = "FILE")]
    pub image: Vec<String>,
    /// A video: a folder of frames or an animated GIF; may be given several times
    #[arg(long, value_name = "PATH")]
    pub video: Vec<String>,
    /// What the model is told before the prompt
    #[arg(long)]
    pub system: Option<String>,
    /// Where the model runs
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: Device,
    /// Most tokens of the answer
    #[arg(long, default_value_t = 128)]
    pub max_tokens: usize,
    /// 0 takes the likeliest token always; above, tokens are drawn
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Draw from this many of the likeliest tokens; 0: from all
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Draw from the likeliest tokens that have this probability together
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Write the prompt's ids and logits to this safetensors file, for comparisons
    #[arg(long, value_name = "FILE")]
    pub logits: Option<PathBuf>,
    /// Decides what is drawn
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum GenerateError {
    #[error(transparent)]
    Model(#[from] DirectoryError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The logits cannot be written.
    #[error("{path}: {reason}")]
    Logits {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    #[error("vision tower: {0}")]
    Tower(TowerError),
    /// The program was not built for the device.
    #[error("device: expected one of {expected:?}, or another build, got {got:?}")]
    NotBuilt {
        /// Those it was built for.
        expected: Vec<Device>,
        /// The one asked for.
        got: Device,
    },
}

impl GenerateArgs {
    fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message {
            role: "system".into(),
            content: Content::Text(text.clone()),
        });
        let images = self.image.iter().map(|image| Part::Image {
            image: image.clone(),
        });
        let videos = self.video.iter().map(|video| Part::Video {
            video: video.clone(),
            fps: None,
        });
        let text = Part::Text {
            text: self.prompt.clone(),
        };
        let parts = images.chain(videos).chain([text]).collect();
        system
            .chain([Message {
                role: "user".into(),
                content: Content::Parts(parts),
            }])
            .collect()
    }
}

/// Runs the program, and writes the answer to `out` as it comes.
///
/// # Errors
/// A directory that is no model, a picture that cannot be decoded, a value out of range, a device that is not there.
pub fn run(args: &GenerateArgs, out: &mut dyn Write) -> Result<(), GenerateError> {
    if !Device::built().contains(&args.device) {
        return Err(GenerateError::NotBuilt {
            expected: Device::built(),
            got: args.device,
        });
    }
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
    };
    let chooser = Chooser::new(sampling, args.seed)?;
    let directory = ModelDirectory::open(&args.model)?;
    on_device(
        args.device,
        Checkpointing::None,
        Answer {
            args,
            directory,
            chooser,
            out,
        },
    )
}

struct Answer<'a> {
    args: &'a GenerateArgs,
    directory: ModelDirectory,
    chooser: Chooser,
    out: &'a mut dyn Write,
}

impl DeviceProgram for Answer<'_> {
    type Output = Result<(), GenerateError>;

    fn run<B: TrainBackend<Device: RankDevice>>(mut self) -> Self::Output {
        self.on::<B::Inner>()
    }
}

impl Answer<'_> {
    fn on<B: burn_cp::attention::ContextParallelBackend>(&mut self) -> Result<(), GenerateError> {
        let device = B::Device::default();
        let processor = self.directory.processor();
        let document = processor.document(&self.args.messages(), Path::new(""), true)?;
        let dtype = if self.args.device == Device::Cuda {
            FloatDType::BF16
        } else {
            FloatDType::F32
        };
        let model = self.directory.load::<B>(&device, dtype)?;
        let mut generator = Generator::new(&model, self.directory.config(), device);
        let last = generator.prompt(&document).map_err(GenerateError::Tower)?;
        if let Some(path) = &self.args.logits {
            write_logits(path, &document.ids, &last)?;
        }
        let num = last.dims()[0];
        let mut logits: Tensor<B, 1> = last.narrow(0, num - 1, 1).squeeze_dim(0);
        let (mut ids, mut shown) = (Vec::new(), String::new());
        for _ in 0..self.args.max_tokens {
            let values: Vec<f32> = logits.into_data().iter::<f32>().collect();
            let id = self.chooser.choose(&values);
            if Some(id) == processor.turn_end() || id == processor.padding_id() {
                break;
            }
            ids.push(id);
            let text = processor.decode(&ids)?;
            // A character may take several tokens; until it is whole it shows as a replacement.
            if !text.ends_with('\u{fffd}') && text.starts_with(&shown) {
                let _ =
                    write!(self.out, "{}", &text[shown.len()..]).and_then(|()| self.out.flush());
                shown = text;
            }
            logits = generator.token(id);
        }
        let text = processor.decode(&ids)?;
        let rest = text.strip_prefix(shown.as_str()).unwrap_or_default();
        let _ = writeln!(self.out, "{rest}");
        Ok(())
    }
}

/// `ids [tokens]` and `logits [tokens, vocab]` as a safetensors file.
fn write_logits<B: Backend>(
    path: &Path,
    ids: &[i64],
    logits: &Tensor<B, 2>,
) -> Result<(), GenerateError> {
    let shape = logits.dims().to_vec();
    let values: Vec<u8> = logits
        .to_data()
        .iter::<f32>()
        .flat_map(f32::to_le_bytes)
        .collect();
    let ids_bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    TensorView::new(Dtype::I64, vec![ids.len()], &ids_bytes)
        .and_then(|ids| {
            Ok([
                ("ids", ids),
                ("logits", TensorView::new(Dtype::F32, shape, &values)?),
            ])
        })
        .and_then(|tensors| safetensors::serialize_to_file(tensors, None, path))
        .map_err(|error| GenerateError::Logits {
            path: path.display().to_string(),
            reason: error.to_string(),
        })
}
