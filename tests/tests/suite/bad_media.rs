//! Images whose grids, pixels and placeholders contradict each other are refused, alike on both ranks.

use burn::tensor::{Tensor, TensorData};
use burn_cp::batch::{BatchError, Media};

use crate::bad_input::{B, ids, refused};
use burn_cp_tests::device;

/// Two images of four and of eight patches, two by two merged into one token: 1 + 2 tokens.
fn media(rows: usize, grids: Vec<[usize; 3]>, marked: &[usize]) -> Media<B> {
    let placeholders: Vec<bool> = (0..12).map(|token| marked.contains(&token)).collect();
    Media {
        name: "image".into(),
        // Never read. Filling an empty one would launch a kernel over nothing, which CUDA refuses.
        pixels: Tensor::empty([rows, 3], &device()),
        grids,
        spatial_merge_size: 2,
        placeholders: TensorData::new(placeholders, [2, 6]),
    }
}

#[test]
fn grids_that_do_not_match_the_pixel_rows_are_refused() {
    let grids = || vec![[1, 2, 2], [1, 4, 2]];
    let error = refused(|| ids().with_media(media(11, grids(), &[0, 1, 2])));
    assert!(
        matches!(
            error,
            BatchError::PixelRows {
                expected: 12,
                got: 11,
                ..
            }
        ),
        "{error}"
    );
    for grid in [[1, 3, 2], [0, 2, 2], [1, 2, 0]] {
        let error =
            refused(|| ids().with_media(media(grid.iter().product::<usize>(), vec![grid], &[0])));
        assert!(
            matches!(error, BatchError::Grid { grid: got, merge: 2, .. } if got == grid),
            "{error}"
        );
    }
}

#[test]
fn placeholders_and_embeddings_must_be_equally_many() {
    let grids = || vec![[1, 2, 2], [1, 4, 2]];
    for marked in [&[0, 1, 2, 7][..], &[0, 1], &[]] {
        let error = refused(|| ids().with_media(media(12, grids(), marked)));
        let expected = BatchError::Placeholders {
            what: "image".into(),
            placeholders: marked.len(),
            embeddings: 3,
        };
        assert_eq!(error, expected);
    }
    let mask =
        |len: usize| TensorData::new((0..12).map(|token| token < len).collect::<Vec<_>>(), [2, 6]);
    for len in [2, 4] {
        let layers = || {
            vec![
                Tensor::<B, 2>::zeros([len, 5], &device()),
                Tensor::zeros([3, 5], &device()),
            ]
        };
        let error = refused(|| ids().with_deepstack(mask(len), layers()));
        let what = "deepstack layer 1".into();
        assert_eq!(
            error,
            BatchError::Placeholders {
                what,
                placeholders: len,
                embeddings: 3
            }
        );
    }
    let wrong = || TensorData::new(vec![true; 10], [2, 5]);
    let error = refused(|| ids().with_deepstack(wrong(), vec![]));
    assert!(
        matches!(error, BatchError::Shape { ref what, .. } if what == "deepstack"),
        "{error}"
    );
}

#[test]
fn two_media_on_one_token_are_refused() {
    let error = refused(|| {
        let video = Media {
            name: "video".into(),
            ..media(8, vec![[2, 2, 2]], &[8, 10])
        };
        ids()
            .with_media(media(4, vec![[1, 2, 2]], &[10]))
            .with_media(video)
    });
    let (first, second) = ("image".into(), "video".into());
    assert_eq!(
        error,
        BatchError::PlaceholderTwice {
            row: 1,
            token: 4,
            first,
            second
        }
    );
}
