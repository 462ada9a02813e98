//! Chat messages to documents: text, placeholders, ids, labels, positions and patches.
//!
//! The marker of an image becomes as many placeholders as the image has tokens; that of a video becomes, slice by slice, the time in
//! words and the slice's placeholders between start and end. The text is tokenised behind that, as in the processor of Qwen3-VL in
//! Hugging Face's transformers.

use std::path::Path;

use tokenizers::Tokenizer;

use super::{
    ChatTemplate, ImageProcessor, Message, Part, Pixels, PromptError, Video, VideoProcessor,
};
use crate::{
    data::{Document, IGNORED_LABEL, Media, MediaKind, PatchShape},
    models::qwen3_vl::{Qwen3VlConfig, mrope_positions},
};

const IMAGE: &str = "<|image_pad|>";
const VIDEO: &str = "<|video_pad|>";
const VISION_START: &str = "<|vision_start|>";
const VISION_END: &str = "<|vision_end|>";
const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";
/// Stands for a placeholder while markers are looked for.
const HELD: &str = "\u{0}";

/// Everything that a model directory says about its input.
#[derive(Debug, Clone)]
pub struct Processor {
    pub(super) tokenizer: Tokenizer,
    pub(super) template: ChatTemplate,
    pub(super) images: ImageProcessor,
    pub(super) videos: VideoProcessor,
    pub(super) config: Qwen3VlConfig,
}

/// A video's patches and the times of its slices.
type Timed = (Pixels, Vec<f64>);

impl Processor {
    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// How pictures are cut.
    pub fn images(&self) -> &ImageProcessor {
        &self.images
    }

    /// The patch geometry.
    pub fn shape(&self) -> PatchShape {
        self.images.shape()
    }

    /// The id of the token that ends a turn, if the tokenizer has it.
    pub fn turn_end(&self) -> Option<i64> {
        self.tokenizer.token_to_id(TURN_END).map(i64::from)
    }

    /// Fills rows behind their last document.
    pub fn padding_id(&self) -> i64 {
        self.tokenizer
            .token_to_id("<|endoftext|>")
            .map_or(0, i64::from)
    }

    /// The messages as text, a marker for each medium.
    ///
    /// # Errors
    /// The template refuses them.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, PromptError> {
        self.template.render(messages, add_generation_prompt)
    }

    /// A document of the messages. Paths count from `base`. Labels are the next token's id where the assistant says it (its turn's end
    /// included), else ignored. With `add_generation_prompt` the document ends where the assistant would begin.
    ///
    /// # Errors
    /// A medium cannot be used, the prompt has another number of markers than there are media, or template or tokenizer refuse.
    pub fn document(
        &self,
        messages: &[Message],
        base: &Path,
        add_generation_prompt: bool,
    ) -> Result<Document, PromptError> {
        let prompt = self.render(messages, add_generation_prompt)?;
        let parts: Vec<&Part> = messages.iter().flat_map(Message::media).collect();
        let count = |video: bool| {
            let is_video = |part: &&&Part| matches!(part, Part::Video { .. }) == video;
            parts.iter().filter(is_video).count()
        };
        // Before any picture is read.
        for (marker, expected) in [(IMAGE, count(false)), (VIDEO, count(true))] {
            let got = prompt.matches(marker).count();
            if got != expected {
                return Err(PromptError::Placeholders {
                    marker,
                    expected,
                    got,
                });
            }
        }
        let (mut images, mut videos) = (Vec::new(), Vec::new());
        let mut media = Vec::new();
        for part in parts {
            match part {
                Part::Text { .. } => {}
                Part::Image { image } => {
                    let pixels = self.images.open(&base.join(image))?;
                    media.push((MediaKind::Image, pixels.clone()));
                    images.push(pixels);
                }
                Part::Video { video, fps } => {
                    let path = base.join(video);
                    let timed = self.videos.cut(&Video::open(&path, *fps)?, &path)?;
                    media.push((MediaKind::Video, timed.0.clone()));
                    videos.push(timed);
                }
            }
        }
        let text = self.expand(prompt, &images, &videos);
        let ids = self.encode(&text)?;
        let grids = |pixels: &[Pixels]| pixels.iter().map(|pixels| pixels.grid).collect::<Vec<_>>();
        let video_grids: Vec<_> = videos.iter().map(|(pixels, _)| pixels.grid).collect();
        let positions = mrope_positions(&ids, &grids(&images), &video_grids, &self.config)?;
        let labels = self.labels(&ids)?;
        let (media, pixels): (Vec<_>, Vec<_>) = media
            .into_iter()
            .map(|(kind, pixels)| {
                (
                    Media {
                        kind,
                        grid: pixels.grid,
                    },
                    pixels.values,
                )
            })
            .unzip();
        Ok(Document::new(
            ids,
            labels,
            positions,
            media,
            pixels.concat(),
        ))
    }

    /// Ids of a text, nothing added.
    ///
    /// # Errors
    /// The tokenizer refuses it.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, PromptError> {
        let encoding =
            self.tokenizer
                .encode(text, false)
                .map_err(|error| PromptError::Tokenizer {
                    reason: error.to_string(),
                })?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// Text of ids, without special tokens.
    ///
    /// # Errors
    /// The tokenizer refuses them.
    pub fn decode(&self, ids: &[i64]) -> Result<String, PromptError> {
        let ids: Vec<u32> = ids
            .iter()
            .filter_map(|&id| u32::try_from(id).ok())
            .collect();
        self.tokenizer
            .decode(&ids, true)
            .map_err(|error| PromptError::Tokenizer {
                reason: error.to_string(),
            })
    }

    /// Markers to placeholders.
    fn expand(&self, mut prompt: String, images: &[Pixels], videos: &[Timed]) -> String {
        let merge = self.images.merge_size.pow(2);
        for pixels in images {
            let num = pixels.grid.iter().product::<usize>() / merge;
            prompt = prompt.replacen(IMAGE, &HELD.repeat(num), 1);
        }
        prompt = prompt.replace(HELD, IMAGE);
        for (pixels, times) in videos {
            let [slices, height, width] = pixels.grid;
            let slice = HELD.repeat(height * width / merge);
            let written: String = times
                .iter()
                .take(slices)
                .map(|time| format!("<{time:.1} seconds>{VISION_START}{slice}{VISION_END}"))
                .collect();
            // Slices have starts and ends of their own.
            let framed = format!("{VISION_START}{VIDEO}{VISION_END}");
            let marker = if prompt.contains(&framed) {
                framed.as_str()
            } else {
                VIDEO
            };
            prompt = prompt.replacen(marker, &written, 1);
        }
        prompt.replace(HELD, VIDEO)
    }

    /// The next token's id where it belongs to the assistant's words.
    fn labels(&self, ids: &[i64]) -> Result<Vec<i64>, PromptError> {
        let head = self.encode(&format!("{TURN_START}assistant\n"))?;
        let end = self.turn_end();
        let mut labels = vec![IGNORED_LABEL; ids.len()];
        let mut at = 0;
        while at < ids.len() {
            if !ids[at..].starts_with(&head) {
                at += 1;
                continue;
            }
            at += head.len();
            while at < ids.len() {
                labels[at - 1] = ids[at];
                at += 1;
                if Some(ids[at - 1]) == end {
                    break;
                }
            }
        }
        Ok(labels)
    }
}
