//! Directories of the text part: read, and refused with all that is wrong.

use std::{fs, path::Path};

use burn::{backend::Flex, tensor::FloatDType};
use burn_cp_examples::{
    hf::{DirectoryProblem, PublishedModel, WeightFiles, save_weights},
    models::{mimo_v2_flash::MimoV2FlashConfig, qwen3_vl::Qwen3VlConfig},
};
use tempfile::TempDir;

use crate::fixture::{folder, published};

/// A copy of the directory whose configuration was changed.
fn changed(from: &str, to: &str) -> TempDir {
    let target = TempDir::new().unwrap();
    let source = folder().join("model");
    fs::copy(
        source.join("model.safetensors"),
        target.path().join("model.safetensors"),
    )
    .unwrap();
    let config = fs::read_to_string(source.join("config.json")).unwrap();
    assert!(config.contains(from), "{from}");
    fs::write(
        target.path().join("config.json"),
        config.replacen(from, to, 1),
    )
    .unwrap();
    target
}

fn problems(path: &Path) -> Vec<DirectoryProblem> {
    let opened = PublishedModel::<MimoV2FlashConfig>::open(path);
    opened.unwrap_err().problems
}

fn values(path: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let mut problems = Vec::new();
    let files = WeightFiles::scan(path, &mut problems);
    assert_eq!(problems, []);
    let tensors = files.tensors().iter();
    tensors
        .map(|(name, info)| (name.clone(), info.shape.clone(), files.read(name).unwrap()))
        .collect()
}

#[test]
fn saved_weights_are_those_that_were_loaded() {
    let source = published();
    let model = source
        .load::<Flex>(&Default::default(), FloatDType::F32)
        .unwrap();
    let target = TempDir::new().unwrap();
    save_weights(&model, source.config(), target.path(), false, usize::MAX).unwrap();
    assert_eq!(values(target.path()), values(source.path()));
}

#[test]
fn layers_of_another_kind_lack_their_tensors_and_leave_others_over() {
    // The second layer with full attention: no sinks, half the key and value heads.
    let copy = changed("\"sliding_attention\"", "\"full_attention\"");
    let found = problems(copy.path());
    let layer = "model.layers.1.self_attn";
    assert!(found.contains(&DirectoryProblem::ExtraTensor {
        name: format!("{layer}.attention_sink_bias"),
    }));
    assert!(found.contains(&DirectoryProblem::Shape {
        name: format!("{layer}.k_proj.weight"),
        expected: vec![16, 24],
        got: vec![32, 24],
    }));
    assert_eq!(found.len(), 3, "{found:?}");

    // The last layer dense: three matrices missing, a router and all experts left over.
    let copy = changed("\"sparse\",\n    \"sparse\"", "\"sparse\",\n    \"dense\"");
    let found = problems(copy.path());
    assert!(found.contains(&DirectoryProblem::MissingTensor {
        name: "model.layers.2.mlp.up_proj.weight".into(),
        file: None,
    }));
    assert_eq!(found.len(), 3 + 2 + 3 * 6, "{found:?}");
}

#[test]
fn wrong_fields_are_named() {
    let copy = changed("\"topk_group\": 1", "\"topk_group\": 3");
    let text = PublishedModel::<MimoV2FlashConfig>::open(copy.path())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("config.json: topk_group: expected 1 to n_group (2), got 3"),
        "{text}"
    );
}

#[test]
fn a_directory_of_another_architecture_is_refused() {
    let opened = PublishedModel::<Qwen3VlConfig>::open(&folder().join("model"));
    let found = opened.unwrap_err().problems;
    assert!(
        matches!(&found[0], DirectoryProblem::Architecture { got, .. } if got == "MiMoV2FlashForCausalLM"),
        "{found:?}"
    );
}

#[test]
fn an_empty_folder_is_one_error_with_all_files() {
    let empty = TempDir::new().unwrap();
    let found = problems(empty.path());
    assert_eq!(found.len(), 2, "{found:?}");
}
