use std::ops::Range;

use crate::layout::*;

type Table<'a> = &'a [(usize, usize, &'a [&'a [Range<usize>]])];

fn check(build: fn(usize, usize) -> Result<TokenLayout, LayoutError>, table: Table<'_>) {
    for &(seq_len, world_size, expected) in table {
        let layout = build(seq_len, world_size).unwrap();
        for (rank, expected) in expected.iter().enumerate() {
            assert_eq!(
                layout.ranges(rank),
                *expected,
                "{seq_len} tokens, rank {rank}"
            );
        }
    }
}

#[test]
fn contiguous_parts_follow_the_closed_form() {
    check(
        TokenLayout::contiguous,
        &[
            (8, 2, &[&[0..4], &[4..8]]),
            (12, 2, &[&[0..6], &[6..12]]),
            (12, 3, &[&[0..4], &[4..8], &[8..12]]),
            (16, 4, &[&[0..4], &[4..8], &[8..12], &[12..16]]),
            (24, 3, &[&[0..8], &[8..16], &[16..24]]),
        ],
    );
}

#[test]
fn head_tail_parts_follow_the_closed_form_and_join_where_they_meet() {
    check(
        TokenLayout::head_tail,
        &[
            (8, 2, &[&[0..2, 6..8], &[2..6]]),
            (12, 2, &[&[0..3, 9..12], &[3..9]]),
            (12, 3, &[&[0..2, 10..12], &[2..4, 8..10], &[4..8]]),
            (
                16,
                4,
                &[&[0..2, 14..16], &[2..4, 12..14], &[4..6, 10..12], &[6..10]],
            ),
            (24, 3, &[&[0..4, 20..24], &[4..8, 16..20], &[8..16]]),
        ],
    );
}

#[test]
fn lengths_that_cannot_be_divided_are_refused_with_the_remainder() {
    let message = |result: Result<TokenLayout, LayoutError>| result.unwrap_err().to_string();
    assert!(message(TokenLayout::contiguous(7, 2)).contains("7 % 2 = 1"));
    assert!(message(TokenLayout::head_tail(10, 2)).contains("10 % 4 = 2"));
    assert!(message(TokenLayout::head_tail(8, 3)).contains("8 % 6 = 2"));
    assert_eq!(TokenLayout::contiguous(8, 0), Err(LayoutError::ZeroRanks));
    assert_eq!(TokenLayout::head_tail(8, 0), Err(LayoutError::ZeroRanks));
    assert!(TokenLayout::head_tail(8, usize::MAX).is_err());
    assert!(TokenLayout::contiguous(0, 2).is_err());
}

#[test]
fn lookups_agree_with_the_ranges() {
    let layout =
        TokenLayout::new(10, vec![vec![7..10, 0..2], vec![2..3], vec![5..7, 3..5]]).unwrap();
    assert_eq!(layout.world_size(), 3);
    assert_eq!([0, 1, 2].map(|rank| layout.local_len(rank)), [5, 1, 4]);
    assert_eq!([0, 1, 2].map(|rank| layout.offset(rank)), [0, 5, 6]);
    assert_eq!(layout.indices(2), [5, 6, 3, 4]);
    let concatenated: Vec<usize> = (0..3).flat_map(|rank| layout.indices(rank)).collect();
    for (token, &index) in layout.inverse().iter().enumerate() {
        assert_eq!(concatenated[index], token);
        let (rank, local) = layout.owner(token).unwrap();
        assert_eq!(layout.indices(rank)[local], token);
        assert_eq!(layout.offset(rank) + local, index);
    }
    assert_eq!(layout.owner(10), None);
    let owned: Vec<_> = (layout.owned_ranges(1..6))
        .map(|owned| (owned.rank, owned.local, owned.tokens))
        .collect();
    assert_eq!(
        owned,
        [
            (0, 4..5, 1..2),
            (1, 0..1, 2..3),
            (2, 2..4, 3..5),
            (2, 0..1, 5..6)
        ]
    );
    assert_eq!(layout.owned_ranges(4..4).count(), 0);
}

#[test]
fn broken_layouts_are_refused() {
    let error = |ranks: Vec<Vec<Range<usize>>>| TokenLayout::new(6, ranks).unwrap_err();
    let whole = |range: Range<usize>| vec![range];
    assert_eq!(error(vec![]), LayoutError::ZeroRanks);
    assert_eq!(
        error(vec![whole(0..6), whole(3..3)]),
        LayoutError::EmptyRank { rank: 1 }
    );
    assert_eq!(
        error(vec![whole(0..4), whole(3..6)]),
        LayoutError::Overlap { token: 3, rank: 1 }
    );
    assert!(
        matches!(error(vec![whole(0..2), whole(3..6)]), LayoutError::Gap { got, .. } if got == (2..3))
    );
    assert!(
        matches!(error(vec![whole(0..2), whole(2..5)]), LayoutError::Gap { got, .. } if got == (5..6))
    );
    assert!(matches!(
        error(vec![whole(0..7)]),
        LayoutError::PastEnd { got: 7, .. }
    ));
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = whole(6..0);
    assert!(matches!(
        error(vec![reversed]),
        LayoutError::ReversedRange { .. }
    ));
}

#[test]
fn policies_pad_to_their_divisor() {
    // (tokens, ranks, multiple, padded length, tokens per rank)
    let table = [
        (5, 2, 1, 8, 4),
        (6, 2, 1, 8, 4),
        (6, 2, 4, 8, 4),
        (6, 4, 1, 8, 2),
        (10, 4, 1, 16, 4),
        (17, 4, 1, 24, 6),
        (16, 4, 6, 24, 6),
        (8, 2, 1, 8, 4),
        (1, 2, 1, 4, 2),
        (5, 1, 1, 6, 6),
    ];
    for (seq_len, world_size, multiple, padded, local) in table {
        let documents = Documents::full(1, seq_len).unwrap();
        let layout = LayoutPolicy::Contiguous { multiple }
            .layout(&documents, world_size)
            .unwrap();
        assert_eq!(layout, TokenLayout::contiguous(padded, world_size).unwrap());
        assert!((0..world_size).all(|rank| layout.local_len(rank) == local));
        let layout = LayoutPolicy::HeadTail
            .layout(&documents, world_size)
            .unwrap();
        let padded = seq_len.next_multiple_of(2 * world_size);
        assert_eq!(layout, TokenLayout::head_tail(padded, world_size).unwrap());
    }
    let documents = Documents::full(1, 5).unwrap();
    let identity = LayoutPolicy::Identity.layout(&documents, 1).unwrap();
    assert_eq!(
        (identity.seq_len(), identity.ranges(0)),
        (5, [0..5].as_slice())
    );
    assert!(matches!(
        LayoutPolicy::Identity.layout(&documents, 2),
        Err(LayoutError::WorldSize {
            expected: 1,
            got: 2,
            ..
        })
    ));
    assert_eq!(
        LayoutPolicy::HeadTail.layout(&documents, 0),
        Err(LayoutError::ZeroRanks)
    );
    assert!(matches!(
        LayoutPolicy::Contiguous {
            multiple: usize::MAX
        }
        .layout(&documents, 2),
        Err(LayoutError::Overflow { .. })
    ));
}

#[test]
fn masks_and_positions_follow_their_tokens_through_padding() {
    let documents = Documents::from_mask(&[vec![true, true, true, true, false]]).unwrap();
    let expect = |policy: LayoutPolicy, positions: [[usize; 4]; 2], padding: [[bool; 4]; 2]| {
        let layout = policy.layout(&documents, 2).unwrap();
        let padded = documents.padded_to(layout.seq_len()).unwrap();
        for rank in 0..2 {
            let indices = layout.indices(rank);
            let local: Vec<usize> = indices.iter().map(|&i| padded.positions(0)[i]).collect();
            assert_eq!(local, positions[rank]);
            let local: Vec<bool> = indices.iter().map(|&i| padded.padding_mask(0)[i]).collect();
            assert_eq!(local, padding[rank]);
        }
    };
    let (t, f) = (true, false);
    let contiguous = LayoutPolicy::Contiguous { multiple: 1 };
    expect(contiguous, [[0, 1, 2, 3], [4, 5, 6, 7]], [[f; 4], [t; 4]]);
    expect(
        LayoutPolicy::HeadTail,
        [[0, 1, 6, 7], [2, 3, 4, 5]],
        [[f, f, t, t], [f, f, t, t]],
    );
}

#[test]
fn custom_ranges_may_be_uneven_longer_and_empty() {
    let documents = Documents::full(2, 6).unwrap();
    let policy = LayoutPolicy::Custom(vec![vec![], vec![4..8, 0..1], vec![3..3], vec![1..4]]);
    let layout = policy.layout(&documents, 4).unwrap();
    assert_eq!(layout.seq_len(), 10);
    assert_eq!(layout.ranges(0), [8..9]);
    assert_eq!(layout.ranges(1), [4..8, 0..1]);
    assert_eq!(layout.ranges(2), [9..10]);
    assert_eq!(layout.ranges(3), [1..4]);

    let short = LayoutPolicy::Custom(vec![vec![0..5], vec![]]).layout(&documents, 2);
    assert!(matches!(short, Err(LayoutError::Gap { got, .. }) if got == (5..6)));
    let ranks = LayoutPolicy::Custom(vec![vec![0..6]]).layout(&documents, 2);
    assert!(matches!(
        ranks,
        Err(LayoutError::WorldSize {
            expected: 1,
            got: 2,
            ..
        })
    ));
}

#[test]
fn layouts_and_policies_survive_serialisation_and_bad_text_is_refused() {
    let layout = TokenLayout::head_tail(12, 3).unwrap();
    let text = serde_json::to_string(&layout).unwrap();
    assert_eq!(serde_json::from_str::<TokenLayout>(&text).unwrap(), layout);
    let gap = r#"{"seq_len":4,"ranks":[[{"start":0,"end":3}]]}"#;
    let error = serde_json::from_str::<TokenLayout>(gap)
        .unwrap_err()
        .to_string();
    assert!(error.contains("tokens 3..4"), "{error}");

    for policy in [
        LayoutPolicy::Identity,
        LayoutPolicy::Contiguous { multiple: 3 },
        LayoutPolicy::HeadTail,
        LayoutPolicy::DualChunkSwap,
        LayoutPolicy::Custom(vec![vec![0..2]]),
    ] {
        let text = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<LayoutPolicy>(&text).unwrap(), policy);
    }
    let read = |text| serde_json::from_str::<LayoutPolicy>(text);
    assert_eq!(read(r#""head-tail""#).unwrap(), LayoutPolicy::HeadTail);
    assert_eq!(
        read(r#""dual-chunk-swap""#).unwrap(),
        LayoutPolicy::DualChunkSwap
    );
    let contiguous = LayoutPolicy::Contiguous { multiple: 1 };
    assert_eq!(read(r#"{"contiguous":{}}"#).unwrap(), contiguous);
    assert!(read(r#"{"contiguous":{"multipel":2}}"#).is_err());
}
