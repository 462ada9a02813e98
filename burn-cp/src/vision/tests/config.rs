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
    let number = "an integer of at least 0";
    let alpha = r#""auto" or an integer of at least 0"#;
    let known = "one of enabled, min_tokens, min_frames, min_local_patch_rows, cost_alpha";
    let mut table = vec![
        ("enabled", "1", "true or false", "1"),
        ("enabled", r#""yes""#, "true or false", r#"the text "yes""#),
        ("enabled", "null", "true or false", "nothing"),
        ("enabled", "[true]", "true or false", "a list"),
        ("cost_alpha", "-1", alpha, "-1"),
        ("cost_alpha", "true", alpha, "the bool true"),
        ("cost_alpha", "1.5", alpha, "the float 1.5"),
        ("cost_alpha", r#""AUTO""#, alpha, r#"the text "AUTO""#),
        ("cost_alpha", r#"{"a": 1}"#, alpha, "a table"),
        ("min_frame", "1", known, "an unknown field"),
    ];
    for field in ["min_tokens", "min_frames", "min_local_patch_rows"] {
        table.extend([
            (field, "-1", number, "-1"),
            (field, "true", number, "the bool true"),
            (field, "96.0", number, "the float 96.0"),
            (field, r#""96""#, number, r#"the text "96""#),
            (field, "null", number, "nothing"),
            (field, "1e30", number, "the float 1e30"),
        ]);
    }
    for (field, value, expected, got) in table {
        let text = format!(r#"{{ "{field}": {value} }}"#);
        let error = read(&text).unwrap_err().to_string();
        let message = format!("{field}: expected {expected}, got {got} at line 1");
        assert!(error.starts_with(&message), "{error:?}, not {message:?}");

        let text = format!(r#"{{ "vision": {text} }}"#);
        let error = serde_json::from_str::<ContextParallelConfig>(&text).unwrap_err();
        let (error, message) = (error.to_string(), format!("vision.{message}"));
        assert!(error.starts_with(&message), "{error:?}, not {message:?}");
    }
    let twice = read(r#"{ "enabled": true, "enabled": false }"#).unwrap_err();
    assert!(
        twice
            .to_string()
            .starts_with("enabled: expected one value, got a second one")
    );
    let error = serde_json::from_str::<ContextParallelConfig>(r#"{ "vision": true }"#).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("expected vision: a table with the fields"),
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
