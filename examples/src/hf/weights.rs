//! Files of weights: one `model.safetensors`, or several with an index. Headers are read when a directory is opened, values
//! tensor by tensor when a model is loaded.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use safetensors::{Dtype, tensor::Metadata};
use serde::Deserialize;

use super::DirectoryProblem;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Bytes of a header beyond which a file is not what it claims to be; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// Where a tensor stands and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightInfo {
    /// Index into the files.
    file: usize,
    /// First byte of its values in that file.
    offset: u64,
    /// Number of bytes.
    len: usize,
    /// Its dtype in the file.
    pub dtype: Dtype,
    /// Its shape in the file.
    pub shape: Vec<usize>,
}

/// The files of weights of a directory, and which tensor stands where.
#[derive(Debug, Clone, Default)]
pub struct WeightFiles {
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, WeightInfo>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Reads the headers of a directory's files. What is wrong with them is added to `problems`; the rest is usable.
    pub fn scan(directory: &Path, problems: &mut Vec<DirectoryProblem>) -> Self {
        let mut found = Self::default();
        let index = directory.join(INDEX);
        if !index.is_file() {
            if directory.join(SINGLE).is_file() {
                found.add_file(directory, SINGLE, problems);
            } else {
                problems.push(DirectoryProblem::MissingFile {
                    file: format!("{SINGLE} or {INDEX}"),
                });
            }
            return found;
        }
        let map = std::fs::read_to_string(&index)
            .map_err(|error| error.to_string())
            .and_then(|text| {
                serde_json::from_str::<Index>(&text).map_err(|error| error.to_string())
            });
        let map = match map {
            Ok(index) => index.weight_map,
            Err(reason) => {
                let file = INDEX.to_owned();
                problems.push(DirectoryProblem::Unreadable { file, reason });
                return found;
            }
        };
        let mut names: Vec<&String> = map.values().collect();
        names.sort();
        names.dedup();
        let readable: Vec<&String> = names
            .into_iter()
            .filter(|name| found.add_file(directory, name, problems))
            .collect();
        for (name, file) in &map {
            // Tensors of a file that cannot be read are one problem, not many.
            if readable.contains(&file) && found.file_of(name) != Some(file.as_str()) {
                problems.push(DirectoryProblem::MissingTensor {
                    name: name.clone(),
                    file: Some(file.clone()),
                });
            }
        }
        found
    }

    /// Name and place of every tensor.
    pub fn tensors(&self) -> &BTreeMap<String, WeightInfo> {
        &self.tensors
    }

    fn file_of(&self, name: &str) -> Option<&str> {
        let info = self.tensors.get(name)?;
        self.files[info.file].file_name()?.to_str()
    }

    /// Whether the file is what its header says.
    fn add_file(
        &mut self,
        directory: &Path,
        name: &str,
        problems: &mut Vec<DirectoryProblem>,
    ) -> bool {
        let path = directory.join(name);
        if !path.is_file() {
            let file = name.to_owned();
            problems.push(DirectoryProblem::MissingFile { file });
            return false;
        }
        let (header, start, got) = match read_header(&path) {
            Ok(read) => read,
            Err(reason) => {
                let file = name.to_owned();
                problems.push(DirectoryProblem::Unreadable { file, reason });
                return false;
            }
        };
        let expected = start + header.data_len() as u64;
        if expected != got {
            problems.push(DirectoryProblem::Length {
                file: name.to_owned(),
                expected,
                got,
            });
            return false;
        }
        let file = self.files.len();
        self.files.push(path);
        for (name, info) in header.tensors() {
            let (from, to) = info.data_offsets;
            let place = WeightInfo {
                file,
                offset: start + from as u64,
                len: to - from,
                dtype: info.dtype,
                shape: info.shape.clone(),
            };
            self.tensors.insert(name, place);
        }
        true
    }

    /// The values of a tensor, in the order of the file.
    ///
    /// # Errors
    /// There is no such tensor, it has another dtype than F32, F16 or BF16, or the file cannot be read.
    pub fn read(&self, name: &str) -> Result<Vec<f32>, DirectoryProblem> {
        let Some(info) = self.tensors.get(name) else {
            return Err(DirectoryProblem::MissingTensor {
                name: name.to_owned(),
                file: None,
            });
        };
        let path = &self.files[info.file];
        let mut bytes = vec![0; info.len];
        File::open(path)
            .and_then(|mut file| {
                file.seek(SeekFrom::Start(info.offset))?;
                file.read_exact(&mut bytes)
            })
            .map_err(|error| DirectoryProblem::Unreadable {
                file: path.display().to_string(),
                reason: error.to_string(),
            })?;
        to_f32(&bytes, info.dtype).ok_or_else(|| DirectoryProblem::Dtype {
            name: name.to_owned(),
            got: format!("{:?}", info.dtype),
        })
    }
}

/// Whether weights may have this dtype.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

fn to_f32(bytes: &[u8], dtype: Dtype) -> Option<Vec<f32>> {
    let halves = |convert: fn([u8; 2]) -> f32| -> Vec<f32> {
        let (pairs, _) = bytes.as_chunks::<2>();
        pairs.iter().map(|&pair| convert(pair)).collect()
    };
    Some(match dtype {
        Dtype::F32 => {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|&word| f32::from_le_bytes(word)).collect()
        }
        Dtype::F16 => halves(|pair| f16::from_le_bytes(pair).to_f32()),
        Dtype::BF16 => halves(|pair| bf16::from_le_bytes(pair).to_f32()),
        _ => return None,
    })
}

/// Header, first byte behind it, and length of a file.
fn read_header(path: &Path) -> Result<(Metadata, u64, u64), String> {
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    let len = file.metadata().map_err(|error| error.to_string())?.len();
    let mut size = [0; 8];
    file.read_exact(&mut size)
        .map_err(|_| "too short to be a safetensors file".to_owned())?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER || size + 8 > len {
        return Err(format!(
            "the file is truncated or no safetensors file: a header of {size} bytes in a file of {len}"
        ));
    }
    #[allow(clippy::cast_possible_truncation, reason = "at most MAX_HEADER")]
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)
        .map_err(|error| error.to_string())?;
    let header: Metadata =
        serde_json::from_slice(&header).map_err(|error| format!("its header: {error}"))?;
    Ok((header, 8 + size, len))
}
