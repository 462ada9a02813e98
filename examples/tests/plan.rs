//! The command `plan` as a user runs it.

use std::{
    collections::HashSet,
    fs,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;

fn plan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plan"))
        .args(args)
        .output()
        .expect("the program starts")
}

fn succeed(args: &[&str]) -> String {
    let output = plan(args);
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

fn refuse(args: &[&str]) -> String {
    let output = plan(args);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{args:?} is accepted");
    assert!(!error.contains("panicked"), "{error}");
    error
}

fn json(args: &[&str]) -> Vec<Value> {
    serde_json::from_str(&succeed(&[args, &["--json"]].concat())).expect("an array")
}

const PACK: [&str; 4] = ["--lengths", "100,80,44", "--ranks", "4"];

#[test]
fn every_layout_meets_every_exchange_and_one_wins() {
    let outcomes = json(&PACK);
    let text = |outcome: &Value, field: &str| outcome[field].as_str().expect("text").to_owned();
    let pairs: HashSet<_> = outcomes
        .iter()
        .map(|o| (text(o, "layout"), text(o, "exchange")))
        .collect();
    assert_eq!((outcomes.len(), pairs.len()), (20, 20));
    let winners: Vec<_> = outcomes
        .iter()
        .filter(|outcome| outcome["winner"] == true)
        .collect();
    assert_eq!(winners.len(), 1);
    for outcome in &outcomes {
        let balance = outcome["balance"].as_f64().expect("a number");
        assert!(balance > 0.0 && balance <= 1.0);
        assert!(
            outcome["kv_fraction"].as_f64().is_some()
                && outcome["kv_fraction_bound"].as_f64().is_some()
        );
        let Some(predicted) = outcome["predicted_ms"].as_f64() else {
            assert!(!text(outcome, "impossible").is_empty());
            assert_eq!(outcome["ranks"], Value::Array(Vec::new()));
            continue;
        };
        assert!(predicted >= winners[0]["predicted_ms"].as_f64().expect("a number"));
        let ranks = outcome["ranks"].as_array().expect("ranks");
        let sum = |field: &str| {
            ranks
                .iter()
                .map(|rank| rank[field].as_u64().expect("a count"))
                .sum::<u64>()
        };
        assert_eq!((ranks.len(), sum("tokens")), (4, 224));
        assert_eq!(sum("area"), 5050 + 3240 + 990);
        assert_eq!(sum("bytes_in"), sum("bytes_out"));
    }
    let by_halo = outcomes
        .iter()
        .find(|o| o["layout"] == "contiguous" && o["exchange"] == "left-halo");
    let reason = text(by_halo.expect("shown"), "impossible");
    assert!(
        reason.contains("rank 3") && reason.contains("got tokens of rank 1"),
        "{reason}"
    );
}

#[test]
fn of_exchanges_that_end_at_once_the_one_that_moves_least_wins() {
    let args = "--lengths 1900,300,1896 --ranks 2 --tflops 20 --layout";
    let args: Vec<_> = args.split(' ').collect();
    for layout in ["contiguous", "head-tail"] {
        let outcomes = json(&[&args[..], &[layout]].concat());
        let time = |outcome: &Value| outcome["predicted_ms"].as_f64();
        let moved = |outcome: &Value| {
            let ranks = outcome["ranks"].as_array().expect("ranks").iter();
            ranks.map(|rank| rank["bytes_in"].as_u64()).max()
        };
        let winner = outcomes.iter().find(|outcome| outcome["winner"] == true);
        let winner = winner.expect("one wins");
        let as_fast = outcomes.iter().filter(|other| time(other) == time(winner));
        assert!(as_fast.clone().count() > 1, "{outcomes:?}");
        for other in as_fast {
            assert!(moved(winner) <= moved(other), "{other}");
        }
    }
}

#[test]
fn the_table_says_what_the_json_says_and_marks_the_winner() {
    let table = succeed(&PACK);
    for word in [
        "tokens",
        "area",
        "in",
        "out",
        "memory",
        "predicted ms",
        "impossible: left-halo",
        "* fastest",
    ] {
        assert!(table.contains(word), "{word}: {table}");
    }
    assert_eq!(
        table,
        succeed(&[&["plan"], &PACK[..]].concat()),
        "with and without the command's name"
    );
}

#[test]
fn layouts_exchanges_and_sizes_are_chosen_by_flags() {
    let one = [
        &PACK[..],
        &["--layout", "balanced", "--exchange", "needed-only"],
    ]
    .concat();
    let bytes_in = |more: &[&str]| {
        let outcomes = json(&[&one[..], more].concat());
        assert_eq!(outcomes.len(), 1);
        let ranks = outcomes[0]["ranks"].as_array().expect("ranks").clone();
        ranks
            .iter()
            .map(|rank| rank["bytes_in"].as_u64().expect("a count"))
            .sum::<u64>()
    };
    let base = bytes_in(&[]);
    assert!(base > 0);
    assert_eq!(bytes_in(&["--dtype", "f32"]), 2 * base);
    assert_eq!(bytes_in(&["--kv-heads", "4"]), base / 2);
    assert_eq!(bytes_in(&["--v-head-dim", "256"]), base / 2 * 3);
    assert!(bytes_in(&["--window", "7"]) < base);
    let heads = json(
        &[
            &PACK[..],
            &[
                "--heads",
                "6",
                "--kv-heads",
                "6",
                "--exchange",
                "head-all-to-all,auto",
            ],
        ]
        .concat(),
    );
    for outcome in heads {
        let impossible = outcome["exchange"] == "head-all-to-all";
        assert_eq!(outcome["predicted_ms"].is_null(), impossible, "{outcome}");
    }
}

#[test]
fn packs_come_from_a_file_and_a_bad_line_is_named() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("packs.jsonl");
    let name = path.to_str().expect("a path");
    fs::write(&path, "[100, 80, 44]\n\n{\"lengths\": [30, 2]}\n").expect("written");
    let outcomes = json(&["--jsonl", name, "--ranks", "2"]);
    let ranks = outcomes[0]["ranks"].as_array().expect("ranks");
    let tokens = ranks
        .iter()
        .map(|rank| rank["tokens"].as_u64().expect("a count"))
        .sum::<u64>();
    assert_eq!(tokens, 256);
    for bad in ["[3, -1]", "[]", "[0, 0]", "{\"length\": [3]}", "three"] {
        fs::write(&path, format!("[4]\n{bad}\n")).expect("written");
        let error = refuse(&["--jsonl", name]);
        assert!(error.contains("packs.jsonl, line 2: expected"), "{error}");
    }
    fs::write(&path, "\n").expect("written");
    assert!(refuse(&["--jsonl", name]).contains("expected a pack on each line"));
    assert!(refuse(&["--jsonl", "/nowhere.jsonl"]).contains("/nowhere.jsonl"));
}

#[test]
fn flags_out_of_range_are_refused_by_name() {
    for (args, expected) in [
        (
            &["--ranks", "0"][..],
            "--ranks: expected a number from 1 to 1024, got 0",
        ),
        (&["--ranks", "1025"], "--ranks: expected"),
        (&["--heads", "0"], "--heads: expected"),
        (
            &["--kv-heads", "3"],
            "--kv-heads: expected a divisor of --heads, got 3",
        ),
        (
            &["--link-gbs", "0"],
            "--link-gbs: expected a number above 0",
        ),
        (&["--tflops", "inf"], "--tflops: expected"),
        (&["--latency-us", "NaN"], "--latency-us: expected"),
        (
            &["--mask", "full", "--window", "3"],
            "--window: expected none with --mask full",
        ),
        (
            &["--layout", "round"],
            "possible values: contiguous, head-tail, dual-chunk-swap, balanced",
        ),
        (
            &["--exchange", "halo"],
            "possible values: all-gather, needed-only, left-halo, ring, head-all-to-all, auto",
        ),
        (
            &["--ranks", "65", "--svg", "/tmp/never.svg"],
            "--svg: expected at most 64 ranks",
        ),
    ] {
        let error = refuse(&[&["--lengths", "8"], args].concat());
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    assert!(refuse(&["--lengths", "0,0"]).contains("--lengths: expected at least one token"));
    assert!(refuse(&[]).contains("--lengths"));
    assert!(
        refuse(&["simulate", "--lengths", "8", "--svg", "a.svg"]).contains("--svg: expected none")
    );
}

#[test]
fn the_picture_shows_every_rank_document_and_move() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("plan.svg");
    succeed(&[&PACK[..], &["--svg", path.to_str().expect("a path")]].concat());
    let picture = fs::read_to_string(&path).expect("a picture");
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
    for text in [
        "rank 3",
        "contiguous: balance",
        "balanced: balance",
        "d2",
        "d1  0..12",
    ] {
        assert!(picture.contains(text), "{text}");
    }
    // Contiguous shards move four runs of keys, and every arrow has a head.
    assert!(picture.matches("<polygon").count() > 4);
    let missing = folder.path().join("no").join("plan.svg");
    let error = refuse(&[&PACK[..], &["--svg", missing.to_str().expect("a path")]].concat());
    assert!(error.contains("plan.svg"), "{error}");
}

#[test]
fn worlds_up_to_a_thousand_ranks_are_simulated() {
    let args = [
        "simulate",
        "--lengths",
        "9000,5000,3000,600,600",
        "--layout",
        "contiguous,balanced",
    ];
    let table = succeed(&args);
    for ranks in ["     8  contiguous", "   128  balanced", "  1024  balanced"] {
        assert!(table.contains(ranks), "{ranks}: {table}");
    }
    let outcomes = json(&[&args[..], &["--ranks", "8,16", "--exchange", "needed-only"]].concat());
    let worlds: Vec<_> = outcomes
        .iter()
        .map(|outcome| outcome["world_size"].as_u64())
        .collect();
    assert_eq!(worlds, [Some(8), Some(8), Some(16), Some(16)]);
}
