//! The digits file: read, checked, and split into training and held-out images.
//!
//! Source of the images: `examples/data/ATTRIBUTION.md`.

use std::io::Read;

use flate2::read::GzDecoder;
use serde::{Deserialize, Serialize};

use super::DataError;

/// Side of a source image in pixels.
pub const SIDE: usize = 8;

/// Largest grey value of the file: full ink.
const MAX_INK: u8 = 16;

/// Of this many consecutive images the last is held out: 299 of 1,797.
const HELD_OUT_EVERY: usize = 6;

const FILE: &[u8] = include_bytes!("../../data/digits.csv.gz");

/// One handwritten digit.
#[derive(Debug, Clone, PartialEq)]
pub struct Digit {
    /// `[8, 8]`, row by row, from 0 (background) to 1 (ink).
    pub ink: [f32; SIDE * SIDE],
    /// What was written: 0 to 9.
    pub value: u8,
}

/// Which images may be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Images that are trained on.
    Train,
    /// Images that are never trained on.
    HeldOut,
}

/// All digits of the file, by split.
#[derive(Debug, Clone)]
pub struct Digits {
    train: Vec<Digit>,
    held_out: Vec<Digit>,
}

impl Digits {
    /// Reads the file that is built into the program.
    ///
    /// # Errors
    ///
    /// Those of [`Digits::from_gzip`]: the file was damaged before the build.
    pub fn load() -> Result<Self, DataError> {
        Self::from_gzip(FILE)
    }

    /// Reads gzip-compressed lines of 64 grey values, 0 to 16, and a digit, 0 to 9, separated by commas.
    ///
    /// # Errors
    ///
    /// [`DataError::Unreadable`] for a broken stream, [`DataError::Line`] for a line of another form,
    /// [`DataError::TooFewImages`] if a split would be empty.
    pub fn from_gzip(bytes: &[u8]) -> Result<Self, DataError> {
        let mut text = String::new();
        GzDecoder::new(bytes).read_to_string(&mut text)?;
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for (index, line) in text.lines().enumerate() {
            let digit = parse_line(index + 1, line)?;
            // A fixed rule, not the training seed: an image that one run trains on is held out in no other.
            if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 {
                held_out.push(digit);
            } else {
                train.push(digit);
            }
        }
        let got = train.len() + held_out.len();
        if got < HELD_OUT_EVERY {
            return Err(DataError::TooFewImages {
                expected: HELD_OUT_EVERY,
                got,
            });
        }
        Ok(Self { train, held_out })
    }

    /// The digits of a split, in the order of the file; not empty.
    #[must_use]
    pub fn of(&self, split: Split) -> &[Digit] {
        match split {
            Split::Train => &self.train,
            Split::HeldOut => &self.held_out,
        }
    }
}

fn parse_line(line: usize, text: &str) -> Result<Digit, DataError> {
    let bad = |what, expected: &str, got: &str| DataError::Line {
        line,
        what,
        expected: expected.into(),
        got: got.into(),
    };
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    if fields.len() != SIDE * SIDE + 1 {
        return Err(bad("number of fields", "65", &fields.len().to_string()));
    }
    let mut ink = [0.0; SIDE * SIDE];
    for (pixel, field) in ink.iter_mut().zip(&fields) {
        let grey = field.parse::<u8>().ok().filter(|&grey| grey <= MAX_INK);
        let grey = grey.ok_or_else(|| bad("grey value", "0 to 16", field))?;
        *pixel = f32::from(grey) / f32::from(MAX_INK);
    }
    let field = fields[SIDE * SIDE];
    let value = field.parse::<u8>().ok().filter(|&value| value <= 9);
    let value = value.ok_or_else(|| bad("digit", "0 to 9", field))?;
    Ok(Digit { ink, value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};
    use std::io::Write;

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn built_in_file_splits_into_disjoint_images() {
        let digits = Digits::load().unwrap();
        let (train, held_out) = (digits.of(Split::Train), digits.of(Split::HeldOut));
        assert_eq!((train.len(), held_out.len()), (1498, 299));
        for digit in held_out {
            assert!(!train.iter().any(|other| other.ink == digit.ink));
        }
        for value in 0..10 {
            assert!(held_out.iter().filter(|digit| digit.value == value).count() >= 20);
            assert!(train.iter().filter(|digit| digit.value == value).count() >= 100);
        }
    }

    #[test]
    fn broken_files_are_refused() {
        assert!(matches!(
            Digits::from_gzip(b"no gzip"),
            Err(DataError::Unreadable { .. })
        ));
        assert!(matches!(
            Digits::from_gzip(&FILE[..FILE.len() / 2]),
            Err(DataError::Unreadable { .. })
        ));
        assert!(matches!(
            Digits::from_gzip(&gzip("")),
            Err(DataError::TooFewImages { got: 0, .. })
        ));

        let good = format!("{}7\n", "16,".repeat(64));
        assert!(matches!(
            Digits::from_gzip(&gzip(&good)),
            Err(DataError::TooFewImages { got: 1, .. })
        ));
        for (line, part) in [
            ("1,2,3".to_string(), "number of fields"),
            (format!("{}7", "17,".repeat(64)), "grey value"),
            (format!("{}10", "1,".repeat(64)), "digit"),
            (format!("{}x", "1,".repeat(64)), "digit"),
        ] {
            match Digits::from_gzip(&gzip(&format!("{good}{line}\n"))) {
                Err(DataError::Line { line: 2, what, .. }) => assert_eq!(what, part),
                other => panic!("{part}: {other:?}"),
            }
        }
    }
}
