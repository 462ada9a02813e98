//! Prompts, positions and patches against the reference processor.

use burn_cp_examples::data::{IGNORED_LABEL, MediaKind};

use crate::fixture::{Case, directory, grids_of, pixels_of};

const CASES: [&str; 9] = [
    "untied-text",
    "untied-image",
    "untied-images",
    "untied-video",
    "untied-mixed",
    "untied-packed",
    "untied-left",
    "untied-right",
    "tied-mixed",
];

fn model_of(name: &str) -> &str {
    name.split('-').next().unwrap()
}

#[test]
fn prompts_and_ids_are_those_of_the_reference() {
    for name in CASES {
        let case = Case::read(name);
        let directory = directory(model_of(name));
        let processor = directory.processor();
        for (messages, prompt) in case.messages.iter().zip(&case.prompts) {
            assert_eq!(
                &processor.render(messages, false).unwrap(),
                prompt,
                "{name}"
            );
        }
        for (document, (ids, labels)) in case
            .documents(processor)
            .iter()
            .zip(case.ids.iter().zip(&case.labels))
        {
            assert_eq!(&document.ids, ids, "{name}");
            let mut shifted = labels[1..].to_vec();
            shifted.push(IGNORED_LABEL);
            assert_eq!(document.labels, shifted, "{name}");
            assert!(
                shifted.iter().any(|&label| label != IGNORED_LABEL),
                "{name}"
            );
        }
    }
}

#[test]
fn positions_and_grids_are_those_of_the_reference() {
    for name in CASES {
        let case = Case::read(name);
        let documents = case.documents(directory(model_of(name)).processor());
        let positions: Vec<i64> = (0..3)
            .flat_map(|axis| {
                documents
                    .iter()
                    .flat_map(move |document| document.positions[axis].clone())
            })
            .collect();
        assert_eq!(positions, case.ints("position_ids"), "{name}");
        assert_eq!(
            grids_of(&documents, MediaKind::Image),
            case.ints("image_grid_thw"),
            "{name}"
        );
        assert_eq!(
            grids_of(&documents, MediaKind::Video),
            case.ints("video_grid_thw"),
            "{name}"
        );
    }
}

/// Enlarged, shrunk and unchanged pictures, gray and transparent ones, frames of a folder and of an animation.
#[test]
fn patches_are_within_one_level_of_the_reference() {
    for name in CASES {
        let case = Case::read(name);
        let directory = directory(model_of(name));
        let documents = case.documents(directory.processor());
        let patch_dim = directory.config().vision_config.patch_dim();
        for (kind, key) in [
            (MediaKind::Image, "pixel_values"),
            (MediaKind::Video, "pixel_values_videos"),
        ] {
            let got = pixels_of(&documents, kind, patch_dim);
            let want = case.tensor(key).unwrap_or_default();
            assert_eq!(got.len(), want.len(), "{name} {key}");
            let differences: Vec<f64> = got
                .iter()
                .zip(want)
                .map(|(&got, want)| (f64::from(got) - want).abs())
                .collect();
            let largest = differences.iter().copied().fold(0.0, f64::max);
            let differing = differences
                .iter()
                .filter(|&&difference| difference > 1e-6)
                .count();
            println!(
                "{name} {key}: largest difference {largest:.2e}, {differing} of {} differ",
                got.len()
            );
            // The reference's weights have 15 bits: where that changes the rounding, it is by one of 255 levels, which are 2/255 apart.
            assert!(largest < 1.01 * 2.0 / 255.0, "{name} {key}: {largest}");
            assert!(
                differing * 50 <= got.len(),
                "{name} {key}: {differing} of {}",
                got.len()
            );
        }
    }
}
