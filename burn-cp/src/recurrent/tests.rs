//! Contexts and orders of small cases, written out.

use super::{context::tokens_at, convolution::HaloPlan, scan::CarryPlan, *};
use crate::{
    collectives::{ExchangePlan, Piece},
    layout::{Document, Documents, LayoutPolicy, TokenLayout},
};

/// `num_ranks` equal parts of documents with these boundaries.
fn contexts(cu_seqlens: &[usize], num_ranks: usize) -> Vec<RankContext> {
    let lengths: Vec<usize> = cu_seqlens.windows(2).map(|cut| cut[1] - cut[0]).collect();
    let len = cu_seqlens[cu_seqlens.len() - 1];
    let documents = Documents::from_lengths(&[lengths], len).unwrap();
    let layout = TokenLayout::contiguous(len, num_ranks).unwrap();
    RankContext::of_row(&documents, 0, &layout).unwrap()
}

/// Documents' boundaries, and what each of equal parts knows of them.
struct Case {
    cu_seqlens: &'static [usize],
    boundaries: &'static [&'static [usize]],
    tokens_before: &'static [usize],
    ranks_before: &'static [usize],
    ranks_after: &'static [usize],
}

const CASES: [Case; 5] = [
    Case {
        cu_seqlens: &[0, 7, 18, 32],
        boundaries: &[&[0, 7, 16], &[0, 2, 16]],
        tokens_before: &[0, 9],
        ranks_before: &[0, 1],
        ranks_after: &[1, 0],
    },
    Case {
        cu_seqlens: &[0, 2, 11, 14, 16],
        boundaries: &[&[0, 2, 4], &[0, 4], &[0, 3, 4], &[0, 2, 4]],
        tokens_before: &[0, 2, 6, 1],
        ranks_before: &[0, 1, 2, 1],
        ranks_after: &[2, 1, 1, 0],
    },
    Case {
        cu_seqlens: &[0, 16],
        boundaries: &[&[0, 4], &[0, 4], &[0, 4], &[0, 4]],
        tokens_before: &[0, 4, 8, 12],
        ranks_before: &[0, 1, 2, 3],
        ranks_after: &[3, 2, 1, 0],
    },
    Case {
        cu_seqlens: &[0, 5, 16],
        boundaries: &[&[0, 4], &[0, 1, 4], &[0, 4], &[0, 4]],
        tokens_before: &[0, 4, 3, 7],
        ranks_before: &[0, 1, 1, 2],
        ranks_after: &[1, 2, 1, 0],
    },
    // Documents that end where ranks do.
    Case {
        cu_seqlens: &[0, 4, 4, 8],
        boundaries: &[&[0, 4], &[0, 4]],
        tokens_before: &[0, 0],
        ranks_before: &[0, 0],
        ranks_after: &[0, 0],
    },
];

#[test]
fn a_rank_knows_what_crosses_its_borders() {
    for case in CASES {
        let contexts = contexts(case.cu_seqlens, case.boundaries.len());
        for (rank, context) in contexts.iter().enumerate() {
            let what = format!("rank {rank} of {:?}", case.cu_seqlens);
            assert_eq!(context.boundaries(), case.boundaries[rank], "{what}");
            assert_eq!(
                context.num_tokens_before(),
                case.tokens_before[rank],
                "{what}"
            );
            assert_eq!(
                context.num_ranks_before(),
                case.ranks_before[rank],
                "{what}"
            );
            assert_eq!(context.num_ranks_after(), case.ranks_after[rank], "{what}");
            assert_eq!(context.is_first(), case.ranks_before[rank] == 0, "{what}");
            assert_eq!(context.is_last(), case.ranks_after[rank] == 0, "{what}");
        }
    }
    // What a convolution of 4 taps finds on the left.
    let found = contexts(&[0, 2, 11, 14, 16], 4);
    let found: Vec<usize> = found
        .iter()
        .map(|rank| rank.num_tokens_before().min(3))
        .collect();
    assert_eq!(found, [0, 2, 3, 1]);
}

#[test]
fn padding_counts_to_no_document() {
    let document = Document {
        runs: vec![1..3, 5..6, 9..10],
        extent: 1..11,
    };
    assert_eq!(tokens_at(&document, &(1..4)), [2..3, 5..6, 9..10]);
    let documents = Documents::from_runs(vec![vec![document]], 16).unwrap();
    let layout = TokenLayout::contiguous(16, 4).unwrap();
    let contexts = RankContext::of_row(&documents, 0, &layout).unwrap();
    let boundaries: Vec<&[usize]> = contexts.iter().map(RankContext::boundaries).collect();
    assert_eq!(boundaries, [&[0, 1, 4][..], &[0, 4], &[0, 3, 4], &[0, 4]]);
    let before: Vec<usize> = contexts
        .iter()
        .map(RankContext::num_tokens_before)
        .collect();
    assert_eq!(before, [0, 2, 3, 0]);
    // The document's extent reaches here, none of its tokens does.
    assert!(contexts[3].is_first() && contexts[2].is_last());
}

#[test]
fn a_context_needs_a_contiguous_layout_of_the_documents_length() {
    let documents = Documents::from_lengths(&[vec![8]], 8).unwrap();
    let error = RankContext::of_row(&documents, 0, &TokenLayout::head_tail(8, 2).unwrap());
    assert_eq!(
        error.unwrap_err(),
        RecurrentError::NotContiguous {
            rank: 0,
            expected: 0..4,
            got: vec![0..2, 6..8]
        }
    );
    let error = RankContext::of_row(&documents, 0, &TokenLayout::contiguous(10, 2).unwrap());
    let (expected, got) = (10, 8);
    assert_eq!(error.unwrap_err(), RecurrentError::Length { expected, got });
}

#[test]
fn only_ranks_that_hold_the_document_are_asked() {
    // One document over all ranks, and one on each rank.
    let documents = Documents::from_lengths(&[vec![16], vec![4; 4]], 16).unwrap();
    let layout = TokenLayout::contiguous(16, 4).unwrap();
    let contexts: Vec<_> = (0..2)
        .map(|row| RankContext::of_row(&documents, row, &layout).unwrap())
        .collect();
    let piece = |source, range| Piece { source, range };
    let halo = |rank, reach| {
        let plan = HaloPlan::new(&documents, &layout, &contexts, (rank, reach));
        plan.exchange.map(|plan| plan.pieces().to_vec())
    };
    // Further back than the left neighbour reaches, and no further than the document does.
    assert_eq!(halo(3, 7).unwrap(), [piece(1, 1..4), piece(2, 0..4)]);
    assert_eq!(halo(1, 7).unwrap(), [piece(0, 0..4)]);
    // A row of its own stands for nothing.
    assert_eq!(halo(0, 7).unwrap(), [piece(0, 0..1)]);
    assert_eq!(halo(3, 0), None);
    let carry = |rank| {
        let plan = CarryPlan::new(&contexts, rank);
        plan.exchange.map(|plan| plan.pieces().to_vec())
    };
    let earlier = |num: usize| -> Vec<Piece> { (0..num).map(|rank| piece(rank, 0..1)).collect() };
    for (rank, expected) in [(0, 1), (1, 1), (2, 2), (3, 3)] {
        assert_eq!(carry(rank).unwrap(), earlier(expected), "rank {rank}");
    }
    let contexts = [contexts[1].clone()];
    assert!(CarryPlan::new(&contexts, 2).exchange.is_none());
}

/// For each token of all ranks, one rank behind the other, where it comes from in the ranks' inputs, one behind the other.
fn permutation(layout: &TokenLayout, plan: impl Fn(usize) -> ExchangePlan) -> Vec<usize> {
    (0..layout.world_size())
        .flat_map(|rank| plan(rank).pieces().to_vec())
        .flat_map(|piece| piece.range.map(move |at| layout.offset(piece.source) + at))
        .collect()
}

#[test]
fn chunks_of_head_and_tail_are_brought_into_order_and_back() {
    let table: [(usize, &[usize], &[usize]); 4] = [
        (1, &[0, 1], &[0, 1]),
        (2, &[0, 2, 3, 1], &[0, 3, 1, 2]),
        (3, &[0, 2, 4, 5, 3, 1], &[0, 5, 1, 4, 2, 3]),
        (4, &[0, 2, 4, 6, 7, 5, 3, 1], &[0, 7, 1, 6, 2, 5, 3, 4]),
    ];
    for (num_ranks, undo, redo) in table {
        let layout = TokenLayout::head_tail(2 * num_ranks, num_ranks).unwrap();
        let order = SequenceOrder::new(&layout);
        assert_eq!(order.is_identity(), num_ranks == 1);
        let there = permutation(&layout, |rank| order.to_contiguous(rank));
        assert_eq!(there, undo, "{num_ranks} ranks");
        let back = permutation(&layout, |rank| order.from_contiguous(rank));
        assert_eq!(back, redo, "{num_ranks} ranks");
    }
}

#[test]
fn packed_documents_are_brought_into_order_and_back() {
    let documents = Documents::from_lengths(&[vec![4, 8]], 12).unwrap();
    let packed = LayoutPolicy::DualChunkSwap.layout(&documents, 2).unwrap();
    assert_eq!(packed.indices(0), [0, 3, 4, 5, 10, 11]);
    assert_eq!(packed.indices(1), [1, 2, 6, 7, 8, 9]);
    let uneven = vec![
        vec![9..12, 1..4],
        vec![4..9],
        std::iter::once(0..1).collect(),
    ];
    for layout in [
        packed,
        TokenLayout::head_tail(8, 2).unwrap(),
        TokenLayout::new(12, uneven).unwrap(),
    ] {
        let order = SequenceOrder::new(&layout);
        let held: Vec<usize> = (0..layout.world_size())
            .flat_map(|rank| layout.indices(rank))
            .collect();
        let there = permutation(&layout, |rank| order.to_contiguous(rank));
        let in_order: Vec<usize> = there.iter().map(|&at| held[at]).collect();
        let all: Vec<usize> = (0..layout.seq_len()).collect();
        assert_eq!(in_order, all);
        let back = permutation(&layout, |rank| order.from_contiguous(rank));
        assert_eq!(back, held);
        for rank in 0..layout.world_size() {
            assert_eq!(order.contiguous().local_len(rank), layout.local_len(rank));
        }
    }
}
