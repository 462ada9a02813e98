//! Vision features that go straight to the ranks whose tokens take them.

use burn::{
    backend::{Autodiff, NdArray},
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Tensor, TensorData, backend::AutodiffBackend},
};
use burn_cp::{
    batch::{Media, SequenceBatch},
    comm::{Groups, ProcessGroup},
    layout::{Documents, LayoutPolicy},
    nn::SequenceModel,
    sharder::{
        ContextParallel, ContextParallelConfig, CpStep, ModelCapabilities, PrimaryStream,
        StepError, Violation,
    },
    vision::{
        FrameSharded, TowerError, VisionDelivery, VisionError, VisionFeatures,
        VisionShardingConfig, VisionTower,
    },
};
use burn_cp_examples::models::qwen3_vl::Qwen3VlConfig;
use burn_cp_tests::{
    Host, Random, backward, device, floats, on_groups, on_ranks, relative_error, sharder,
};

type B = Autodiff<NdArray<f64>>;
type Grids = &'static [[usize; 3]];

const SIZE: [usize; 2] = [2, 20];
const VOCAB: usize = 64;

fn to_consumers() -> VisionShardingConfig {
    VisionShardingConfig::always().with_delivery(VisionDelivery::ToConsumers)
}

/// Images and a video of a batch, and the tokens `row * 20 + slot` that take their features.
#[derive(Clone, Copy)]
struct Case {
    images: (Grids, &'static [usize]),
    video: (Grids, &'static [usize]),
}

const CASES: [Case; 3] = [
    // In both rows, the video between the images.
    Case {
        images: (
            &[[1, 2, 4], [1, 2, 2], [1, 4, 4]],
            &[2, 3, 12, 24, 25, 26, 27],
        ),
        video: (&[[3, 2, 2]], &[6, 9, 31]),
    },
    // At the front of one row: most ranks have no such token.
    Case {
        images: (&[[1, 4, 4], [1, 2, 2]], &[0, 1, 2, 3, 4]),
        video: (&[], &[]),
    },
    // One frame: most ranks have none.
    Case {
        images: (&[[1, 2, 4]], &[19, 36]),
        video: (&[], &[]),
    },
];

fn media(name: &str, (grids, tokens): (Grids, &[usize]), seed: u64) -> Option<Media<B>> {
    if grids.is_empty() {
        return None;
    }
    let rows: usize = grids.iter().map(|[t, h, w]| t * h * w).sum();
    let width = Qwen3VlConfig::tiny(VOCAB).vision_config.patch_dim();
    let values = Random::new(seed).floats(rows * width);
    let marks: Vec<bool> = (0..SIZE[0] * SIZE[1])
        .map(|token| tokens.contains(&token))
        .collect();
    Some(Media {
        name: name.into(),
        pixels: Tensor::from_data(TensorData::new(values, [rows, width]), &device()),
        grids: grids.to_vec(),
        spatial_merge_size: 2,
        placeholders: TensorData::new(marks, SIZE),
    })
}

fn batch(case: Case, layout: &LayoutPolicy, world_size: usize) -> SequenceBatch<B> {
    let num_tokens = SIZE[0] * SIZE[1];
    let ids: Vec<i64> = (0..num_tokens).map(|i| (i * 7 % 60) as i64).collect();
    // The last three tokens are padding.
    let label = |i: usize| match i % 5 {
        1 => -100,
        _ if i >= num_tokens - 3 => -100,
        _ => (i * 11 % 60) as i64,
    };
    let labels: Vec<i64> = (0..num_tokens).map(label).collect();
    let documents = Documents::from_lengths(&[vec![7, 13], vec![1, 0, 16]], SIZE[1]).unwrap();
    let mut batch = SequenceBatch::from_ids(TensorData::new(ids, SIZE))
        .with_labels(TensorData::new(labels, SIZE));
    batch = if *layout == LayoutPolicy::DualChunkSwap {
        let aligned = documents.aligned(2 * world_size).unwrap().flattened();
        batch.with_aligned_documents(aligned)
    } else {
        batch.with_documents(documents)
    };
    let media = [
        media("image", case.images, 1),
        media("video", case.video, 2),
    ];
    for media in media.into_iter().flatten() {
        batch = batch.with_media(media);
    }
    batch
}

struct Collect<'a> {
    gradients: &'a <B as AutodiffBackend>::Gradients,
    found: Vec<Vec<f64>>,
}

impl ModuleVisitor<B> for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        let gradient = value.grad(self.gradients);
        self.found.push(floats(
            &gradient.unwrap_or_else(|| value.inner().zeros_like()),
        ));
    }
}

/// The loss, and this rank's gradients of all parameters.
fn train(
    groups: &Groups,
    config: ContextParallelConfig,
    case: Case,
    frozen: bool,
) -> (f64, Vec<Vec<f64>>) {
    let world_size = groups.along(&["cp"]).unwrap().size();
    let batch = batch(case, &config.layout, world_size);
    let model = Qwen3VlConfig::tiny(VOCAB)
        .init::<B>(&device(), 5)
        .expect("the preset is valid");
    let model = if frozen { model.freeze_vision() } else { model };
    let step = sharder(groups, config).shard(batch, &device()).unwrap();
    let capabilities = SequenceModel::<B>::capabilities(&model);
    capabilities.check_step(&step).unwrap();
    let loss = step.cross_entropy(model.forward(&step).unwrap()).unwrap();
    let gradients = loss.backward();
    let mut collect = Collect {
        gradients: &gradients,
        found: Vec::new(),
    };
    model.visit(&mut collect);
    (loss.global_value(), collect.found)
}

fn layouts(world_size: usize) -> Vec<LayoutPolicy> {
    // Uneven, out of order, and all ranks but two without a token of the batch.
    let mut custom = vec![Vec::new(); world_size];
    custom[world_size - 1] = vec![12..20, 0..5];
    custom[0].push(5..12);
    vec![
        LayoutPolicy::Contiguous { multiple: 1 },
        LayoutPolicy::HeadTail,
        LayoutPolicy::DualChunkSwap,
        LayoutPolicy::Custom(custom),
    ]
}

#[test]
fn a_model_whose_features_go_to_their_consumers_trains_as_on_one_rank() {
    for (number, case) in CASES.into_iter().enumerate() {
        for frozen in [false, true] {
            let alone = ContextParallelConfig {
                vision: VisionShardingConfig::replicated(),
                ..ContextParallelConfig::default()
            };
            let (want, want_gradients) = on_groups(&[("cp", 1)], |groups| {
                train(&groups, alone.clone(), case, frozen)
            })
            .swap_remove(0);
            for world_size in 1..=5 {
                let mut layouts = layouts(world_size);
                // Every layout meets every case and every world, half of them a frozen tower.
                layouts.retain(|_| world_size > 1);
                for (at, layout) in layouts.into_iter().enumerate() {
                    if (at + world_size) % 2 != usize::from(frozen) {
                        continue;
                    }
                    let what = format!("case {number}, {layout:?} on {world_size}, {frozen}");
                    let vision = if at == 0 && world_size == 3 {
                        // Not split, and delivered all the same.
                        VisionShardingConfig::replicated()
                            .with_delivery(VisionDelivery::ToConsumers)
                    } else {
                        to_consumers().with_min_local_patch_rows(24 * (world_size % 2))
                    };
                    let config = ContextParallelConfig {
                        layout,
                        vision,
                        ..ContextParallelConfig::default()
                    };
                    let results = on_groups(&[("cp", world_size)], |groups| {
                        train(&groups, config.clone(), case, frozen)
                    });
                    for (loss, _) in &results {
                        assert!((loss - want).abs() < 1e-11 * want, "{what}: {loss} {want}");
                    }
                    for (parameter, want) in want_gradients.iter().enumerate() {
                        let mut sum = vec![0.0; want.len()];
                        for (_, gradients) in &results {
                            for (sum, part) in sum.iter_mut().zip(&gradients[parameter]) {
                                *sum += part;
                            }
                        }
                        let error = relative_error(&sum, want);
                        assert!(error < 1e-10, "{what}, parameter {parameter}: {error:e}");
                    }
                }
            }
        }
    }
}

/// Patches are their own features: the map from pixels to features is the delivery alone.
struct Identity;

impl VisionTower<B> for Identity {
    fn spatial_merge_size(&self) -> usize {
        1
    }

    fn hidden_size(&self) -> usize {
        1
    }

    fn is_trainable(&self) -> bool {
        false
    }

    fn forward(
        &self,
        pixels: Tensor<B, 2>,
        _: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, TowerError> {
        Ok(VisionFeatures {
            embeddings: pixels.clone(),
            deepstack: vec![pixels * 2.0],
        })
    }
}

/// `<A x, y> = <x, Aᵀ y>` over all ranks: rows that several ranks take, that none takes, and ranks that take none.
#[test]
fn the_adjoint_of_a_delivery_is_its_transpose() {
    let grids = [[2, 1, 3], [1, 2, 2], [3, 1, 1]];
    let num_rows = 13;
    for world_size in 1..=5 {
        let mut random = Random::new(world_size as u64);
        let wanted: Vec<Vec<_>> = (0..world_size)
            .map(|rank| match rank {
                0 => vec![11..13, 2..7],
                3 => Vec::new(),
                _ => vec![rank..rank + 4, 12..13, 0..1],
            })
            .collect();
        let x = random.floats(num_rows * 2);
        let y: Vec<Vec<f64>> = (0..world_size).map(|_| random.floats(40 * 2)).collect();
        let config = to_consumers().with_min_local_patch_rows(4);
        let parts = on_ranks(world_size, |group| {
            let pixels =
                Tensor::<B, 2>::from_data(TensorData::new(x.clone(), [num_rows, 2]), &device())
                    .require_grad();
            let rows = &wanted[group.rank()];
            let features = FrameSharded::new(&Identity, &group, &config)
                .for_rows(rows)
                .forward(pixels.clone(), &grids)
                .unwrap();
            let num_taken: usize = rows.iter().map(ExactSizeIterator::len).sum();
            assert_eq!(features.embeddings.dims(), [num_taken.max(1), 2]);
            let taken = Tensor::cat(vec![features.embeddings, features.deepstack[0].clone()], 1);
            let weights = Host {
                shape: [1, num_taken.max(1), 4],
                values: y[group.rank()]
                    .iter()
                    .cycle()
                    .take(num_taken.max(1) * 4)
                    .copied()
                    .collect(),
            };
            let weights = if num_taken == 0 {
                Host::zeros(weights.shape)
            } else {
                weights
            };
            let product = (taken.clone() * weights.tensor(DType::F64).squeeze_dim(0)).sum();
            let gradients = backward(&product, &group);
            let gradient = pixels.grad(&gradients).unwrap();
            (floats(&product)[0], floats(&gradient), floats(&taken))
        });
        let forward: f64 = parts.iter().map(|(product, ..)| product).sum();
        let transposed: f64 = (parts.iter())
            .flat_map(|(_, gradient, _)| gradient.iter().zip(&x))
            .map(|(a, b)| a * b)
            .sum();
        assert!(
            (forward - transposed).abs() < 1e-12 * forward.abs().max(1.0),
            "{world_size}: {forward} {transposed}"
        );
        for (rank, (_, _, taken)) in parts.iter().enumerate() {
            for (row, taken) in wanted[rank].iter().cloned().flatten().zip(taken.chunks(4)) {
                let [a, b] = [x[2 * row], x[2 * row + 1]];
                assert_eq!(
                    taken,
                    [a, b, 2.0 * a, 2.0 * b],
                    "rank {rank} of {world_size}"
                );
            }
        }
    }
}

const FRAMES: usize = 64;

/// 64 frames of a token each, spread evenly over 256 tokens.
fn spread_batch() -> SequenceBatch<B> {
    let marks: Vec<bool> = (0..4 * FRAMES).map(|token| token % 4 == 1).collect();
    let pixels = Host::from_fn([1, FRAMES, 3], |[_, row, _]| (1 + row) as f64);
    let ids = TensorData::zeros::<i64, _>([1, 4 * FRAMES]);
    SequenceBatch::from_ids(ids).with_media(Media {
        name: "image".into(),
        pixels: pixels.tensor::<B>(DType::F64).squeeze_dim(0),
        grids: vec![[1, 1, 1]; FRAMES],
        spatial_merge_size: 1,
        placeholders: TensorData::new(marks, [1, 4 * FRAMES]),
    })
}

/// A step of it whose tower is split, and delivers so.
fn spread_step(groups: &Groups, delivery: VisionDelivery) -> CpStep<B> {
    let config = ContextParallelConfig {
        layout: LayoutPolicy::HeadTail,
        vision: VisionShardingConfig::always()
            .with_min_local_patch_rows(0)
            .with_delivery(delivery),
        ..ContextParallelConfig::default()
    };
    sharder(groups, config)
        .shard(spread_batch(), &device())
        .unwrap()
}

/// Rows that this rank receives from others and holds, and its tokens' features.
fn received(groups: &Groups, delivery: VisionDelivery) -> (usize, usize, Vec<f64>) {
    let step = spread_step(groups, delivery);
    let features = step.encode_media(&Identity).unwrap().expect("media");
    let local = floats(&step.scatter_media(features.embeddings.clone()));
    let (group, shares) = (step.group(), step.frame_shares(&Identity).unwrap());
    let wanted = group.host_all_gather("rows", step.media_rows()).unwrap();
    let received = match delivery {
        VisionDelivery::Gathered => FRAMES - shares.shares()[group.rank()].num_tokens,
        VisionDelivery::ToConsumers if shares.is_replicated() => 0,
        VisionDelivery::ToConsumers => {
            let plan = shares.delivery(&wanted, group.rank()).unwrap();
            let others = plan
                .pieces()
                .iter()
                .filter(|piece| piece.source != group.rank());
            others.map(|piece| piece.range.len()).sum()
        }
    };
    let held = features.embeddings.dims()[0];
    assert_eq!(features.deepstack[0].dims()[0], held);
    (received, held, local)
}

#[test]
fn what_a_rank_receives_and_holds_shrinks_with_the_number_of_ranks() {
    for world_size in [1, 2, 4, 8] {
        let of = |delivery| on_groups(&[("cp", world_size)], |groups| received(&groups, delivery));
        let gathered = of(VisionDelivery::Gathered);
        let delivered = of(VisionDelivery::ToConsumers);
        for (rank, (all, own)) in gathered.iter().zip(&delivered).enumerate() {
            let what = format!("rank {rank} of {world_size}");
            assert!(all.2 == own.2, "{what}: other features");
            assert_eq!(all.1, FRAMES, "{what}");
            assert_eq!(own.1, FRAMES / world_size, "{what}");
            assert_eq!(all.0, FRAMES - FRAMES / world_size, "{what}");
            assert!(own.0 <= FRAMES / world_size, "{what}: {}", own.0);
        }
    }
}

#[test]
fn a_frozen_tower_over_replicas_delivers_to_each_of_them() {
    let parts = on_groups(&[("cp", 2), ("tp", 2)], |groups| {
        let both = groups.along(&["cp", "tp"]).unwrap();
        let step = spread_step(&groups, VisionDelivery::ToConsumers);
        let features = step
            .encode_media_over(&Identity, &both)
            .unwrap()
            .expect("media");
        assert_eq!(features.embeddings.dims(), [FRAMES / 2, 3]);
        let step_of_all = spread_step(&groups, VisionDelivery::Gathered);
        let all = step_of_all.encode_media(&Identity).unwrap().expect("media");
        let want = floats(&step_of_all.scatter_media(all.embeddings));
        (floats(&step.scatter_media(features.embeddings)), want)
    });
    for (rank, (got, want)) in parts.iter().enumerate() {
        assert!(got == want, "rank {rank}: other features");
    }
}

#[test]
fn rows_that_no_frame_makes_are_one_error_on_every_rank() {
    let config = to_consumers();
    for world_size in [1, 3] {
        let errors = on_ranks(world_size, |group| {
            let pixels = Tensor::<B, 2>::zeros([6, 2], &device());
            let rows = if group.rank() + 1 == world_size {
                4..7
            } else {
                0..2
            };
            FrameSharded::new(&Identity, &group, &config)
                .for_rows(&[rows])
                .forward(pixels, &[[3, 1, 2]])
                .unwrap_err()
        });
        for error in errors {
            assert!(
                matches!(error, VisionError::Rows { rank, start: 4, end: 7, expected: 6 } if rank + 1 == world_size),
                "{error}"
            );
        }
    }
    let pixels = Tensor::<B, 2>::zeros([2, 2], &device());
    let error = FrameSharded::new(&Identity, &ProcessGroup::solo(), &config)
        .forward(pixels, &[[1, 1, 2]])
        .unwrap_err();
    assert!(matches!(error, VisionError::NoConsumers), "{error}");
}

#[test]
fn a_consumer_that_needs_all_rows_is_refused() {
    let config = ContextParallelConfig {
        vision: to_consumers(),
        ..ContextParallelConfig::default()
    };
    let whole = ModelCapabilities::text()
        .with_media()
        .with_vision_sharding();
    let error = whole.check_config(&config, 2).unwrap_err();
    assert_eq!(error.violations, [Violation::VisionDelivery]);
    assert!(error.to_string().contains("vision.delivery = \"gathered\""));
    whole.with_local_media().check_config(&config, 2).unwrap();
    // Nothing is delivered to a model that reads no media.
    ModelCapabilities::text().check_config(&config, 2).unwrap();
    let config = ContextParallelConfig {
        primary: PrimaryStream::Whole,
        ..config
    };
    let errors = on_groups(&[("dp", 1), ("cp", 2)], |groups| {
        ContextParallel::new(&groups, config.clone()).unwrap_err()
    });
    for error in errors {
        assert!(
            matches!(&error, StepError::Invalid { what, .. } if what == "vision.delivery"),
            "{error}"
        );
    }
}
