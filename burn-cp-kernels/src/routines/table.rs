//! The table of `ROUTINES.md`, from the code.

use burn::tensor::DType;

use super::{hopper, portable, tensor_core};
use crate::definition::{AttentionError, AttentionOptions, AttentionProblem, Dropout, Segments};

type Check = fn(&AttentionProblem, DType, &AttentionOptions) -> Result<(), AttentionError>;

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

fn problem(head_dim: usize, v_head_dim: usize) -> AttentionProblem {
    let segments = Segments::new(vec![], (1, 4), (1, 4)).expect("no segment is a legal list");
    let shape = |dim| [1, 2, 4, dim];
    let (q, v) = (shape(head_dim), shape(v_head_dim));
    AttentionProblem::new(q, q, v, &segments).expect("shapes that fit")
}

fn dtypes(serves: impl Fn(DType) -> bool) -> String {
    let names = DTYPES.iter().filter(|dtype| serves(**dtype));
    names
        .map(|dtype| format!("{dtype:?}"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// The pairs of sizes up to 300 that are served.
fn dims(serves: impl Fn(&AttentionProblem) -> bool) -> Vec<(usize, usize)> {
    let pairs = (1..300).flat_map(|dim| (1..300).map(move |v_dim| (dim, v_dim)));
    pairs
        .filter(|(dim, v_dim)| serves(&problem(*dim, *v_dim)))
        .collect()
}

#[test]
fn the_documented_table_is_what_the_code_serves() {
    let text = include_str!("../../ROUTINES.md");
    let row = |name: &str| -> Vec<&str> {
        let row = text
            .lines()
            .find(|line| line.starts_with(&format!("| {name} |")));
        row.unwrap()
            .trim_matches('|')
            .split('|')
            .map(str::trim)
            .collect()
    };
    let row_portable = row("portable");
    let serves = |problem: &AttentionProblem, dtype| portable::check(problem, dtype).is_ok();
    assert_eq!(
        row_portable[2],
        dtypes(|dtype| serves(&problem(64, 64), dtype))
    );
    assert_eq!(row_portable[3], "each a multiple of 8 from 8 to 256");
    let sizes: Vec<usize> = (8..=256).step_by(8).collect();
    let pairs = sizes
        .iter()
        .flat_map(|a| sizes.iter().map(move |b| (*a, *b)));
    assert_eq!(
        dims(|problem| serves(problem, DType::F32)),
        pairs.collect::<Vec<_>>()
    );

    let options = AttentionOptions::new();
    let checks: [(&str, Check); 2] = [
        ("tensor_core", tensor_core::check),
        ("hopper", hopper::check),
    ];
    for (name, check) in checks {
        let row = row(name);
        let serves = |problem: &AttentionProblem, dtype, options: &AttentionOptions| {
            check(problem, dtype, options).is_ok()
        };
        let plain = |dtype| serves(&problem(64, 64), dtype, &options);
        assert_eq!(row[2], dtypes(plain));
        assert_eq!(row[3], "each a multiple of 8 from 8 to 256");
        let sizes: Vec<usize> = (8..=256).step_by(8).collect();
        let pairs = sizes
            .iter()
            .flat_map(|a| sizes.iter().map(move |b| (*a, *b)));
        let served = dims(|problem| serves(problem, DType::BF16, &options));
        assert_eq!(served, pairs.collect::<Vec<_>>());
        let with = |options| serves(&problem(64, 64), DType::BF16, &options);
        let said = |yes: bool| if yes { "yes" } else { "no" };
        let capped = AttentionOptions::new().with_softcap(2.0);
        assert_eq!(row[4], said(with(capped)));
        let dropped = AttentionOptions::new().with_dropout(Dropout::new(0.5, 0));
        assert_eq!(row[6], said(with(dropped)));
    }
}
