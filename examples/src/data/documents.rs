//! One document: images and videos of digits amid filler words, each on a ground of another hue; then the question;
//! then, for each hue in a new order, its digit. Every answer comes after all images, so answering means looking back
//! for the right one.
//!
//! Positions are those of Qwen3-VL's interleaved mRoPE (Bai et al., "Qwen3-VL Technical Report", 2025): a video is a
//! series of one-slice blocks with a written time before each.

use rand::{Rng, rngs::StdRng, seq::SliceRandom};

use super::images::{Drift, Scene, push_patches};
use super::vocabulary as vocab;
use super::{DataConfig, Digit, IGNORED_LABEL, Media, MediaKind, PatchShape};

/// Largest shift of a video's digit from the middle, in source pixels.
const MAX_SHIFT: f32 = 0.75;

/// A document by itself: what a pack strings together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Document {
    /// Token ids, `[tokens]`.
    pub ids: Vec<i64>,
    /// `[tokens]`: at a token that an answer digit follows, that digit's id; elsewhere [`IGNORED_LABEL`], since hues and
    /// filler words are random.
    pub labels: Vec<i64>,
    /// Temporal, vertical and horizontal position of each token, three times `[tokens]`, from 0.
    pub positions: [Vec<i64>; 3],
    /// Images and videos in the order of their placeholders.
    pub media: Vec<Media>,
    /// Their patch rows, `[rows, patch_dim]`.
    pub pixels: Vec<f32>,
    next_position: i64,
}

impl Document {
    /// Draws a document that shows images of `digits`. `config` is a valid one and `digits` is not empty.
    pub(super) fn draw(
        rng: &mut StdRng,
        digits: &[Digit],
        config: &DataConfig,
        shape: &PatchShape,
    ) -> Self {
        let num_media = rng.random_range(1..=config.max_images);
        let mut hues: Vec<usize> = (0..vocab::NUM_HUES).collect();
        hues.shuffle(rng);
        let fillers = spread(rng, config.max_filler, num_media + 1);

        let mut document = Self::default();
        let mut answers = Vec::with_capacity(num_media);
        let mut num_videos = 0;
        document.push_text(vocab::BEGIN);
        for (&hue, &num_words) in hues.iter().take(num_media).zip(&fillers) {
            document.push_filler(rng, num_words);
            let digit = &digits[rng.random_range(0..digits.len())];
            let scene = Scene {
                digit,
                hue,
                drift: Drift::NONE,
            };
            if num_videos < config.max_videos && rng.random_range(0..100) < config.video_percent {
                num_videos += 1;
                document.push_video(rng, scene, config, shape);
            } else {
                document.push_image(rng, scene, config, shape);
            }
            answers.push((
                vocab::FIRST_HUE + hue as i64,
                vocab::FIRST_DIGIT + i64::from(digit.value),
            ));
        }
        document.push_filler(rng, fillers[num_media]);

        document.push_text(vocab::QUESTION);
        answers.shuffle(rng);
        for (hue, digit) in answers {
            document.push_text(hue);
            // The label of a token is the token after it.
            if let Some(label) = document.labels.last_mut() {
                *label = digit;
            }
            document.push_text(digit);
        }
        document.push_text(vocab::END);
        document
    }

    /// A document from its parts; see the fields.
    #[must_use]
    pub fn new(
        ids: Vec<i64>,
        labels: Vec<i64>,
        positions: [Vec<i64>; 3],
        media: Vec<Media>,
        pixels: Vec<f32>,
    ) -> Self {
        let largest = positions.iter().flatten().max();
        Self {
            next_position: largest.map_or(0, |at| at + 1),
            ids,
            labels,
            positions,
            media,
            pixels,
        }
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The position that a token behind this document would have: one more than the largest.
    #[must_use]
    pub fn next_position(&self) -> i64 {
        self.next_position
    }

    fn push_token(&mut self, id: i64, position: [i64; 3]) {
        self.ids.push(id);
        self.labels.push(IGNORED_LABEL);
        for (axis, at) in self.positions.iter_mut().zip(position) {
            axis.push(at);
        }
    }

    fn push_text(&mut self, id: i64) {
        self.push_token(id, [self.next_position; 3]);
        self.next_position += 1;
    }

    fn push_filler(&mut self, rng: &mut StdRng, num_words: usize) {
        for _ in 0..num_words {
            self.push_text(vocab::FIRST_FILLER + rng.random_range(0..vocab::NUM_FILLER as i64));
        }
    }

    fn push_image(
        &mut self,
        rng: &mut StdRng,
        scene: Scene<'_>,
        config: &DataConfig,
        shape: &PatchShape,
    ) {
        let size = config.image_sizes[rng.random_range(0..config.image_sizes.len())];
        self.push_block(vocab::IMAGE, size);
        self.push_media(MediaKind::Image, 1, size, shape);
        self.push_pixels(&scene, shape);
    }

    fn push_video(
        &mut self,
        rng: &mut StdRng,
        mut scene: Scene<'_>,
        config: &DataConfig,
        shape: &PatchShape,
    ) {
        let size = config.video_sizes[rng.random_range(0..config.video_sizes.len())];
        let slices = rng.random_range(2..=config.max_slices);
        for time in 0..slices as i64 {
            self.push_text(vocab::FIRST_TIME + time);
            self.push_block(vocab::VIDEO, size);
        }
        let mut shift = || std::array::from_fn(|_| rng.random_range(-MAX_SHIFT..=MAX_SHIFT));
        scene.drift = Drift {
            start: shift(),
            end: shift(),
        };
        self.push_media(MediaKind::Video, slices, size, shape);
        self.push_pixels(&scene, shape);
    }

    /// One frame's tokens between their markers: time stands still, rows and columns count from the running position,
    /// and the text goes on behind the longer side.
    fn push_block(&mut self, placeholder: i64, [height, width]: [usize; 2]) {
        self.push_text(vocab::VISION_START);
        let start = self.next_position;
        for row in 0..height as i64 {
            for column in 0..width as i64 {
                self.push_token(placeholder, [start, start + row, start + column]);
            }
        }
        self.next_position = start + height.max(width) as i64;
        self.push_text(vocab::VISION_END);
    }

    fn push_media(
        &mut self,
        kind: MediaKind,
        slices: usize,
        [height, width]: [usize; 2],
        shape: &PatchShape,
    ) {
        let grid = [slices, height * shape.merge_size, width * shape.merge_size];
        self.media.push(Media { kind, grid });
    }

    fn push_pixels(&mut self, scene: &Scene<'_>, shape: &PatchShape) {
        if let Some(media) = self.media.last() {
            push_patches(&mut self.pixels, scene, media, shape);
        }
    }
}

/// Draws a number of words from 0 to `max` and spreads it at random over `num_places` places.
fn spread(rng: &mut StdRng, max: usize, num_places: usize) -> Vec<usize> {
    let mut places = vec![0; num_places];
    for _ in 0..rng.random_range(0..=max) {
        places[rng.random_range(0..num_places)] += 1;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Digits, Split};
    use rand::SeedableRng;

    const SHAPE: PatchShape = PatchShape {
        patch_size: 4,
        merge_size: 2,
        temporal_patch_size: 2,
        channels: 3,
    };

    fn documents(count: usize) -> Vec<Document> {
        let digits = Digits::load().unwrap();
        let mut rng = StdRng::seed_from_u64(5);
        let config = DataConfig::default();
        (0..count)
            .map(|_| Document::draw(&mut rng, digits.of(Split::Train), &config, &SHAPE))
            .collect()
    }

    #[test]
    fn placeholders_and_rows_match_the_grids() {
        for document in documents(200) {
            let count = |id| document.ids.iter().filter(|&&other| other == id).count();
            for (kind, id) in [
                (MediaKind::Image, vocab::IMAGE),
                (MediaKind::Video, vocab::VIDEO),
            ] {
                let of_kind = document.media.iter().filter(|media| media.kind == kind);
                assert_eq!(
                    of_kind.map(|media| media.num_tokens(&SHAPE)).sum::<usize>(),
                    count(id)
                );
            }
            let rows: usize = document.media.iter().map(Media::num_patches).sum();
            assert_eq!(document.pixels.len(), rows * SHAPE.patch_dim());
            assert!(
                document
                    .pixels
                    .iter()
                    .all(|value| (-1.0..=1.0).contains(value))
            );
        }
    }

    #[test]
    fn answers_come_after_all_images_and_labels_are_the_next_token() {
        for document in documents(200) {
            let last_image = document
                .ids
                .iter()
                .rposition(|&id| id == vocab::VISION_END)
                .unwrap();
            let answers: Vec<usize> = (0..document.len())
                .filter(|&at| document.labels[at] != IGNORED_LABEL)
                .collect();
            assert_eq!(answers.len(), document.media.len());
            for at in answers {
                assert!(at > last_image);
                assert_eq!(document.labels[at], document.ids[at + 1]);
                let digits = vocab::FIRST_DIGIT..vocab::FIRST_DIGIT + vocab::NUM_DIGITS as i64;
                assert!(digits.contains(&document.labels[at]));
                // Each hue is asked for once.
                let named = document
                    .ids
                    .iter()
                    .filter(|&&id| id == document.ids[at])
                    .count();
                assert_eq!(named, 1);
            }
            assert_eq!(document.labels[document.len() - 1], IGNORED_LABEL);
        }
    }

    #[test]
    fn lengths_vary_and_stay_below_the_stated_maximum() {
        let lengths: Vec<usize> = documents(500).iter().map(Document::len).collect();
        let (min, max) = (
            *lengths.iter().min().unwrap(),
            *lengths.iter().max().unwrap(),
        );
        assert!(min < 15 && max > 8 * min, "{min} to {max}");
        assert!(max <= DataConfig::default().max_document_tokens());
    }

    #[test]
    fn longest_document_has_the_stated_length() {
        let config = DataConfig {
            max_filler: 0,
            max_images: 1,
            max_videos: 0,
            ..Default::default()
        };
        let digits = Digits::load().unwrap();
        let mut rng = StdRng::seed_from_u64(1);
        let longest = (0..100)
            .map(|_| Document::draw(&mut rng, digits.of(Split::Train), &config, &SHAPE).len())
            .max();
        assert_eq!(longest, Some(config.max_document_tokens()));
    }

    #[test]
    fn positions_of_a_block_count_rows_and_columns() {
        let mut document = Document::default();
        document.push_text(vocab::BEGIN);
        document.push_block(vocab::IMAGE, [2, 3]);
        document.push_text(vocab::END);
        let [time, rows, columns] = &document.positions;
        assert_eq!(time, &[0, 1, 2, 2, 2, 2, 2, 2, 5, 6]);
        assert_eq!(rows, &[0, 1, 2, 2, 2, 3, 3, 3, 5, 6]);
        assert_eq!(columns, &[0, 1, 2, 3, 4, 2, 3, 4, 5, 6]);
        assert_eq!(document.next_position(), 7);
    }

    #[test]
    fn a_video_is_a_series_of_blocks_with_times() {
        let config = DataConfig {
            video_percent: 100,
            max_images: 1,
            max_videos: 1,
            max_filler: 0,
            ..Default::default()
        };
        let digits = Digits::load().unwrap();
        let document = Document::draw(
            &mut StdRng::seed_from_u64(2),
            digits.of(Split::Train),
            &config,
            &SHAPE,
        );
        let [media] = document.media[..] else {
            panic!("one video")
        };
        assert_eq!(media.kind, MediaKind::Video);
        let starts = document
            .ids
            .iter()
            .filter(|&&id| id == vocab::VISION_START)
            .count();
        assert_eq!(starts, media.grid[0]);
        let times = document
            .ids
            .iter()
            .filter(|&&id| (8..12).contains(&id))
            .copied();
        assert!(times.eq((0..starts as i64).map(|time| vocab::FIRST_TIME + time)));
    }
}
