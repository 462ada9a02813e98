use crate::layout::*;

const ABSENT: i64 = Documents::ABSENT_LENGTH;

fn rows(rows: &[&[i64]]) -> Vec<Vec<i64>> {
    rows.iter().map(|row| row.to_vec()).collect()
}

/// Real lengths, padded lengths, tokens of a row; then both boundaries, the longest document, padding.
type PackedStream = (
    Vec<Vec<i64>>,
    Vec<Vec<i64>>,
    usize,
    (Vec<usize>, Option<Vec<usize>>, usize, Vec<usize>),
);

#[test]
fn boundaries_of_packed_rows_are_reported_with_a_tail_counted_to_the_last_document() {
    let long_tail: Vec<usize> = (560..1024).collect();
    let long = format!(
        "[[[112,112,112,112,112]], [[112,112,112,112,576]], 1024,
          [[0,112,224,336,448,1024], null, 576, {long_tail:?}]]"
    );
    let table = [
        "[[[3,2],[6,-1000]], [[4,2],[6,-1000]], 6, [[0,3,5,11], [0,4,6,12], 6, [3]]]",
        "[[[3,2],[2,3]], [[4,2],[3,3]], 6, [[0,3,5,7,10], [0,4,6,9,12], 3, [3,8]]]",
        "[[[3,3]], [[4,4]], 8, [[0,3,6], [0,4,8], 3, [3,7]]]",
        "[[[3]], [[3]], 6, [[0,6], null, 6, [3,4,5]]]",
        "[[[3,3]], [[3,5]], 8, [[0,3,8], null, 5, [6,7]]]",
        "[[[5,3]], [[8,4]], 12, [[0,5,8], [0,8,12], 5, [5,6,7,11]]]",
        "[[[2],[3]], [[4],[4]], 4, [[0,2,5], [0,4,8], 3, [2,3,7]]]",
        &long,
        "[[[6]], [[6]], 6, [[0,6], null, 6, []]]",
        // The end of a row that no length reaches moves the documents of the next row all the same.
        "[[[3],[4]], [[3],[4]], 4, [[0,3,7], [0,4,8], 4, [3]]]",
    ];
    for text in table {
        let (real, padded, seq_len, expected): PackedStream = serde_json::from_str(text).unwrap();
        let documents = Documents::from_seq_lens(&real, Some(&padded), seq_len).unwrap();
        let got = documents.thd_metadata().unwrap();
        assert_eq!(
            (
                got.cu_seqlens,
                got.cu_seqlens_padded,
                got.max_seqlen,
                got.padding
            ),
            expected,
            "{text}"
        );
        // The report changes no document.
        let lengths = documents.rows().flatten().map(Document::len);
        let given = (real.iter().flatten()).filter_map(|&length| usize::try_from(length).ok());
        assert!(lengths.eq(given), "{text}");
    }
}

#[test]
fn boundaries_of_several_streams_are_tables_with_absent_ends() {
    // Of each stream: real lengths, padded lengths, tokens. Then the tables.
    type Stream<'a> = (&'a [usize], &'a [usize], usize);
    type Row<'a> = (
        &'a [Stream<'a>],
        &'a [&'a [i64]],
        Option<&'a [&'a [i64]]>,
        &'a [usize],
    );
    let table: &[Row<'_>] = &[
        (
            &[(&[3, 3], &[3, 3], 6), (&[6], &[6], 6)],
            &[&[0, 3, 6], &[0, 6, ABSENT]],
            None,
            &[3, 6],
        ),
        // A stream whose tail counts to its last document repeats its boundaries where another one has padding between.
        (
            &[(&[3, 3], &[3, 5], 8), (&[1, 2, 2], &[2, 2, 4], 8)],
            &[&[0, 3, 8, ABSENT], &[0, 1, 3, 5]],
            Some(&[&[0, 3, 8, ABSENT], &[0, 2, 4, 8]]),
            &[5, 2],
        ),
        (&[], &[], None, &[]),
    ];
    for (streams, cu_seqlens, padded, max_seqlen) in table {
        let streams: Vec<ThdMetadata> = (streams.iter())
            .map(|(real, padded, len)| {
                let documents =
                    Documents::from_padded_lengths(&[real.to_vec()], &[padded.to_vec()], *len);
                documents.unwrap().thd_metadata().unwrap()
            })
            .collect();
        let got = ThdMetadata::tables(&streams);
        assert_eq!(got.cu_seqlens, rows(cu_seqlens));
        assert_eq!(got.cu_seqlens_padded, padded.map(rows));
        assert_eq!(got.max_seqlen, *max_seqlen);
        let padding = streams.into_iter().map(|stream| stream.padding);
        assert!(padding.eq(got.padding));
    }
}

#[test]
fn boundaries_hold_empty_documents_and_padding_ahead_of_all() {
    let metadata = |ids: &[&[i64]]| {
        Documents::from_ids(&rows(ids))
            .unwrap()
            .thd_metadata()
            .unwrap()
    };
    let ahead = metadata(&[&[0, 0, 1, 1, 0]]);
    assert_eq!(ahead.cu_seqlens, [0, 0, 2]);
    assert_eq!(ahead.cu_seqlens_padded.unwrap(), [0, 2, 4]);
    assert_eq!((ahead.max_seqlen, ahead.padding), (2, vec![0, 1, 4]));
    let none = metadata(&[&[0, 0], &[0, 0]]);
    assert_eq!((none.cu_seqlens, none.cu_seqlens_padded), (vec![0], None));
    assert_eq!((none.max_seqlen, none.padding), (0, vec![0, 1, 2, 3]));
    let empty = Documents::from_lengths(&[vec![2, 0, 3, 0]], 5).unwrap();
    assert_eq!(empty.thd_metadata().unwrap().cu_seqlens, [0, 2, 2, 5, 5]);
}

#[test]
fn boundaries_cannot_express_holes() {
    let hole = Documents::from_mask(&[vec![true; 3], vec![true, false, true]]).unwrap();
    assert_eq!(
        hole.thd_metadata(),
        Err(LayoutError::Unpacked {
            row: 1,
            document: 0,
            expected: 0..2,
            got: vec![0..1, 2..3],
        })
    );
}

#[test]
fn absent_entries_are_left_out_wherever_they_stand() {
    let table = rows(&[
        &[ABSENT, 2, 1],
        &[3, ABSENT, ABSENT],
        &[ABSENT, ABSENT, ABSENT],
    ]);
    let expected = Documents::from_lengths(&[vec![2, 1], vec![3], vec![]], 4).unwrap();
    assert_eq!(Documents::from_seq_lens(&table, None, 4).unwrap(), expected);
    let padded = Documents::from_seq_lens(&table, Some(&table), 4).unwrap();
    assert_eq!(padded, expected);
}

#[test]
fn bad_length_tables_say_what_was_expected() {
    // (real, padded, message)
    type Row<'a> = (&'a [&'a [i64]], Option<&'a [&'a [i64]]>, &'a str);
    let table: &[Row<'_>] = &[
        (
            &[&[2, -1]],
            None,
            "seq_lens, row 0, entry 1: expected a value of at least 0, got -1",
        ),
        (&[&[2]], Some(&[&[-2]]), "seq_lens_padded, row 0, entry 0"),
        (
            &[&[2]],
            Some(&[&[2], &[2]]),
            "seq_lens_padded: expected 1 batch rows, got 2",
        ),
        (
            &[&[2]],
            Some(&[&[2, 2]]),
            "seq_lens_padded, row 0: expected 1 entries, got 2",
        ),
        (
            &[&[2, 3]],
            Some(&[&[2, ABSENT]]),
            "entry 1: expected an absent entry in both",
        ),
        (
            &[&[ABSENT, 3]],
            Some(&[&[2, 3]]),
            "entry 0: expected an absent entry in both",
        ),
        (&[&[3]], Some(&[&[2]]), "3 real tokens, got 2"),
        (
            &[&[3, 3]],
            Some(&[&[3, 6]]),
            "within 8 tokens, got an end at 9",
        ),
        (&[&[9]], None, "within 8 tokens, got an end at 9"),
        (&[], None, "at least one batch row"),
    ];
    for (real, padded, expected) in table {
        let padded = padded.map(rows);
        let result = Documents::from_seq_lens(&rows(real), padded.as_deref(), 8);
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}

#[test]
fn token_ids_alone_give_padding_only_if_it_is_an_exact_tail() {
    let padding = |ids: &[&[i64]]| {
        Documents::from_token_ids(&rows(ids), 0)
            .map(|documents| documents.thd_metadata().unwrap().padding)
    };
    assert_eq!(padding(&[&[5, 6, 0, 0]]).unwrap(), [2, 3]);
    assert!(padding(&[&[5, 6]]).unwrap().is_empty());
    assert_eq!(padding(&[&[5, 0], &[0, 0], &[5, 6]]).unwrap(), [1, 2, 3]);
    for ids in [[5, 0, 6, 0], [0, 5, 6, 0]] {
        let error = padding(&[&[7; 4], &ids]).unwrap_err();
        let first = ids.iter().position(|&id| id == 0).unwrap();
        assert!(
            matches!(error, LayoutError::PaddingInContent { row: 1, padding_id: 0, got } if got == first)
        );
        assert!(error.to_string().contains("also occurs as content"));
    }
    assert!(Documents::from_token_ids(&rows(&[&[1], &[1, 1]]), 0).is_err());
    assert!(Documents::from_token_ids(&[], 0).is_err());
}

#[test]
fn flattening_puts_rows_one_behind_the_other() {
    let documents =
        Documents::from_ids(&rows(&[&[1, 1, 0, 2], &[2, 2, 2, 0], &[0, 0, 0, 0]])).unwrap();
    let flat = documents.flattened();
    assert_eq!((flat.batch_size(), flat.seq_len()), (1, 12));
    let extents: Vec<_> = flat.row(0).iter().map(|d| d.extent.clone()).collect();
    assert_eq!(extents, [0..2, 3..4, 4..7]);
    let rows = (0..3).flat_map(|row| documents.padding_mask(row));
    assert!(rows.eq(flat.padding_mask(0)));
    assert_eq!(flat.flattened(), flat);
    assert_eq!(flat.num_real_tokens(), documents.num_real_tokens());
}
