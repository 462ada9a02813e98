//! A model written as a directory that Hugging Face's tools load.

use std::{collections::BTreeMap, collections::HashMap, fs, io, path::Path};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Tensor, backend::Backend},
};
use half::bf16;
use safetensors::{Dtype, tensor::TensorView};

use super::{
    Published, SaveError, WeightForm,
    names::{Place, transposed},
};
use crate::models::qwen3_vl::VisionConfig;

/// A tensor as it will stand in a file.
struct Saved {
    name: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

struct Writer<'a> {
    vision: Option<&'a VisionConfig>,
    directory: &'a Path,
    dtype: Dtype,
    max_bytes: usize,
    place: Place,
    pending: Vec<Saved>,
    /// Names by file, files numbered from 1.
    written: Vec<Vec<String>>,
    total: usize,
    error: Option<SaveError>,
}

impl Writer<'_> {
    fn partial(&self, number: usize) -> std::path::PathBuf {
        self.directory.join(format!(".model-{number:05}.partial"))
    }

    fn push(&mut self, saved: Saved) {
        let pending: usize = self.pending.iter().map(|saved| saved.bytes.len()).sum();
        if pending > 0 && pending + saved.bytes.len() > self.max_bytes {
            self.flush();
        }
        self.total += saved.bytes.len();
        self.pending.push(saved);
    }

    fn flush(&mut self) {
        if self.pending.is_empty() || self.error.is_some() {
            return;
        }
        let path = self.partial(self.written.len() + 1);
        let shown = path.display().to_string();
        let views: Result<Vec<_>, _> = self
            .pending
            .iter()
            .map(|saved| {
                TensorView::new(self.dtype, saved.shape.clone(), &saved.bytes)
                    .map(|view| (saved.name.clone(), view))
            })
            .collect();
        let kind = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let done = views.and_then(|views| safetensors::serialize_to_file(views, Some(kind), &path));
        if let Err(error) = done {
            self.error = Some(SaveError::Weights {
                path: shown,
                reason: error.to_string(),
            });
        }
        self.written
            .push(self.pending.drain(..).map(|saved| saved.name).collect());
    }
}

impl<B: Backend> ModuleVisitor<B> for Writer<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.error.is_some() {
            return;
        }
        let data = param.val().into_data();
        let dims = data.shape.to_vec();
        let weight = self.place.weight(&dims, self.vision);
        let mut values: Vec<f32> = data.iter::<f32>().collect();
        if weight.form == WeightForm::Transposed {
            values = transposed(&values, dims[0], dims[1]);
        }
        let bytes = match self.dtype {
            Dtype::BF16 => values
                .iter()
                .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
                .collect(),
            _ => values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
        };
        self.push(Saved {
            name: weight.name,
            shape: weight.shape,
            bytes,
        });
    }
}

/// Writes the weights of a model into a directory, under their published names: one file, or several of at most `max_bytes` and
/// an index. `bf16` rounds them; else they are f32.
///
/// # Errors
/// The file system refused.
pub fn save_weights<B: Backend, M: Module<B>>(
    model: &M,
    config: &impl Published,
    directory: &Path,
    bf16: bool,
    max_bytes: usize,
) -> Result<(), SaveError> {
    fs::create_dir_all(directory).map_err(io_error(directory))?;
    let mut writer = Writer {
        vision: config.vision(),
        directory,
        dtype: if bf16 { Dtype::BF16 } else { Dtype::F32 },
        max_bytes,
        place: Place::default(),
        pending: Vec::new(),
        written: Vec::new(),
        total: 0,
        error: None,
    };
    model.visit(&mut writer);
    writer.flush();
    if let Some(error) = writer.error {
        return Err(error);
    }
    // Names say how many files there are, which is known only now.
    let num = writer.written.len();
    let mut map = BTreeMap::new();
    for (index, names) in writer.written.iter().enumerate() {
        let file = if num == 1 {
            "model.safetensors".to_owned()
        } else {
            format!("model-{:05}-of-{num:05}.safetensors", index + 1)
        };
        let (from, to) = (writer.partial(index + 1), directory.join(&file));
        fs::rename(&from, &to).map_err(io_error(&to))?;
        map.extend(names.iter().map(|name| (name.clone(), file.clone())));
    }
    if num > 1 {
        let index =
            serde_json::json!({"metadata": {"total_size": writer.total}, "weight_map": map});
        let path = directory.join("model.safetensors.index.json");
        fs::write(&path, format!("{index:#}\n")).map_err(io_error(&path))?;
    }
    Ok(())
}

pub(super) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> SaveError {
    let path = path.display().to_string();
    move |source| SaveError::Io { path, source }
}
