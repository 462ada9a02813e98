//! Positions of a document's tokens on three axes.

use super::config::Qwen3VlConfig;

/// Why a document's tokens and grids do not fit each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PositionError {
    /// Placeholders without an entry that they belong to.
    #[error("token {token}: expected a grid for this placeholder, got none")]
    MissingGrid {
        /// Index of the token.
        token: usize,
    },
    /// An entry has another number of placeholders.
    #[error("token {token}: expected {expected} placeholders in a run, got {got}")]
    Placeholders {
        /// Index of the first placeholder.
        token: usize,
        /// Tokens of the entry.
        expected: usize,
        /// Placeholders found.
        got: usize,
    },
    /// Entries that no token waits for.
    #[error("grids: expected {expected} images and video frames, got {got}")]
    UnusedGrids {
        /// Entries that placeholders belong to.
        expected: usize,
        /// Entries given.
        got: usize,
    },
}

/// Positions of one document on the axes time, height and width, each `[tokens]` and from 0.
///
/// Text counts on all three axes. A frame of `h x w` tokens stands still in time, its rows and columns count from the
/// running position, and what follows goes on behind the longer side (Wang et al., "Qwen2-VL", 2024). Videos are written
/// frame by frame, with text between the frames, so each frame is an entry of its own (Qwen3-VL).
///
/// `ids` are the document's tokens; `image_grids` and `video_grids` the grids `(t, h, w)` in patches, in the order of the
/// placeholders.
///
/// # Errors
///
/// Grids and placeholders that do not fit: see [`PositionError`].
pub fn mrope_positions(
    ids: &[i64],
    image_grids: &[[usize; 3]],
    video_grids: &[[usize; 3]],
    config: &Qwen3VlConfig,
) -> Result<[Vec<i64>; 3], PositionError> {
    let merge = config.vision_config.spatial_merge_size;
    let frames = |grids: &[[usize; 3]]| -> Vec<[usize; 2]> {
        let sizes = |&[t, h, w]: &[usize; 3]| vec![[h / merge, w / merge]; t];
        grids.iter().flat_map(sizes).collect()
    };
    let (images, videos) = (frames(image_grids), frames(video_grids));
    let mut waiting = [images.iter(), videos.iter()];
    let mut positions: [Vec<i64>; 3] = std::array::from_fn(|_| Vec::with_capacity(ids.len()));
    let mut push = |at: [i64; 3]| {
        for (axis, at) in positions.iter_mut().zip(at) {
            axis.push(at);
        }
    };
    let (mut token, mut next) = (0, 0);
    while let Some(&id) = ids.get(token) {
        let kind = [config.image_token_id, config.video_token_id]
            .iter()
            .position(|&p| p == id);
        let Some(kind) = kind else {
            push([next; 3]);
            (token, next) = (token + 1, next + 1);
            continue;
        };
        let &[height, width] = waiting[kind]
            .next()
            .ok_or(PositionError::MissingGrid { token })?;
        let expected = height * width;
        let got = ids[token..]
            .iter()
            .take(expected)
            .take_while(|&&other| other == id)
            .count();
        if got < expected {
            return Err(PositionError::Placeholders {
                token,
                expected,
                got,
            });
        }
        for row in 0..height as i64 {
            for column in 0..width as i64 {
                push([next, next + row, next + column]);
            }
        }
        token += expected.max(1);
        next += height.max(width) as i64;
    }
    let unused: usize = waiting.iter().map(ExactSizeIterator::len).sum();
    let got = images.len() + videos.len();
    if unused > 0 {
        return Err(PositionError::UnusedGrids {
            expected: got - unused,
            got,
        });
    }
    Ok(positions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_count_rows_and_columns_and_text_goes_on_behind_them() {
        let config = Qwen3VlConfig::tiny(64);
        let (text, image, video) = (9, config.image_token_id, config.video_token_id);
        let ids = [
            text, image, image, image, image, image, image, text, video, text, video,
        ];
        let got = mrope_positions(&ids, &[[1, 4, 6]], &[[2, 2, 2]], &config).unwrap();
        assert_eq!(got[0], [0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 7]);
        assert_eq!(got[1], [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7]);
        assert_eq!(got[2], [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn grids_that_do_not_fit_are_refused() {
        let config = Qwen3VlConfig::tiny(64);
        let image = config.image_token_id;
        let error = |ids: &[i64], grids: &[[usize; 3]]| {
            mrope_positions(ids, grids, &[], &config).unwrap_err()
        };
        assert_eq!(
            error(&[9, image], &[]),
            PositionError::MissingGrid { token: 1 }
        );
        assert_eq!(
            error(&[image, 9], &[[1, 2, 4]]),
            PositionError::Placeholders {
                token: 0,
                expected: 2,
                got: 1
            }
        );
        assert_eq!(
            error(&[9], &[[1, 2, 2]]),
            PositionError::UnusedGrids {
                expected: 0,
                got: 1
            }
        );
    }
}
