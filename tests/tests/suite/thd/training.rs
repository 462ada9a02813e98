//! A small model with media, trained on packed batches in chunks over several ranks, against one rank that knows no streams.

use std::sync::Mutex;

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{Int, Tensor, TensorData, activation, backend::AutodiffBackend},
};
use burn_cp::{
    attention::AttentionOptions,
    batch::Media,
    comm::ProgramOrder,
    loss::NumLabels,
    sharder::{ContextParallel, ContextParallelConfig, CpStep, MediaKind, ThdSharder},
    vision::{TowerError, VisionDelivery, VisionFeatures, VisionShardingConfig, VisionTower},
};
use burn_cp_tests::{Random, backward, device, floats, on_groups, relative_error, sharder};

use super::{
    IMAGE, VIDEO, config, in_chunks,
    packed::{Packed, patches},
};

/// In f64 nothing but the order of sums differs.
type B = Autodiff<NdArray<f64>>;

const TOLERANCE: f64 = 1e-10;
const VOCAB: usize = 64;
const HIDDEN: usize = 8;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 4;
const V_HEAD_DIM: usize = 3;

/// Projects each patch on its own. Notes the patches that it is given.
#[derive(Debug)]
struct Tower {
    weight: Tensor<B, 2>,
    given: Mutex<Vec<Vec<f64>>>,
}

impl VisionTower<B> for Tower {
    fn spatial_merge_size(&self) -> usize {
        1
    }

    fn hidden_size(&self) -> usize {
        HIDDEN
    }

    fn is_trainable(&self) -> bool {
        true
    }

    fn forward(
        &self,
        pixels: Tensor<B, 2>,
        _: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, TowerError> {
        self.given.lock().unwrap().push(floats(&pixels));
        Ok(VisionFeatures {
            embeddings: activation::tanh(pixels.matmul(self.weight.clone())),
            deepstack: Vec::new(),
        })
    }
}

/// Embeddings and features, two layers of attention (full with sinks, window), logits.
#[derive(Debug)]
struct Model {
    tower: Tower,
    /// Table of embeddings; per layer projections to queries, keys, values and back; logits.
    weights: Vec<Tensor<B, 2>>,
    sinks: Tensor<B, 1>,
}

impl Model {
    fn new() -> Self {
        let mut random = Random::new(11);
        let mut weight = |rows: usize, columns: usize| {
            let scale = 0.7 / (rows as f64).sqrt();
            let values = random.floats(rows * columns);
            let values: Vec<f64> = values.into_iter().map(|value| value * scale).collect();
            let data = TensorData::new(values, [rows, columns]);
            Tensor::<B, 2>::from_data(data, &device()).require_grad()
        };
        let tower = weight(2, HIDDEN);
        let mut weights = vec![weight(VOCAB, HIDDEN)];
        for _ in 0..2 {
            for width in [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * V_HEAD_DIM] {
                weights.push(weight(HIDDEN, width));
            }
            weights.push(weight(HEADS * V_HEAD_DIM, HIDDEN));
        }
        weights.push(weight(HIDDEN, VOCAB));
        let sinks = Tensor::from_floats([0.4, -0.9, 1.3, 0.1], &device()).require_grad();
        Self {
            tower: Tower {
                weight: tower,
                given: Mutex::default(),
            },
            weights,
            sinks,
        }
    }

    fn forward(&self, step: &CpStep<B>) -> Tensor<B, 3> {
        let ids: Tensor<B, 2, Int> = step.ids().unwrap();
        let [rows, tokens] = ids.dims();
        let embedded = self.weights[0]
            .clone()
            .select(0, ids.reshape([rows * tokens]));
        let mut x = embedded.reshape([rows, tokens, HIDDEN]);
        if let Some(features) = step.encode_media(&self.tower).unwrap() {
            let keep = step.media_mask().bool_not().float().unsqueeze_dim::<3>(2);
            x = x * keep + step.scatter_media(features.embeddings);
        }
        // Positions of all axes count.
        let turns = step
            .positions()
            .sum_dim(0)
            .float()
            .reshape([rows, tokens, 1]);
        x = x + (turns * 0.1).sin();
        for (layer, of_layer) in self.weights[1..9].chunks(4).enumerate() {
            let heads = |which: usize, width: usize| {
                let wide = x.clone().matmul(of_layer[which].clone().unsqueeze());
                let num = wide.dims()[2] / width;
                wide.reshape([rows, tokens, num, width]).swap_dims(1, 2)
            };
            let (q, k, v) = (heads(0, HEAD_DIM), heads(1, HEAD_DIM), heads(2, V_HEAD_DIM));
            let out = if layer == 0 {
                let options = AttentionOptions::causal();
                step.attention_with_sinks(q, k, v, self.sinks.clone(), &options)
            } else {
                step.attention(q, k, v, &AttentionOptions::causal().with_window(3))
            };
            let out = out
                .swap_dims(1, 2)
                .reshape([rows, tokens, HEADS * V_HEAD_DIM]);
            x = x + out.matmul(of_layer[3].clone().unsqueeze());
        }
        x.matmul(self.weights[9].clone().unsqueeze())
    }

    /// Gradients of all parameters, zeros where there are none.
    fn gradients(&self, grads: &<B as AutodiffBackend>::Gradients) -> Vec<Vec<f64>> {
        let of = |weight: &Tensor<B, 2>| match weight.grad(grads) {
            Some(grad) => floats(&grad),
            None => vec![0.0; weight.shape().num_elements()],
        };
        let sinks = self.sinks.grad(grads);
        let sinks = sinks.map_or(vec![0.0; HEADS], |grad| floats(&grad));
        let weights = [&self.tower.weight].into_iter().chain(&self.weights);
        weights.map(of).chain([sinks]).collect()
    }
}

fn add(sums: &mut Vec<Vec<f64>>, more: Vec<Vec<f64>>) {
    if sums.is_empty() {
        *sums = more;
        return;
    }
    for (sum, more) in sums.iter_mut().zip(more) {
        for (sum, more) in sum.iter_mut().zip(more) {
            *sum += more;
        }
    }
}

/// Loss and gradients of one rank, in rows as they are, with the media in the batch.
fn on_one_rank(packed: &Packed) -> (f64, Vec<Vec<f64>>) {
    let model = Model::new();
    let mut batch = packed.batch::<B>();
    for (name, placeholder) in [("images", IMAGE), ("videos", VIDEO)] {
        let num = packed.count(0..packed.ids.len(), placeholder);
        if num > 0 {
            let mask = packed.ids.iter().map(|id| *id == placeholder);
            batch = batch.with_media(Media {
                name: name.into(),
                pixels: patches(0..num, placeholder),
                grids: vec![[1, 1, num]],
                spatial_merge_size: 1,
                placeholders: TensorData::new(mask.collect::<Vec<_>>(), packed.size),
            });
        }
    }
    let config = ContextParallelConfig {
        vision: VisionShardingConfig::replicated(),
        ..ContextParallelConfig::default()
    };
    let step = ContextParallel::solo(config)
        .shard(batch, &device())
        .unwrap();
    let loss = step.cross_entropy(model.forward(&step)).unwrap();
    (loss.global_value(), model.gradients(&loss.backward()))
}

/// The same in chunks over ranks: the sum of the chunks' losses, and of all ranks' gradients. `together`: one backward pass.
fn in_streams(
    packed: &Packed,
    (world_size, num_chunks): (usize, usize),
    vision: &VisionShardingConfig,
    together: bool,
) -> (f64, Vec<Vec<f64>>) {
    let results = on_groups(&[("cp", world_size)], |groups| {
        let model = Model::new();
        let config = ContextParallelConfig {
            vision: vision.clone(),
            ..config()
        };
        let cp = ThdSharder::new(sharder(&groups, config), in_chunks(num_chunks)).unwrap();
        let (batch, media) = (packed.batch::<B>(), packed.slots(num_chunks));
        let step = match together {
            true => cp.shard_in_order(batch, media, &device(), &ProgramOrder::new()),
            false => cp.shard(batch, media, &device()),
        };
        let step = step.unwrap();
        let labels: NumLabels = step.num_labels().unwrap();
        let losses = step.steps().iter().map(|chunk| {
            let loss = chunk.cross_entropy_over(model.forward(chunk), labels);
            loss.unwrap()
        });
        let (mut global, mut gradients) = (0.0, Vec::new());
        if together {
            let mut sum = Tensor::<B, 1>::zeros([1], &device());
            for loss in losses {
                global += loss.global_value();
                sum = sum + loss.local;
            }
            gradients = model.gradients(&backward(&sum, cp.context().group()));
        } else {
            for loss in losses {
                global += loss.global_value();
                add(&mut gradients, model.gradients(&loss.backward()));
            }
        }
        (global, gradients)
    });
    let mut sums = Vec::new();
    let loss = results[0].0;
    for (of_rank, gradients) in results {
        assert_eq!(
            of_rank.to_bits(),
            loss.to_bits(),
            "every rank reports one loss"
        );
        add(&mut sums, gradients);
    }
    (loss, sums)
}

#[test]
fn chunks_over_ranks_give_the_loss_and_the_gradients_of_one_rank_without_streams() {
    chunks_over_ranks(|_| false);
}

#[test]
fn one_backward_pass_over_all_chunks_gives_the_same() {
    chunks_over_ranks(|_| true);
}

fn chunks_over_ranks(one_pass: impl Fn(usize) -> bool) {
    let visions = [
        VisionShardingConfig::replicated(),
        VisionShardingConfig::always(),
        VisionShardingConfig::always().with_delivery(VisionDelivery::ToConsumers),
    ];
    for seed in 0..4 {
        let packed = Packed::random(&mut Random::new(900 + seed), 4, 8);
        let (loss, gradients) = on_one_rank(&packed);
        assert!(loss > 0.0);
        for world_size in [1, 2, 4] {
            for num_chunks in [1, 2, 4] {
                let vision = &visions[(seed as usize + num_chunks + world_size) % 3];
                let together = one_pass(num_chunks);
                let what = format!(
                    "seed {seed}, {world_size} ranks, {num_chunks} chunks, {vision:?}, one pass: {together}"
                );
                let (got, sums) = in_streams(&packed, (world_size, num_chunks), vision, together);
                assert!(
                    relative_error(&[got], &[loss]) < TOLERANCE,
                    "{what}: {got}, {loss}"
                );
                for (which, (got, want)) in sums.iter().zip(&gradients).enumerate() {
                    let error = relative_error(got, want);
                    assert!(
                        error < TOLERANCE,
                        "{what}: gradient {which} is off by {error}"
                    );
                }
            }
        }
    }
}

/// A batch of two chunks: only the tail of the first one's row waits for a video, which one of two ranks owns, and the second
/// one's waits for nothing.
fn lopsided() -> Packed {
    let mut ids = vec![1; 16];
    ids[2..4].fill(VIDEO);
    Packed {
        size: [2, 8],
        labels: ids
            .iter()
            .map(|id| if *id == 1 { 1 } else { -100 })
            .collect(),
        ids,
        positions: vec![0; 48],
        lengths: vec![vec![[8, 8]]; 2],
    }
}

#[test]
fn vision_runs_on_every_rank_where_any_token_waits_and_on_none_where_none_does() {
    let packed = lopsided();
    for vision in [
        VisionShardingConfig::always().with_min_local_patch_rows(0),
        VisionShardingConfig::replicated(),
    ] {
        on_groups(&[("cp", 2)], |groups| {
            let model = Model::new();
            let config = ContextParallelConfig {
                vision: vision.clone(),
                ..config()
            };
            let cp = ThdSharder::new(sharder(&groups, config), in_chunks(2)).unwrap();
            let step = cp
                .shard(packed.batch::<B>(), packed.slots(2), &device())
                .unwrap();
            let rank = cp.context().group().rank();
            let local = step.media_rows(0, MediaKind::Video);
            assert_eq!(local, if rank == 1 { vec![0, 1] } else { vec![] });
            let features = step.steps()[0].encode_media(&model.tower).unwrap();
            let features = features
                .expect("a token waits, on whichever rank")
                .embeddings;
            let given = std::mem::take(&mut *model.tower.given.lock().unwrap());
            let all = floats(&patches::<B>(0..2, VIDEO));
            let want = match vision.enabled {
                // Pixels are not cut by tokens: a rank computes on all of them, or on its frames.
                false => all,
                true => all[2 * rank..2 * rank + 2].to_vec(),
            };
            assert_eq!(given, [want]);
            // Both take the rows of their own tokens, and a rank without any stays on the tower's graph.
            let own = step.select_media(0, MediaKind::Video, features).unwrap();
            assert_eq!(own.dims()[0], [1, 2][rank]);
            let grads = backward(&own.sum(), cp.context().group());
            let weight = model.tower.weight.grad(&grads);
            assert!(
                vision.enabled || (floats(&weight.unwrap()) == [0.0; 2 * HIDDEN]) == (rank == 0)
            );

            assert!(
                step.steps()[1]
                    .encode_media(&model.tower)
                    .unwrap()
                    .is_none()
            );
            assert!(model.tower.given.lock().unwrap().is_empty());
        });
    }
}
