//! Random plans against a mask that is written out pair by pair.

use std::ops::Range;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::layout::{Document, Documents, LayoutPolicy, TokenLayout};
use crate::plan::*;

/// Document and document position of each token of each row; `None` for padding.
type Labels = Vec<Vec<Option<(usize, usize)>>>;

#[derive(Debug, Clone)]
struct Case {
    documents: Documents,
    labels: Labels,
    policy: LayoutPolicy,
    world_size: usize,
    mask: MaskKind,
}

/// Padding ahead of the document, its runs with the hole behind each, padding behind it.
type DocumentShape = (usize, Vec<(usize, usize)>, usize);

fn document_shape() -> impl Strategy<Value = DocumentShape> {
    let length = prop_oneof![
        6 => prop::sample::select(vec![0_usize, 1, 2, 3, 5, 7, 13]),
        1 => Just(61_usize),
    ];
    let runs = prop_oneof![
        4 => vec((length.clone(), Just(0)), 1),
        1 => vec((length, 0..3_usize), 1..4),
    ];
    let padding = || prop_oneof![3 => Just(0_usize), 1 => 1..12_usize];
    (padding(), runs, padding())
}

fn build_row(shapes: &[DocumentShape]) -> (Vec<Document>, Vec<Option<(usize, usize)>>) {
    let (mut documents, mut labels) = (Vec::new(), Vec::new());
    for (index, (ahead, shape, behind)) in shapes.iter().enumerate() {
        labels.extend(std::iter::repeat_n(None, *ahead));
        let start = labels.len();
        let (mut runs, mut position) = (Vec::new(), 0);
        for &(length, hole) in shape {
            runs.push(labels.len()..labels.len() + length);
            labels.extend((position..position + length).map(|position| Some((index, position))));
            position += length;
            labels.extend(std::iter::repeat_n(None, hole));
        }
        labels.extend(std::iter::repeat_n(None, *behind));
        let extent = start..labels.len();
        documents.push(Document { runs, extent });
    }
    (documents, labels)
}

/// Deals pieces of the given lengths to ranks in turn until `covered` tokens are out, each rank's pieces
/// in the order of their keys.
fn custom(pieces: &[(usize, usize, u8)], covered: usize, world_size: usize) -> LayoutPolicy {
    let mut ranks: Vec<Vec<(u8, Range<usize>)>> = vec![Vec::new(); world_size];
    let mut start = 0;
    for &(rank, length, key) in pieces.iter().cycle() {
        let end = (start + length).min(covered);
        ranks[rank % world_size].push((key, start..end));
        start = end;
        if start == covered {
            break;
        }
    }
    let in_order = |mut ranges: Vec<(u8, Range<usize>)>| {
        ranges.sort_by_key(|(key, _)| *key);
        ranges.into_iter().map(|(_, range)| range).collect()
    };
    LayoutPolicy::Custom(ranks.into_iter().map(in_order).collect())
}

fn case() -> impl Strategy<Value = Case> {
    let rows = vec(vec(document_shape(), 0..6), 1..4);
    let mask = prop_oneof![
        Just(MaskKind::CAUSAL),
        Just(MaskKind::Full),
        prop::sample::select(vec![0, 1, 2, 6, 30, usize::MAX]).prop_map(|window| {
            MaskKind::Causal {
                window: Some(window),
            }
        }),
    ];
    let pieces = vec((0..8_usize, 1..20_usize, any::<u8>()), 1..30);
    (rows, 1..9_usize, mask, 0..5_usize, pieces, 0..10_usize).prop_map(
        |(rows, world_size, mask, policy, pieces, extra)| {
            let (documents, mut labels): (Vec<_>, Labels) =
                rows.iter().map(|shapes| build_row(shapes)).unzip();
            let seq_len = labels.iter().map(Vec::len).max().unwrap().max(1) + extra / 3;
            labels.iter_mut().for_each(|row| row.resize(seq_len, None));
            let documents = Documents::from_runs(documents, seq_len).unwrap();
            if policy == 4 {
                return swapped(&documents, &labels, world_size, mask);
            }
            let policy = match policy {
                0 if world_size == 1 => LayoutPolicy::Identity,
                0 => LayoutPolicy::Contiguous { multiple: extra },
                1 => LayoutPolicy::HeadTail,
                _ => custom(&pieces, seq_len + extra, world_size),
            };
            Case {
                documents,
                labels,
                policy,
                world_size,
                mask,
            }
        },
    )
}

/// The documents in one row, each with as much room as dual-chunk-swap asks for.
fn swapped(documents: &Documents, labels: &Labels, world_size: usize, mask: MaskKind) -> Case {
    let aligned = documents.aligned(2 * world_size).unwrap().flattened();
    // Documents of other rows are other documents.
    let labels = labels.iter().enumerate().flat_map(|(row, labels)| {
        let apart = move |(document, position)| (1000 * row + document, position);
        labels.iter().map(move |label| label.map(apart))
    });
    let labels: Vec<_> = labels.collect();
    Case {
        labels: vec![aligned.placement.place(&labels, None).unwrap()],
        documents: aligned.documents,
        policy: LayoutPolicy::DualChunkSwap,
        world_size,
        mask,
    }
}

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

fn visible(mask: MaskKind, query: Option<(usize, usize)>, key: Option<(usize, usize)>) -> bool {
    let (Some((q_document, q)), Some((k_document, k))) = (query, key) else {
        return false;
    };
    let allowed = match mask {
        MaskKind::Full => true,
        MaskKind::Causal { window } => k <= q && window.is_none_or(|window| q - k <= window),
    };
    q_document == k_document && allowed
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
            assert_eq!(labels[row][first].unwrap().1, segment.k_position);
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
        check_maximal(plan, rank, labels);
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

fn check_maximal(plan: &AttentionPlan, rank: usize, labels: &Labels) {
    let own = plan.layout().indices(rank);
    let rank_plan = plan.rank(rank);
    for pair in rank_plan.segments.windows(2) {
        let (a, b) = (&pair[0], &pair[1]);
        assert!((a.q_row, a.q.end) <= (b.q_row, b.q.start));
        let (last_document, last) = labels[a.q_row][own[a.q.end - 1]].unwrap();
        let (document, first) = labels[b.q_row][own[b.q.start]].unwrap();
        let continues = a.q_row == b.q_row
            && a.q.end == b.q.start
            && last_document == document
            && last + 1 == first;
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
