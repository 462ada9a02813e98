//! What a configuration must fulfil.

use super::config::{AttentionKind, MimoV2FlashConfig, MimoV2FlashVlConfig};
use crate::models::{
    problems::{ConfigError, Problems},
    qwen3_vl::{Initialization, check_vision},
};

pub(super) fn validate(config: &MimoV2FlashConfig) -> Result<(), ConfigError> {
    let mut problems = Problems::default();
    check(config, &mut problems);
    problems.into_result()
}

pub(super) fn validate_with_media(config: &MimoV2FlashVlConfig) -> Result<(), ConfigError> {
    let (text, vision) = (&config.text_config, &config.vision_config);
    let mut problems = Problems::default();
    check(text, &mut problems);
    check_vision(vision, &mut problems);
    problems.require(
        vision.out_hidden_size == text.hidden_size,
        "vision_config.out_hidden_size",
        format!("hidden_size of the decoder ({})", text.hidden_size),
        vision.out_hidden_size,
    );
    problems.require(
        vision.deepstack_visual_indexes.is_empty(),
        "vision_config.deepstack_visual_indexes",
        "none",
        &vision.deepstack_visual_indexes,
    );
    problems.require(
        config.balance.is_finite() && config.balance >= 0.0,
        "balance",
        "a number of at least 0",
        config.balance,
    );
    problems.into_result()
}

fn check(config: &MimoV2FlashConfig, problems: &mut Problems) {
    problems.positive(&[
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_hidden_layers", config.num_hidden_layers),
        ("num_attention_heads", config.num_attention_heads),
        ("head_dim", config.head_dim),
        ("v_head_dim", config.v_head_dim),
        ("sliding_window", config.sliding_window),
    ]);
    problems.positive_number("rms_norm_eps", config.rms_norm_eps);
    problems.positive_number("initializer_range", config.initializer_range);
    check_layers(config, problems);
    check_attention(config, problems);
    check_experts(config, problems);
    if let Initialization::FanIn { embedding_std, .. } = config.initialization {
        problems.positive_number("initialization.fan_in.embedding_std", embedding_std);
    }
}

fn check_layers(config: &MimoV2FlashConfig, problems: &mut Problems) {
    let lengths = [
        ("layer_types", config.attention_kinds().len()),
        ("mlp_layer_types", config.mlp_kinds().len()),
    ];
    for (path, got) in lengths {
        let expected = format!("one per layer ({})", config.num_hidden_layers);
        problems.require(got == config.num_hidden_layers, path, expected, got);
    }
    for (path, pattern) in [
        ("hybrid_layer_pattern", &config.hybrid_layer_pattern),
        ("moe_layer_freq", &config.moe_layer_freq),
    ] {
        let legal = pattern.iter().flatten().all(|&kind| kind <= 1);
        problems.require(legal, path, "0 and 1", pattern);
    }
}

fn check_attention(config: &MimoV2FlashConfig, problems: &mut Problems) {
    for (kind, heads, rope) in [
        (
            AttentionKind::Full,
            "num_key_value_heads",
            "rope_parameters.full_attention",
        ),
        (
            AttentionKind::Sliding,
            "swa_num_key_value_heads",
            "rope_parameters.sliding_attention",
        ),
    ] {
        let num_kv_heads = config.num_kv_heads(kind);
        problems.positive(&[(heads, num_kv_heads)]);
        problems.divides(
            "num_attention_heads",
            config.num_attention_heads,
            num_kv_heads,
            heads,
        );
        let known = config
            .rope(kind)
            .rope_type
            .is_none_or(|name| name == "default");
        problems.require(known, rope, "rope_type default", config.rope(kind));
        let (rotary, width) = config.rotary(kind);
        let fits = width <= config.head_dim && rotary.validate(width).is_ok();
        problems.require(
            fits,
            rope,
            format!(
                "a positive rope_theta, and an even part of head_dim ({})",
                config.head_dim
            ),
            config.rope(kind),
        );
    }
    let scale = config.value_scale();
    problems.require(
        scale.is_finite(),
        "attention_value_scale",
        "a number",
        scale,
    );
    problems.require(
        config.add_full_attention_sink_bias != Some(true),
        "add_full_attention_sink_bias",
        "false",
        true,
    );
    problems.require(
        config.add_swa_attention_sink_bias != Some(false),
        "add_swa_attention_sink_bias",
        "true",
        false,
    );
}

fn check_experts(config: &MimoV2FlashConfig, problems: &mut Problems) {
    let (experts, groups) = (config.n_routed_experts, config.n_group);
    problems.positive(&[
        ("n_routed_experts", experts),
        ("moe_intermediate_size", config.moe_intermediate_size),
        ("n_group", groups),
    ]);
    problems.divides("n_routed_experts", experts, groups, "n_group");
    problems.require(
        (1..=groups.max(1)).contains(&config.topk_group),
        "topk_group",
        format!("1 to n_group ({groups})"),
        config.topk_group,
    );
    // A group is rated by its best two experts.
    let size = experts / groups.max(1);
    problems.require(
        groups == 1 || size >= 2,
        "n_group",
        "groups of at least two experts",
        groups,
    );
    let eligible = config.topk_group.saturating_mul(size);
    problems.require(
        (1..=eligible).contains(&config.num_experts_per_tok),
        "num_experts_per_tok",
        format!("1 to the experts of topk_group groups ({eligible})"),
        config.num_experts_per_tok,
    );
    let scale = config.routed_scaling_factor.unwrap_or(1.0);
    problems.positive_number("routed_scaling_factor", scale);
    let sigmoid = config
        .scoring_func
        .as_deref()
        .is_none_or(|name| name == "sigmoid");
    problems.require(sigmoid, "scoring_func", "sigmoid", &config.scoring_func);
    problems.require(
        config.n_shared_experts.unwrap_or(0) == 0,
        "n_shared_experts",
        "none",
        config.n_shared_experts,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::mimo_v2_flash::MlpKind;

    fn paths(change: impl FnOnce(&mut MimoV2FlashVlConfig)) -> Vec<&'static str> {
        let mut config = MimoV2FlashVlConfig::small();
        change(&mut config);
        match config.validate() {
            Ok(()) => vec![],
            Err(error) => error.problems.iter().map(|problem| problem.path).collect(),
        }
    }

    #[test]
    fn presets_are_valid() {
        MimoV2FlashVlConfig::tiny().validate().unwrap();
        MimoV2FlashVlConfig::small().validate().unwrap();
    }

    #[test]
    fn every_wrong_field_is_listed_with_its_path() {
        let found = paths(|config| {
            config.text_config.swa_num_key_value_heads = Some(3);
            config.text_config.num_experts_per_tok = 7;
            config.vision_config.out_hidden_size = 63;
            config.vision_config.deepstack_visual_indexes = vec![0];
            config.balance = -1.0;
        });
        assert_eq!(
            found,
            [
                "num_attention_heads",
                "num_experts_per_tok",
                "vision_config.out_hidden_size",
                "vision_config.deepstack_visual_indexes",
                "balance"
            ]
        );
        let groups = paths(|config| {
            config.text_config.n_group = 4;
            config.text_config.topk_group = 5;
        });
        assert_eq!(
            groups,
            ["n_routed_experts", "topk_group", "n_group"],
            "six experts are no four groups, let alone five"
        );
        let layers = paths(|config| config.text_config.layer_types = Some(vec![]));
        assert_eq!(layers, ["layer_types"]);
        let rope = paths(|config| config.text_config.partial_rotary_factor = Some(1.5));
        assert_eq!(
            rope,
            [
                "rope_parameters.full_attention",
                "rope_parameters.sliding_attention"
            ]
        );
        let other = paths(|config| {
            config.text_config.add_full_attention_sink_bias = Some(true);
            config.text_config.scoring_func = Some("softmax".into());
            config.text_config.n_shared_experts = Some(1);
        });
        assert_eq!(
            other,
            [
                "add_full_attention_sink_bias",
                "scoring_func",
                "n_shared_experts"
            ]
        );
    }

    /// Names of the published file.
    const PUBLISHED: &str = r#"{
        "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 7,
        "num_attention_heads": 64, "num_key_value_heads": 4, "swa_num_key_value_heads": 8, "head_dim": 192, "v_head_dim": 128,
        "sliding_window": 128, "sliding_window_size": 128, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1], "rope_theta": 5000000, "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334, "attention_value_scale": 0.707, "layernorm_epsilon": 1e-05,
        "add_full_attention_sink_bias": false, "add_swa_attention_sink_bias": true, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
        "routed_scaling_factor": null, "scoring_func": "sigmoid", "n_shared_experts": null, "tie_word_embeddings": false
    }"#;

    #[test]
    fn names_of_the_published_file_are_read() {
        let config: MimoV2FlashConfig = serde_json::from_str(PUBLISHED).unwrap();
        config.validate().unwrap();
        let kinds = config.attention_kinds();
        assert_eq!(kinds[..2], [AttentionKind::Full, AttentionKind::Sliding]);
        assert_eq!(config.mlp_kinds()[..2], [MlpKind::Dense, MlpKind::Sparse]);
        assert_eq!(config.window(AttentionKind::Sliding), Some(128));
        assert_eq!(config.rotary(AttentionKind::Sliding).1, 64);
        assert_eq!(config.rotary(AttentionKind::Full).0.theta, 5e6);
        // Without the pattern the layers are those of the reference.
        let bare = MimoV2FlashConfig {
            hybrid_layer_pattern: None,
            moe_layer_freq: None,
            ..config.clone()
        };
        assert_eq!(bare.attention_kinds(), kinds);
        assert_eq!(bare.mlp_kinds(), config.mlp_kinds());
    }
}
