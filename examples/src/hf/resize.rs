//! Bicubic resampling with antialiasing, rounded where the reference rounds: rows of pixels first, to whole levels, then columns.
//!
//! The kernel is Keys' with a = -0.5 (Keys, "Cubic convolution interpolation for digital image processing", 1981), widened when a picture
//! shrinks, as in Pillow and in PyTorch's antialiased `interpolate`.

use image::RgbImage;

/// Half the width of the kernel.
const REACH: f64 = 2.0;
const A: f64 = -0.5;
const CHANNELS: usize = 3;

/// First source pixel and the weights of it and its neighbours.
struct Taps {
    first: usize,
    weights: Vec<f64>,
}

fn kernel(x: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < REACH {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// For each of `to` pixels the source pixels of `from` that it is made of.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "sides of pictures"
)]
fn taps(from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let widened = scale.max(1.0);
    (0..to)
        .map(|at| {
            let center = (at as f64 + 0.5) * scale;
            let reach = REACH * widened;
            let first = (center - reach + 0.5).max(0.0) as usize;
            let last = ((center + reach + 0.5) as usize).min(from);
            let mut weights: Vec<f64> = (first..last)
                .map(|source| kernel((source as f64 - center + 0.5) / widened))
                .collect();
            let total: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= total);
            Taps { first, weights }
        })
        .collect()
}

/// The nearest level.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to the levels"
)]
fn level(value: f64) -> u8 {
    (value + 0.5).floor().clamp(0.0, 255.0) as u8
}

/// Each of `lines` lines of pixels, resampled. Pixel `x` of line `y` stands at `y · line + x · step` bytes.
fn pass(source: &[u8], target: &mut [u8], taps: &[Taps], lines: usize, strides: [[usize; 2]; 2]) {
    let [[line, step], [to_line, to_step]] = strides;
    for y in 0..lines {
        for (x, taps) in taps.iter().enumerate() {
            for channel in 0..CHANNELS {
                let from = y * line + taps.first * step + channel;
                let values = source[from..].iter().step_by(step);
                let sum: f64 = taps
                    .weights
                    .iter()
                    .zip(values)
                    .map(|(weight, &value)| weight * f64::from(value))
                    .sum();
                target[y * to_line + x * to_step + channel] = level(sum);
            }
        }
    }
}

/// The picture in another size, none of which is 0.
pub(super) fn resize(image: &RgbImage, height: usize, width: usize) -> RgbImage {
    let (from_width, from_height) = (image.width() as usize, image.height() as usize);
    let (row, to_row) = (from_width * CHANNELS, width * CHANNELS);
    let mut narrow = vec![0; from_height * to_row];
    let strides = [[row, CHANNELS], [to_row, CHANNELS]];
    pass(
        image.as_raw(),
        &mut narrow,
        &taps(from_width, width),
        from_height,
        strides,
    );
    let mut done = vec![0; height * to_row];
    let strides = [[CHANNELS, to_row], [CHANNELS, to_row]];
    pass(
        &narrow,
        &mut done,
        &taps(from_height, height),
        width,
        strides,
    );
    #[allow(clippy::cast_possible_truncation, reason = "sides of pictures")]
    let (to_width, to_height) = (width as u32, height as u32);
    RgbImage::from_raw(to_width, to_height, done).expect("as many bytes as the size says")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_of_that_size_stays_as_it_is() {
        let pixels: Vec<u8> = (0..5 * 7 * 3).map(|at| (at * 37 % 256) as u8).collect();
        let image = RgbImage::from_raw(7, 5, pixels).unwrap();
        assert_eq!(resize(&image, 5, 7), image);
    }

    #[test]
    fn one_color_stays_one_color() {
        let image = RgbImage::from_pixel(9, 4, image::Rgb([3, 200, 77]));
        for (height, width) in [(2, 3), (16, 11), (4, 20)] {
            let resized = resize(&image, height, width);
            assert!(resized.pixels().all(|pixel| pixel.0 == [3, 200, 77]));
        }
    }
}
