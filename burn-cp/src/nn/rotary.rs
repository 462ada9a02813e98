//! Rotary position embeddings from the positions of a step.
//!
//! A head of width `head_dim` is rotated in `head_dim / 2` planes, plane `i` spanned by the dims `i` and
//! `i + head_dim / 2`, by the angle `position · theta^(-2i / head_dim)` (Su et al., "RoFormer: Enhanced Transformer with
//! Rotary Position Embedding", 2021). Multi-axis positions (time, height, width) give each plane one of the three axes
//! (Wang et al., "Qwen2-VL", 2024, section 2.1); which plane gets which axis is the interleaved arrangement of Qwen3-VL:
//! see [`RotaryConfig::axis_of_planes`].
//!
//! Positions come from outside; where they start and how they advance is not decided here.

use std::f64::consts::TAU;

use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

use super::NnError;

/// Positions are split into digits of this base, so that angles stay small enough for f32.
const BASE: i32 = 128;
/// Digits of a position; the last one is not bounded.
const NUM_DIGITS: i32 = 3;

/// How positions turn into angles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotaryConfig {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Planes that turn with time, height and width; they sum to `head_dim / 2`. `None`: positions have one axis.
    #[serde(default)]
    pub sections: Option<[usize; 3]>,
}

impl RotaryConfig {
    /// One axis.
    #[must_use]
    pub fn new(theta: f64) -> Self {
        Self {
            theta,
            sections: None,
        }
    }

    /// Three axes, interleaved.
    #[must_use]
    pub fn with_sections(self, sections: [usize; 3]) -> Self {
        Self {
            sections: Some(sections),
            ..self
        }
    }

    /// Checks the values for heads of width `head_dim`.
    ///
    /// # Errors
    ///
    /// `theta` not a positive number, an odd `head_dim`, or sections that do not share out its planes.
    pub fn validate(&self, head_dim: usize) -> Result<(), NnError> {
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return Err(NnError::field(
                "rope.theta",
                "a positive number",
                self.theta,
            ));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(NnError::field(
                "head_dim",
                "an even number with rotary",
                head_dim,
            ));
        }
        let Some(sections) = self.sections else {
            return Ok(());
        };
        let refuse = |expected| {
            Err(NnError::Sections {
                head_dim,
                expected,
                sections,
            })
        };
        let half = head_dim / 2;
        if sections
            .iter()
            .try_fold(0usize, |sum, &n| sum.checked_add(n))
            != Some(half)
        {
            return refuse(format!("a sum of {half}"));
        }
        // The arrangement has no place for them beyond every third plane; the sum above bounds the products.
        if (1..3).any(|axis| sections[axis] > 0 && 3 * (sections[axis] - 1) + axis >= half) {
            return refuse("height and width to find room in every third plane".into());
        }
        Ok(())
    }

    /// For each of the `head_dim / 2` planes the axis that turns it: 0 time, 1 height, 2 width; all 0 without sections.
    ///
    /// Interleaved: planes are dealt out in turns of time, height, width until height and width have as many as their
    /// sections say; time takes all others. With sections `[4, 2, 2]`: `[0, 1, 2, 0, 1, 2, 0, 0]`. The source is
    /// `recomposition_frequencies` of `Qwen3VLTextRotaryEmbedding` in Hugging Face's transformers (before 5.0
    /// `apply_interleaved_mrope`), and Bai et al., "Qwen3-VL Technical Report", 2025.
    #[must_use]
    pub fn axis_of_planes(&self, head_dim: usize) -> Vec<usize> {
        let sections = self.sections.unwrap_or_default();
        (0..head_dim / 2)
            .map(|plane| {
                let axis = plane % 3;
                if axis > 0 && plane < 3 * sections[axis] {
                    axis
                } else {
                    0
                }
            })
            .collect()
    }

    /// Frequencies of the planes, in radians per position.
    fn frequencies(&self, head_dim: usize) -> impl Iterator<Item = f64> {
        let theta = self.theta;
        (0..head_dim / 2).map(move |plane| theta.powf(-((2 * plane) as f64) / head_dim as f64))
    }
}

/// Cosines and sines of a step's tokens. Made once per forward pass and shared by all layers; cheap to clone.
#[derive(Debug, Clone)]
pub struct RotaryTables<B: Backend> {
    /// `[batch, 1, tokens, head_dim / 2]`, f32, or f64 where the backend's floats are f64.
    cos: Tensor<B, 4>,
    sin: Tensor<B, 4>,
}

impl<B: Backend> RotaryTables<B> {
    /// Tables for `positions [axes, batch, tokens]`, `axes` 1 or 3, for heads of width `head_dim`; `config` is valid for
    /// that width. With sections, positions of one axis count on all three. No gradient.
    ///
    /// The angle is off by less than 1e-4 for positions up to 10⁶ in f32: a position is written as
    /// `d0 + d1·128 + d2·128²`, and each digit is multiplied by the angle of its place, which was reduced to ±π in f64.
    /// The plain product in f32 is off by 0.01 at 10⁵ already.
    ///
    /// # Panics
    ///
    /// If there are neither 1 nor 3 axes, or 3 without sections.
    #[must_use]
    pub fn new(positions: Tensor<B, 3, Int>, config: &RotaryConfig, head_dim: usize) -> Self {
        let axes = positions.dims()[0];
        let device = positions.device();
        let planes = match (axes, config.sections) {
            (1, _) => None,
            (3, Some(_)) => {
                let axis: Vec<i64> = config
                    .axis_of_planes(head_dim)
                    .into_iter()
                    .map(|axis| axis as i64)
                    .collect();
                let len = axis.len();
                Some(Tensor::<B, 1, Int>::from_data(
                    TensorData::new(axis, [len]),
                    &device,
                ))
            }
            _ => panic!(
                "rotary positions: expected 1 axis, or 3 with sections, got {axes} with sections {:?}",
                config.sections
            ),
        };

        let mut rest = positions;
        let mut angles: Option<Tensor<B, 3>> = None;
        for place in 0..NUM_DIGITS {
            let digit = if place + 1 == NUM_DIGITS {
                rest.clone()
            } else {
                rest.clone().remainder_scalar(BASE)
            };
            rest = (rest - digit.clone()).div_scalar(BASE);
            let digit = digit.float();
            let dtype = table_dtype(digit.dtype());
            let digit = digit.cast(dtype);
            // [planes or 1, batch, tokens] -> [batch, tokens, planes or 1]
            let digit = match &planes {
                Some(planes) => digit.select(0, planes.clone()),
                None => digit,
            }
            .permute([1, 2, 0]);
            let turned = digit * place_angles(config, head_dim, place, dtype, &device);
            angles = Some(match angles {
                Some(angles) => angles + turned,
                None => turned,
            });
        }
        let angles = angles.expect("a position has at least one digit");
        Self::from_cos_sin(angles.clone().cos(), angles.sin())
    }

    /// Tables that were computed elsewhere, each `[batch, tokens, head_dim / 2]`.
    #[must_use]
    pub fn from_cos_sin(cos: Tensor<B, 3>, sin: Tensor<B, 3>) -> Self {
        Self {
            cos: cos.unsqueeze_dim(1),
            sin: sin.unsqueeze_dim(1),
        }
    }

    /// Rotates `x [batch, heads, tokens, head_dim]`; same shape and dtype. Half precision is rotated in f32.
    #[must_use]
    pub fn rotate(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let dtype = x.dtype();
        let work = if dtype == DType::F64 {
            DType::F64
        } else {
            self.cos.dtype()
        };
        let [cos, sin] = [&self.cos, &self.sin].map(|table| table.clone().cast(work));
        let half = cos.dims()[3];
        let x = x.cast(work);
        let first = x.clone().narrow(3, 0, half);
        let second = x.narrow(3, half, half);
        let rotated = vec![
            first.clone() * cos.clone() - second.clone() * sin.clone(),
            second * cos + first * sin,
        ];
        crate::cat(rotated, 3).cast(dtype)
    }
}

/// Dtype in which angles are computed where the backend's floats are `float`.
fn table_dtype(float: DType) -> DType {
    if float == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// `[1, 1, head_dim / 2]`: by what angle in ±π a plane turns per unit of the digit at `place`.
fn place_angles<B: Backend>(
    config: &RotaryConfig,
    head_dim: usize,
    place: i32,
    dtype: DType,
    device: &B::Device,
) -> Tensor<B, 3> {
    let unit = f64::from(BASE).powi(place);
    let angles: Vec<f64> = config
        .frequencies(head_dim)
        .map(|frequency| {
            let angle = frequency * unit;
            angle - (angle / TAU).round() * TAU
        })
        .collect();
    let len = angles.len();
    Tensor::from_data(TensorData::new(angles, [1, 1, len]), (device, dtype))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn rotate(config: &RotaryConfig, positions: [i64; 3], axes: usize, x: &[f64]) -> Vec<f64> {
        let device = Default::default();
        let positions = TensorData::new(positions[..axes].to_vec(), [axes, 1, 1]);
        let tables =
            RotaryTables::<Flex>::new(Tensor::from_data(positions, &device), config, x.len());
        let x = Tensor::from_data(TensorData::new(x.to_vec(), [1, 1, 1, x.len()]), &device);
        tables.rotate(x).into_data().iter::<f64>().collect()
    }

    #[test]
    fn rotation_equals_the_formula_in_f64_at_far_positions() {
        let head_dim = 16;
        let x: Vec<f64> = (0..head_dim).map(|i| (i as f64 * 0.7).sin()).collect();
        let plain = RotaryConfig::new(1e4);
        let sections = plain.with_sections([4, 2, 2]);
        for start in [0, 1, 127, 128, 5_000, 100_003, 999_999] {
            let positions = [start, start + 3, start + 70];
            for (config, axes) in [(plain, 1), (sections, 1), (sections, 3)] {
                let got = rotate(&config, positions, axes, &x);
                let axis = config.axis_of_planes(head_dim);
                for plane in 0..head_dim / 2 {
                    let position = positions[if axes == 1 { 0 } else { axis[plane] }] as f64;
                    let angle = position * 1e4f64.powf(-(plane as f64) / 8.0);
                    let (a, b) = (x[plane], x[plane + 8]);
                    let want = [
                        a * angle.cos() - b * angle.sin(),
                        b * angle.cos() + a * angle.sin(),
                    ];
                    for (got, want) in [got[plane], got[plane + 8]].into_iter().zip(want) {
                        assert!((got - want).abs() < 1e-4, "{start} {plane}: {got} {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn planes_are_interleaved_until_height_and_width_have_theirs() {
        let config = RotaryConfig::new(1e4);
        let axes = |sections, head_dim| config.with_sections(sections).axis_of_planes(head_dim);
        assert_eq!(axes([4, 2, 2], 16), [0, 1, 2, 0, 1, 2, 0, 0]);
        let published = axes([24, 20, 20], 128);
        for (axis, count) in [24, 20, 20].into_iter().enumerate() {
            assert_eq!(published.iter().filter(|&&got| got == axis).count(), count);
        }
        assert!(published[60..].iter().all(|&axis| axis == 0));
        assert_eq!(config.axis_of_planes(6), [0, 0, 0]);
    }

    #[test]
    fn bad_configurations_are_refused() {
        let config = RotaryConfig::new(1e4);
        assert!(config.validate(16).is_ok());
        assert!(config.with_sections([24, 20, 20]).validate(128).is_ok());
        assert!(matches!(
            config.validate(15),
            Err(NnError::Field {
                what: "head_dim",
                ..
            })
        ));
        assert!(matches!(
            RotaryConfig::new(0.0).validate(16),
            Err(NnError::Field { .. })
        ));
        for sections in [[4, 2, 3], [2, 3, 3], [usize::MAX, 8, 1]] {
            let result = config.with_sections(sections).validate(16);
            assert!(
                matches!(result, Err(NnError::Sections { .. })),
                "{sections:?}"
            );
        }
    }
}
