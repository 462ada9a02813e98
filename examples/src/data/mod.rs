//! What `train-vlm` and `train-mimo` read: documents that show handwritten digits amid text and then ask for them.
//!
//! Holds the digits file and its split ([`digits`]), images and videos made of a digit and cut into patches
//! ([`images`]), documents with labels and positions ([`documents`]), and their packing into streams of one length
//! ([`packing`]). All of it is host data, computed from a seed and an index: no tensors, no ranks, no state to save.

pub mod digits;
pub mod documents;
pub mod images;
pub mod packing;
pub mod vocabulary;

use serde::{Deserialize, Serialize};

pub use digits::{Digit, Digits, Split};
pub use documents::Document;
pub use images::{Media, MediaKind, PatchShape};
pub use packing::{Marks, Pack, PackSource};

/// A label that the loss leaves out.
pub const IGNORED_LABEL: i64 = -100;

/// What the documents look like. The patch geometry is not here: it is the model's ([`PatchShape`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Most images and videos of one document; each document draws its number from 1 to this. 1 to 12.
    pub max_images: usize,
    /// Over this many first training packs `max_images` and `max_filler` rise, slowly at first, from 1 and 0 to their
    /// full values: what a digit looks like is learned before how to find it among others. 0: no such ramp. Held-out
    /// packs have none.
    pub ramp_packs: u64,
    /// Most filler words of one document; each document draws its number from 0 to this.
    pub max_filler: usize,
    /// Most videos of one document; further media of it are images.
    pub max_videos: usize,
    /// Chance in percent that a medium is a video, until the document has `max_videos`. 0 to 100.
    pub video_percent: u32,
    /// Most temporal slices of a video; each video draws its number from 2 to this. 2 to 4.
    pub max_slices: usize,
    /// Sizes that an image is drawn with, each `[height, width]` in merged tokens. A size that stands here more often is
    /// drawn more often.
    pub image_sizes: Vec<[usize; 2]>,
    /// Sizes that a slice of a video is drawn with, each `[height, width]` in merged tokens.
    pub video_sizes: Vec<[usize; 2]>,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            max_images: 12,
            ramp_packs: 240,
            max_filler: 40,
            max_videos: 2,
            video_percent: 12,
            max_slices: 4,
            image_sizes: vec![[1, 1], [1, 1], [1, 1], [1, 2], [2, 1], [2, 2]],
            video_sizes: vec![[1, 1], [1, 1], [2, 1]],
        }
    }
}

impl DataConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// [`DataError::Config`] names the first field that is out of range.
    pub fn validate(&self) -> Result<(), DataError> {
        let range = |field: &'static str, low: usize, high: usize, got: usize| {
            if (low..=high).contains(&got) {
                Ok(())
            } else {
                Err(DataError::Config {
                    field,
                    expected: format!("{low} to {high}"),
                    got: got.to_string(),
                })
            }
        };
        range("max_images", 1, vocabulary::NUM_HUES, self.max_images)?;
        range("max_videos", 0, self.max_images, self.max_videos)?;
        range("video_percent", 0, 100, self.video_percent as usize)?;
        range("max_slices", 2, vocabulary::NUM_TIMES, self.max_slices)?;
        range("max_filler", 0, 1 << 20, self.max_filler)?;
        for (field, sizes) in [
            ("image_sizes", &self.image_sizes),
            ("video_sizes", &self.video_sizes),
        ] {
            if sizes.is_empty()
                || sizes
                    .iter()
                    .flatten()
                    .any(|&side| !(1..=64).contains(&side))
            {
                return Err(DataError::Config {
                    field,
                    expected: "at least one [height, width], each side 1 to 64".into(),
                    got: format!("{sizes:?}"),
                });
            }
        }
        Ok(())
    }

    /// The configuration of training pack number `index`: this one, with lower limits during the ramp.
    #[must_use]
    pub fn at_pack(&self, index: u64) -> Self {
        let mut config = self.clone();
        if index < self.ramp_packs {
            // The square: a third of the ramp passes with one or two images.
            let share = (index as f64 / self.ramp_packs as f64).powi(2);
            let rise = |limit: usize| (limit as f64 * share) as usize;
            config.max_images = 1 + rise(self.max_images - 1);
            config.max_filler = rise(self.max_filler);
            config.max_videos = self.max_videos.min(config.max_images);
        }
        config
    }

    /// Tokens of the longest document that can be drawn: the least length of a pack.
    #[must_use]
    pub fn max_document_tokens(&self) -> usize {
        let largest = |sizes: &[[usize; 2]]| sizes.iter().map(|[h, w]| h * w).max().unwrap_or(0);
        // An image is start, tokens, end; each slice of a video has a time before that.
        let image = largest(&self.image_sizes) + 2;
        let video = self.max_slices * (largest(&self.video_sizes) + 3);
        let num_videos = if self.video_percent == 0 {
            0
        } else {
            self.max_videos.min(self.max_images)
        };
        let media = num_videos * video.max(image) + (self.max_images - num_videos) * image;
        // Begin, question and end; a hue and a digit per answer.
        3 + self.max_filler + media + 2 * self.max_images
    }
}

/// What can be wrong with the digits file or with what is asked of the data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The digits file is no readable gzip stream of text.
    #[error("the digits file cannot be decompressed: {source}")]
    Unreadable {
        /// The decoder's reason.
        #[from]
        source: std::io::Error,
    },
    /// A line of the digits file is not an image with its digit.
    #[error("line {line} of the digits file: {what} should be {expected}, got {got}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The part of the line that is wrong.
        what: &'static str,
        /// What it should be.
        expected: String,
        /// What stands there.
        got: String,
    },
    /// The digits file has too few images to split them.
    #[error("the digits file should hold at least {expected} images, got {got}")]
    TooFewImages {
        /// Least number of images.
        expected: usize,
        /// Number of images read.
        got: usize,
    },
    /// A field of the configuration is out of range.
    #[error("data configuration: `{field}` should be {expected}, got {got}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its range.
        expected: String,
        /// Its value.
        got: String,
    },
    /// A document may be longer than a pack.
    #[error(
        "a pack should have at least {expected} tokens, the length of the longest document, got {got}"
    )]
    PackTooShort {
        /// Tokens of the longest document.
        expected: usize,
        /// Tokens asked for.
        got: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_configuration_is_valid() {
        DataConfig::default().validate().unwrap();
    }

    #[test]
    fn limits_rise_over_the_ramp() {
        let config = DataConfig {
            ramp_packs: 100,
            ..Default::default()
        };
        let images: Vec<usize> = (0..=100)
            .map(|index| config.at_pack(index).max_images)
            .collect();
        assert!(images.is_sorted());
        assert_eq!(
            (images[0], images[33], images[99], images[100]),
            (1, 2, 11, 12)
        );
        for index in 0..100 {
            config.at_pack(index).validate().unwrap();
        }
        assert_eq!(config.at_pack(100), config);
    }

    #[test]
    fn out_of_range_fields_are_named() {
        let bad = [
            (
                DataConfig {
                    max_images: 13,
                    ..Default::default()
                },
                "max_images",
            ),
            (
                DataConfig {
                    max_images: 0,
                    ..Default::default()
                },
                "max_images",
            ),
            (
                DataConfig {
                    max_slices: 1,
                    ..Default::default()
                },
                "max_slices",
            ),
            (
                DataConfig {
                    video_percent: 101,
                    ..Default::default()
                },
                "video_percent",
            ),
            (
                DataConfig {
                    image_sizes: vec![],
                    ..Default::default()
                },
                "image_sizes",
            ),
            (
                DataConfig {
                    video_sizes: vec![[0, 1]],
                    ..Default::default()
                },
                "video_sizes",
            ),
        ];
        for (config, name) in bad {
            match config.validate() {
                Err(DataError::Config { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }
}
