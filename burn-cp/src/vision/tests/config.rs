//! What configuration files may say.

use super::super::*;
use crate::sharder::ContextParallelConfig;

fn read(text: &str) -> Result<VisionShardingConfig, serde_json::Error> {
    serde_json::from_str(text)
}

#[test]
fn fields_that_are_left_out_have_defaults() {
    assert_eq!(read("{}").unwrap(), VisionShardingConfig::default());
    let given = read(r#"{ "min_tokens": 0, "min_frames": 0, "cost_alpha": 5 }"#).unwrap();
    assert_eq!(given, VisionShardingConfig::always().with_cost_alpha(5));
    let given = read(r#"{ "enabled": false, "min_local_patch_rows": 0 }"#).unwrap();
    let expected = VisionShardingConfig::replicated().with_min_local_patch_rows(0);
    assert_eq!(given, expected);
}

#[test]
fn alpha_is_auto_absent_null_or_a_number() {
    for (text, expected) in [
        ("{}", None),
        (r#"{ "cost_alpha": null }"#, None),
        (r#"{ "cost_alpha": "auto" }"#, None),
        (r#"{ "cost_alpha": " AUTO" }"#, None),
        (r#"{ "cost_alpha": 0 }"#, Some(0)),
        (r#"{ "cost_alpha": 3456 }"#, Some(3456)),
    ] {
        assert_eq!(read(text).unwrap().cost_alpha, expected, "{text}");
    }
}

#[test]
fn what_is_written_reads_back() {
    for config in [
        VisionShardingConfig::default(),
        VisionShardingConfig::replicated().with_cost_alpha(7),
    ] {
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(read(&text).unwrap(), config, "{text}");
        let whole = ContextParallelConfig {
            vision: config,
            ..ContextParallelConfig::default()
        };
        let text = serde_json::to_string(&whole).unwrap();
        let got = serde_json::from_str::<ContextParallelConfig>(&text).unwrap();
        assert_eq!(got, whole, "{text}");
    }
}

#[test]
fn wrong_fields_are_named_with_their_path_alone_and_nested() {
    let alpha = r#"expected "auto" or an integer of at least 0"#;
    let known = "unknown field `min_frame`, expected one of `enabled`, `min_tokens`";
    let mut table = vec![
        ("enabled", "1", "integer `1`, expected a boolean"),
        ("enabled", r#""yes""#, r#"string "yes", expected a boolean"#),
        ("enabled", "null", "null, expected a boolean"),
        ("enabled", "[true]", "sequence, expected a boolean"),
        ("cost_alpha", "-1", alpha),
        ("cost_alpha", "true", alpha),
        ("cost_alpha", "1.5", alpha),
        ("cost_alpha", r#""none""#, alpha),
        ("cost_alpha", r#"{"a": 1}"#, alpha),
        ("min_frame", "1", known),
    ];
    for field in ["min_tokens", "min_frames", "min_local_patch_rows"] {
        table.extend([
            (field, "-1", "integer `-1`, expected usize"),
            (field, "true", "boolean `true`, expected usize"),
            (field, "96.0", "floating point `96.0`, expected usize"),
            (field, r#""96""#, r#"string "96", expected usize"#),
            (field, "null", "null, expected usize"),
        ]);
    }
    for (field, value, expected) in table {
        let text = format!(r#"{{ "{field}": {value} }}"#);
        let error = read(&text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{field}: ")), "{error}");
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");

        let text = format!(r#"{{ "vision": {text} }}"#);
        let error = serde_json::from_str::<ContextParallelConfig>(&text).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with(&format!("vision.{field}: ")), "{error}");
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
    let twice = read(r#"{ "enabled": true, "enabled": false }"#).unwrap_err();
    assert!(twice.to_string().contains("duplicate field `enabled`"));
    let error = serde_json::from_str::<ContextParallelConfig>(r#"{ "vision": true }"#).unwrap_err();
    assert!(
        error.to_string().starts_with(
            "vision: invalid type: boolean `true`, expected struct VisionShardingConfig"
        ),
        "{error}"
    );
}

#[test]
fn alpha_follows_the_towers_width_unless_given() {
    let default = VisionShardingConfig::default();
    for (width, alpha) in [(1152, 3456), (1024, 3072), (1280, 3840), (768, 2304)] {
        assert_eq!(default.alpha(width), alpha);
    }
    for alpha in [0, 5] {
        assert_eq!(default.clone().with_cost_alpha(alpha).alpha(1152), alpha);
    }
}

#[test]
fn delivery_is_written_in_words() {
    let read_delivery = |text: &str| read(text).map(|config| config.delivery);
    assert_eq!(read_delivery("{}").unwrap(), VisionDelivery::Gathered);
    for (word, expected) in [
        ("gathered", VisionDelivery::Gathered),
        ("to-consumers", VisionDelivery::ToConsumers),
    ] {
        let text = format!(r#"{{ "delivery": "{word}" }}"#);
        assert_eq!(read_delivery(&text).unwrap(), expected);
        assert!(
            serde_json::to_string(&read(&text).unwrap())
                .unwrap()
                .contains(word)
        );
    }
    let error = read_delivery(r#"{ "delivery": "everywhere" }"#)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("delivery: "), "{error}");
    assert!(error.contains("`to-consumers`"), "{error}");
}
