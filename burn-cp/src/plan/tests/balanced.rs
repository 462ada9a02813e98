//! Balanced layouts, judged by the plans they lead to.

use proptest::prelude::*;

use crate::layout::{
    Document, Documents, LayoutError, LayoutPolicy, TokenLayout, Visibility, least_kv_received,
};
use crate::plan::{AttentionPlan, MaskKind};

const FULL: Visibility = Visibility::Full;
const CAUSAL: Visibility = Visibility::Causal { window: None };

fn packed(lengths: &[usize]) -> Documents {
    Documents::from_lengths(&[lengths.to_vec()], lengths.iter().sum()).unwrap()
}

fn deal(documents: &Documents, world_size: usize, visibility: Visibility) -> TokenLayout {
    LayoutPolicy::Balanced { visibility }
        .layout(documents, world_size)
        .unwrap()
}

fn plan(lengths: &[usize], world_size: usize, mask: MaskKind) -> AttentionPlan {
    let documents = packed(lengths);
    let layout = deal(&documents, world_size, mask.into());
    let documents = documents.padded_to(layout.seq_len()).unwrap();
    AttentionPlan::new(documents.into(), layout.into(), mask).unwrap()
}

fn most_received(plan: &AttentionPlan) -> usize {
    plan.ranks()
        .iter()
        .map(|rank| rank.kv_tokens_received)
        .max()
        .unwrap()
}

/// Lengths with many short documents and few long ones, from powers of a fixed sequence.
fn skewed(seed: u64, scale: f64, total: usize) -> Vec<usize> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut lengths = Vec::new();
    let mut left = total;
    while left > 0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Between 1/16 and 16 times the scale, small ones more often.
        let power = (state >> 11) as f64 / (1_u64 << 53) as f64 * 8.0 - 4.0;
        let len = ((scale * power.exp2()) as usize).clamp(1, left);
        lengths.push(len);
        left -= len;
    }
    lengths
}

fn check(lengths: &[usize], world_size: usize, mask: MaskKind) -> (usize, usize) {
    let plan = plan(lengths, world_size, mask);
    let total: usize = lengths.iter().sum();
    let case = || format!("{world_size} ranks, {mask:?}: {lengths:?}");
    // Padding is added only for ranks without a token.
    let num_empty = plan.ranks().iter().filter(|rank| rank.tokens == 0).count();
    assert_eq!(plan.layout().seq_len(), total + num_empty, "{}", case());
    assert!(
        plan.balance() >= 0.95,
        "balance {}, {}",
        plan.balance(),
        case()
    );
    for rank in plan.ranks() {
        assert!(
            rank.tokens * world_size * 2 <= total * 3,
            "{} tokens, {}",
            rank.tokens,
            case()
        );
    }
    let bound = least_kv_received(&packed(lengths), world_size, mask.into()).unwrap();
    let received = most_received(&plan);
    assert!(
        bound <= received,
        "bound {bound}, received {received}, {}",
        case()
    );
    (received, bound)
}

#[test]
fn documents_that_fit_stay_whole() {
    for lengths in [&[4; 8][..], &[64, 64, 32, 32, 32, 32, 8, 8], &[5, 5]] {
        let plan = plan(lengths, 2, MaskKind::CAUSAL);
        assert_eq!(
            (plan.balance(), most_received(&plan)),
            (1.0, 0),
            "{lengths:?}"
        );
    }
}

#[test]
fn work_is_even_and_few_keys_are_received_for_packs_of_all_kinds() {
    for seed in 0..12 {
        for world_size in [2, 3, 4, 8, 16, 64] {
            for scale in [512.0, 4096.0] {
                let (received, bound) =
                    check(&skewed(seed, scale, 65_536), world_size, MaskKind::CAUSAL);
                if world_size == 8 && scale == 512.0 {
                    let limit = (0.30 * 57_344_f64).max(1.2 * bound as f64);
                    assert!(
                        received as f64 <= limit,
                        "received {received}, bound {bound}, seed {seed}"
                    );
                }
            }
        }
    }
}

#[test]
fn one_document_among_short_ones_and_one_alone_are_balanced() {
    for world_size in [2, 3, 5, 8, 16, 32, 64] {
        check(&[65_536], world_size, MaskKind::CAUSAL);
        let mut lengths = vec![32_768];
        lengths.extend(skewed(3, 512.0, 32_768));
        check(&lengths, world_size, MaskKind::CAUSAL);
    }
    let (received, bound) = check(&[65_536], 8, MaskKind::CAUSAL);
    assert_eq!(received, bound, "no layout can do better");
}

#[test]
fn work_is_that_of_the_mask() {
    for seed in 0..6 {
        for world_size in [2, 4, 8] {
            let lengths = skewed(seed, 1024.0, 65_536);
            check(&lengths, world_size, MaskKind::Full);
            check(&lengths, world_size, MaskKind::Causal { window: Some(511) });
        }
    }
}

/// Every way to deal out the tokens of these documents, whole batch by batch.
fn least_of_all(lengths: &[usize], world_size: usize, mask: MaskKind) -> Option<usize> {
    let documents = packed(lengths);
    let num_tokens = documents.seq_len();
    let mut best: Option<usize> = None;
    for code in 0..world_size.pow(num_tokens as u32) {
        let mut ranks = vec![Vec::new(); world_size];
        let mut rest = code;
        for token in 0..num_tokens {
            ranks[rest % world_size].push(token..token + 1);
            rest /= world_size;
        }
        let Ok(layout) = TokenLayout::new(num_tokens, ranks) else {
            continue;
        };
        let plan = AttentionPlan::new(documents.clone().into(), layout.into(), mask).unwrap();
        let few = |rank: &crate::plan::RankPlan| rank.tokens * world_size * 2 <= num_tokens * 3;
        if plan.balance() >= 0.95 && plan.ranks().iter().all(few) {
            let received = most_received(&plan);
            best = Some(best.map_or(received, |best| best.min(received)));
        }
    }
    best
}

#[test]
fn the_bound_holds_for_every_balanced_layout_of_a_few_tokens() {
    let masks = [
        MaskKind::CAUSAL,
        MaskKind::Full,
        MaskKind::Causal { window: Some(3) },
    ];
    let mut tight = 0;
    for (lengths, world_size) in [
        (&[10][..], 2),
        (&[9, 1], 2),
        (&[7, 3], 2),
        (&[6, 2, 2], 2),
        (&[7], 3),
        (&[6, 1], 3),
        (&[4, 3], 3),
    ] {
        for mask in masks {
            let bound = least_kv_received(&packed(lengths), world_size, mask.into()).unwrap();
            if let Some(least) = least_of_all(lengths, world_size, mask) {
                assert!(
                    bound <= least,
                    "{lengths:?} on {world_size}, {mask:?}: {bound} > {least}"
                );
                tight += usize::from(bound == least && bound > 0);
            }
        }
    }
    assert!(
        tight >= 3,
        "the bound says something: it is met {tight} times"
    );
}

#[test]
fn what_is_not_one_stream_is_refused() {
    let policy = LayoutPolicy::Balanced { visibility: CAUSAL };
    let rows = Documents::from_lengths(&[vec![4], vec![4]], 4).unwrap();
    let refused = LayoutError::NotFlattened {
        what: "balanced",
        expected: 1,
        got: 2,
    };
    assert_eq!(policy.layout(&rows, 2), Err(refused.clone()));
    assert_eq!(least_kv_received(&rows, 2, CAUSAL), Err(refused));
    assert_eq!(
        policy.layout(&rows.flattened(), 0),
        Err(LayoutError::ZeroRanks)
    );
    assert_eq!(
        least_kv_received(&rows.flattened(), 0, CAUSAL),
        Err(LayoutError::ZeroRanks)
    );
    let huge = 1 << 40;
    let row = vec![Document::contiguous(0..huge)];
    let documents = Documents::from_runs(vec![row], huge).unwrap();
    let refused = LayoutError::Overflow {
        what: "balanced",
        got: huge,
    };
    assert_eq!(policy.layout(&documents, 2), Err(refused));
}

fn visibility() -> impl Strategy<Value = Visibility> {
    prop_oneof![
        Just(CAUSAL),
        Just(FULL),
        (0_usize..20).prop_map(|window| Visibility::Causal {
            window: Some(window)
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_documents_with_any_padding_are_dealt_out(
        ids in prop::collection::vec(0_i64..5, 1..160),
        runs in 1_usize..24,
        world_size in 1_usize..9,
        visibility in visibility(),
    ) {
        let ids: Vec<i64> = ids.iter().flat_map(|&id| std::iter::repeat_n(id, runs)).collect();
        let documents = Documents::from_ids(std::slice::from_ref(&ids)).unwrap();
        let layout = deal(&documents, world_size, visibility);
        prop_assert_eq!(&layout, &deal(&documents, world_size, visibility));
        // Padding is added only for ranks without a token.
        prop_assert!(layout.seq_len() < ids.len() + world_size);
        let mean = ids.len().div_ceil(world_size);
        for rank in 0..world_size {
            let most = mean.max(ids.len() * 3 / (2 * world_size)).max(1);
            prop_assert!(layout.local_len(rank) <= most, "rank {}: {} > {}", rank, layout.local_len(rank), most);
        }
        let padded = documents.padded_to(layout.seq_len()).unwrap();
        AttentionPlan::new(padded.into(), layout.into(), MaskKind::CAUSAL).unwrap();
    }
}
