use proptest::{collection::vec, option, prelude::*};

use crate::layout::*;

#[test]
fn tokens_of_a_row_move_to_their_slots_and_back() {
    let targets = [
        vec![Some(0), Some(1), None, Some(4)],
        vec![Some(2), None, None, None],
    ];
    let placement = Placement::from_rows(&targets, 6).unwrap();
    let values = [7, 8, 9, 10, 5, 6, 7, 8];
    let placed = placement.place(&values, 0).unwrap();
    assert_eq!(placed, [7, 8, 0, 0, 10, 0, 0, 0, 5, 0, 0, 0]);
    let back = placement.restore(&placed, -9).unwrap();
    assert_eq!(back, [7, 8, -9, 10, 5, -9, -9, -9]);
    assert_eq!(placement.target(0, 3), Some((0, 4)));
    assert_eq!(placement.target(1, 0), Some((1, 2)));
    assert_eq!(placement.target(1, 3), None);

    let flat = placement.clone().flattened();
    assert_eq!((flat.input_size(), flat.placed_size()), ([2, 4], [1, 12]));
    assert_eq!(flat.place(&values, 0).unwrap(), placed);
    assert_eq!(flat.target(1, 0), Some((0, 8)));

    let longer = placement.padded_to(8).unwrap();
    let placed = longer.place(&values, 0).unwrap();
    assert_eq!(placed, [7, 8, 0, 0, 10, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0]);
    assert_eq!(longer.restore(&placed, -9).unwrap(), back);
}

#[test]
fn rows_one_behind_the_other_move_no_token() {
    let flat = Placement::flat(2, 3).unwrap();
    assert_eq!((flat.input_size(), flat.placed_size()), ([2, 3], [1, 6]));
    assert_eq!(flat.place(b"abcdef", b'_').unwrap(), b"abcdef");
    let longer = flat.padded_to(8).unwrap();
    assert_eq!(longer.place(b"abcdef", b'_').unwrap(), b"abcdef__");
    assert_eq!(longer.sources()[5..], [Some(5), None, None]);
}

#[test]
fn placements_that_lose_or_mix_tokens_are_refused() {
    let cases = [
        (Placement::from_rows(&[], 4), "at least one batch row"),
        (Placement::from_rows(&[vec![]], 4), "at least one token"),
        (
            Placement::from_rows(&[vec![Some(0)]], 0),
            "at least one token",
        ),
        (
            Placement::from_rows(&[vec![Some(0)], vec![None, None]], 4),
            "row 1: expected 1 entries, got 2",
        ),
        (
            Placement::from_rows(&[vec![None, Some(4)]], 4),
            "row 0, token 1: expected a free slot within 0..4, got 4",
        ),
        (
            Placement::from_rows(&[vec![Some(2), Some(2)]], 4),
            "row 0, token 1: expected a free slot within 0..4, got 2",
        ),
        (Placement::flat(0, 1), "at least one batch row"),
        (Placement::flat(1, 0), "at least one token"),
        (Placement::flat(2, usize::MAX), "does not fit"),
        (Placement::flat(1, 4).unwrap().padded_to(3), "got 3"),
    ];
    for (index, (result, expected)) in cases.into_iter().enumerate() {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected), "case {index}: {message}");
    }
    let placement = Placement::flat(1, 4).unwrap();
    let error = placement.place(&[1], 0).unwrap_err().to_string();
    assert!(error.contains("expected 4 values, got 1"), "{error}");
    assert!(placement.restore(&[1; 5], 0).is_err());
}

#[test]
fn a_padding_mask_takes_tokens_out_of_documents() {
    let ids = Documents::from_ids(&[vec![1, 1, 1, 2, 2, 0]]).unwrap();
    let padded = [vec![false, true, false, true, true, true]];
    let documents = ids.without_padding(&padded).unwrap();
    assert_eq!(documents.row(0)[0].runs, [0..1, 2..3]);
    assert_eq!(documents.row(0)[0].extent, 0..3);
    assert!(documents.row(0)[1].is_empty());
    assert_eq!(documents.padding_mask(0), padded[0]);
    assert_eq!(
        ids.without_padding(&[vec![false; 6]]),
        Err(LayoutError::Homeless { row: 0, token: 5 })
    );
    assert!(ids.without_padding(&[vec![true; 5]]).is_err());
    assert!(ids.without_padding(&[]).is_err());
}

proptest! {
    #[test]
    fn what_is_placed_comes_back(
        row in vec(option::of(0..4_usize), 1..12),
        spread in 1..3_usize,
        extra in 0..5_usize,
    ) {
        // Slots ascend by the drawn gaps; `None` drops the token.
        let mut next = 0;
        let targets: Vec<Option<usize>> = row
            .iter()
            .map(|gap| gap.map(|gap| { let slot = next + gap * spread; next = slot + 1; slot }))
            .collect();
        let placement = Placement::from_rows(&[targets.clone(), targets], next.max(1)).unwrap();
        let values: Vec<usize> = (0..2 * row.len()).collect();
        for placement in [placement.clone(), placement.clone().padded_to(next.max(1) + extra).unwrap(), placement.flattened()] {
            let placed = placement.place(&values, usize::MAX).unwrap();
            let back = placement.restore(&placed, usize::MAX).unwrap();
            for (token, value) in back.iter().enumerate() {
                let kept = row[token % row.len()].is_some();
                prop_assert_eq!(*value, if kept { token } else { usize::MAX });
            }
            prop_assert_eq!(placed.iter().filter(|value| **value != usize::MAX).count(), 2 * row.iter().flatten().count());
            let sources = placement.sources();
            for (slot, value) in placed.iter().enumerate() {
                prop_assert_eq!(sources[slot].unwrap_or(usize::MAX), *value);
            }
        }
    }
}
