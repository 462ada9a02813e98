//! A row's forward result does not depend on how its document is cut: equal to the bit on Flex.

use std::ops::Range;

use burn::{backend::Flex, tensor::DType};
use burn_cp_kernels::{Segment, Window, attention_forward};
use proptest::prelude::*;

use crate::support::{Case, Heads, causal, values};

/// Output and log-sum-exp bits of the queries `range` of a document, given the keys `keys` of it
/// alone, in a buffer of their own that `before` other keys precede.
fn run(document: &Case, range: Range<usize>, keys: Range<usize>, before: usize) -> Vec<Vec<u64>> {
    let problem = document.problem;
    let (tokens, window) = (problem.q_tokens, document.segments.as_slice()[0].reach().0);
    let segment = Segment {
        window: window.map(Window::left),
        ..causal(0..range.len(), before..before + keys.len(), keys.start)
    };
    let heads = Heads {
        num_heads: problem.num_heads,
        num_kv_heads: problem.num_kv_heads,
        head_dim: problem.head_dim,
        v_head_dim: problem.v_head_dim,
    };
    let sizes = ((1, range.len()), (1, before + keys.len()));
    let mut part = Case::new(vec![segment], sizes.0, sizes.1, heads);
    let copy = |from: &[f64], to: &mut [f64], heads: usize, range: &Range<usize>, before: usize| {
        let dim = from.len() / heads / tokens;
        let len = before + range.len();
        for head in 0..heads {
            let source = (head * tokens + range.start) * dim..(head * tokens + range.end) * dim;
            to[(head * len + before) * dim..(head + 1) * len * dim].copy_from_slice(&from[source]);
        }
    };
    copy(&document.q, &mut part.q, problem.num_heads, &range, 0);
    copy(
        &document.k,
        &mut part.k,
        problem.num_kv_heads,
        &keys,
        before,
    );
    copy(
        &document.v,
        &mut part.v,
        problem.num_kv_heads,
        &keys,
        before,
    );
    let [q, k, v] = part.qkv::<Flex>(DType::F32);
    let output = attention_forward(q, k, v, &part.segments, &part.options);
    let bits = |values: Vec<f64>, dim: usize| -> Vec<Vec<u64>> {
        let by_head = values.chunks(dim * range.len());
        by_head
            .map(|head| head.iter().map(|x| x.to_bits()).collect())
            .collect()
    };
    let mut rows = bits(values(&output.out), problem.v_head_dim);
    rows.extend(bits(values(&output.lse), 1));
    rows
}

/// Cuts a document's queries at `cuts` and compares with the whole.
fn check(tokens: usize, cuts: &[usize], window: Option<usize>, heads: Heads) {
    let segment = Segment {
        window: window.map(Window::left),
        ..causal(0..tokens, 0..tokens, 0)
    };
    let document = Case::new(vec![segment], (1, tokens), (1, tokens), heads);
    let whole = run(&document, 0..tokens, 0..tokens, 0);
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % tokens).collect();
    ends.extend([0, tokens]);
    ends.sort_unstable();
    ends.dedup();
    for (index, pair) in ends.windows(2).enumerate() {
        let range = pair[0]..pair[1];
        // The keys end at the piece's last query, and start where its first query's window does
        // (or, every other time, at the document's start).
        let first = match window {
            Some(window) if index % 2 == 0 => range.start.saturating_sub(window),
            _ => 0,
        };
        let before = [0, 1, 37][index % 3];
        let part = run(&document, range.clone(), first..range.end, before);
        for (row, (whole, part)) in whole.iter().zip(&part).enumerate() {
            let dim = whole.len() / tokens;
            let whole = &whole[range.start * dim..range.end * dim];
            assert_eq!(
                whole, part,
                "row {row} of queries {range:?} of {tokens} tokens"
            );
        }
    }
}

fn heads(group: usize, kv: usize, head_dim: usize, v_head_dim: usize) -> Heads {
    Heads {
        num_heads: group * kv,
        num_kv_heads: kv,
        head_dim,
        v_head_dim,
    }
}

#[test]
fn every_cut_of_a_short_document() {
    for tokens in [1, 2, 3, 5, 17, 66] {
        for cut in 0..tokens {
            check(tokens, &[cut, cut + 1], None, heads(1, 2, 16, 16));
            check(tokens, &[cut], Some(3), heads(2, 1, 8, 12));
        }
    }
}

#[test]
fn single_queries() {
    let every: Vec<usize> = (0..70).collect();
    check(70, &every, None, heads(1, 1, 16, 16));
    check(70, &every, Some(5), heads(1, 1, 16, 16));
    check(70, &every, None, heads(4, 2, 64, 64));
}

#[test]
fn a_long_document() {
    check(700, &[64, 100, 101, 256, 511], None, heads(2, 2, 32, 32));
    check(
        700,
        &[64, 100, 101, 256, 511],
        Some(100),
        heads(2, 2, 32, 32),
    );
    check(300, &[77], None, heads(1, 1, 128, 128));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn random_cuts(
        tokens in 1..260usize,
        cuts in proptest::collection::vec(0..260usize, 1..5),
        window in proptest::option::of(0..150usize),
        group in 1..4usize,
        dims in prop_oneof![Just((16, 16)), Just((3, 5)), Just((40, 24)), Just((64, 64))],
    ) {
        check(tokens, &cuts, window, heads(group, 2, dims.0, dims.1));
    }
}
