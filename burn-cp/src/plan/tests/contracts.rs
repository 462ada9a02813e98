//! What a plan promises beside covering the pairs.

use std::sync::Arc;

use super::{ids, plan};
use crate::layout::{Document, Documents, TokenLayout};
use crate::plan::*;

#[test]
fn a_window_shortens_what_moves() {
    let mask = MaskKind::Causal { window: Some(2) };
    let plan = plan(&ids(&[16], 0), 4, mask);
    let rank = plan.rank(2);
    assert_eq!(
        rank.segments,
        [Segment {
            q_row: 0,
            q: 0..4,
            k_row: 0,
            k: 0..6,
            k_position: 6,
            causal: true,
            window: Some(2),
        }]
    );
    assert_eq!(rank.kv_source(), KvSource::Buffer);
    assert_eq!(
        (rank.kv_tokens_received, rank.kv_tokens_sent, rank.area),
        (2, 2, 12)
    );
    assert_eq!(
        plan.transfers(1, 2),
        [TokenSpan {
            row: 0,
            local: 2..4
        }]
    );
    assert_eq!(plan.rank(0).area, 1 + 2 + 3 + 3);
    let widest = MaskKind::Causal {
        window: Some(usize::MAX),
    };
    let wide = AttentionPlan::new(plan.documents().clone(), plan.layout().clone(), widest).unwrap();
    assert_eq!(wide.total_area(), 16 * 17 / 2);
}

#[test]
fn one_rank_needs_no_buffer_for_ordinary_documents() {
    for mask in [
        MaskKind::CAUSAL,
        MaskKind::Full,
        MaskKind::Causal { window: Some(1) },
    ] {
        let documents = Documents::from_lengths(&[vec![3, 0, 2], vec![7]], 8).unwrap();
        let layout = TokenLayout::contiguous(8, 1).unwrap();
        let plan = AttentionPlan::new(documents.into(), layout.into(), mask).unwrap();
        let rank = plan.rank(0);
        assert_eq!(rank.kv_source(), KvSource::Local);
        let local = rank.local_segments.as_ref().unwrap();
        let found: Vec<_> = local
            .iter()
            .map(|s| (s.q_row, s.k_row, s.k.clone()))
            .collect();
        assert_eq!(found, [(0, 0, 0..3), (0, 0, 3..5), (1, 1, 0..7)]);
        assert!(!plan.moves_tokens());
        assert_eq!(rank.tokens, 12);
    }
}

#[test]
fn holes_in_a_document_are_no_keys_and_no_positions() {
    let document = Document {
        runs: vec![1..3, 4..6],
        extent: 1..6,
    };
    let documents = Arc::new(Documents::from_runs(vec![vec![document]], 8).unwrap());
    let one = Arc::new(TokenLayout::contiguous(8, 1).unwrap());
    let plan = AttentionPlan::new(documents.clone(), one, MaskKind::CAUSAL).unwrap();
    let found: Vec<_> = (plan.rank(0).segments.iter())
        .map(|s| (s.q.clone(), s.k.clone(), s.k_position))
        .collect();
    assert_eq!(found, [(1..3, 0..2, 0), (4..6, 0..4, 0)]);
    assert_eq!(plan.rank(0).kv_source(), KvSource::Buffer);

    // A layout that deals the hole to another rank brings the queries together.
    let layout = TokenLayout::new(8, vec![vec![1..3, 4..6], vec![0..1, 3..4, 6..8]]).unwrap();
    let plan = AttentionPlan::new(documents, layout.into(), MaskKind::CAUSAL).unwrap();
    assert_eq!(plan.rank(0).segments.len(), 1);
    assert_eq!(plan.rank(0).kv_source(), KvSource::Local);
    assert_eq!(plan.rank(1).kv_source(), KvSource::Local);
    assert!(plan.rank(1).segments.is_empty());
}

#[test]
fn work_and_bytes_follow_the_plan() {
    let documents = Arc::new(Documents::full(1, 16).unwrap());
    let shape = CostShape {
        num_heads: 2,
        num_kv_heads: 2,
        head_dim: 8,
        v_head_dim: 8,
        bytes_per_element: 4,
    };
    let token = 2 * 2 * 8 * 4;
    assert_eq!(shape.kv_bytes_per_token(), token);
    let make = |layout: TokenLayout| {
        AttentionPlan::new(documents.clone(), layout.into(), MaskKind::CAUSAL).unwrap()
    };
    let contiguous = make(TokenLayout::contiguous(16, 4).unwrap());
    let bytes = |strategy, rank| contiguous.exchange_bytes(strategy, &shape, rank);
    for rank in 0..4 {
        let expected = ExchangeBytes {
            received: 12 * token,
            sent: 12 * token,
        };
        assert_eq!(bytes(ExchangeStrategy::AllGather, rank), expected);
        let moved = rank as u64 * 4 * token;
        let expected = ExchangeBytes {
            received: moved,
            sent: 12 * token - moved,
        };
        assert_eq!(bytes(ExchangeStrategy::NeededOnly, rank), expected);
    }
    let areas: Vec<u64> = contiguous.ranks().iter().map(|rank| rank.area).collect();
    assert_eq!(areas, [10, 26, 42, 58]);
    assert!((contiguous.balance() - 34.0 / 58.0).abs() < 1e-12);
    assert_eq!(make(TokenLayout::head_tail(16, 4).unwrap()).balance(), 1.0);
    assert_eq!(plan(&[0, 0], 2, MaskKind::CAUSAL).balance(), 1.0);
}

#[test]
fn the_hash_depends_on_documents_layout_and_mask_alone() {
    let base = plan(&ids(&[3, 3], 2), 2, MaskKind::CAUSAL);
    assert_eq!(
        base.hash(),
        plan(&[7, 7, 7, 5, 5, 5, 0, 0], 2, MaskKind::CAUSAL).hash()
    );
    let others = [
        plan(&ids(&[4, 2], 2), 2, MaskKind::CAUSAL),
        plan(&ids(&[3, 3], 2), 4, MaskKind::CAUSAL),
        plan(&ids(&[3, 3], 2), 2, MaskKind::Full),
        plan(&ids(&[3, 3], 2), 2, MaskKind::Causal { window: Some(0) }),
        plan(&ids(&[3, 3], 2), 2, MaskKind::Causal { window: Some(1) }),
        plan(&ids(&[3, 3, 1], 1), 2, MaskKind::CAUSAL),
    ];
    let mut hashes: Vec<String> = others.iter().map(AttentionPlan::hash_hex).collect();
    hashes.push(base.hash_hex());
    assert!(hashes.iter().all(|hash| hash.len() == 64));
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), 7);
    // Fixed once and for all: processes on different platforms compare it.
    assert_eq!(
        base.hash_hex(),
        "329f3245e2a8505ecf418d5c398c5676cc810ef9353ef72fbd169b49052b075f"
    );
}

#[test]
fn documents_and_layout_of_different_length_are_refused() {
    let documents = Documents::full(1, 6).unwrap();
    let layout = TokenLayout::contiguous(8, 2).unwrap();
    let error = AttentionPlan::new(documents.into(), layout.into(), MaskKind::Full).unwrap_err();
    assert_eq!(
        error,
        PlanError::SeqLen {
            expected: 8,
            got: 6
        }
    );
}

#[test]
fn streams_far_beyond_memory_are_planned_in_closed_form_or_refused() {
    let make = |seq_len| {
        let documents = Documents::full(1, seq_len).unwrap();
        let layout = TokenLayout::head_tail(seq_len, 4).unwrap();
        AttentionPlan::new(documents.into(), layout.into(), MaskKind::CAUSAL)
    };
    let plan = make(1 << 32).unwrap();
    assert_eq!(plan.total_area(), (1 << 63) + (1 << 31));
    assert!(matches!(make(1 << 40), Err(PlanError::Overflow { .. })));
}

#[test]
fn masks_survive_serialisation() {
    for mask in [
        MaskKind::CAUSAL,
        MaskKind::Full,
        MaskKind::Causal { window: Some(9) },
        MaskKind::CAUSAL_WITH_SPANS,
        MaskKind::PREFIX,
        MaskKind::PER_DOCUMENT,
    ] {
        let text = serde_json::to_string(&mask).unwrap();
        assert_eq!(serde_json::from_str::<MaskKind>(&text).unwrap(), mask);
    }
    let read = |text| serde_json::from_str::<MaskKind>(text);
    assert_eq!(read(r#"{"causal":{}}"#).unwrap(), MaskKind::default());
    assert_eq!(
        read(r#"{"causal-with-spans":{}}"#).unwrap(),
        MaskKind::CAUSAL_WITH_SPANS
    );
    assert!(read(r#"{"causal":{"windw":3}}"#).is_err());
}
