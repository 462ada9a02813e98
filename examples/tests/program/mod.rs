//! Programs that are run, and what they leave.

#![allow(dead_code, reason = "each test uses a part")]

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

/// Runs a command to its end.
pub(crate) fn finish(mut command: Command) -> Output {
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .expect("the program starts")
}

/// Runs a command that must succeed, and returns what it prints.
pub(crate) fn succeed(command: Command) -> String {
    let output = finish(command);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "exit {:?}: {error}",
        output.status.code()
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a command that must fail, and returns its message.
pub(crate) fn refuse(command: Command) -> String {
    let output = finish(command);
    assert!(!output.status.success(), "expected a refusal");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !error.contains("panicked"),
        "a refusal must not be a panic: {error}"
    );
    error
}

/// What a run has summarised.
pub(crate) fn summary(out: &Path) -> Value {
    let text = fs::read_to_string(out.join("summary.json")).expect("a summary");
    serde_json::from_str(&text).expect("valid JSON")
}
