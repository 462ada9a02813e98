//! Model directories: read, refused, and written back.

use std::{fs, path::Path};

use burn::{backend::Flex, tensor::FloatDType};
use burn_cp_examples::hf::{DirectoryProblem, ModelDirectory, WeightFiles};
use tempfile::TempDir;

use crate::fixture::{directory, folder};

fn copy_of(model: &str) -> TempDir {
    let target = TempDir::new().unwrap();
    for entry in fs::read_dir(folder().join(model)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), target.path().join(entry.file_name())).unwrap();
    }
    target
}

fn problems(path: &Path) -> Vec<DirectoryProblem> {
    ModelDirectory::open(path).unwrap_err().problems
}

fn values(path: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let mut problems = Vec::new();
    let files = WeightFiles::scan(path, &mut problems);
    assert_eq!(problems, []);
    let of = |(name, info): (&String, &burn_cp_examples::hf::WeightInfo)| {
        (name.clone(), info.shape.clone(), files.read(name).unwrap())
    };
    files.tensors().iter().map(of).collect()
}

#[test]
fn a_saved_model_holds_what_was_loaded() {
    for (model, bf16) in [("untied", false), ("tied", true), ("tied", false)] {
        let source = directory(model);
        let loaded = source
            .load::<Flex>(&Default::default(), FloatDType::F32)
            .unwrap();
        let target = TempDir::new().unwrap();
        source.save(&loaded, target.path(), bf16).unwrap();
        assert_eq!(values(target.path()), values(source.path()), "{model}");
        ModelDirectory::open(target.path()).unwrap();
    }
}

#[test]
fn several_files_are_written_with_an_index() {
    let source = directory("untied");
    let loaded = source
        .load::<Flex>(&Default::default(), FloatDType::F32)
        .unwrap();
    let target = TempDir::new().unwrap();
    burn_cp_examples::hf::save_weights(&loaded, source.config(), target.path(), false, 100_000)
        .unwrap();
    assert!(target.path().join("model.safetensors.index.json").is_file());
    assert_eq!(values(target.path()), values(source.path()));
}

#[test]
fn all_that_is_wrong_is_listed() {
    let copy = copy_of("tied");
    let path = copy.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    // One more layer than the file has, and a feed-forward layer of another width in the tower.
    let config = config
        .replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3")
        .replace("\"intermediate_size\": 24", "\"intermediate_size\": 25");
    fs::write(&path, config).unwrap();
    fs::remove_file(copy.path().join("tokenizer.json")).unwrap();
    let found = problems(copy.path());
    let missing = found.iter().filter(|problem| matches!(problem, DirectoryProblem::MissingTensor { name, .. } if name.starts_with("model.language_model.layers.2."))).count();
    assert_eq!(missing, 11, "{found:?}");
    assert!(found.contains(&DirectoryProblem::Shape {
        name: "model.visual.blocks.1.mlp.linear_fc1.weight".into(),
        expected: vec![25, 16],
        got: vec![24, 16],
    }));
    assert!(found.contains(&DirectoryProblem::MissingFile {
        file: "tokenizer.json".into()
    }));
    assert_eq!(found.len(), missing + 2 * 3 + 1, "{found:?}");
}

#[test]
fn tensors_that_the_model_has_no_place_for_are_listed() {
    let copy = copy_of("tied");
    let path = copy.path().join("config.json");
    let config = fs::read_to_string(&path)
        .unwrap()
        .replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    fs::write(&path, config).unwrap();
    let found = problems(copy.path());
    assert_eq!(found.len(), 11, "{found:?}");
    assert!(
        found
            .iter()
            .all(|problem| matches!(problem, DirectoryProblem::ExtraTensor { .. }))
    );
}

#[test]
fn another_architecture_is_refused() {
    let copy = copy_of("tied");
    let path = copy.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap().replace(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    );
    fs::write(&path, config).unwrap();
    let found = problems(copy.path());
    assert!(
        matches!(&found[..], [DirectoryProblem::Architecture { got, .. }] if got.contains("Moe")),
        "{found:?}"
    );
}

#[test]
fn truncated_files_and_files_that_the_index_names_in_vain_are_listed() {
    let copy = copy_of("untied");
    let first = copy.path().join("model-00001-of-00002.safetensors");
    let bytes = fs::read(&first).unwrap();
    fs::write(&first, &bytes[..bytes.len() - 7]).unwrap();
    fs::remove_file(copy.path().join("model-00002-of-00002.safetensors")).unwrap();
    let found = problems(copy.path());
    let length = DirectoryProblem::Length {
        file: "model-00001-of-00002.safetensors".into(),
        expected: bytes.len() as u64,
        got: bytes.len() as u64 - 7,
    };
    assert!(found.contains(&length), "{found:?}");
    assert!(found.contains(&DirectoryProblem::MissingFile {
        file: "model-00002-of-00002.safetensors".into()
    }));
}

#[test]
fn an_empty_folder_is_one_error_with_all_files() {
    let empty = TempDir::new().unwrap();
    let text = ModelDirectory::open(empty.path()).unwrap_err().to_string();
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "preprocessor_config.json",
        "chat_template.jinja",
    ] {
        assert!(text.contains(file), "{text}");
    }
}
