//! Names that configuration files use, and the errors that they get.

use serde_json::{Value, json};

use super::*;
use crate::sharder::ContextParallelConfig;

fn read(config: &Value) -> Result<ContextParallelConfig, String> {
    serde_json::from_str(&config.to_string()).map_err(|error| error.to_string())
}

/// The name as it is, and as people type it.
fn spellings(name: &str) -> [String; 4] {
    [
        name.to_owned(),
        name.to_uppercase(),
        name.replace('_', "-"),
        format!("  {name}\t"),
    ]
}

#[test]
fn every_name_of_an_exchange_is_read() {
    use ExchangeStrategy::{AllGather, Auto, HeadAllToAll, LeftHalo, NeededOnly, Ring};
    for (name, exchange) in [
        ("all_gather", AllGather),
        ("allgather", AllGather),
        ("needed_only", NeededOnly),
        ("needed", NeededOnly),
        ("halo", NeededOnly),
        ("neighbor", NeededOnly),
        ("neighbour", NeededOnly),
        ("a2a", NeededOnly),
        ("a2av", NeededOnly),
        ("alltoall", NeededOnly),
        ("all_to_all", NeededOnly),
        ("needed_a2a", NeededOnly),
        ("left_halo", LeftHalo),
        ("ring", Ring),
        ("ring_attention", Ring),
        ("p2p", Ring),
        ("head_all_to_all", HeadAllToAll),
        ("head_a2a", HeadAllToAll),
        ("ulysses", HeadAllToAll),
        ("auto", Auto),
        ("default", NeededOnly),
        ("", NeededOnly),
    ] {
        for name in spellings(name) {
            let config = read(&json!({ "exchange": name })).unwrap();
            assert_eq!(config.exchange, exchange, "{name:?}");
        }
    }
    assert_eq!(
        read(&json!({ "exchange": null })).unwrap().exchange,
        NeededOnly
    );
}

#[test]
fn every_name_of_a_layout_is_read() {
    use LayoutPolicy::{DualChunkSwap, HeadTail, Identity};
    for (name, layout) in [
        ("contiguous", DEFAULT_LAYOUT),
        ("head_tail", HeadTail),
        ("round_robin", HeadTail),
        ("load_balanced", HeadTail),
        ("zigzag", HeadTail),
        ("dual_chunk_swap", DualChunkSwap),
        ("thd", DualChunkSwap),
        ("thd_dual_chunk_swap", DualChunkSwap),
        (
            "balanced",
            LayoutPolicy::Balanced {
                visibility: Visibility::default(),
            },
        ),
        ("identity", Identity),
        ("auto", DEFAULT_LAYOUT),
        ("default", DEFAULT_LAYOUT),
        ("", DEFAULT_LAYOUT),
    ] {
        for name in spellings(name) {
            let config = read(&json!({ "layout": name })).unwrap();
            assert_eq!(config.layout, layout, "{name:?}");
        }
    }
    assert_eq!(
        read(&json!({ "layout": null })).unwrap().layout,
        DEFAULT_LAYOUT
    );
    for (layout, expected) in [
        (
            json!({ "Contiguous": { "multiple": 8 } }),
            LayoutPolicy::Contiguous { multiple: 8 },
        ),
        (json!({ "contiguous": {} }), DEFAULT_LAYOUT),
        (json!({ "round-robin": null }), HeadTail),
        (
            json!({ "balanced": {} }),
            LayoutPolicy::Balanced {
                visibility: Visibility::default(),
            },
        ),
        (
            json!({ "balanced": { "visibility": "full" } }),
            LayoutPolicy::Balanced {
                visibility: Visibility::Full,
            },
        ),
        (
            json!({ "custom": [[{ "start": 3, "end": 5 }], [{ "start": 0, "end": 3 }]] }),
            LayoutPolicy::Custom([3..5, 0..3].map(|range| vec![range]).to_vec()),
        ),
    ] {
        assert_eq!(
            read(&json!({ "layout": layout })).unwrap().layout,
            expected,
            "{layout}"
        );
    }
}

#[test]
fn every_name_of_a_primary_stream_is_read() {
    for (name, primary) in [
        ("sharded", PrimaryStream::Sharded),
        ("whole", PrimaryStream::Whole),
        ("auto", PrimaryStream::Sharded),
        ("default", PrimaryStream::Sharded),
        ("", PrimaryStream::Sharded),
    ] {
        for name in spellings(name) {
            let config = read(&json!({ "primary": name })).unwrap();
            assert_eq!(config.primary, primary, "{name:?}");
        }
    }
}

#[test]
fn what_is_written_is_read_again() {
    let layouts = [
        LayoutPolicy::Contiguous { multiple: 8 },
        LayoutPolicy::HeadTail,
        LayoutPolicy::DualChunkSwap,
        LayoutPolicy::Balanced {
            visibility: Visibility::Causal { window: Some(7) },
        },
        LayoutPolicy::Identity,
        LayoutPolicy::Custom(vec![vec![0..2, 5..8], vec![2..5]]),
    ];
    for layout in layouts {
        for exchange in [
            ExchangeStrategy::AllGather,
            ExchangeStrategy::NeededOnly,
            ExchangeStrategy::LeftHalo,
            ExchangeStrategy::Ring,
            ExchangeStrategy::HeadAllToAll,
            ExchangeStrategy::Auto,
        ] {
            for primary in [PrimaryStream::Sharded, PrimaryStream::Whole] {
                let config = ContextParallelConfig {
                    cp_axis: "context".to_owned(),
                    layout: layout.clone(),
                    exchange,
                    overlap: true,
                    keep_keys: true,
                    sm_margin: 16,
                    primary,
                    padding_token_id: 7,
                    ..ContextParallelConfig::default()
                };
                let written = serde_json::to_value(&config).unwrap();
                assert_eq!(read(&written), Ok(config), "{written}");
            }
        }
    }
    assert_eq!(read(&json!({})), Ok(ContextParallelConfig::default()));
}

/// A field's value in JSON, and how the error begins.
const WRONG: &[(&str, &str)] = &[
    (
        r#""exchange": 3"#,
        "exchange: invalid type: integer `3`, expected one of needed-only, all-gather",
    ),
    (
        r#""layout": "snake""#,
        r#"layout: expected one of contiguous, head-tail, dual-chunk-swap, balanced, identity, custom; got "snake""#,
    ),
    (
        r#""layout": {}"#,
        "layout: expected one of contiguous, head-tail, dual-chunk-swap, balanced, identity, custom; got an empty table",
    ),
    (
        r#""layout": "custom""#,
        "layout: custom: expected the ranges of every rank",
    ),
    (
        r#""layout": { "contiguous": { "multiple": -1 } }"#,
        "layout.contiguous.multiple: invalid value: integer `-1`",
    ),
    (
        r#""layout": { "contiguous": { "multiples": 2 } }"#,
        "layout.contiguous.multiples: unknown field `multiples`",
    ),
    (
        r#""layout": { "custom": [[{ "start": 0 }]] }"#,
        "layout.custom[0][0]: missing field `end`",
    ),
    (
        r#""layout": { "head-tail": 2 }"#,
        "layout.head-tail: invalid type: integer `2`",
    ),
    (
        r#""layout": { "head-tail": null, "identity": null }"#,
        "layout: expected one layout, got head-tail and identity",
    ),
    (
        r#""primary": "half""#,
        r#"primary: expected one of sharded, whole; got "half""#,
    ),
    (
        r#""cp_axis": 5"#,
        "cp_axis: invalid type: integer `5`, expected a string",
    ),
    (
        r#""loss_axes": ["dp", 1]"#,
        "loss_axes[1]: invalid type: integer `1`",
    ),
    (
        r#""vision": { "min_tokens": -1 }"#,
        "vision.min_tokens: invalid value: integer `-1`",
    ),
    (
        r#""streams": [{ "name": "depth", "dim": "x" }]"#,
        "streams[0].dim: invalid type: string \"x\"",
    ),
    (
        r#""padding_token_id": "x""#,
        "padding_token_id: invalid type: string \"x\"",
    ),
    (
        r#""attn_backend": "flash""#,
        "attn_backend: unknown field `attn_backend`, expected one of",
    ),
];

#[test]
fn a_wrong_field_is_refused_by_its_path() {
    for (field, message) in WRONG {
        let config: Value = serde_json::from_str(&format!("{{ {field} }}")).unwrap();
        let error = read(&config).unwrap_err();
        assert!(error.starts_with(message), "{field}: {error}");
    }
    assert!(
        read(&json!("x"))
            .unwrap_err()
            .starts_with("invalid type: string")
    );
}

#[test]
fn what_is_no_exchange_is_refused_and_what_there_is_is_listed() {
    let exchanges = "exchange: expected one of needed-only, all-gather, left-halo, ring, \
                     head-all-to-all, auto; ";
    // Kernels, not exchanges.
    for name in ["flash", "te", "dense"] {
        let error = read(&json!({ "exchange": name })).unwrap_err();
        assert!(
            error.starts_with(&format!("{exchanges}got {name:?}")),
            "{error}"
        );
    }
}
