//! Pictures as the reference processor cuts them: resized to whole squares of patches within a range of pixels, normalised, and
//! laid out patch by patch.
//!
//! The source of sizes and of the order of patches is the image processor of Qwen2-VL in Hugging Face's transformers, which
//! Qwen3-VL uses.

use std::path::Path;

use image::{DynamicImage, ImageDecoder, ImageReader, RgbImage};
use serde::Deserialize;

use super::{DirectoryProblem, MediaError, resize::resize};
use crate::{data::PatchShape, models::qwen3_vl::VisionConfig};

/// Sides may differ by this factor at most.
const MAX_RATIO: usize = 200;
/// The number by which configurations name bicubic resampling.
const BICUBIC: u8 = 3;

/// Fewest and most pixels of a resized picture, or of all frames of a video together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct PixelLimits {
    /// Fewest pixels. The field's name is that of the files, which call an area an edge.
    pub shortest_edge: usize,
    /// Most pixels.
    pub longest_edge: usize,
}

/// How pictures become patches: fields of `preprocessor_config.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ImageProcessor {
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames that a patch spans.
    pub temporal_patch_size: usize,
    /// Patches per side of a square that becomes one token.
    pub merge_size: usize,
    /// Mean of each channel, of values from 0 to 1.
    pub image_mean: [f32; 3],
    /// Standard deviation of each channel.
    pub image_std: [f32; 3],
    /// Limits of the resized size.
    #[serde(default)]
    pub size: Option<PixelLimits>,
    /// Older name of the lower limit; goes before `size`.
    #[serde(default)]
    pub min_pixels: Option<usize>,
    /// Older name of the upper limit; goes before `size`.
    #[serde(default)]
    pub max_pixels: Option<usize>,
    #[serde(default)]
    resample: Option<u8>,
    #[serde(default)]
    rescale_factor: Option<f64>,
    #[serde(default)]
    do_resize: Option<bool>,
    #[serde(default)]
    do_rescale: Option<bool>,
    #[serde(default)]
    do_normalize: Option<bool>,
}

/// A picture or video as patches.
#[derive(Debug, Clone, PartialEq)]
pub struct Pixels {
    /// `(t, h, w)` in patches.
    pub grid: [usize; 3],
    /// `[t·h·w, patch_dim]`.
    pub values: Vec<f32>,
}

impl ImageProcessor {
    /// Limits of a picture's area.
    #[must_use]
    pub fn limits(&self, default: PixelLimits) -> PixelLimits {
        let size = self.size.unwrap_or(default);
        PixelLimits {
            shortest_edge: self.min_pixels.unwrap_or(size.shortest_edge),
            longest_edge: self.max_pixels.unwrap_or(size.longest_edge),
        }
    }

    /// The patch geometry.
    #[must_use]
    pub fn shape(&self) -> PatchShape {
        PatchShape {
            patch_size: self.patch_size,
            merge_size: self.merge_size,
            temporal_patch_size: self.temporal_patch_size,
            channels: 3,
        }
    }

    /// Adds what does not fit the model, or is not known here.
    pub(super) fn check(
        &self,
        file: &str,
        vision: &VisionConfig,
        problems: &mut Vec<DirectoryProblem>,
    ) {
        let mut require = |field: &str, expected: String, got: String| {
            if expected != got {
                problems.push(DirectoryProblem::Field {
                    file: file.to_owned(),
                    field: field.to_owned(),
                    expected,
                    got,
                });
            }
        };
        for (field, expected, got) in [
            ("patch_size", vision.patch_size, self.patch_size),
            ("merge_size", vision.spatial_merge_size, self.merge_size),
            (
                "temporal_patch_size",
                vision.temporal_patch_size,
                self.temporal_patch_size,
            ),
            ("channels", vision.in_channels, 3),
        ] {
            require(field, expected.to_string(), got.to_string());
        }
        let resample = self.resample.unwrap_or(BICUBIC);
        require("resample", BICUBIC.to_string(), resample.to_string());
        let factor = self.rescale_factor.unwrap_or(1.0 / 255.0);
        require(
            "rescale_factor",
            format!("{:.6}", 1.0 / 255.0),
            format!("{factor:.6}"),
        );
        for (field, done) in [
            ("do_resize", self.do_resize),
            ("do_rescale", self.do_rescale),
            ("do_normalize", self.do_normalize),
        ] {
            require(field, "true".into(), done.unwrap_or(true).to_string());
        }
    }

    /// Reads a picture and cuts it.
    ///
    /// # Errors
    /// It cannot be decoded, or is too long for its width.
    pub fn open(&self, path: &Path) -> Result<Pixels, MediaError> {
        let image = open_image(path)?;
        let (width, height) = image.dimensions();
        let [height, width] = smart_resize(
            [height as usize, width as usize],
            self.patch_size * self.merge_size,
            self.limits(PixelLimits {
                shortest_edge: 65_536,
                longest_edge: 16_777_216,
            }),
        )
        .map_err(|got| too_long(path, &got))?;
        Ok(self.cut(&[resize(&image, height, width)]))
    }

    /// Frames of one size, already resized, as patches: the last one is repeated until they fill a temporal patch.
    ///
    /// Rows come slice by slice and square by square, within a square row by row; a row's values are ordered by channel, frame, row
    /// and column of pixels.
    #[must_use]
    pub fn cut(&self, frames: &[RgbImage]) -> Pixels {
        let (patch, merge, spans) = (self.patch_size, self.merge_size, self.temporal_patch_size);
        let Some(last) = frames.len().checked_sub(1) else {
            return Pixels {
                grid: [0; 3],
                values: vec![],
            };
        };
        let (width, height) = frames[0].dimensions();
        let [rows, columns] = [height as usize / patch, width as usize / patch];
        let slices = frames.len().div_ceil(spans);
        let mut values = Vec::with_capacity(slices * rows * columns * self.shape().patch_dim());
        // In f32 and fused like the reference, so that rounding is the same.
        let mean = self.image_mean.map(|mean| mean * 255.0);
        let deviation = self.image_std.map(|deviation| deviation * 255.0);
        let mut push_patch = |slice: usize, row: usize, column: usize| {
            for channel in 0..3 {
                for frame in slice * spans..(slice + 1) * spans {
                    let frame = frames[frame.min(last)].as_raw();
                    for y in row * patch..(row + 1) * patch {
                        for x in column * patch..(column + 1) * patch {
                            let value = f32::from(frame[(y * width as usize + x) * 3 + channel]);
                            values.push((value - mean[channel]) / deviation[channel]);
                        }
                    }
                }
            }
        };
        for slice in 0..slices {
            for top in (0..rows).step_by(merge) {
                for left in (0..columns).step_by(merge) {
                    for row in top..top + merge {
                        (left..left + merge).for_each(|column| push_patch(slice, row, column));
                    }
                }
            }
        }
        Pixels {
            grid: [slices, rows, columns],
            values,
        }
    }
}

/// The size `[height, width]` that a picture is resized to: the nearest multiples of `factor`, shrunk or grown to keep the area within
/// the limits and the sides near their ratio.
///
/// # Errors
/// One side is more than 200 times the other; the error says what they are.
pub fn smart_resize(
    size: [usize; 2],
    factor: usize,
    limits: PixelLimits,
) -> Result<[usize; 2], String> {
    scaled(size, 1.0, 1.0, factor, limits)
}

/// [`smart_resize`] where the area counts `rounded_frames` times when it is compared with the limits, and `frames` times when the
/// scale is computed.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "sides of pictures"
)]
pub(super) fn scaled(
    [height, width]: [usize; 2],
    frames: f64,
    rounded_frames: f64,
    factor: usize,
    limits: PixelLimits,
) -> Result<[usize; 2], String> {
    let (short, long) = (height.min(width), height.max(width));
    if short == 0 || long > MAX_RATIO * short {
        return Err(format!("{width} x {height}"));
    }
    let (least, most) = (limits.shortest_edge as f64, limits.longest_edge as f64);
    let (unit, area) = (factor as f64, frames * (height * width) as f64);
    let sides = [height as f64, width as f64];
    // Half goes to even, as in Python.
    let nearest = sides.map(|side| (side / unit).round_ties_even() * unit);
    let total = rounded_frames * nearest[0] * nearest[1];
    let sides = if total > most {
        let shrink = (area / most).sqrt();
        sides.map(|side| ((side / shrink / unit).floor() * unit).max(unit))
    } else if total < least {
        let grow = (least / area).sqrt();
        sides.map(|side| (side * grow / unit).ceil() * unit)
    } else {
        nearest
    };
    Ok(sides.map(|side| side as usize))
}

pub(super) fn too_long(path: &Path, got: &str) -> MediaError {
    MediaError::Form {
        path: path.display().to_string(),
        what: "sides",
        expected: format!("one at most {MAX_RATIO} times the other"),
        got: got.to_owned(),
    }
}

/// A picture upright and without its alpha channel.
pub(super) fn open_image(path: &Path) -> Result<RgbImage, MediaError> {
    decode(path).map_err(|reason| MediaError::Decode {
        path: path.display().to_string(),
        reason,
    })
}

fn decode(path: &Path) -> Result<RgbImage, String> {
    let reader = ImageReader::open(path)
        .and_then(ImageReader::with_guessed_format)
        .map_err(|error| error.to_string())?;
    let mut decoder = reader.into_decoder().map_err(|error| error.to_string())?;
    let orientation = decoder.orientation().map_err(|error| error.to_string())?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(|error| error.to_string())?;
    image.apply_orientation(orientation);
    Ok(image.to_rgb8())
}
