//! A digit on a tinted ground, as an image or a short video, cut into the patch rows that the vision tower reads.

use serde::{Deserialize, Serialize};

use super::digits::{Digit, SIDE};
use super::vocabulary::NUM_HUES;

/// Channels of every image: red, green, blue.
pub const NUM_CHANNELS: usize = 3;

/// How the tower cuts frames: fields of the model's vision configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatchShape {
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Side of the square of patches that become one merged token.
    pub merge_size: usize,
    /// Frames that one patch spans; an image repeats its only frame.
    pub temporal_patch_size: usize,
    /// Colour channels: [`NUM_CHANNELS`].
    pub channels: usize,
}

impl PatchShape {
    /// Values of one patch row: channels x frames x height x width.
    #[must_use]
    pub fn patch_dim(&self) -> usize {
        self.channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// The fields by name, for checks.
    pub(super) fn fields(&self) -> [(&'static str, usize); 4] {
        [
            ("patch_size", self.patch_size),
            ("merge_size", self.merge_size),
            ("temporal_patch_size", self.temporal_patch_size),
            ("channels", self.channels),
        ]
    }
}

/// Whether a medium is a still image or a video.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MediaKind {
    /// A still image: one temporal slice.
    Image,
    /// A video: two or more temporal slices.
    Video,
}

/// One image or video of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Media {
    /// Image or video.
    pub kind: MediaKind,
    /// Temporal slices, patches from top to bottom, patches from left to right: `(t, h, w)`.
    pub grid: [usize; 3],
}

impl Media {
    /// Patch rows: `t * h * w`.
    #[must_use]
    pub fn num_patches(&self) -> usize {
        self.grid.iter().product()
    }

    /// Merged tokens, and so placeholders in the stream.
    #[must_use]
    pub fn num_tokens(&self, shape: &PatchShape) -> usize {
        self.num_patches() / (shape.merge_size * shape.merge_size)
    }
}

/// What a medium shows: a digit on a ground of one hue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scene<'a> {
    /// The digit.
    pub(super) digit: &'a Digit,
    /// Number of the hue, from 0 for red around the colour wheel; below [`NUM_HUES`].
    pub(super) hue: usize,
    /// How the digit moves.
    pub(super) drift: Drift,
}

/// A straight drift of a digit over the frames of a video, in source pixels `[down, right]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Drift {
    /// Shift of the first frame.
    pub(super) start: [f32; 2],
    /// Shift of the last frame.
    pub(super) end: [f32; 2],
}

impl Drift {
    /// No shift: a still image.
    pub(super) const NONE: Self = Self {
        start: [0.0; 2],
        end: [0.0; 2],
    };

    fn at(&self, frame: usize, num_frames: usize) -> [f32; 2] {
        let share = if num_frames < 2 {
            0.0
        } else {
            frame as f32 / (num_frames - 1) as f32
        };
        std::array::from_fn(|dim| self.start[dim] + share * (self.end[dim] - self.start[dim]))
    }
}

/// Draws `scene` with the grid of `media` and appends its patch rows `[t * h * w, patch_dim]` to `pixels`.
///
/// A value is the ink, 0 to 1, plus the channel's part of the hue, 0 to 1, minus 1. Rows follow slices, then squares of
/// `merge_size` x `merge_size` patches from left to right and top to bottom, then the patches of a square. Within a
/// row: channel, frame, y, x. This is the order of the Qwen-VL family (Bai et al., "Qwen2.5-VL Technical Report", 2025).
pub(super) fn push_patches(
    pixels: &mut Vec<f32>,
    scene: &Scene<'_>,
    media: &Media,
    shape: &PatchShape,
) {
    let [slices, rows, columns] = media.grid;
    let (patch, merge) = (shape.patch_size, shape.merge_size);
    let (height, width) = (rows * patch, columns * patch);
    let num_frames = match media.kind {
        MediaKind::Image => 1,
        MediaKind::Video => slices * shape.temporal_patch_size,
    };
    let frames: Vec<Vec<f32>> = (0..num_frames)
        .map(|frame| {
            let shift = scene.drift.at(frame, num_frames);
            draw(scene.digit, height, width, shift)
        })
        .collect();
    let tint = hue_channels(scene.hue);
    let squares_per_row = columns / merge;
    for slice in 0..slices {
        for square in 0..rows / merge * squares_per_row {
            let (top, left) = (
                square / squares_per_row * merge,
                square % squares_per_row * merge,
            );
            for inner in 0..merge * merge {
                let (y0, x0) = (
                    (top + inner / merge) * patch,
                    (left + inner % merge) * patch,
                );
                for layer in 0..shape.channels * shape.temporal_patch_size {
                    let (channel, frame) = (
                        layer / shape.temporal_patch_size,
                        layer % shape.temporal_patch_size,
                    );
                    let frame = slice * shape.temporal_patch_size + frame;
                    let frame = &frames[frame.min(num_frames - 1)];
                    for y in y0..y0 + patch {
                        let line = &frame[y * width + x0..y * width + x0 + patch];
                        pixels.extend(line.iter().map(|ink| ink + tint[channel] - 1.0));
                    }
                }
            }
        }
    }
}

/// Red, green and blue of a hue, 0 to 1: the edge of the HSV colour wheel, [`NUM_HUES`] steps around.
fn hue_channels(hue: usize) -> [f32; NUM_CHANNELS] {
    let angle = 6.0 * hue as f32 / NUM_HUES as f32;
    // Each channel is full within a sixth of its own angle, gone beyond two sixths, and linear between.
    [0.0, 2.0, 4.0].map(|own: f32| {
        let away = (angle - own).abs();
        (2.0 - away.min(6.0 - away)).clamp(0.0, 1.0)
    })
}

/// The ink of a digit stretched to `[height, width]` and shifted, by bilinear interpolation between pixel centres.
fn draw(digit: &Digit, height: usize, width: usize, shift: [f32; 2]) -> Vec<f32> {
    let source = |at: usize, len: usize, shift: f32| {
        (at as f32 + 0.5) * SIDE as f32 / len as f32 - 0.5 - shift
    };
    let mut frame = Vec::with_capacity(height * width);
    for y in 0..height {
        for x in 0..width {
            let ink = sample(
                digit,
                source(y, height, shift[0]),
                source(x, width, shift[1]),
            );
            frame.push(ink);
        }
    }
    frame
}

/// The ink at a point between pixel centres; what lies outside of the image is background.
fn sample(digit: &Digit, y: f32, x: f32) -> f32 {
    let (top, left) = (y.floor(), x.floor());
    let (down, right) = (y - top, x - left);
    let ink = |y: f32, x: f32| {
        let inside = |at: f32| (0.0..SIDE as f32).contains(&at);
        if inside(y) && inside(x) {
            digit.ink[y as usize * SIDE + x as usize]
        } else {
            0.0
        }
    };
    (1.0 - down) * ((1.0 - right) * ink(top, left) + right * ink(top, left + 1.0))
        + down * ((1.0 - right) * ink(top + 1.0, left) + right * ink(top + 1.0, left + 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: PatchShape = PatchShape {
        patch_size: 4,
        merge_size: 2,
        temporal_patch_size: 2,
        channels: NUM_CHANNELS,
    };

    /// A digit whose pixel `i` has ink `i / 64`.
    fn ramp() -> Digit {
        Digit {
            ink: std::array::from_fn(|i| i as f32 / 64.0),
            value: 0,
        }
    }

    fn rows_of(media: &Media, hue: usize, drift: Drift) -> Vec<f32> {
        let mut pixels = Vec::new();
        let digit = ramp();
        push_patches(
            &mut pixels,
            &Scene {
                digit: &digit,
                hue,
                drift,
            },
            media,
            &SHAPE,
        );
        assert_eq!(pixels.len(), media.num_patches() * SHAPE.patch_dim());
        pixels
    }

    /// The source pixel's number, from a value of a channel that the hue leaves out.
    fn source_of(value: f32) -> f32 {
        (value + 1.0) * 64.0
    }

    #[test]
    fn image_of_source_size_keeps_its_pixels_in_patch_order() {
        let media = Media {
            kind: MediaKind::Image,
            grid: [1, 2, 2],
        };
        // Blue: nothing is added to the first channel.
        let pixels = rows_of(&media, 8, Drift::NONE);
        // Top left pixel of each patch: the four quarters of the source; the second frame repeats the first.
        for (row, first) in pixels.chunks(SHAPE.patch_dim()).zip([0.0, 4.0, 32.0, 36.0]) {
            assert_eq!(source_of(row[0]), first);
            assert_eq!(row[..16], row[16..32]);
        }
        assert_eq!(source_of(pixels[4]), 8.0);
    }

    #[test]
    fn rows_of_one_merged_token_are_consecutive() {
        let media = Media {
            kind: MediaKind::Image,
            grid: [1, 2, 4],
        };
        let pixels = rows_of(&media, 8, Drift::NONE);
        // Twice as wide: rows 0 to 3 show the left half of the digit, rows 4 to 7 the right half.
        for (row, values) in pixels.chunks(SHAPE.patch_dim()).enumerate() {
            let right = row >= 4;
            let column = source_of(values[1]) % 8.0;
            assert_eq!(column > 3.5, right, "row {row}: {column}");
        }
        assert_eq!(media.num_tokens(&SHAPE), 2);
    }

    #[test]
    fn hues_go_around_the_wheel_and_tint_the_channels() {
        assert_eq!(hue_channels(0), [1.0, 0.0, 0.0]);
        assert_eq!(hue_channels(1), [1.0, 0.5, 0.0]);
        assert_eq!(hue_channels(2), [1.0, 1.0, 0.0]);
        assert_eq!(hue_channels(4), [0.0, 1.0, 0.0]);
        assert_eq!(hue_channels(6), [0.0, 1.0, 1.0]);
        assert_eq!(hue_channels(8), [0.0, 0.0, 1.0]);
        assert_eq!(hue_channels(11), [1.0, 0.0, 0.5]);
        let media = Media {
            kind: MediaKind::Image,
            grid: [1, 2, 2],
        };
        let row = &rows_of(&media, 1, Drift::NONE)[..SHAPE.patch_dim()];
        for at in 0..32 {
            assert_eq!(
                (row[at] - row[64 + at], row[32 + at] - row[64 + at]),
                (1.0, 0.5)
            );
        }
    }

    #[test]
    fn video_frames_move() {
        let media = Media {
            kind: MediaKind::Video,
            grid: [2, 2, 2],
        };
        let drift = Drift {
            start: [0.0, 0.0],
            end: [0.0, 1.0],
        };
        let pixels = rows_of(&media, 8, drift);
        assert_ne!(pixels[..16], pixels[16..32]);
        // The last frame is the first one, a pixel to the right.
        let last = &pixels[4 * SHAPE.patch_dim() + 16..][..16];
        for y in 0..4 {
            assert!((last[y * 4 + 1] - pixels[y * 4]).abs() < 1e-5);
            assert_eq!(source_of(last[y * 4]), 0.0);
        }
    }
}
