//! Models for the digits of [`data`](crate::data).

use super::{AttentionKind, MimoV2FlashConfig, MimoV2FlashVlConfig, config::defaults};
use crate::{
    data::vocabulary,
    models::qwen3_vl::{Activation, Initialization, VisionConfig, vision_for_digits},
};

impl MimoV2FlashConfig {
    fn for_digits(vocab_size: usize) -> Self {
        Self {
            vocab_size,
            hidden_size: 64,
            intermediate_size: 160,
            num_hidden_layers: 3,
            num_attention_heads: 8,
            num_key_value_heads: 2,
            swa_num_key_value_heads: None,
            // Multiples of 8, as kernels of devices take them.
            head_dim: 24,
            v_head_dim: 16,
            // Answers ask for pictures far before them, and fillers stand between: three layers need two that see all.
            layer_types: Some(vec![
                AttentionKind::Full,
                AttentionKind::Sliding,
                AttentionKind::Full,
            ]),
            sliding_window: 24,
            sliding_window_size: None,
            hybrid_layer_pattern: None,
            mlp_layer_types: None,
            moe_layer_freq: None,
            rope_parameters: None,
            rope_theta: Some(1e6),
            swa_rope_theta: Some(1e4),
            partial_rotary_factor: Some(0.5),
            attention_value_scale: defaults::attention_value_scale(),
            attention_bias: false,
            n_routed_experts: 6,
            num_experts_per_tok: 2,
            moe_intermediate_size: 64,
            n_group: 1,
            topk_group: 1,
            norm_topk_prob: true,
            routed_scaling_factor: None,
            scoring_func: None,
            n_shared_experts: None,
            add_full_attention_sink_bias: None,
            add_swa_attention_sink_bias: None,
            rms_norm_eps: defaults::rms_norm_eps(),
            hidden_act: Activation::Silu,
            tie_word_embeddings: false,
            initializer_range: defaults::initializer_range(),
            initialization: Initialization::FanIn {
                embedding_std: 0.1,
                position_std: 0.5,
            },
        }
    }
}

impl MimoV2FlashVlConfig {
    /// A model for digits in seconds: three decoder layers of width 32. Placeholders are those of
    /// [`vocabulary`], as are its `vocab_size` ids.
    #[must_use]
    pub fn tiny() -> Self {
        Self::for_digits(
            MimoV2FlashConfig {
                hidden_size: 32,
                intermediate_size: 64,
                head_dim: 16,
                v_head_dim: 8,
                n_routed_experts: 4,
                moe_intermediate_size: 24,
                ..MimoV2FlashConfig::for_digits(vocabulary::SIZE)
            },
            VisionConfig {
                hidden_size: 32,
                intermediate_size: 64,
                num_heads: 2,
                ..vision_for_digits()
            },
        )
    }

    /// A model that learns to read digits on a CPU: three decoder layers of width 64.
    #[must_use]
    pub fn small() -> Self {
        Self::for_digits(
            MimoV2FlashConfig::for_digits(vocabulary::SIZE),
            vision_for_digits(),
        )
    }

    fn for_digits(text_config: MimoV2FlashConfig, vision_config: VisionConfig) -> Self {
        Self {
            vision_config: VisionConfig {
                out_hidden_size: text_config.hidden_size,
                deepstack_visual_indexes: vec![],
                ..vision_config
            },
            text_config,
            balance: 1e-2,
        }
    }
}
