use crate::layout::*;

fn ids(ids: &[&[i64]]) -> Documents {
    Documents::from_ids(&ids.iter().map(|row| row.to_vec()).collect::<Vec<_>>()).unwrap()
}

#[test]
fn lengths_boundaries_and_ids_give_the_same_table() {
    let expected = ids(&[&[1, 1, 1, 2, 2, 0, 0, 0], &[1, 2, 2, 2, 2, 2, 2, 0]]);
    let lengths = Documents::from_lengths(&[vec![3, 2], vec![1, 6]], 8).unwrap();
    let cu_seqlens = Documents::from_cu_seqlens(&[vec![0, 3, 5], vec![0, 1, 7]], 8).unwrap();
    assert_eq!(lengths, expected);
    assert_eq!(cu_seqlens, expected);
    assert_eq!(expected.batch_size(), 2);
    assert_eq!(expected.seq_len(), 8);
    assert_eq!(expected.num_documents(), 4);
    assert_eq!(expected.num_real_tokens(), 12);
    assert_eq!(expected.row(0)[1], Document::contiguous(3..5));
    assert_eq!(
        Documents::full(2, 3).unwrap(),
        ids(&[&[7, 7, 7], &[1, 1, 1]])
    );
}

#[test]
fn an_id_that_comes_back_is_a_new_document() {
    let documents = ids(&[&[1, 1, 2, 2, 1, 0, 1, 0]]);
    let runs: Vec<_> = documents.row(0).iter().map(|d| d.runs[0].clone()).collect();
    assert_eq!(runs, [0..2, 2..4, 4..5, 6..7]);
}

#[test]
fn empty_documents_own_no_token() {
    let documents = Documents::from_lengths(&[vec![0, 2, 0, 1, 0]], 5).unwrap();
    assert_eq!(documents.num_documents(), 5);
    assert_eq!(documents.num_real_tokens(), 3);
    assert!(documents.row(0)[2].is_empty() && documents.row(0)[2].runs.is_empty());
    assert_eq!(documents.positions(0), [0, 1, 0, 1, 2]);
    assert_eq!(
        Documents::from_cu_seqlens(&[vec![0, 0, 2, 2, 3, 3]], 5).unwrap(),
        documents
    );
    assert_eq!(
        Documents::from_lengths(&[vec![]], 2)
            .unwrap()
            .padding_mask(0),
        [true, true]
    );
}

#[test]
fn padding_of_a_document_is_kept_apart_from_its_real_tokens() {
    let documents =
        Documents::from_padded_lengths(&[vec![3, 2], vec![2, 3]], &[vec![4, 2], vec![3, 3]], 6)
            .unwrap();
    assert_eq!(documents.row(0)[0].runs, [0..3]);
    assert_eq!(documents.row(0)[0].extent, 0..4);
    assert_eq!(
        documents.padding_mask(0),
        [false, false, false, true, false, false]
    );
    assert_eq!(documents.positions(0), [0, 1, 2, 3, 0, 1]);
    assert_eq!(documents.positions(1), [0, 1, 2, 0, 1, 2]);
}

#[test]
fn interior_padding_does_not_split_a_document() {
    let (t, f) = (true, false);
    let documents =
        Documents::from_mask(&[vec![f, t, t, f, t, f], vec![f; 6], vec![t; 6]]).unwrap();
    assert_eq!(documents.row(0).len(), 1);
    assert_eq!(documents.row(0)[0].runs, [1..3, 4..5]);
    assert_eq!(documents.row(0)[0].extent, 1..5);
    assert_eq!(documents.row(0)[0].len(), 3);
    assert_eq!(documents.padding_mask(0), [t, f, f, t, f, t]);
    assert_eq!(documents.positions(0), [0, 0, 1, 2, 3, 4]);
    assert!(documents.row(1).is_empty());
    assert_eq!(documents.positions(1), [0, 1, 2, 3, 4, 5]);
    assert_eq!(documents.row(2)[0], Document::contiguous(0..6));
}

#[test]
fn padding_a_row_continues_its_positions() {
    let documents = ids(&[&[1, 1, 2, 2, 0]]).padded_to(8).unwrap();
    assert_eq!(documents.positions(0), [0, 1, 0, 1, 2, 3, 4, 5]);
    assert_eq!(
        documents.padding_mask(0)[3..],
        [false, true, true, true, true]
    );
    assert!(matches!(
        documents.padded_to(7),
        Err(LayoutError::Shorter {
            expected: 8,
            got: 7
        })
    ));
}

#[test]
fn runs_are_made_canonical_and_checked() {
    let document = |runs: &[std::ops::Range<usize>], extent| Document {
        runs: runs.to_vec(),
        extent,
    };
    let build = |documents: Vec<Document>| Documents::from_runs(vec![documents], 10);
    let joined = build(vec![document(&[2..3, 3..3, 3..5, 6..7], 1..8)]).unwrap();
    assert_eq!(joined.row(0)[0].runs, [2..5, 6..7]);
    assert_eq!(joined.positions(0), [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);

    let outside = build(vec![document(&[0..3], 1..8)]);
    assert!(matches!(outside, Err(LayoutError::DocumentRuns { .. })));
    let overlapping = build(vec![document(&[1..4, 3..5], 1..8)]);
    assert!(matches!(overlapping, Err(LayoutError::DocumentRuns { .. })));
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = build(vec![document(&[], 8..1)]);
    assert!(matches!(reversed, Err(LayoutError::DocumentRuns { .. })));
    let order = build(vec![document(&[4..6], 4..6), document(&[5..8], 5..8)]);
    assert!(matches!(
        order,
        Err(LayoutError::DocumentOrder {
            expected: 6,
            got: 5,
            ..
        })
    ));
    let past = build(vec![document(&[4..6], 4..11)]);
    assert!(matches!(
        past,
        Err(LayoutError::PastStream {
            expected: 10,
            got: 11,
            ..
        })
    ));
}

#[test]
fn bad_tables_say_what_was_expected() {
    let cases: Vec<(Result<Documents, LayoutError>, &str)> = vec![
        (Documents::from_ids(&[]), "at least one batch row"),
        (Documents::from_ids(&[vec![]]), "at least one token"),
        (
            Documents::from_ids(&[vec![1, 1], vec![1]]),
            "row 1: expected 2 entries, got 1",
        ),
        (
            Documents::from_ids(&[vec![1, -1]]),
            "entry 1: expected a value of at least 0, got -1",
        ),
        (
            Documents::from_lengths(&[vec![3, 3]], 5),
            "within 5 tokens, got an end at 6",
        ),
        (
            Documents::from_lengths(&[vec![usize::MAX, 2]], 5),
            "within 5 tokens",
        ),
        (
            Documents::from_padded_lengths(&[vec![3]], &[], 5),
            "expected 1 batch rows, got 0",
        ),
        (
            Documents::from_padded_lengths(&[vec![3]], &[vec![]], 5),
            "expected 1 entries, got 0",
        ),
        (
            Documents::from_padded_lengths(&[vec![3]], &[vec![2]], 5),
            "3 real tokens, got 2",
        ),
        (
            Documents::from_cu_seqlens(&[vec![1, 3]], 5),
            "first boundary to be 0, got Some(1)",
        ),
        (
            Documents::from_cu_seqlens(&[vec![]], 5),
            "first boundary to be 0, got None",
        ),
        (
            Documents::from_cu_seqlens(&[vec![0, 3, 2]], 5),
            "entry 2: expected a boundary of at least 3, got 2",
        ),
        (Documents::from_cu_seqlens(&[vec![0, -1]], 5), "got -1"),
        (
            Documents::from_cu_seqlens(&[vec![0, 6]], 5),
            "within 5 tokens, got an end at 6",
        ),
        (
            Documents::from_mask(&[vec![true], vec![]]),
            "row 1: expected 1 entries, got 0",
        ),
        (Documents::full(0, 4), "at least one batch row"),
        (Documents::full(1, 0), "at least one token"),
    ];
    for (result, expected) in cases {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}

/// Formats that name fields and formats that do not, as between processes.
#[test]
fn documents_travel_with_their_marks_and_without() {
    let plain = Documents::from_lengths(&[vec![5, 9], vec![3]], 16).unwrap();
    let marked = plain
        .clone()
        .with_spans(&[vec![1..4, 6..8], vec![]])
        .and_then(|documents| documents.with_prefixes(vec![vec![2, 0], vec![3]]))
        .and_then(|documents| {
            documents.with_masks(vec![
                vec![MaskKind::Full, MaskKind::PREFIX],
                vec![MaskKind::CAUSAL],
            ])
        })
        .unwrap();
    for documents in [plain, marked] {
        let bytes = postcard::to_stdvec(&documents).unwrap();
        assert_eq!(
            postcard::from_bytes::<Documents>(&bytes).unwrap(),
            documents
        );
        let text = serde_json::to_string(&documents).unwrap();
        assert_eq!(serde_json::from_str::<Documents>(&text).unwrap(), documents);
    }
}
