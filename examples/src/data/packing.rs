//! Documents strung together to streams of one length.
//!
//! A pack follows from (seed, split, index) and the configuration alone. It knows nothing of ranks or of steps, so
//! a run that resumes at a step asks for that step's packs and gets them.

use rand::{SeedableRng, rngs::StdRng};

use super::images::NUM_CHANNELS;
use super::vocabulary as vocab;
use super::{DataConfig, DataError, Digits, Document, IGNORED_LABEL, Media, PatchShape, Split};

/// Documents that may fail to fit one after the other before the rest of a pack becomes padding.
const LOOK_AHEAD: usize = 8;

/// Ids that mean something to a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// Fills the tail.
    pub padding: i64,
    /// Placeholder of an image's token.
    pub image: i64,
    /// Placeholder of a video's token.
    pub video: i64,
}

impl Marks {
    /// Those of [`vocabulary`](super::vocabulary).
    pub const DIGITS: Self = Self {
        padding: vocab::PAD,
        image: vocab::IMAGE,
        video: vocab::VIDEO,
    };
}

/// One packed stream, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Pack {
    /// Token ids, `[tokens]`; the tail is padding.
    pub ids: Vec<i64>,
    /// The next token's id where it is an answer digit, else [`IGNORED_LABEL`]: `[tokens]`, already shifted.
    pub labels: Vec<i64>,
    /// Temporal, vertical and horizontal positions: `[3, tokens]`, row by row. They restart at each document and run
    /// on through the padding.
    pub positions: Vec<i64>,
    /// Lengths of the documents, in order, from token 0 without gaps. Tokens behind them are padding.
    pub document_lengths: Vec<usize>,
    /// Images and videos in the order of their placeholders.
    pub media: Vec<Media>,
    /// Their patch rows, `[rows, patch_dim]`, from -1 to 1.
    pub pixels: Vec<f32>,
    /// `[tokens]`: placeholders of images.
    pub image_mask: Vec<bool>,
    /// `[tokens]`: placeholders of videos.
    pub video_mask: Vec<bool>,
    /// `[tokens]`: tokens whose label is an answer digit, by which accuracy is counted.
    pub answer_mask: Vec<bool>,
}

impl Pack {
    /// Number of tokens, padding included.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.ids.len()
    }

    /// Number of tokens that belong to documents.
    #[must_use]
    pub fn num_real_tokens(&self) -> usize {
        self.document_lengths.iter().sum()
    }

    /// Documents one behind the other, and padding up to `tokens`; they must fit.
    #[must_use]
    pub fn from_documents(documents: Vec<Document>, tokens: usize, marks: Marks) -> Self {
        let mut pack = Self {
            ids: Vec::with_capacity(tokens),
            labels: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(3 * tokens),
            document_lengths: documents.iter().map(Document::len).collect(),
            media: Vec::new(),
            pixels: Vec::new(),
            image_mask: Vec::new(),
            video_mask: Vec::new(),
            answer_mask: Vec::new(),
        };
        for axis in 0..3 {
            for document in &documents {
                pack.positions.extend_from_slice(&document.positions[axis]);
            }
            let padded_from = documents.last().map_or(0, Document::next_position);
            let missing = (axis + 1) * tokens - pack.positions.len();
            pack.positions.extend((padded_from..).take(missing));
        }
        for document in documents {
            pack.ids.extend(document.ids);
            pack.labels.extend(document.labels);
            pack.media.extend(document.media);
            pack.pixels.extend(document.pixels);
        }
        pack.ids.resize(tokens, marks.padding);
        pack.labels.resize(tokens, IGNORED_LABEL);
        pack.image_mask = pack.ids.iter().map(|&id| id == marks.image).collect();
        pack.video_mask = pack.ids.iter().map(|&id| id == marks.video).collect();
        pack.answer_mask = pack
            .labels
            .iter()
            .map(|&label| label != IGNORED_LABEL)
            .collect();
        pack
    }
}

/// Makes the packs of one split.
#[derive(Debug, Clone)]
pub struct PackSource {
    digits: Digits,
    seed: u64,
    tokens: usize,
    split: Split,
    config: DataConfig,
    shape: PatchShape,
}

impl PackSource {
    /// Reads the digits and checks that every document fits into a pack of `tokens` tokens.
    ///
    /// # Errors
    ///
    /// [`DataError::PackTooShort`] names the least number of tokens; [`DataError::Config`] a field out of range; else
    /// the digits file is damaged.
    pub fn new(
        seed: u64,
        tokens: usize,
        split: Split,
        config: DataConfig,
        shape: PatchShape,
    ) -> Result<Self, DataError> {
        config.validate()?;
        for (field, got) in shape.fields() {
            if got == 0 {
                return Err(DataError::Config {
                    field,
                    expected: "at least 1".into(),
                    got: got.to_string(),
                });
            }
        }
        if shape.channels != NUM_CHANNELS {
            return Err(DataError::Config {
                field: "channels",
                expected: NUM_CHANNELS.to_string(),
                got: shape.channels.to_string(),
            });
        }
        let expected = config.max_document_tokens();
        if tokens < expected {
            return Err(DataError::PackTooShort {
                expected,
                got: tokens,
            });
        }
        let digits = Digits::load()?;
        Ok(Self {
            digits,
            seed,
            tokens,
            split,
            config,
            shape,
        })
    }

    /// Pack number `index`. The same index gives the same pack, whatever was asked before.
    ///
    /// Documents are drawn one after the other and kept if they fit into what is left; after eight that did not, the
    /// rest is padding. Those that did not fit are dropped, so that no pack depends on another.
    #[must_use]
    pub fn pack(&self, index: u64) -> Pack {
        let mut rng = StdRng::seed_from_u64(mix(self.seed, self.split, index));
        let digits = self.digits.of(self.split);
        let config = match self.split {
            Split::Train => self.config.at_pack(index),
            Split::HeldOut => self.config.clone(),
        };
        let mut documents = Vec::new();
        let (mut left, mut misses) = (self.tokens, 0);
        while misses < LOOK_AHEAD {
            let document = Document::draw(&mut rng, digits, &config, &self.shape);
            if document.len() <= left {
                left -= document.len();
                misses = 0;
                documents.push(document);
            } else {
                misses += 1;
            }
        }
        Pack::from_documents(documents, self.tokens, Marks::DIGITS)
    }

    /// Tokens of each pack.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The patch geometry of the pixel rows.
    #[must_use]
    pub fn shape(&self) -> &PatchShape {
        &self.shape
    }
}

/// One seed out of three numbers, by the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), so that neighbouring
/// indices and seeds give unrelated packs.
fn mix(seed: u64, split: Split, index: u64) -> u64 {
    let split = match split {
        Split::Train => 1,
        Split::HeldOut => 2,
    };
    [seed, split, index]
        .into_iter()
        .fold(0, |state: u64, part| {
            let mut z = state.wrapping_add(part).wrapping_add(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: PatchShape = PatchShape {
        patch_size: 4,
        merge_size: 2,
        temporal_patch_size: 2,
        channels: 3,
    };

    fn source(seed: u64, split: Split) -> PackSource {
        PackSource::new(seed, 512, split, DataConfig::default(), SHAPE).unwrap()
    }

    #[test]
    fn a_pack_depends_on_seed_split_and_index_only() {
        let train = source(1, Split::Train);
        let third = train.pack(3);
        let _ = train.pack(0);
        assert_eq!(train.pack(3), third);
        assert_eq!(source(1, Split::Train).pack(3), third);
        assert_ne!(train.pack(4), third);
        assert_ne!(source(2, Split::Train).pack(3), third);
        assert_ne!(source(1, Split::HeldOut).pack(3), third);
    }

    #[test]
    fn streams_fit_together() {
        let source = source(7, Split::HeldOut);
        let mut filled = 0;
        for index in 0..50 {
            let pack = source.pack(index);
            assert_eq!(pack.num_tokens(), 512);
            assert_eq!((pack.labels.len(), pack.positions.len()), (512, 3 * 512));
            assert_eq!(
                (
                    pack.image_mask.len(),
                    pack.video_mask.len(),
                    pack.answer_mask.len()
                ),
                (512, 512, 512)
            );
            let placeholders = (0..512)
                .filter(|&at| pack.image_mask[at] || pack.video_mask[at])
                .count();
            assert_eq!(
                pack.media
                    .iter()
                    .map(|media| media.num_tokens(&SHAPE))
                    .sum::<usize>(),
                placeholders
            );
            let rows: usize = pack.media.iter().map(Media::num_patches).sum();
            assert_eq!(pack.pixels.len(), rows * SHAPE.patch_dim());
            assert_eq!(
                pack.answer_mask.iter().filter(|&&answer| answer).count(),
                pack.media.len()
            );
            filled += pack.num_real_tokens();
        }
        assert!(filled > 50 * 512 * 9 / 10, "{filled}");
    }

    #[test]
    fn positions_restart_at_documents_and_run_on_through_padding() {
        let pack = source(3, Split::Train).pack(0);
        for axis in pack.positions.chunks(512) {
            let mut start = 0;
            for &len in &pack.document_lengths {
                assert_eq!(axis[start], 0);
                assert_eq!(pack.ids[start], vocab::BEGIN);
                assert_eq!(pack.ids[start + len - 1], vocab::END);
                start += len;
            }
            for at in start..512 {
                assert_eq!(axis[at], axis[at - 1] + 1);
                assert_eq!((pack.ids[at], pack.labels[at]), (vocab::PAD, IGNORED_LABEL));
            }
        }
    }

    #[test]
    fn labels_stay_within_their_document() {
        let pack = source(4, Split::Train).pack(2);
        for at in 0..512 {
            if pack.labels[at] != IGNORED_LABEL {
                assert_eq!(pack.labels[at], pack.ids[at + 1]);
            }
        }
    }

    #[test]
    fn a_pack_shorter_than_a_document_is_refused() {
        let config = DataConfig::default();
        let least = config.max_document_tokens();
        assert!(PackSource::new(0, least, Split::Train, config.clone(), SHAPE).is_ok());
        match PackSource::new(0, least - 1, Split::Train, config, SHAPE) {
            Err(DataError::PackTooShort { expected, got }) => {
                assert_eq!((expected, got), (least, least - 1))
            }
            other => panic!("{:?}", other.map(|_| ())),
        }
    }

    #[test]
    fn a_zero_in_the_patch_shape_is_refused() {
        let shape = PatchShape {
            merge_size: 0,
            ..SHAPE
        };
        let refused = PackSource::new(0, 512, Split::Train, DataConfig::default(), shape);
        assert!(matches!(
            refused,
            Err(DataError::Config {
                field: "merge_size",
                ..
            })
        ));
    }
}
