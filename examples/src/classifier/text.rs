//! Real texts to tell apart: passages of a licence, of prose about this project, and of Rust source.

use rand::{Rng, SeedableRng, rngs::SmallRng};

/// One text for each class.
const SOURCES: [&str; 3] = [
    include_str!("../../../LICENSE-APACHE"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../train/worker.rs"),
];

/// What each class is called.
pub const CLASSES: [&str; SOURCES.len()] = ["licence", "prose", "source"];
/// Number of token ids: those of bytes, and 0 for padding, which no text holds.
pub const VOCAB_SIZE: usize = 256;
/// Bytes of a passage, from and to.
const PASSAGE: [usize; 2] = [40, 160];
/// The part of each text, from its start, that is trained on.
const TRAINED: f64 = 0.8;

/// The longest passage.
pub const MAX_LEN: usize = PASSAGE[1];

/// Passages one behind the other, each a document of bytes with the class that it is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passages {
    /// Byte ids and, behind the last passage, zeros: `tokens` of them.
    pub ids: Vec<i64>,
    /// Bytes of each passage.
    pub lengths: Vec<usize>,
    /// Class of each passage.
    pub classes: Vec<usize>,
}

impl Passages {
    /// A row of `tokens` full of passages, which depend on `seed` only: of the part of each text that is trained on, or of the rest.
    pub fn pack(seed: u64, tokens: usize, held_out: bool) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut pack = Self {
            ids: Vec::with_capacity(tokens),
            lengths: Vec::new(),
            classes: Vec::new(),
        };
        loop {
            let class = random.random_range(0..SOURCES.len());
            let bytes = part(SOURCES[class].as_bytes(), held_out);
            let len = random.random_range(PASSAGE[0]..=PASSAGE[1]);
            let start = random.random_range(0..bytes.len().saturating_sub(len).max(1));
            if pack.ids.len() + len > tokens {
                pack.ids.resize(tokens, 0);
                return pack;
            }
            let passage = &bytes[start..(start + len).min(bytes.len())];
            pack.ids.extend(passage.iter().map(|byte| i64::from(*byte)));
            pack.lengths.push(passage.len());
            pack.classes.push(class);
        }
    }

    /// The class at the first token of each passage, and `ignored` everywhere else.
    pub fn labels(&self, ignored: i64) -> Vec<i64> {
        let mut labels = vec![ignored; self.ids.len()];
        let mut start = 0;
        for (&len, &class) in self.lengths.iter().zip(&self.classes) {
            labels[start] = class as i64;
            start += len;
        }
        labels
    }
}

fn part(bytes: &[u8], held_out: bool) -> &[u8] {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )]
    let cut = (bytes.len() as f64 * TRAINED) as usize;
    if held_out {
        &bytes[cut..]
    } else {
        &bytes[..cut]
    }
}
