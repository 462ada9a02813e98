//! Parameters of a module by the names and in the forms of published weights.
//!
//! Matrices of linear layers are `[outputs, inputs]` there and `[inputs, outputs]` here; the vectors of norms are `weight` and
//! `bias` there, `gamma` and `beta` here; the patch embedding is a convolution there.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{FloatDType, Tensor, TensorData, backend::Backend},
};

use super::{DirectoryProblem, Published, WeightFiles, weights::is_float};
use crate::models::qwen3_vl::VisionConfig;

const PATCH_EMBEDDING: &str = "model.visual.patch_embed.proj.weight";
const HEAD: &str = "lm_head.weight";

/// How a published tensor relates to the parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightForm {
    /// The same order of elements.
    AsIs,
    /// `[outputs, ...]` there, `[inputs, outputs]` here, where `inputs` are all further dims.
    Transposed,
}

/// A parameter under its published name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightName {
    /// Published name.
    pub name: String,
    /// Published shape.
    pub shape: Vec<usize>,
    /// How its elements are ordered.
    pub form: WeightForm,
}

/// Where a walk over a module stands.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    path: Vec<String>,
    containers: Vec<String>,
}

impl Place {
    pub(super) fn enter(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    pub(super) fn exit(&mut self) {
        self.path.pop();
        self.containers.pop();
    }

    /// The parameter of shape `dims` that the walk has reached.
    pub(super) fn weight(&self, dims: &[usize], vision: Option<&VisionConfig>) -> WeightName {
        // Published names do not say which variant of an enum a module is.
        let parts = self.path.iter().zip(&self.containers);
        let mut path: Vec<String> = parts
            .filter(|(_, container)| !container.starts_with("Enum:"))
            .map(|(part, _)| part.clone())
            .collect();
        if let Some(last) = path.last_mut() {
            match last.as_str() {
                "gamma" => *last = "weight".to_owned(),
                "beta" => *last = "bias".to_owned(),
                _ => {}
            }
        }
        let name = path.join(".");
        let is_matrix = dims.len() == 2
            && self
                .containers
                .last()
                .is_some_and(|container| container == "Struct:Linear");
        let (form, shape) = if let Some(vision) = vision.filter(|_| name == PATCH_EMBEDDING) {
            let side = vision.patch_size;
            let kernel = [vision.in_channels, vision.temporal_patch_size, side, side];
            (
                WeightForm::Transposed,
                [&[vision.hidden_size], &kernel[..]].concat(),
            )
        } else if is_matrix {
            (WeightForm::Transposed, vec![dims[1], dims[0]])
        } else {
            (WeightForm::AsIs, dims.to_vec())
        };
        WeightName { name, shape, form }
    }
}

struct Names<'a> {
    vision: Option<&'a VisionConfig>,
    place: Place,
    found: Vec<WeightName>,
}

impl<B: Backend> ModuleVisitor<B> for Names<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let dims: [usize; D] = param.lazy_shape().dims();
        self.found.push(self.place.weight(&dims, self.vision));
    }
}

/// Every parameter of a model in the order of its modules. Reads no values, so lazy parameters stay lazy.
pub fn weight_names<B: Backend, M: Module<B>>(
    model: &M,
    config: &impl Published,
) -> Vec<WeightName> {
    let mut names = Names {
        vision: config.vision(),
        place: Place::default(),
        found: Vec::new(),
    };
    model.visit(&mut names);
    names.found
}

/// Adds what is missing, too much, mis-shaped or of another dtype. Tensors whose names begin with one of `unread` may be there.
pub(super) fn check_weights(
    expected: &[WeightName],
    unread: &[&str],
    files: &WeightFiles,
    problems: &mut Vec<DirectoryProblem>,
) {
    for weight in expected {
        let Some(info) = files.tensors().get(&weight.name) else {
            // The index may have said so already.
            let told = problems.iter().any(
                |problem| matches!(problem, DirectoryProblem::MissingTensor { name, .. } if *name == weight.name),
            );
            if !told {
                problems.push(DirectoryProblem::MissingTensor {
                    name: weight.name.clone(),
                    file: None,
                });
            }
            continue;
        };
        if info.shape != weight.shape {
            problems.push(DirectoryProblem::Shape {
                name: weight.name.clone(),
                expected: weight.shape.clone(),
                got: info.shape.clone(),
            });
        }
        if !is_float(info.dtype) {
            problems.push(DirectoryProblem::Dtype {
                name: weight.name.clone(),
                got: format!("{:?}", info.dtype),
            });
        }
    }
    for name in files.tensors().keys() {
        let known = expected.iter().any(|weight| weight.name == *name);
        // Some tools write a tied head as well; it is the embedding again.
        let unread = unread.iter().any(|prefix| name.starts_with(prefix));
        if !known && !unread && name != HEAD {
            problems.push(DirectoryProblem::ExtraTensor { name: name.clone() });
        }
    }
}

/// Values `[rows, columns]` as `[columns, rows]`.
pub(super) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const TILE: usize = 64;
    let mut out = vec![0.0; values.len()];
    // By tiles, so that neither side leaves the cache.
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for column in left..columns.min(left + TILE) {
                    out[column * rows + row] = values[row * columns + column];
                }
            }
        }
    }
    out
}

struct Loader<'a> {
    vision: Option<&'a VisionConfig>,
    files: &'a WeightFiles,
    dtype: FloatDType,
    place: Place,
    problems: Vec<DirectoryProblem>,
}

impl<B: Backend> ModuleMapper<B> for Loader<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let dims: [usize; D] = param.lazy_shape().dims();
        let weight = self.place.weight(&dims, self.vision);
        let mut values = match self.files.read(&weight.name) {
            Ok(values) if values.len() == dims.iter().product::<usize>() => values,
            Ok(values) => {
                self.problems.push(DirectoryProblem::Shape {
                    name: weight.name,
                    expected: weight.shape,
                    got: vec![values.len()],
                });
                return param;
            }
            Err(problem) => {
                self.problems.push(problem);
                return param;
            }
        };
        if weight.form == WeightForm::Transposed {
            values = transposed(&values, dims[1], dims[0]);
        }
        let data = TensorData::new(values, dims);
        let value = Tensor::from_data(data, (&param.lazy_device(), self.dtype.into()));
        let (id, old, mapper) = param.consume();
        let value = value.set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Reads every parameter of a model from the files, as `dtype`. What cannot be read is returned beside it.
pub fn load_weights<B: Backend, M: Module<B>>(
    model: M,
    config: &impl Published,
    files: &WeightFiles,
    dtype: FloatDType,
) -> (M, Vec<DirectoryProblem>) {
    let mut loader = Loader {
        vision: config.vision(),
        files,
        dtype,
        place: Place::default(),
        problems: Vec::new(),
    };
    let model = model.map(&mut loader);
    (model, loader.problems)
}

#[cfg(test)]
mod tests {
    use super::transposed;

    #[test]
    fn a_matrix_is_transposed_across_tiles() {
        let (rows, columns) = (70, 130);
        let values: Vec<f32> = (0..rows * columns).map(|at| at as f32).collect();
        let out = transposed(&values, rows, columns);
        for row in 0..rows {
            for column in 0..columns {
                assert_eq!(out[column * rows + row], values[row * columns + column]);
            }
        }
        assert_eq!(transposed(&out, columns, rows), values);
    }
}
