//! Initial weights that depend on a seed and on nothing else.
//!
//! A backend's own generator belongs to the process, and Burn draws a parameter when it is first read, so with several
//! threads its values depend on who came first. Here each parameter has a generator of its own, seeded by the seed and the
//! parameter's path, and all of them are drawn at once.

use burn::{
    module::{ModuleMapper, Param},
    tensor::{Tensor, TensorData, backend::Backend},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use sha2::{Digest, Sha256};

use super::qwen3_vl::Initialization;

/// Replaces every parameter by an initial one; `module.map(&mut filler)`.
pub(super) struct Filler {
    scales: Scales,
    seed: u64,
    path: Vec<String>,
}

/// What the standard deviations of a model follow from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales {
    pub(super) initialization: Initialization,
    /// Standard deviation and layers of the decoder.
    pub(super) text: (f64, usize),
    /// Those of the vision tower, whose parameters stand below `visual`.
    pub(super) vision: (f64, usize),
}

impl Filler {
    pub(super) fn new(scales: Scales, seed: u64) -> Self {
        Self {
            scales,
            seed,
            path: Vec::new(),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.path.iter().any(|part| part == name)
    }

    /// Standard deviation of the matrix at the current path, `[inputs, outputs]` or `[entries, width]`.
    fn std(&self, dims: &[usize]) -> f64 {
        let (published, num_layers) = if self.has("visual") {
            self.scales.vision
        } else {
            self.scales.text
        };
        let Initialization::FanIn {
            embedding_std,
            position_std,
        } = self.scales.initialization
        else {
            return published;
        };
        if self.has("embed_tokens") {
            return embedding_std;
        }
        if self.has("pos_embed") {
            return position_std;
        }
        // A router's matrix is `[experts, inputs]`.
        let inputs = if self.has("gate") {
            dims[dims.len() - 1]
        } else {
            dims[0]
        };
        let fan_in = 1.0 / (inputs.max(1) as f64).sqrt();
        // The second and last name that a block writes into its residual stream with.
        let writes = (self.has("layers") && (self.has("o_proj") || self.has("down_proj")))
            || (self.has("blocks") && (self.has("proj") || self.has("linear_fc2")));
        if writes {
            fan_in / (2.0 * num_layers as f64).sqrt()
        } else {
            fan_in
        }
    }

    fn values(&self, dims: &[usize]) -> Vec<f64> {
        let len = dims.iter().product();
        match self.path.last().map(String::as_str) {
            Some("gamma") => vec![1.0; len],
            Some("bias" | "beta" | "e_score_correction_bias") => vec![0.0; len],
            _ => {
                let std = self.std(dims);
                let mut values = normal(self.seed, &self.path.join("."), len);
                values.iter_mut().for_each(|value| *value *= std);
                values
            }
        }
    }
}

impl<B: Backend> ModuleMapper<B> for Filler {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let dims: [usize; D] = param.lazy_shape().dims();
        let data = TensorData::new(self.values(&dims), dims);
        let value = Tensor::from_data(data, &param.lazy_device());
        let (id, old, mapper) = param.consume();
        let value = value.set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Standard normal values for one parameter (Box and Muller, 1958).
fn normal(seed: u64, path: &str, len: usize) -> Vec<f64> {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(path.as_bytes());
    let mut rng = StdRng::from_seed(hash.finalize().into());
    let mut values = Vec::with_capacity(len + 1);
    while values.len() < len {
        // 1 - x lies in (0, 1], where the logarithm is finite.
        let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
        let angle = std::f64::consts::TAU * rng.random::<f64>();
        values.extend([radius * angle.cos(), radius * angle.sin()]);
    }
    values.truncate(len);
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_depend_on_seed_and_path_and_are_standard_normal() {
        let values = normal(1, "a.weight", 20_001);
        assert_eq!(values[..100], normal(1, "a.weight", 100));
        assert_ne!(values[0], normal(2, "a.weight", 1)[0]);
        assert_ne!(values[0], normal(1, "b.weight", 1)[0]);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let square = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
        assert!(
            mean.abs() < 0.03 && (square - 1.0).abs() < 0.05,
            "{mean} {square}"
        );
    }
}
