//! The tower and the initial weights; whole models are tested over ranks elsewhere.

use burn::{
    backend::{Autodiff, Flex},
    module::{ModuleVisitor, Param},
    tensor::{Tensor, TensorData},
};
use burn_cp::vision::{VisionFeatures, VisionTower};

use super::*;

fn pixels<B: Backend>(rows: usize, patch_dim: usize) -> Tensor<B, 2> {
    let values: Vec<f32> = (0..rows * patch_dim)
        .map(|i| (i as f32 * 0.37).sin())
        .collect();
    Tensor::from_data(
        TensorData::new(values, [rows, patch_dim]),
        &Default::default(),
    )
}

fn all_features<B: Backend>(features: VisionFeatures<B>) -> Vec<Tensor<B, 2>> {
    std::iter::once(features.embeddings)
        .chain(features.deepstack)
        .collect()
}

/// Path, shape and values of every parameter.
#[derive(Default)]
struct Collect {
    path: Vec<String>,
    found: Vec<(String, Vec<usize>, Vec<f32>)>,
}

impl<B: Backend> ModuleVisitor<B> for Collect {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let data = param.val().into_data();
        self.found.push((
            self.path.join("."),
            data.shape.to_vec(),
            data.iter::<f32>().collect(),
        ));
    }
}

fn parameters(config: &Qwen3VlConfig, seed: u64) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let model = config
        .init::<Flex>(&Default::default(), seed)
        .expect("presets are valid");
    let mut collect = Collect::default();
    model.visit(&mut collect);
    collect.found
}

fn shape(parameters: &[(String, Vec<usize>, Vec<f32>)], name: &str) -> Option<Vec<usize>> {
    let found = parameters.iter().find(|(path, ..)| path == name);
    found.map(|(_, shape, _)| shape.clone())
}

#[test]
fn a_frame_does_not_depend_on_the_others() {
    let config = Qwen3VlConfig::tiny(64);
    let tower = config
        .init::<Flex>(&Default::default(), 3)
        .unwrap()
        .model
        .visual;
    let patch_dim = config.vision_config.patch_dim();
    let all = pixels::<Flex>(8 + 2 * 4, patch_dim);
    let whole = all_features(tower.forward(all.clone(), &[[1, 2, 4], [2, 2, 2]]).unwrap());
    let parts = [(0, 8, [1, 2, 4]), (8, 4, [1, 2, 2]), (12, 4, [1, 2, 2])];
    let parts: Vec<_> = parts
        .map(|(start, rows, grid)| {
            all_features(
                tower
                    .forward(all.clone().narrow(0, start, rows), &[grid])
                    .unwrap(),
            )
        })
        .into();
    for (layer, whole) in whole.into_iter().enumerate() {
        assert_eq!(whole.dims(), [4, config.text_config.hidden_size]);
        let parts = Tensor::cat(parts.iter().map(|part| part[layer].clone()).collect(), 0);
        let difference: f32 = (whole - parts).abs().max().into_scalar();
        assert!(difference < 1e-5, "layer {layer}: {difference}");
    }
}

#[test]
fn a_patch_depends_on_its_whole_frame_and_on_its_place() {
    let config = Qwen3VlConfig::tiny(64);
    let tower = config
        .init::<Flex>(&Default::default(), 3)
        .unwrap()
        .model
        .visual;
    let patch_dim = config.vision_config.patch_dim();
    let run = |pixels| tower.forward(pixels, &[[1, 2, 4]]).unwrap().embeddings;
    let first = run(pixels::<Flex>(8, patch_dim));
    let changed = pixels::<Flex>(8, patch_dim);
    let changed = Tensor::cat(
        vec![
            changed.clone().narrow(0, 0, 4),
            changed.narrow(0, 4, 4) * 2.0,
        ],
        0,
    );
    let moved: f32 = (run(changed) - first)
        .narrow(0, 0, 1)
        .abs()
        .max()
        .into_scalar();
    assert!(moved > 1e-4, "{moved}");
    let same = run(Tensor::ones([8, patch_dim], &Default::default()));
    let apart: f32 = (same.clone().narrow(0, 0, 1) - same.narrow(0, 1, 1))
        .abs()
        .max()
        .into_scalar();
    assert!(apart > 1e-5, "{apart}");
}

#[test]
fn initial_weights_depend_only_on_the_seed() {
    let config = Qwen3VlConfig::tiny(64);
    let first = parameters(&config, 7);
    // What the process-wide generator did meanwhile does not matter.
    let _ = Tensor::<Flex, 1>::random(
        [5],
        burn::tensor::Distribution::Default,
        &Default::default(),
    );
    let other = std::thread::spawn({
        let config = config.clone();
        move || parameters(&config, 7)
    });
    assert_eq!(first, other.join().unwrap());
    assert_ne!(first, parameters(&config, 8));
}

#[test]
fn parameters_have_the_published_names() {
    let config = Qwen3VlConfig::small(64);
    let (text, vision) = (&config.text_config, &config.vision_config);
    let tied = parameters(&config, 1);
    let (wide, hidden) = (text.hidden_size, vision.hidden_size);
    let keys = text.num_kv_heads() * text.head_dim;
    let square = vision.spatial_merge_size.pow(2) * hidden;
    let layers = "model.language_model.layers.0";
    let visual = "model.visual";
    for (name, expected) in [
        (
            "model.language_model.embed_tokens.weight".into(),
            vec![64, wide],
        ),
        (
            format!("{layers}.self_attn.k_proj.weight"),
            vec![wide, keys],
        ),
        (
            format!("{layers}.self_attn.q_norm.gamma"),
            vec![text.head_dim],
        ),
        (
            format!("{layers}.mlp.down_proj.weight"),
            vec![text.intermediate_size, wide],
        ),
        (
            format!("{layers}.post_attention_layernorm.gamma"),
            vec![wide],
        ),
        ("model.language_model.norm.gamma".into(), vec![wide]),
        (
            format!("{visual}.patch_embed.proj.weight"),
            vec![vision.patch_dim(), hidden],
        ),
        (
            format!("{visual}.pos_embed.weight"),
            vec![vision.num_position_embeddings, hidden],
        ),
        (
            format!("{visual}.blocks.1.attn.qkv.weight"),
            vec![hidden, 3 * hidden],
        ),
        (
            format!("{visual}.merger.linear_fc2.weight"),
            vec![square, wide],
        ),
        (format!("{visual}.merger.norm.gamma"), vec![hidden]),
        (
            format!("{visual}.deepstack_merger_list.0.norm.gamma"),
            vec![square],
        ),
    ] {
        assert_eq!(shape(&tied, &name), Some(expected), "{name}");
    }
}

#[test]
fn only_an_untied_model_has_a_head() {
    let config = Qwen3VlConfig::tiny(64);
    assert_eq!(shape(&parameters(&config, 1), "lm_head.weight"), None);
    let untied = Qwen3VlConfig {
        tie_word_embeddings: Some(false),
        ..config
    };
    let head = shape(&parameters(&untied, 1), "lm_head.weight");
    assert_eq!(head, Some(vec![untied.text_config.hidden_size, 64]));
}

#[test]
fn norms_start_as_one_and_biases_as_zero() {
    let tied = parameters(&Qwen3VlConfig::tiny(64), 1);
    for (path, _, values) in &tied {
        let size = values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32;
        let expected = match path.rsplit('.').next() {
            Some("gamma") => 1.0,
            Some("bias" | "beta") => 0.0,
            _ => continue,
        };
        assert_eq!(size, expected, "{path}");
    }
}

#[test]
fn a_frozen_tower_is_not_trainable() {
    let config = Qwen3VlConfig::tiny(64);
    let model = config
        .init::<Autodiff<Flex>>(&Default::default(), 1)
        .unwrap();
    assert!(model.model.visual.is_trainable());
    let frozen = model.freeze_vision();
    assert!(!frozen.model.visual.is_trainable());
    assert!(frozen.model.language_model.norm.gamma.is_require_grad());
}

#[test]
fn pixels_of_another_patch_size_are_an_error_of_the_tower() {
    let config = Qwen3VlConfig::tiny(64);
    let model = config.init::<Flex>(&Default::default(), 1).unwrap();
    let error = model
        .model
        .visual
        .forward(pixels(4, 5), &[[1, 2, 2]])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "pixels [rows, patch_dim] of grids [[1, 2, 2]]: expected [4, 96], got [4, 5]"
    );
}
