//! Videos: frames chosen, resized together and cut, and the times that prompts say them at.
//!
//! The source of sampling, sizes and times is the video processor of Qwen3-VL in Hugging Face's transformers.

use std::{fs, fs::File, io::BufReader, path::Path};

use image::{AnimationDecoder, RgbImage, codecs::gif::GifDecoder};
use serde::Deserialize;

use super::{
    ImageProcessor, MediaError, PixelLimits, Pixels,
    images::{open_image, scaled, too_long},
    resize::resize,
};

/// Frames per second where nothing says them.
const DEFAULT_FPS: f64 = 24.0;
const LIMITS: PixelLimits = PixelLimits {
    shortest_edge: 131_072,
    longest_edge: 786_432,
};

/// How videos become patches: fields of `video_preprocessor_config.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct VideoProcessor {
    /// What videos share with pictures.
    #[serde(flatten)]
    pub images: ImageProcessor,
    /// Frames per second that are kept.
    #[serde(default = "defaults::fps")]
    pub fps: f64,
    /// Fewest frames that are kept, where there are as many.
    #[serde(default = "defaults::min_frames")]
    pub min_frames: usize,
    /// Most frames that are kept.
    #[serde(default = "defaults::max_frames")]
    pub max_frames: usize,
    /// Whether frames are chosen by `fps`; else all are kept.
    #[serde(default = "defaults::yes")]
    pub do_sample_frames: bool,
}

mod defaults {
    pub(super) fn fps() -> f64 {
        2.0
    }
    pub(super) fn min_frames() -> usize {
        4
    }
    pub(super) fn max_frames() -> usize {
        768
    }
    pub(super) fn yes() -> bool {
        true
    }
}

/// A video as it was read: frames of one size.
#[derive(Debug, Clone)]
pub struct Video {
    /// Its frames, at least one.
    pub frames: Vec<RgbImage>,
    /// Frames per second.
    pub fps: f64,
}

impl Video {
    /// Reads a folder of pictures, in the order of their names, or an animated GIF. `fps` goes before what the file says.
    ///
    /// # Errors
    /// A frame cannot be decoded, frames differ in size, there is none, or `fps` is not a positive number.
    pub fn open(path: &Path, fps: Option<f64>) -> Result<Self, MediaError> {
        let form = |what, expected: &str, got: String| MediaError::Form {
            path: path.display().to_string(),
            what,
            expected: expected.to_owned(),
            got,
        };
        let (frames, found) = if path.is_dir() {
            (folder(path)?, None)
        } else {
            animation(path)?
        };
        let Some(first) = frames.first().map(RgbImage::dimensions) else {
            return Err(form("frames", "at least one", "none".into()));
        };
        if let Some(other) = frames.iter().find(|frame| frame.dimensions() != first) {
            let shown = |(width, height)| format!("{width} x {height}");
            return Err(form(
                "size of a frame",
                &shown(first),
                shown(other.dimensions()),
            ));
        }
        let fps = fps.or(found).unwrap_or(DEFAULT_FPS);
        if !(fps.is_finite() && fps > 0.0) {
            return Err(form("fps", "a positive number", fps.to_string()));
        }
        Ok(Self { frames, fps })
    }
}

fn folder(path: &Path) -> Result<Vec<RgbImage>, MediaError> {
    let failed = |error: std::io::Error| MediaError::Decode {
        path: path.display().to_string(),
        reason: error.to_string(),
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        let hidden = file
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if file.is_file() && !hidden {
            files.push(file);
        }
    }
    files.sort();
    files.iter().map(|file| open_image(file)).collect()
}

fn animation(path: &Path) -> Result<(Vec<RgbImage>, Option<f64>), MediaError> {
    let failed = |reason: String| MediaError::Decode {
        path: path.display().to_string(),
        reason,
    };
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    let decoder =
        GifDecoder::new(BufReader::new(file)).map_err(|error| failed(error.to_string()))?;
    let frames = decoder
        .into_frames()
        .collect_frames()
        .map_err(|error| failed(error.to_string()))?;
    let milliseconds: f64 = frames
        .iter()
        .map(|frame| {
            let (numerator, denominator) = frame.delay().numer_denom_ms();
            f64::from(numerator) / f64::from(denominator.max(1))
        })
        .sum();
    #[allow(clippy::cast_precision_loss, reason = "a number of frames")]
    let fps = (milliseconds > 0.0).then(|| 1000.0 * frames.len() as f64 / milliseconds);
    let frames = frames
        .into_iter()
        .map(|frame| image::DynamicImage::from(frame.into_buffer()).to_rgb8())
        .collect();
    Ok((frames, fps))
}

impl VideoProcessor {
    /// Chooses frames of a video, resizes and cuts them. With the patches come the times of the slices in seconds.
    ///
    /// # Errors
    /// Fewer frames than a temporal patch spans, frames smaller than a token, or too long for their width. `path` is for messages.
    #[allow(clippy::cast_precision_loss, reason = "a number of frames")]
    pub fn cut(&self, video: &Video, path: &Path) -> Result<(Pixels, Vec<f64>), MediaError> {
        let images = &self.images;
        let (factor, spans) = (
            images.patch_size * images.merge_size,
            images.temporal_patch_size,
        );
        let total = video.frames.len();
        let indices = if self.do_sample_frames {
            sample_frames(
                total,
                video.fps,
                self.fps,
                [self.min_frames, self.max_frames],
            )
        } else {
            (0..total).collect()
        };
        let (width, height) = video.frames[0].dimensions();
        let [height, width] = [height as usize, width as usize];
        let form = |what, expected: String, got: String| MediaError::Form {
            path: path.display().to_string(),
            what,
            expected,
            got,
        };
        if indices.len() < spans {
            let expected = format!("at least {spans}");
            return Err(form("frames", expected, indices.len().to_string()));
        }
        if height.min(width) < factor {
            let expected = format!("sides of at least {factor}");
            return Err(form("size", expected, format!("{width} x {height}")));
        }
        let frames = indices.len() as f64;
        let rounded = (frames / spans as f64).round_ties_even() * spans as f64;
        let [height, width] = scaled(
            [height, width],
            frames,
            rounded,
            factor,
            images.limits(LIMITS),
        )
        .map_err(|got| too_long(path, &got))?;
        let frames: Vec<RgbImage> = indices
            .iter()
            .map(|&at| resize(&video.frames[at], height, width))
            .collect();
        let times = timestamps(&indices, video.fps, images.merge_size);
        Ok((images.cut(&frames), times))
    }
}

/// Which of `total` frames are kept: evenly spread, so many that `fps` of them pass in a second, within `[least, most]`.
#[must_use]
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "numbers of frames"
)]
pub fn sample_frames(
    total: usize,
    native_fps: f64,
    fps: f64,
    [least, most]: [usize; 2],
) -> Vec<usize> {
    let wanted = (total as f64 / native_fps * fps) as usize;
    let num = wanted.max(least).min(most).min(total);
    let step = total.saturating_sub(1) as f64 / num.saturating_sub(1).max(1) as f64;
    (0..num)
        .map(|at| (at as f64 * step).round_ties_even() as usize)
        .collect()
}

/// Seconds at which slices of `merge` frames stand: the middle between a slice's first and last frame.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "numbers of frames")]
pub fn timestamps(indices: &[usize], fps: f64, merge: usize) -> Vec<f64> {
    let seconds = |at: &usize| *at as f64 / fps;
    indices
        .chunks(merge)
        .map(|slice| {
            let last = slice.last().or(indices.last());
            f64::midpoint(
                slice.first().map_or(0.0, seconds),
                last.map_or(0.0, seconds),
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_spread_evenly_within_limits() {
        assert_eq!(sample_frames(5, 4.0, 2.0, [2, 8]), [0, 4]);
        assert_eq!(sample_frames(5, 4.0, 2.0, [4, 8]), [0, 1, 3, 4]);
        assert_eq!(sample_frames(3, 24.0, 2.0, [4, 8]), [0, 1, 2]);
        assert_eq!(sample_frames(100, 10.0, 2.0, [4, 8]).len(), 8);
        assert_eq!(sample_frames(1, 24.0, 2.0, [4, 8]), [0]);
    }

    #[test]
    fn a_slice_stands_at_its_middle() {
        assert_eq!(timestamps(&[0, 2, 4], 4.0, 2), [0.25, 1.0]);
        // Ties go to even, as in Python's formatting.
        assert_eq!(format!("{:.1} {:.1}", 0.25, 0.75), "0.2 0.8");
    }
}
