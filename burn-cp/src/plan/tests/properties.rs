//! Random plans against a mask that is written out pair by pair.

use std::sync::Arc;

use proptest::prelude::*;

use super::cases::{Case, Label, Labels, OWN, case};
use crate::layout::{Documents, TokenLayout};
use crate::plan::*;

/// The row and token behind each entry of a rank's buffer.
fn buffer(plan: &AttentionPlan, rank: usize) -> Vec<(usize, usize)> {
    let mut buffer = Vec::new();
    for piece in &plan.rank(rank).pieces {
        assert_eq!(piece.at, buffer.len());
        let tokens = plan.layout().indices(piece.source);
        buffer.extend(
            tokens[piece.local.clone()]
                .iter()
                .map(|&token| (piece.row, token)),
        );
    }
    assert_eq!(buffer.len(), plan.rank(rank).buffer_len);
    buffer
}

/// Every (query, key) pair of the segments as (row, token) each, with `key` to look keys up.
fn expand(
    segments: &[Segment],
    own: &[usize],
    key: impl Fn(usize, usize) -> (usize, usize),
) -> Vec<((usize, usize), (usize, usize))> {
    let mut pairs = Vec::new();
    for segment in segments {
        let (nq, nk) = (segment.q.len(), segment.k.len());
        assert!(nq > 0 && nk > 0);
        for t in 0..nq {
            let end = if segment.causal { nk - nq + t + 1 } else { nk };
            let start = segment
                .window
                .map_or(0, |window| (end - 1).saturating_sub(window));
            for k in start..end {
                let query = (segment.q_row, own[segment.q.start + t]);
                pairs.push((query, key(segment.k_row, segment.k.start + k)));
            }
        }
    }
    pairs
}

fn visible(mask: MaskKind, query: Option<Label>, key: Option<Label>) -> bool {
    let (Some(q), Some(k)) = (query, key) else {
        return false;
    };
    let earlier = k.position <= q.position;
    let allowed = match mask {
        MaskKind::Full => true,
        MaskKind::Causal { window } => {
            earlier && window.is_none_or(|window| q.position - k.position <= window)
        }
        MaskKind::CausalWithSpans { .. } => earlier || (q.span.is_some() && q.span == k.span),
        MaskKind::Prefix { .. } => earlier || (q.in_prefix && k.in_prefix),
        MaskKind::PerDocument { .. } => return visible(OWN[q.own], query, key),
    };
    q.document == k.document && allowed
}

/// The set of tokens, if any, whose members all see it whole.
fn together(mask: MaskKind, label: Label) -> Option<usize> {
    match mask {
        MaskKind::CausalWithSpans { .. } => label.span,
        MaskKind::Prefix { .. } => label.in_prefix.then_some(0),
        MaskKind::PerDocument { .. } => together(OWN[label.own], label),
        _ => None,
    }
}

fn check_cover(case: &Case, plan: &AttentionPlan, labels: &Labels) {
    let seq_len = plan.layout().seq_len();
    let mut count = vec![vec![0_u8; seq_len * seq_len]; labels.len()];
    for (rank, rank_plan) in plan.ranks().iter().enumerate() {
        let own = plan.layout().indices(rank);
        let buffer = buffer(plan, rank);
        let pairs = expand(&rank_plan.segments, &own, |row, k| {
            assert_eq!(row, 0);
            buffer[k]
        });
        assert_eq!(pairs.len() as u64, rank_plan.area);
        let mut seen = vec![false; labels.len() * seq_len];
        for &((q_row, q), (k_row, k)) in &pairs {
            assert_eq!(q_row, k_row);
            count[q_row][q * seq_len + k] += 1;
            seen[k_row * seq_len + k] = true;
        }
        assert!(
            buffer.iter().all(|&(row, k)| seen[row * seq_len + k]),
            "a key nobody sees"
        );
        let place = |&(row, token): &(usize, usize)| (row, labels[row][token].unwrap());
        assert!(buffer.is_sorted_by(|a, b| place(a) < place(b)));

        for segment in &rank_plan.segments {
            let (row, first) = buffer[segment.k.start];
            assert_eq!(labels[row][first].unwrap().position, segment.k_position);
        }
        if let Some(local) = &rank_plan.local_segments {
            assert_eq!(expand(local, &own, |row, k| (row, own[k])), pairs);
        }
        let keys_are_local = rank_plan.segments.iter().all(|segment| {
            let owners = buffer[segment.k.clone()].iter().map(|&(row, token)| {
                assert_eq!(row, segment.q_row);
                plan.layout().owner(token).unwrap()
            });
            let owners: Vec<_> = owners.collect();
            owners.iter().all(|&(owner, _)| owner == rank)
                && owners.windows(2).all(|pair| pair[0].1 + 1 == pair[1].1)
        });
        assert_eq!(rank_plan.local_segments.is_some(), keys_are_local);
        check_maximal(case.mask, plan, rank, labels);
    }
    for (row, (count, labels)) in count.iter().zip(labels).enumerate() {
        for q in 0..seq_len {
            for k in 0..seq_len {
                let expected = u8::from(visible(case.mask, labels[q], labels[k]));
                assert_eq!(
                    count[q * seq_len + k],
                    expected,
                    "row {row}, query {q}, key {k}"
                );
            }
        }
    }
}

fn check_maximal(mask: MaskKind, plan: &AttentionPlan, rank: usize, labels: &Labels) {
    let own = plan.layout().indices(rank);
    let rank_plan = plan.rank(rank);
    for pair in rank_plan.segments.windows(2) {
        let (a, b) = (&pair[0], &pair[1]);
        assert!((a.q_row, a.q.end) <= (b.q_row, b.q.start));
        let last = labels[a.q_row][own[a.q.end - 1]].unwrap();
        let first = labels[b.q_row][own[b.q.start]].unwrap();
        let continues = a.q_row == b.q_row
            && a.q.end == b.q.start
            && last.document == first.document
            && last.position + 1 == first.position
            && together(mask, last) == together(mask, first);
        assert!(!continues, "two segments that are one");
    }
    for pair in rank_plan.pieces.windows(2) {
        let (a, b) = (&pair[0], &pair[1]);
        let continues = a.source == b.source && a.row == b.row && a.local.end == b.local.start;
        assert!(!continues, "two pieces that are one");
    }
    let real = own
        .iter()
        .flat_map(|&token| labels.iter().map(move |row| row[token]));
    assert_eq!(rank_plan.tokens, real.flatten().count());
    assert_eq!(
        rank_plan.tokens,
        rank_plan.segments.iter().map(|s| s.q.len()).sum::<usize>()
    );
}

/// Plays both exchanges on (row, token) pairs.
fn check_exchanges(plan: &AttentionPlan) {
    let (layout, world_size) = (plan.layout(), plan.world_size());
    let shards: Vec<Vec<usize>> = (0..world_size).map(|rank| layout.indices(rank)).collect();
    let mut sent = vec![0; world_size];
    for rank in 0..world_size {
        let expected = buffer(plan, rank);
        let mut received = Vec::new();
        let mut from_others = 0;
        for (source, shard) in shards.iter().enumerate() {
            let before = received.len();
            for span in plan.transfers(source, rank) {
                let tokens = &shard[span.local.clone()];
                received.extend(tokens.iter().map(|&token| (span.row, token)));
            }
            let num = received.len() - before;
            assert_eq!(plan.num_transferred(source, rank), num);
            if source != rank {
                sent[source] += num;
                from_others += num;
            }
        }
        assert_eq!(plan.rank(rank).kv_tokens_received, from_others);
        // The buffer is ordered by document, what travels by source: the same tokens, each once.
        let mut expected = expected;
        expected.sort_unstable();
        received.sort_unstable();
        assert_eq!(received, expected);
    }
    let planned: Vec<usize> = plan
        .ranks()
        .iter()
        .map(|rank| rank.kv_tokens_sent)
        .collect();
    assert_eq!(planned, sent);
    assert_eq!(plan.moves_tokens(), sent.iter().any(|&num| num > 0));
}

fn check_documents(documents: &Documents, labels: &Labels) {
    for (row, labels) in labels.iter().enumerate() {
        let padding: Vec<bool> = labels.iter().map(Option::is_none).collect();
        assert_eq!(documents.padding_mask(row), padding);
        let positions = documents.positions(row);
        for document in documents.row(row) {
            if !document.extent.is_empty() {
                assert_eq!(positions[document.extent.start], 0);
            }
        }
        let starts = documents
            .row(row)
            .iter()
            .map(|document| document.extent.start);
        let starts: Vec<usize> = starts.collect();
        for token in 1..positions.len() {
            let continues = positions[token] == positions[token - 1] + 1;
            assert!(continues || (positions[token] == 0 && starts.contains(&token)));
        }
    }
    let real = labels.iter().flatten().flatten().count();
    assert_eq!(documents.num_real_tokens(), real);
}

fn check_layout(case: &Case, layout: &TokenLayout) {
    let mut tokens: Vec<usize> = (0..case.world_size)
        .flat_map(|rank| layout.indices(rank))
        .collect();
    let restored: Vec<usize> = layout
        .inverse()
        .iter()
        .map(|&index| tokens[index])
        .collect();
    tokens.sort_unstable();
    assert_eq!(tokens, restored);
    assert_eq!(tokens, (0..layout.seq_len()).collect::<Vec<_>>());
    assert!((0..case.world_size).all(|rank| layout.local_len(rank) >= 1));
    let text = serde_json::to_string(layout).unwrap();
    assert_eq!(&serde_json::from_str::<TokenLayout>(&text).unwrap(), layout);
}

fn config() -> ProptestConfig {
    // The default honours PROPTEST_CASES; without it run more than proptest would.
    let mut config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 512;
    }
    config.failure_persistence = None;
    config
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn plans_cover_every_visible_pair_exactly_once(case in case()) {
        let layout = Arc::new(case.policy.layout(&case.documents, case.world_size).unwrap());
        check_layout(&case, &layout);
        let documents = Arc::new(case.documents.padded_to(layout.seq_len()).unwrap());
        let mut labels = case.labels.clone();
        labels.iter_mut().for_each(|row| row.resize(layout.seq_len(), None));
        check_documents(&documents, &labels);
        let plan = AttentionPlan::new(documents, layout, case.mask).unwrap();
        check_cover(&case, &plan, &labels);
        check_exchanges(&plan);
    }
}
