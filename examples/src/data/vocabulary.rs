//! The token ids of the documents. There is no text to tokenise: documents are composed of ids.

/// Fills the tail of a pack; belongs to no document.
pub const PAD: i64 = 0;
/// First token of a document.
pub const BEGIN: i64 = 1;
/// Last token of a document.
pub const END: i64 = 2;
/// Stands before the placeholders of an image or of one slice of a video.
pub const VISION_START: i64 = 3;
/// Stands behind the placeholders of an image or of one slice of a video.
pub const VISION_END: i64 = 4;
/// Placeholder of one merged token of an image.
pub const IMAGE: i64 = 5;
/// Placeholder of one merged token of a video.
pub const VIDEO: i64 = 6;
/// Ends what is shown and begins the answers.
pub const QUESTION: i64 = 7;
/// Time of the first slice of a video; the following ids are those of the later slices.
pub const FIRST_TIME: i64 = 8;
/// Number of times.
pub const NUM_TIMES: usize = 4;
/// The digit 0; the following ids are 1 to 9.
pub const FIRST_DIGIT: i64 = FIRST_TIME + NUM_TIMES as i64;
/// Number of digits.
pub const NUM_DIGITS: usize = 10;
/// The first of the hues that images are tinted with, from red around the colour wheel. A question asks by hue.
pub const FIRST_HUE: i64 = FIRST_DIGIT + NUM_DIGITS as i64;
/// Number of hues.
pub const NUM_HUES: usize = 12;
/// The first filler word. Filler carries no meaning; it makes lengths and distances vary.
pub const FIRST_FILLER: i64 = FIRST_HUE + NUM_HUES as i64;
/// Number of filler words.
pub const NUM_FILLER: usize = 30;
/// Number of ids: the least `vocab_size` of a model.
pub const SIZE: usize = FIRST_FILLER as usize + NUM_FILLER;

const HUE_NAMES: [&str; NUM_HUES] = [
    "red", "orange", "yellow", "lime", "green", "mint", "cyan", "azure", "blue", "violet",
    "magenta", "rose",
];

/// A short printable form of a token id, e.g. `red` for a hue or `7` for a digit; `?` for an unknown id.
#[must_use]
pub fn name(id: i64) -> String {
    let within = |first: i64, len: usize| {
        (first..first + len as i64)
            .contains(&id)
            .then(|| id - first)
    };
    match id {
        PAD => "<pad>".into(),
        BEGIN => "<begin>".into(),
        END => "<end>".into(),
        VISION_START => "<vision>".into(),
        VISION_END => "</vision>".into(),
        IMAGE => "<image>".into(),
        VIDEO => "<video>".into(),
        QUESTION => "<question>".into(),
        _ => {
            if let Some(time) = within(FIRST_TIME, NUM_TIMES) {
                format!("<time {time}>")
            } else if let Some(digit) = within(FIRST_DIGIT, NUM_DIGITS) {
                digit.to_string()
            } else if let Some(hue) = within(FIRST_HUE, NUM_HUES) {
                HUE_NAMES[hue as usize].into()
            } else if let Some(word) = within(FIRST_FILLER, NUM_FILLER) {
                format!("word{word}")
            } else {
                "?".into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_distinct() {
        let names: HashSet<String> = (0..SIZE as i64).map(name).collect();
        assert_eq!(names.len(), SIZE);
        assert!(!names.contains("?"));
        assert_eq!(name(FIRST_DIGIT + 7), "7");
        assert_eq!(name(FIRST_HUE + 8), "blue");
        assert_eq!(name(-1), "?");
    }
}
