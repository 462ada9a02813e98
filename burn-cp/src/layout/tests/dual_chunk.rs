use proptest::collection::vec;
use proptest::prelude::*;

use crate::layout::*;

/// `"0,3-5"` is `[0, 3, 4, 5]`: bounds belong to their runs.
fn tokens(text: &str) -> Vec<usize> {
    let number = |text: &str| text.parse::<usize>().unwrap();
    text.split(',')
        .flat_map(|run| match run.split_once('-') {
            Some((first, last)) => number(first)..=number(last),
            None => number(run)..=number(run),
        })
        .collect()
}

fn deal(documents: &Documents, world_size: usize) -> Result<TokenLayout, LayoutError> {
    LayoutPolicy::DualChunkSwap.layout(documents, world_size)
}

fn boundaries(cu_seqlens: &[i64], seq_len: usize) -> Documents {
    Documents::from_cu_seqlens(&[cu_seqlens.to_vec()], seq_len).unwrap()
}

#[test]
fn every_document_is_swapped_on_its_own_and_documents_follow_each_other() {
    // (boundaries, tokens of each rank)
    let table: &[(&[i64], &[&str])] = &[
        (&[0, 8], &["0,1,6,7", "2-5"]),
        (&[0, 4, 12], &["0,3-5,10,11", "1,2,6-9"]),
        (&[0, 8, 24], &["0,1,6-11,20-23", "2-5,12-19"]),
        (&[0, 4, 8, 16], &["0,3,4,7-9,14,15", "1,2,5,6,10-13"]),
        (
            &[0, 8, 16],
            &["0,7,8,15", "1,6,9,14", "2,5,10,13", "3,4,11,12"],
        ),
        (
            &[0, 8, 24, 32],
            &[
                "0,7-9,22-24,31",
                "1,6,10,11,20,21,25,30",
                "2,5,12,13,18,19,26,29",
                "3,4,14-17,27,28",
            ],
        ),
        (
            &[0, 12, 18],
            &["0,1,10-12,17", "2,3,8,9,13,16", "4-7,14,15"],
        ),
        (&[0, 4, 16], &["0,3-6,13-15", "1,2,7-12"]),
        (&[0, 8, 12, 24], &["0,1,6-8,11-14,21-23", "2-5,9,10,15-20"]),
        (&[0, 16], &["0,1,14,15", "2,3,12,13", "4,5,10,11", "6-9"]),
    ];
    for (cu_seqlens, expected) in table {
        let seq_len = usize::try_from(*cu_seqlens.last().unwrap()).unwrap();
        let layout = deal(&boundaries(cu_seqlens, seq_len), expected.len()).unwrap();
        for (rank, expected) in expected.iter().enumerate() {
            assert_eq!(
                layout.indices(rank),
                tokens(expected),
                "{cu_seqlens:?}, rank {rank}"
            );
        }
    }
}

#[test]
fn one_document_is_dealt_out_as_head_tail_does() {
    for (seq_len, world_size) in [(8, 2), (12, 3), (16, 4), (24, 3), (6, 1)] {
        let layout = deal(&Documents::full(1, seq_len).unwrap(), world_size).unwrap();
        assert_eq!(layout, TokenLayout::head_tail(seq_len, world_size).unwrap());
    }
}

#[test]
fn one_rank_owns_everything_in_order_whatever_the_lengths_are() {
    for cu_seqlens in [&[0, 3, 6][..], &[0, 1, 5], &[0, 7]] {
        let layout = deal(&boundaries(cu_seqlens, 7), 1).unwrap();
        assert_eq!(layout, TokenLayout::contiguous(7, 1).unwrap());
    }
}

#[test]
fn empty_documents_own_no_token() {
    let layout = deal(&boundaries(&[0, 0, 4, 4, 4, 12, 12], 12), 2).unwrap();
    assert_eq!(layout, deal(&boundaries(&[0, 4, 12], 12), 2).unwrap());
}

#[test]
fn documents_that_do_not_divide_are_refused_by_name_with_the_way_out() {
    let message = |cu_seqlens: &[i64], seq_len| {
        let error = deal(&boundaries(cu_seqlens, seq_len), 2).unwrap_err();
        error.to_string()
    };
    let text = message(&[0, 6, 8], 8);
    for part in ["document 0 at 0..6", "6 % 4 = 2", "`align_documents`"] {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
    assert!(message(&[0, 4, 6, 16], 16).contains("document 1 at 4..6"));
}

#[test]
fn several_rows_are_refused_until_they_are_flattened() {
    let documents = Documents::from_lengths(&[vec![4, 4], vec![8]], 8).unwrap();
    let error = deal(&documents, 2).unwrap_err();
    assert!(matches!(
        error,
        LayoutError::NotFlattened {
            expected: 1,
            got: 2,
            ..
        }
    ));
    assert!(error.to_string().contains("Documents::flattened"));
    let layout = deal(&documents.flattened(), 2).unwrap();
    assert_eq!(layout.indices(0), tokens("0,3,4,7-9,14,15"));
}

#[test]
fn padding_outside_documents_is_dealt_out_as_a_document_is() {
    // (documents, tokens of a row, tokens of each rank), for two ranks
    type Row<'a> = (&'a [(usize, usize)], usize, [&'a str; 2]);
    let table: &[Row<'_>] = &[
        // The tail divides already.
        (&[(0, 8)], 12, ["0,1,6,7,8,11", "2-5,9,10"]),
        // The tail is extended from 3 to 4 tokens.
        (&[(0, 4)], 7, ["0,3,4,7", "1,2,5,6"]),
        // Ahead of the first document, and between two with an empty one in the gap.
        (
            &[(4, 8), (10, 10), (12, 16)],
            16,
            ["0,3,4,7,8,11,12,15", "1,2,5,6,9,10,13,14"],
        ),
        // Nothing but padding.
        (&[], 5, ["0,1,6,7", "2-5"]),
    ];
    for (extents, seq_len, expected) in table {
        let row = extents.iter().map(|&(a, b)| Document::contiguous(a..b));
        let documents = Documents::from_runs(vec![row.collect()], *seq_len).unwrap();
        let layout = deal(&documents, 2).unwrap();
        for (rank, expected) in expected.iter().enumerate() {
            assert_eq!(layout.indices(rank), tokens(expected), "{extents:?}");
        }
    }
    let document = Document::contiguous(6..10);
    let documents = Documents::from_runs(vec![vec![document]], 10).unwrap();
    let error = deal(&documents, 2).unwrap_err();
    assert!(matches!(&error, LayoutError::GapDivisibility { got, .. } if *got == (0..6)));
    assert!(error.to_string().contains("6 tokens at 0..6"), "{error}");
}

#[test]
fn worlds_without_ranks_and_too_large_ones_are_refused() {
    let documents = Documents::full(1, 8).unwrap();
    assert_eq!(deal(&documents, 0), Err(LayoutError::ZeroRanks));
    assert!(matches!(
        deal(&documents, usize::MAX),
        Err(LayoutError::Overflow { .. })
    ));
}

#[test]
fn packing_rounds_documents_up_and_gives_the_tail_to_the_last() {
    // (lengths, size of the pack, padded lengths, tokens of each rank, padding among them)
    type Row<'a> = (&'a [usize], usize, &'a [usize], &'a [(&'a str, &'a str)]);
    let table: &[Row<'_>] = &[
        (
            &[3, 5],
            16,
            &[4, 12],
            &[("0,3,4-6,13-15", ".P...PPP"), ("1,2,7-12", "....PPPP")],
        ),
        (
            &[7, 2, 6],
            24,
            &[8, 4, 12],
            &[
                ("0,1,6-8,11-14,21-23", "...P.P...PPP"),
                ("2-5,9,10,15-20", ".....P...PPP"),
            ],
        ),
        (
            &[5],
            16,
            &[16],
            &[
                ("0,1,14,15", "..PP"),
                ("2,3,12,13", "..PP"),
                ("4,5,10,11", ".PPP"),
                ("6-9", "PPPP"),
            ],
        ),
    ];
    for (lengths, seq_len, padded, ranks) in table {
        let aligned = align_documents(lengths, 2 * ranks.len(), Some(*seq_len)).unwrap();
        let row = aligned.documents.row(0);
        let extents: Vec<_> = row.iter().map(|document| document.extent.len()).collect();
        assert_eq!(extents, *padded);
        let real: Vec<_> = row.iter().map(Document::len).collect();
        assert_eq!(real, *lengths);
        let layout = deal(&aligned.documents, ranks.len()).unwrap();
        assert_eq!(layout.seq_len(), *seq_len);
        let padding = aligned.documents.padding_mask(0);
        for (rank, (indices, marks)) in ranks.iter().enumerate() {
            assert_eq!(layout.indices(rank), tokens(indices));
            let local = layout.indices(rank).into_iter();
            let local: String = local.map(|i| if padding[i] { 'P' } else { '.' }).collect();
            assert_eq!(local, *marks, "{lengths:?}, rank {rank}");
        }
    }
}

#[test]
fn aligned_documents_say_where_every_token_went() {
    let aligned = align_documents(&[3, 0, 5], 4, None).unwrap();
    assert_eq!(aligned.documents.seq_len(), 12);
    assert_eq!(aligned.documents.row(0)[1].extent, 4..4);
    let targets = [0, 1, 2, 4, 5, 6, 7, 8].map(Some);
    assert_eq!(aligned.placement.targets(), targets);
    let placed = aligned
        .placement
        .place(&[1, 2, 3, 4, 5, 6, 7, 8], 0)
        .unwrap();
    assert_eq!(placed, [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0]);
    // What is left of a row that is asked to be longer are slots of the last document.
    let longer = align_documents(&[3, 0, 5], 4, Some(16)).unwrap();
    assert_eq!(longer.placement.placed_size(), [1, 16]);
    assert_eq!(longer.placement.targets(), targets);
}

#[test]
fn aligning_drops_padding_that_belongs_to_no_document() {
    let rows = vec![
        vec![
            Document {
                runs: vec![1..2, 3..4],
                extent: 1..5,
            },
            Document::contiguous(6..7),
        ],
        vec![],
    ];
    let aligned = (Documents::from_runs(rows, 8).unwrap()).aligned(2).unwrap();
    let expected = Document {
        runs: vec![0..1, 2..3],
        extent: 0..4,
    };
    assert_eq!(aligned.documents.row(0)[0], expected);
    assert_eq!(aligned.documents.row(0)[1].runs, [4..5]);
    assert_eq!(aligned.documents.row(0)[1].extent, 4..6);
    let placed = aligned.placement.place(b".abcd.e.........", b'_').unwrap();
    assert_eq!(placed, b"abcde_______");
    assert_eq!(aligned.placement.targets()[8..], [None; 8]);
}

#[test]
fn what_cannot_be_aligned_is_refused() {
    let cases = [
        (align_documents(&[3], 0, None), "not 0, got 0"),
        (align_documents(&[], 4, Some(8)), "at least one token"),
        (
            align_documents(&[3], 4, Some(6)),
            "multiple of 4 and not 0, got 6",
        ),
        (align_documents(&[3, 3], 4, Some(4)), "got an end at 8"),
        (align_documents(&[usize::MAX, 2], 4, None), "does not fit"),
        (Documents::full(1, 5).unwrap().aligned(usize::MAX - 1), ""),
    ];
    for (index, (result, expected)) in cases.into_iter().enumerate() {
        if expected.is_empty() {
            // Long, but nothing is wrong with it: no memory is taken for padding.
            assert_eq!(result.unwrap().documents.seq_len(), usize::MAX - 1);
            continue;
        }
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected), "{index}: {message}");
    }
}

proptest! {
    #[test]
    fn aligned_documents_are_dealt_out_evenly_and_keep_their_tokens(
        lengths in vec(vec(0..20_usize, 0..5), 1..4),
        extra in 0..9_usize,
        world_size in 1..6_usize,
    ) {
        let longest = lengths.iter().map(|row| row.iter().sum::<usize>()).max().unwrap();
        let documents = Documents::from_lengths(&lengths, longest + extra + 1).unwrap();
        let aligned = documents.aligned(2 * world_size).unwrap();
        let stream = aligned.documents.flattened();
        let layout = deal(&stream, world_size).unwrap();
        prop_assert_eq!(layout.seq_len(), stream.seq_len());
        for document in stream.row(0) {
            let num_tokens = |rank| {
                (layout.owned_ranges(document.extent.clone()))
                    .filter(|owned| owned.rank == rank)
                    .map(|owned| owned.tokens.len())
                    .sum::<usize>()
            };
            for rank in 0..world_size {
                prop_assert_eq!(num_tokens(rank) * world_size, document.extent.len());
            }
        }
        for row in 0..documents.batch_size() {
            let (before, after) = (documents.positions(row), aligned.documents.positions(row));
            let (real, kept) = (documents.padding_mask(row), aligned.documents.padding_mask(row));
            for token in 0..documents.seq_len() {
                match aligned.placement.target(row, token) {
                    Some((to, slot)) => {
                        prop_assert_eq!(to, row);
                        prop_assert_eq!(before[token], after[slot]);
                        prop_assert_eq!(real[token], kept[slot]);
                    }
                    None => prop_assert!(real[token]),
                }
            }
        }
        prop_assert_eq!(documents.num_real_tokens(), aligned.documents.num_real_tokens());
    }

    #[test]
    fn a_row_that_was_extended_is_dealt_out_as_before(
        lengths in vec(0..4_usize, 0..5),
        extra in 1..30_usize,
        world_size in 1..6_usize,
    ) {
        let lengths: Vec<usize> = lengths.iter().map(|&len| 2 * world_size * len).collect();
        let seq_len = lengths.iter().sum::<usize>() + extra;
        let documents = Documents::from_lengths(&[lengths], seq_len).unwrap();
        let layout = deal(&documents, world_size).unwrap();
        let again = deal(&documents.padded_to(layout.seq_len()).unwrap(), world_size).unwrap();
        prop_assert_eq!(layout, again);
    }
}
