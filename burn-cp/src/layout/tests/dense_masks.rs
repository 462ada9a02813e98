use proptest::collection::vec;
use proptest::prelude::*;

use crate::layout::*;

fn ids(ids: &[i64]) -> Documents {
    Documents::from_ids(&[ids.to_vec()]).unwrap()
}

/// Rows of `x` (sees) and anything else, blanks left out.
fn picture(rows: &[&str]) -> (Vec<bool>, [usize; 4]) {
    let mask: Vec<bool> = (rows.iter().flat_map(|row| row.chars()))
        .filter(|c| !c.is_whitespace())
        .map(|c| c == 'x')
        .collect();
    (mask, [1, 1, rows.len(), rows.len()])
}

/// The mask that documents stand for. Padding sees itself if asked to.
fn draw(documents: &Documents, causal: bool, padding_sees_itself: bool) -> (Vec<bool>, [usize; 4]) {
    let seq_len = documents.seq_len();
    let mut mask = Vec::new();
    for (row, table) in documents.rows().enumerate() {
        let padding = documents.padding_mask(row);
        let owner = |token: usize| {
            table
                .iter()
                .position(|d| d.runs.iter().any(|run| run.contains(&token)))
        };
        for (query, &padding) in padding.iter().enumerate() {
            for key in 0..seq_len {
                let padded = padding_sees_itself && padding && query == key;
                let same = owner(query).is_some() && owner(query) == owner(key);
                mask.push(padded || same && (!causal || key <= query));
            }
        }
    }
    (mask, [documents.batch_size(), 1, seq_len, seq_len])
}

fn additive(mask: &[bool], masked: f32) -> Vec<f32> {
    mask.iter()
        .map(|&sees| if sees { 0.0 } else { masked })
        .collect()
}

#[test]
fn documents_come_back_from_the_mask_that_was_made_of_them() {
    let hole = Documents::from_mask(&[vec![false, true, true, false, true, false]]).unwrap();
    for documents in [
        ids(&[1, 1, 1, 2, 2, 3, 3, 3]),
        ids(&[0, 0, 1, 1, 0, 2, 2, 0]),
        ids(&[0, 0, 0]),
        hole,
    ] {
        for (causal, itself) in [(true, false), (true, true), (false, false), (false, true)] {
            let (mask, shape) = draw(&documents, causal, itself);
            let read = DenseMask::from_bools(&mask, shape, SelfOnly::Padding).unwrap();
            assert_eq!(read.documents, documents);
            let some = documents.num_documents() > 0;
            assert_eq!(
                (read.is_causal, read.is_full),
                (causal || !some, !causal || !some)
            );
            for masked in [f32::NEG_INFINITY, f32::MIN, -65504.0, -1e4] {
                let mask = additive(&mask, masked);
                let same = DenseMask::from_additive(&mask, shape, SelfOnly::Padding).unwrap();
                assert_eq!(same, read);
            }
        }
    }
}

#[test]
fn a_token_that_only_sees_itself_is_what_the_caller_says() {
    let (mask, shape) = picture(&["x...", ".x..", ".xx.", "...x"]);
    let padding = DenseMask::from_bools(&mask, shape, SelfOnly::Padding).unwrap();
    assert_eq!(padding.documents, ids(&[0, 1, 1, 0]));
    let documents = DenseMask::from_bools(&mask, shape, SelfOnly::Document).unwrap();
    assert_eq!(documents.documents, ids(&[1, 2, 2, 3]));
    let (mask, shape) = picture(&["x..", ".x.", "..."]);
    let single = DenseMask::from_bools(&mask, shape, SelfOnly::Document).unwrap();
    assert_eq!(single.documents, ids(&[1, 2, 0]));
    assert!(single.is_causal && single.is_full);
}

#[test]
fn one_mask_of_a_batch_decides_for_all_rows() {
    let (causal, _) = draw(&ids(&[1, 1, 2, 2]), true, false);
    let (full, _) = draw(&ids(&[1, 1, 2, 2]), false, false);
    let shape = [2, 1, 4, 4];
    let read = DenseMask::from_bools(
        &[full.clone(), full.clone()].concat(),
        shape,
        SelfOnly::Padding,
    );
    assert!(read.unwrap().is_full);
    let mixed = DenseMask::from_bools(&[causal, full].concat(), shape, SelfOnly::Padding);
    assert_eq!(
        mixed,
        Err(LayoutError::MaskPair {
            row: 1,
            query: 0,
            key: 1,
            got: true
        })
    );
}

#[test]
fn masks_that_are_not_made_of_documents_name_the_first_pair() {
    // (what, mask, query, key, sees)
    let table: &[(&str, &[&str], usize, usize, bool)] = &[
        ("window", &["x...", "xx..", ".xx.", "..xx"], 2, 0, false),
        ("prefix", &["xx..", "xx..", "xxx.", "xxxx"], 0, 2, false),
        ("late prefix", &["x...", "xx..", "xxxx", "xxxx"], 2, 3, true),
        ("interleaved", &["x...", ".x..", "x.x.", ".x.x"], 2, 0, true),
        (
            "across documents",
            &["x...", "xx..", "..x.", ".xxx"],
            3,
            1,
            true,
        ),
        (
            "real token without itself",
            &["x..", "x..", "xxx"],
            1,
            1,
            false,
        ),
        ("padding as key", &["x..", "...", "xxx"], 2, 1, true),
        (
            "padding that sees ahead",
            &["x..", "..x", "..x"],
            1,
            1,
            false,
        ),
    ];
    for &(what, rows, query, key, got) in table {
        let (mask, shape) = picture(rows);
        let expected = LayoutError::MaskPair {
            row: 0,
            query,
            key,
            got,
        };
        let read = DenseMask::from_bools(&mask, shape, SelfOnly::Padding);
        assert_eq!(read, Err(expected), "{what}");
    }
    let (mask, shape) = picture(&["x.", ".."]);
    let two = DenseMask::from_bools(
        &[mask.clone(), mask].concat(),
        [2, 1, 2, 2],
        SelfOnly::Document,
    );
    assert_eq!(two.unwrap().documents.num_documents(), 2);
    let (window, _) = picture(&["xx", ".x"]);
    let error = DenseMask::from_bools(&window, shape, SelfOnly::Padding).unwrap_err();
    assert!(error.to_string().contains("row 0"), "{error}");
}

#[test]
fn an_additive_bias_is_not_a_mask() {
    for value in [1.0, -0.5, -9999.0, f32::NAN, f32::INFINITY] {
        let mask = [0.0, -1e9, value, 0.0];
        let error = DenseMask::from_additive(&mask, [1, 1, 2, 2], SelfOnly::Padding).unwrap_err();
        assert!(
            matches!(&error, LayoutError::MaskValue { index: 2, got } if *got == value.to_string()),
            "{error}"
        );
    }
    let negative_zero = [-0.0, -1e9, 0.0, -0.0];
    let read = DenseMask::from_additive(&negative_zero, [1, 1, 2, 2], SelfOnly::Padding).unwrap();
    assert_eq!(read.documents, ids(&[1, 1]));
}

#[test]
fn shapes_of_dense_masks_are_checked() {
    let read =
        |len, shape| DenseMask::from_bools(&vec![true; len], shape, SelfOnly::Padding).unwrap_err();
    assert!(matches!(
        read(8, [1, 2, 2, 2]),
        LayoutError::MaskShape { .. }
    ));
    assert!(matches!(
        read(6, [1, 1, 3, 2]),
        LayoutError::MaskShape { .. }
    ));
    assert!(matches!(
        read(5, [1, 1, 2, 2]),
        LayoutError::MaskLen { got: 5, .. }
    ));
    assert!(matches!(
        read(0, [0, 1, 2, 2]),
        LayoutError::EmptyBatch { .. }
    ));
    assert!(matches!(
        read(0, [2, 1, 0, 0]),
        LayoutError::EmptyStream { .. }
    ));
    let huge = usize::MAX / 2;
    assert!(matches!(
        read(0, [2, 1, huge, huge]),
        LayoutError::MaskLen { .. }
    ));
    assert!(matches!(
        read(0, [0, 1, huge, huge]),
        LayoutError::EmptyBatch { .. }
    ));
}

#[test]
fn integer_masks_are_ids_only_if_a_value_is_above_one() {
    let read = |rows: &[&[i64]]| {
        Documents::from_mask_values(&rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>())
    };
    let hole = read(&[&[1, 0, 1, 0], &[0, 0, 0, 0]]).unwrap();
    assert_eq!(hole.row(0).len(), 1);
    assert_eq!(hole.row(0)[0].runs, [0..1, 2..3]);
    assert!(hole.row(1).is_empty());
    let ids = read(&[&[1, 0, 1, 0], &[2, 2, 3, 0]]).unwrap();
    assert_eq!((ids.row(0).len(), ids.row(1).len()), (2, 2));
    let error = |rows| read(rows).unwrap_err().to_string();
    assert!(error(&[&[1, -1]]).contains("attention mask, row 0, entry 1"));
    assert!(error(&[&[1, 2], &[1]]).contains("row 1: expected 2 entries"));
    assert!(error(&[]).contains("at least one batch row"));
}

proptest! {
    #[test]
    fn any_table_of_longer_documents_survives_its_mask(
        rows in vec(vec((0..3_usize, 2..5_usize, 0..2_usize), 0..4), 1..4),
        causal in any::<bool>(),
        itself in any::<bool>(),
    ) {
        let mut documents = Vec::new();
        for shapes in &rows {
            let (mut row, mut end) = (Vec::new(), 0);
            for &(ahead, len, hole) in shapes {
                let (start, middle) = (end + ahead, end + ahead + len / 2);
                end = start + len + hole;
                row.push(Document { runs: vec![start..middle, middle + hole..end], extent: start..end });
            }
            documents.push(row);
        }
        let seq_len = documents.iter().flatten().map(|d| d.extent.end).max().unwrap_or(0) + 2;
        let documents = Documents::from_runs(documents, seq_len).unwrap();
        let (mask, shape) = draw(&documents, causal, itself);
        let read = DenseMask::from_bools(&mask, shape, SelfOnly::Padding).unwrap();
        prop_assert_eq!(&read.documents, &documents);
        if !itself {
            let same = DenseMask::from_bools(&mask, shape, SelfOnly::Document).unwrap();
            prop_assert_eq!(same, read);
        }
    }

    #[test]
    fn one_flipped_pair_is_never_read_as_the_same_documents(
        lengths in vec(2..5_usize, 1..4),
        pair in any::<prop::sample::Index>(),
        causal in any::<bool>(),
    ) {
        let seq_len = lengths.iter().sum();
        let documents = Documents::from_lengths(&[lengths], seq_len).unwrap();
        let (mut mask, shape) = draw(&documents, causal, false);
        let index = pair.index(mask.len());
        mask[index] = !mask[index];
        // What is read, if anything, must stand for the mask that was given.
        if let Ok(read) = DenseMask::from_bools(&mask, shape, SelfOnly::Document) {
            prop_assert_eq!(draw(&read.documents, read.is_causal, false).0, mask);
        }
    }
}
