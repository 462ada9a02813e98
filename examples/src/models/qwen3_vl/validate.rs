//! What a configuration must fulfil.

use super::config::{Initialization, Qwen3VlConfig, TextConfig, VisionConfig};
use crate::models::problems::{ConfigError, Problems};

pub(super) fn validate(config: &Qwen3VlConfig) -> Result<(), ConfigError> {
    let mut problems = Problems::default();
    check_text(&config.text_config, &mut problems);
    check_vision(&config.vision_config, &mut problems);
    check_together(config, &mut problems);
    problems.into_result()
}

fn check_text(text: &TextConfig, problems: &mut Problems) {
    problems.positive(&[
        ("text_config.vocab_size", text.vocab_size),
        ("text_config.hidden_size", text.hidden_size),
        ("text_config.intermediate_size", text.intermediate_size),
        ("text_config.num_hidden_layers", text.num_hidden_layers),
        ("text_config.num_attention_heads", text.num_attention_heads),
        ("text_config.num_key_value_heads", text.num_kv_heads()),
        ("text_config.head_dim", text.head_dim),
    ]);
    problems.divides(
        "text_config.num_attention_heads",
        text.num_attention_heads,
        text.num_kv_heads(),
        "num_key_value_heads",
    );
    problems.positive_number("text_config.rms_norm_eps", text.rms_norm_eps);
    problems.positive_number("text_config.initializer_range", text.initializer_range);

    let rope = text.rope();
    let default_type = rope
        .rope_type
        .as_deref()
        .is_none_or(|name| name == "default");
    problems.require(
        default_type,
        "text_config.rope_parameters.rope_type",
        "default",
        &rope.rope_type,
    );
    problems.require(
        rope.mrope_interleaved != Some(false),
        "text_config.rope_parameters.mrope_interleaved",
        "true",
        false,
    );
    if let Err(error) = text.rotary().validate(text.head_dim) {
        problems.require(
            false,
            "text_config.rope_parameters",
            error.to_string(),
            text.rotary(),
        );
    }
}

/// For any model whose configuration holds a `vision_config`.
pub(in crate::models) fn check_vision(vision: &VisionConfig, problems: &mut Problems) {
    problems.positive(&[
        ("vision_config.depth", vision.depth),
        ("vision_config.hidden_size", vision.hidden_size),
        ("vision_config.intermediate_size", vision.intermediate_size),
        ("vision_config.num_heads", vision.num_heads),
        ("vision_config.in_channels", vision.in_channels),
        ("vision_config.patch_size", vision.patch_size),
        (
            "vision_config.spatial_merge_size",
            vision.spatial_merge_size,
        ),
        (
            "vision_config.temporal_patch_size",
            vision.temporal_patch_size,
        ),
        (
            "vision_config.num_position_embeddings",
            vision.num_position_embeddings,
        ),
    ]);
    // A quarter of a head turns with each of height and width, in pairs of dims.
    problems.divides(
        "vision_config.hidden_size",
        vision.hidden_size,
        vision.num_heads.saturating_mul(4),
        "4 · num_heads",
    );
    problems.require(
        vision.grid_side().pow(2) == vision.num_position_embeddings,
        "vision_config.num_position_embeddings",
        "a square number",
        vision.num_position_embeddings,
    );
    let indexes = &vision.deepstack_visual_indexes;
    problems.require(
        indexes.windows(2).all(|pair| pair[0] < pair[1])
            && indexes.iter().all(|&index| index < vision.depth),
        "vision_config.deepstack_visual_indexes",
        format!("rising indexes below depth ({})", vision.depth),
        indexes,
    );
    problems.positive_number("vision_config.initializer_range", vision.initializer_range);
}

fn check_together(config: &Qwen3VlConfig, problems: &mut Problems) {
    let (text, vision) = (&config.text_config, &config.vision_config);
    problems.require(
        vision.out_hidden_size == text.hidden_size,
        "vision_config.out_hidden_size",
        format!("text_config.hidden_size ({})", text.hidden_size),
        vision.out_hidden_size,
    );
    let num_deepstack = vision.deepstack_visual_indexes.len();
    problems.require(
        num_deepstack <= text.num_hidden_layers,
        "vision_config.deepstack_visual_indexes",
        format!("at most one per decoder layer ({})", text.num_hidden_layers),
        num_deepstack,
    );
    for (path, id) in [
        ("image_token_id", config.image_token_id),
        ("video_token_id", config.video_token_id),
        ("vision_start_token_id", config.vision_start_token_id),
        ("vision_end_token_id", config.vision_end_token_id),
    ] {
        let legal = usize::try_from(id).is_ok_and(|id| id < text.vocab_size);
        problems.require(
            legal,
            path,
            format!("0 to below vocab_size ({})", text.vocab_size),
            id,
        );
    }
    if let Initialization::FanIn {
        embedding_std,
        position_std,
    } = config.initialization
    {
        problems.positive_number("initialization.fan_in.embedding_std", embedding_std);
        problems.positive_number("initialization.fan_in.position_std", position_std);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(change: impl FnOnce(&mut Qwen3VlConfig)) -> Vec<&'static str> {
        let mut config = Qwen3VlConfig::small(64);
        change(&mut config);
        match config.validate() {
            Ok(()) => vec![],
            Err(error) => error.problems.iter().map(|problem| problem.path).collect(),
        }
    }

    #[test]
    fn presets_are_valid() {
        Qwen3VlConfig::tiny(64).validate().unwrap();
        Qwen3VlConfig::small(64).validate().unwrap();
    }

    #[test]
    fn every_wrong_field_is_listed_with_its_path() {
        let found = paths(|config| {
            config.text_config.num_key_value_heads = Some(3);
            config.vision_config.out_hidden_size = 63;
            config.image_token_id = 64;
        });
        assert_eq!(
            found,
            [
                "text_config.num_attention_heads",
                "vision_config.out_hidden_size",
                "image_token_id"
            ]
        );
        let zero = paths(|config| config.vision_config.num_heads = 0);
        assert_eq!(zero, ["vision_config.num_heads"]);
        let heads = paths(|config| config.vision_config.num_heads = 32);
        assert_eq!(heads, ["vision_config.hidden_size"]);
        let grid = paths(|config| config.vision_config.num_position_embeddings = 15);
        assert_eq!(grid, ["vision_config.num_position_embeddings"]);
        let deep = paths(|config| config.vision_config.deepstack_visual_indexes = vec![1, 0]);
        assert_eq!(deep, ["vision_config.deepstack_visual_indexes"]);
        let rope = paths(|config| config.text_config.head_dim += 2);
        assert_eq!(rope, ["text_config.rope_parameters"]);
    }

    /// The fields of the published 4B model's file that matter here, and some that do not.
    const PUBLISHED: &str = r#"{
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
        "image_token_id": 151655, "video_token_id": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "tie_word_embeddings": true,
        "text_config": {"attention_bias": false, "attention_dropout": 0.0, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_theta": 5000000, "vocab_size": 151936,
            "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"}},
        "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024, "in_channels": 3,
            "intermediate_size": 4096, "num_heads": 16, "num_position_embeddings": 2304,
            "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    }"#;

    #[test]
    fn a_published_file_is_read() {
        let config: Qwen3VlConfig = serde_json::from_str(PUBLISHED).unwrap();
        config.validate().unwrap();
        assert!(config.is_tied());
        assert_eq!(config.text_config.rotary().theta, 5e6);
        assert_eq!(config.text_config.rotary().sections, Some([24, 20, 20]));
        assert_eq!(config.vision_config.grid_side(), 48);
        assert_eq!(config.initialization, Initialization::Published);
    }
}
