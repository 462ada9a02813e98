//! A real vision tower over several ranks, and media of both kinds in one step.

use std::sync::Mutex;

use burn::{
    backend::{Autodiff, NdArray},
    module::{Module, ModuleVisitor, Param},
    tensor::{Tensor, TensorData},
};
use burn_cp::{
    batch::{Media, SequenceBatch},
    collectives::CollectiveBackend,
    comm::ProcessGroup,
    layout::LayoutPolicy,
    sharder::ContextParallelConfig,
    vision::{FrameSharded, TowerError, VisionFeatures, VisionShardingConfig, VisionTower},
};
use burn_cp_examples::models::qwen3_vl::{Qwen3VlConfig, Qwen3VlVision};
use burn_cp_tests::{Host, backward, device, floats, on_groups, on_ranks, relative_error, sharder};

/// In f64 nothing but the order of sums differs.
type B = Autodiff<NdArray<f64>>;

const TOLERANCE: f64 = 1e-10;

type Grids<'a> = &'a [[usize; 3]];

fn tower() -> Qwen3VlVision<B> {
    let model = Qwen3VlConfig::tiny(64).init::<B>(&device(), 5);
    model.expect("the preset is valid").model.visual
}

/// Pixels for [`tower`] that differ from row to row; `from` is the first row's number.
fn pixels(grids: Grids<'_>, from: usize) -> Tensor<B, 2> {
    let rows: usize = grids.iter().map(|[t, h, w]| t * h * w).sum();
    let width = Qwen3VlConfig::tiny(64).vision_config.patch_dim();
    let values: Vec<f64> = (from * width..(from + rows) * width)
        .map(|i| (i as f64 * 0.37).sin() + (i as f64 * 0.011).cos())
        .collect();
    Tensor::from_data(TensorData::new(values, [rows, width]), &device())
}

fn parts<K: CollectiveBackend>(features: VisionFeatures<K>) -> Vec<Tensor<K, 2>> {
    let embeddings = std::iter::once(features.embeddings);
    embeddings.chain(features.deepstack).collect()
}

/// The gradient of every parameter, zeros where it has none.
struct Collect<'a> {
    gradients: &'a <B as burn::tensor::backend::AutodiffBackend>::Gradients,
    found: Vec<Vec<f64>>,
}

impl ModuleVisitor<B> for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        let gradient = value.grad(self.gradients);
        let gradient = gradient.unwrap_or_else(|| value.inner().zeros_like());
        self.found.push(floats(&gradient));
    }
}

/// Embeddings and deepstack layers, and the parameters' gradients of a loss over this rank's part of the tokens.
fn train(
    group: &ProcessGroup,
    config: &VisionShardingConfig,
    grids: Grids<'_>,
) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let tower = tower();
    let features = FrameSharded::new(&tower, group, config)
        .forward(pixels(grids, 0), grids)
        .unwrap();
    let parts = parts(features);
    let mut loss = Tensor::<B, 1>::zeros([1], &device());
    for (layer, part) in parts.iter().enumerate() {
        let [rows, width] = part.dims();
        // Weights of this rank's tokens, every `size`-th.
        let weight = |[_, row, column]: [usize; 3]| {
            let mine = row % group.size() == group.rank();
            let value = ((row * width + column) as f64 * 0.7 + layer as f64).cos();
            if mine { value } else { 0.0 }
        };
        let weights = Host::from_fn([1, rows, width], weight).tensor::<B>(part.dtype());
        loss = loss + (part.clone() * part.clone() * weights.squeeze_dim(0)).sum();
    }
    let gradients = backward(&loss, group);
    let mut collect = Collect {
        gradients: &gradients,
        found: Vec::new(),
    };
    tower.visit(&mut collect);
    (parts.iter().map(floats).collect(), collect.found)
}

/// Images and videos, one video, one image: many frames, and fewer frames than ranks.
const CASES: [Grids<'static>; 3] = [
    &[[1, 4, 4], [1, 2, 6], [3, 4, 2], [2, 2, 2], [1, 4, 4]],
    &[[5, 4, 4]],
    &[[1, 4, 6]],
];

#[test]
fn a_real_towers_features_and_summed_gradients_equal_those_of_one_rank() {
    for grids in CASES {
        let always = VisionShardingConfig::always();
        let (features, gradients) = train(&ProcessGroup::solo(), &always, grids);
        for world_size in 2..=4 {
            for floor in [0, 96] {
                let config = always.clone().with_min_local_patch_rows(floor);
                let what = format!("{grids:?} on {world_size} ranks, floor {floor}");
                let results = on_ranks(world_size, |group| train(&group, &config, grids));
                let mut sums: Vec<Vec<f64>> = gradients
                    .iter()
                    .map(|gradient| vec![0.0; gradient.len()])
                    .collect();
                for (rank, (got, gradients)) in results.iter().enumerate() {
                    for (layer, (got, want)) in got.iter().zip(&features).enumerate() {
                        let error = relative_error(got, want);
                        assert!(
                            error < TOLERANCE,
                            "{what}, rank {rank}, layer {layer}: {error:e}"
                        );
                    }
                    for (sum, gradient) in sums.iter_mut().zip(gradients) {
                        sum.iter_mut()
                            .zip(gradient)
                            .for_each(|(sum, part)| *sum += part);
                    }
                }
                for (parameter, (got, want)) in sums.iter().zip(&gradients).enumerate() {
                    let error = relative_error(got, want);
                    assert!(
                        error < TOLERANCE,
                        "{what}, parameter {parameter}: {error:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_rank_without_a_frame_has_no_part_in_a_real_towers_gradients() {
    let config = VisionShardingConfig::always();
    let results = on_ranks(3, |group| train(&group, &config, &[[2, 4, 4]]).1);
    assert!(
        results[0]
            .iter()
            .all(|gradient| gradient.iter().any(|&value| value != 0.0))
    );
    assert!(results[2].iter().flatten().all(|&value| value == 0.0));
}

/// A tower that notes what it is run with.
struct Noting<'a> {
    tower: &'a Qwen3VlVision<B>,
    calls: Mutex<Vec<Vec<[usize; 3]>>>,
}

impl VisionTower<B> for Noting<'_> {
    fn spatial_merge_size(&self) -> usize {
        VisionTower::<B>::spatial_merge_size(self.tower)
    }

    fn hidden_size(&self) -> usize {
        VisionTower::<B>::hidden_size(self.tower)
    }

    fn is_trainable(&self) -> bool {
        self.tower.is_trainable()
    }

    fn forward(
        &self,
        pixels: Tensor<B, 2>,
        grids: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, TowerError> {
        self.calls.lock().unwrap().push(grids.to_vec());
        self.tower.forward(pixels, grids)
    }
}

const IMAGES: Grids<'static> = &[[1, 2, 4], [1, 2, 2]];
const VIDEO: Grids<'static> = &[[3, 2, 2]];
/// Tokens of the images and of the video; the video comes first in the sequence, and its frames stand apart.
const IMAGE_TOKENS: [usize; 3] = [5, 6, 8];
const VIDEO_TOKENS: [usize; 3] = [1, 3, 10];
const NUM_TOKENS: usize = 12;

fn media(name: &str, grids: Grids<'_>, from: usize, tokens: &[usize]) -> Media<B> {
    let placeholders: Vec<bool> = (0..NUM_TOKENS)
        .map(|token| tokens.contains(&token))
        .collect();
    Media {
        name: name.into(),
        pixels: pixels(grids, from),
        grids: grids.to_vec(),
        spatial_merge_size: 2,
        placeholders: TensorData::new(placeholders, [1, NUM_TOKENS]),
    }
}

fn ids() -> SequenceBatch<B> {
    SequenceBatch::from_ids(TensorData::new(vec![1_i64; NUM_TOKENS], [1, NUM_TOKENS]))
}

/// What each token of the sequence is given: the feature of its image or video, encoded on their own, or zeros.
fn expected_rows() -> Vec<Vec<f64>> {
    let tower = tower();
    let encode = |grids, from| parts(tower.forward(pixels(grids, from), grids).unwrap());
    let (images, video) = (encode(IMAGES, 0), encode(VIDEO, 12));
    let layer = |(images, video): (&Tensor<B, 2>, &Tensor<B, 2>)| {
        let width = images.dims()[1];
        let mut rows = vec![0.0; NUM_TOKENS * width];
        for (tokens, features) in [(IMAGE_TOKENS, images), (VIDEO_TOKENS, video)] {
            for (token, row) in tokens.iter().zip(floats(features).chunks(width)) {
                rows[token * width..][..width].copy_from_slice(row);
            }
        }
        rows
    };
    images.iter().zip(&video).map(layer).collect()
}

#[test]
fn images_and_a_video_are_encoded_in_one_call_and_find_their_tokens() {
    let expected = expected_rows();
    for world_size in 1..=4 {
        for layout in [
            LayoutPolicy::Contiguous { multiple: 1 },
            LayoutPolicy::HeadTail,
        ] {
            let config = ContextParallelConfig {
                layout,
                vision: VisionShardingConfig::always(),
                ..ContextParallelConfig::default()
            };
            let results = on_groups(&[("cp", world_size)], |groups| {
                let tower = tower();
                let noting = Noting {
                    tower: &tower,
                    calls: Mutex::default(),
                };
                let batch = ids()
                    .with_media(media("image", IMAGES, 0, &IMAGE_TOKENS))
                    .with_media(media("video", VIDEO, 12, &VIDEO_TOKENS));
                let step = sharder(&groups, config.clone())
                    .shard(batch, &device())
                    .unwrap();
                let features = step.encode_media(&noting).unwrap().expect("media");
                let local: Vec<Vec<f64>> = parts(features)
                    .into_iter()
                    .map(|part| floats(&step.scatter_media(part)))
                    .collect();
                let tokens = step.layout().indices(step.group().rank());
                (noting.calls.into_inner().unwrap(), tokens, local)
            });
            for (rank, (calls, tokens, local)) in results.iter().enumerate() {
                let what = format!("{:?}, rank {rank} of {world_size}", config.layout);
                assert_eq!(calls.len(), 1, "{what}: {calls:?}");
                for (got, whole) in local.iter().zip(&expected) {
                    let width = whole.len() / NUM_TOKENS;
                    let row = |&token: &usize| match token {
                        NUM_TOKENS.. => vec![0.0; width],
                        token => whole[token * width..][..width].to_vec(),
                    };
                    let want: Vec<f64> = tokens.iter().flat_map(row).collect();
                    let error = relative_error(got, &want);
                    assert!(error < TOLERANCE, "{what}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn the_tower_runs_whole_or_not_at_all_where_splitting_does_not_pay() {
    let default = VisionShardingConfig::default;
    let batch = |name: &str| match name {
        "images" => ids().with_media(media("image", IMAGES, 0, &IMAGE_TOKENS)),
        "video" => ids().with_media(media("video", VIDEO, 12, &VIDEO_TOKENS)),
        _ => ids(),
    };
    // What the batch has, configuration, and what the tower of each of three ranks is run with, if at all.
    let table: [(_, _, Option<Grids<'_>>); 5] = [
        ("nothing", VisionShardingConfig::always(), None),
        ("images", VisionShardingConfig::replicated(), Some(IMAGES)),
        // Three tokens of two frames are below both thresholds.
        (
            "images",
            default().with_min_tokens(4).with_min_frames(3),
            Some(IMAGES),
        ),
        // Three tokens are few, three frames are not.
        (
            "video",
            default()
                .with_min_tokens(4)
                .with_min_frames(3)
                .with_min_local_patch_rows(0),
            Some(&[[1, 2, 2]]),
        ),
        (
            "video",
            default().with_min_tokens(3).with_min_local_patch_rows(8),
            Some(&[[1, 2, 2], [1, 2, 2]]),
        ),
    ];
    for (name, vision, expected) in table {
        let config = ContextParallelConfig {
            vision,
            ..ContextParallelConfig::default()
        };
        let calls = on_groups(&[("cp", 3)], |groups| {
            let tower = tower();
            let noting = Noting {
                tower: &tower,
                calls: Mutex::default(),
            };
            let step = sharder(&groups, config.clone())
                .shard(batch(name), &device())
                .unwrap();
            let features = step.encode_media(&noting).unwrap();
            let calls = noting.calls.into_inner().unwrap();
            assert_eq!(features.is_some(), !calls.is_empty());
            calls
        });
        let expected: Vec<Vec<_>> = expected.iter().map(|grids| grids.to_vec()).collect();
        for (rank, calls) in calls.into_iter().enumerate() {
            assert_eq!(calls, expected, "rank {rank}, {name}, {:?}", config.vision);
        }
    }
}
