//! The token verbs: cutting, gathering, and features at the tokens that wait for them.

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{DType, Tensor, TensorData},
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::{Media, SequenceBatch},
    layout::{Documents, LayoutPolicy},
    sharder::{ContextParallelConfig, Coordinates, CpStep, PrimaryStream},
};
use burn_cp_tests::{
    Host, TestBackend, backward, device, floats, ints, on_groups, sharder, to_bits,
};

use crate::steps::{batch, cases, config, local};

#[test]
fn gathered_shards_are_the_whole_for_every_kind_and_dim() {
    type B = TestBackend;
    for (mut random, documents, layout, world_size) in cases() {
        let dim = random.int(0..=2);
        let mut shape = [2, 3, 2];
        shape[dim] = documents.seq_len();
        let whole = Host {
            shape,
            values: random.small_ints(shape.iter().product()),
        };
        on_groups(&[("cp", world_size)], |groups| {
            let step = sharder(&groups, config(&layout))
                .shard(batch::<B>(&documents), &device())
                .unwrap();
            let real: Tensor<B, 3> = whole.tensor(DType::F32);
            let shard = step.shard_tokens(real.clone(), dim, Coordinates::Input, Some(5.0));
            assert_eq!(
                Host::of(&step.gather_tokens(shard.clone(), dim, Coordinates::Input, None)),
                whole
            );
            let padded = step.gather_tokens(shard.clone(), dim, Coordinates::Padded, None);
            let len = step.layout().seq_len();
            assert_eq!(padded.dims()[dim], len);
            let fill = Host::of(&padded).rows(dim, &(documents.seq_len()..len));
            assert!(fill.values.iter().all(|value| *value == 5.0));
            // Padded already: nothing is added, so no fill is needed.
            assert_eq!(
                to_bits(&step.shard_tokens(padded, dim, Coordinates::Padded, None)),
                to_bits(&shard)
            );

            let ints =
                step.shard_tokens(whole.int_tensor::<B>(), dim, Coordinates::Input, Some(1.0));
            assert_eq!(
                Host::of(&step.gather_tokens(ints, dim, Coordinates::Input, None)),
                whole
            );
            let bools = whole.int_tensor::<B>().greater_elem(0);
            let shard = step.shard_tokens(bools.clone(), dim, Coordinates::Input, Some(1.0));
            let again = step.gather_tokens(shard, dim, Coordinates::Input, None);
            assert_eq!(Host::of(&again.int()), Host::of(&bools.int()));
        });
    }
}

/// Every rank weights the whole by its own weights: the leaf of a rank gets, at its own tokens, the sum of all ranks' weights.
#[test]
fn the_gradient_of_shard_and_gather_is_the_sum_over_ranks_at_the_ranks_own_tokens() {
    type B = Autodiff<NdArray<f64>>;
    for (mut random, documents, layout, world_size) in cases() {
        let shape = [2, documents.seq_len(), 2];
        let weights: Vec<Host> = (0..world_size)
            .map(|_| Host {
                shape,
                values: random.small_ints(shape.iter().product()),
            })
            .collect();
        on_groups(&[("cp", world_size)], |groups| {
            let step = sharder(&groups, config(&layout))
                .shard(batch::<B>(&documents), &device())
                .unwrap();
            let leaf: Tensor<B, 3> = Host::zeros(shape).tensor::<B>(DType::F64).require_grad();
            let shard = step.shard_tokens(leaf.clone(), 1, Coordinates::Input, Some(0.0));
            let whole = step.gather_tokens(shard, 1, Coordinates::Input, None);
            let rank = step.group().rank();
            let loss = (whole * weights[rank].tensor(DType::F64)).sum();
            // Also on a rank whose tokens were all added by the layout.
            let got = leaf
                .grad(&backward(&loss, step.group()))
                .expect("every rank is on the graph");
            let own = step.layout().indices(rank);
            let sum = Host::sum(&weights);
            let want = Host::from_fn(shape, |index| {
                if own.contains(&index[1]) {
                    sum.at(index)
                } else {
                    0.0
                }
            });
            assert_eq!(Host::of(&got), want);
        });
    }
}

/// The message with which `run` panics.
pub(crate) fn panic_of(run: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    let panic = panic.expect_err("this must panic");
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(other) => (*other.downcast::<&str>().expect("a message")).to_owned(),
    }
}

/// The loss weights the whole, alike on every rank: the plain gather multiplies its gradient by the number of ranks, the one for
/// replicated losses does not.
#[test]
fn a_loss_that_every_rank_computes_counts_once_or_once_per_rank_as_asked() {
    type B = Autodiff<NdArray<f64>>;
    for (mut random, documents, layout, world_size) in cases() {
        let shape = [2, documents.seq_len(), 2];
        let weights = Host {
            shape,
            values: random.small_ints(shape.iter().product()),
        };
        on_groups(&[("cp", world_size)], |groups| {
            let cp = sharder(&groups, config(&layout));
            let gradient = |replicated: bool| {
                let step = cp.shard(batch::<B>(&documents), &device()).unwrap();
                let leaf: Tensor<B, 3> = weights.tensor::<B>(DType::F64).require_grad();
                let shard = step.shard_tokens(leaf.clone(), 1, Coordinates::Input, Some(0.0));
                let whole = if replicated {
                    step.gather_tokens_for_replicated_loss(shard, 1, Coordinates::Input, None)
                } else {
                    step.gather_tokens(shard, 1, Coordinates::Input, None)
                };
                assert_eq!(Host::of(&whole.clone().inner()), weights);
                let loss = (whole * weights.tensor(DType::F64)).sum();
                Host::of(&leaf.grad(&backward(&loss, step.group())).unwrap())
            };
            let own = cp
                .config()
                .layout
                .layout(&documents, world_size)
                .unwrap()
                .indices(cp.group().rank());
            let want = |factor: f64| {
                Host::from_fn(shape, |index| {
                    if own.contains(&index[1]) {
                        factor * weights.at(index)
                    } else {
                        0.0
                    }
                })
            };
            assert_eq!(gradient(true), want(1.0));
            assert_eq!(gradient(false), want(world_size as f64));
        });
    }
}

#[test]
fn a_primary_stream_left_whole_and_cut_later_equals_one_that_came_cut() {
    for (mut random, documents, layout, world_size) in cases() {
        let shape = [documents.batch_size(), documents.seq_len(), 3];
        let embeddings = Host {
            shape,
            values: random.floats(shape.iter().product()),
        };
        on_groups(&[("cp", world_size)], |groups| {
            let cut = |primary: PrimaryStream, batch: SequenceBatch<TestBackend>| {
                let config = ContextParallelConfig {
                    primary,
                    ..config(&layout)
                };
                sharder(&groups, config).shard(batch, &device()).unwrap()
            };
            let ids = |primary| cut(primary, batch(&documents));
            let whole = ids(PrimaryStream::Whole);
            let all = whole.ids().unwrap();
            assert_eq!(
                all.dims(),
                [documents.batch_size(), whole.layout().seq_len()]
            );
            let later = whole.shard_tokens(all, 1, Coordinates::Padded, None);
            assert_eq!(
                ints(&later),
                ints(&ids(PrimaryStream::Sharded).ids().unwrap())
            );

            let batch = || {
                SequenceBatch::from_embeddings(embeddings.tensor(DType::F32))
                    .with_documents(documents.clone())
            };
            let whole = cut(PrimaryStream::Whole, batch());
            assert_eq!(whole.positions().dims()[2], whole.local_len());
            let later =
                whole.shard_tokens(whole.embeddings().unwrap(), 1, Coordinates::Padded, None);
            assert_eq!(
                to_bits(&later),
                to_bits(&cut(PrimaryStream::Sharded, batch()).embeddings().unwrap())
            );
        });
    }
}

#[test]
fn gradients_flow_back_to_the_embeddings_of_the_batch() {
    type B = Autodiff<TestBackend>;
    for primary in [PrimaryStream::Sharded, PrimaryStream::Whole] {
        let gradients = on_groups(&[("cp", 3)], |groups| {
            let leaf = Tensor::<B, 3>::ones([2, 7, 2], &device()).require_grad();
            let config = ContextParallelConfig {
                primary,
                ..config(&LayoutPolicy::HeadTail)
            };
            let batch = SequenceBatch::from_embeddings(leaf.clone());
            let step = sharder(&groups, config).shard(batch, &device()).unwrap();
            let mut local = step.embeddings().unwrap();
            if primary == PrimaryStream::Whole {
                local = step.shard_tokens(local, 1, Coordinates::Padded, None);
            }
            let weights = local
                .clone()
                .detach()
                .mul(step.positions().float().swap_dims(0, 1).swap_dims(1, 2));
            let gradient = leaf.grad(&backward(&(local * weights).sum(), step.group()));
            gradient.map_or_else(|| vec![0.0; 28], |gradient| floats(&gradient))
        });
        let sum: Vec<f64> = (0..28)
            .map(|i| gradients.iter().map(|gradient| gradient[i]).sum())
            .collect();
        assert_eq!(
            sum,
            (0..28).map(|i| f64::from(i / 2 % 7)).collect::<Vec<_>>()
        );
    }
}

fn with_media<B: ContextParallelBackend>(marked: &[Vec<bool>]) -> SequenceBatch<B> {
    let device = device();
    let [image, video] = [0, 1].map(|i| TensorData::new(marked[i].clone(), [2, 9]));
    let media = |name: &str, grid: [usize; 3], placeholders| Media {
        name: name.into(),
        pixels: Tensor::zeros([grid.iter().product(), 3], &device),
        grids: vec![grid],
        spatial_merge_size: 2,
        placeholders,
    };
    let deepstack: Vec<Tensor<B, 2>> = (1..=2)
        .map(|i| {
            Tensor::arange(0..8, &device)
                .float()
                .reshape([4, 2])
                .mul_scalar(i)
        })
        .collect();
    SequenceBatch::from_ids(TensorData::zeros::<i64, _>([2, 9]))
        .with_media(media("image", [1, 4, 4], image.clone()))
        .with_media(media("video", [3, 2, 2], video))
        .with_deepstack(image, deepstack)
}

/// Both layers' rows `[2i, 2i + 1]`, the second layer's doubled, at the marked tokens of the two rows.
fn deepstack_rows_land_at_the_tokens<B: ContextParallelBackend>(step: &CpStep<B>, image: &[usize]) {
    assert_eq!(step.deepstack().len(), 2);
    for (layer, factor) in step.deepstack().iter().zip([1.0, 2.0]) {
        let at = |row: usize, token: usize| match image
            .iter()
            .position(|place| *place == row * 9 + token)
        {
            Some(row) => [factor * 2.0 * row as f64, factor * (2.0 * row as f64 + 1.0)],
            None => [0.0; 2],
        };
        let want: Vec<_> = local(
            &Documents::full(2, 9).unwrap(),
            &step.layout().indices(step.group().rank()),
            at,
            |_, _| [0.0; 2],
        )
        .into_iter()
        .flatten()
        .collect();
        assert_eq!(floats(layer), want);
    }
}

#[test]
fn feature_rows_land_at_the_tokens_that_wait_for_them() {
    type B = Autodiff<TestBackend>;
    // The image's four tokens and the video's three, over both rows of the batch.
    let marks = |tokens: &[usize]| {
        (0..18)
            .map(|token| tokens.contains(&token))
            .collect::<Vec<_>>()
    };
    let (image, video) = ([1, 2, 9, 17], [0, 10, 11]);
    let marked = [marks(&image), marks(&video)];
    for layout in [
        LayoutPolicy::Contiguous { multiple: 1 },
        LayoutPolicy::HeadTail,
    ] {
        let gradients = on_groups(&[("cp", 3)], |groups| {
            let device = device();
            let step = sharder(&groups, config(&layout))
                .shard(with_media::<B>(&marked), &device)
                .unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let documents = Documents::full(2, 9).unwrap();
            let feature = |row: usize, token: usize| {
                let place = row * 9 + token;
                let find = |tokens: &[usize]| tokens.iter().position(|token| *token == place);
                find(&image).or_else(|| find(&video).map(|row| row + 4))
            };
            let mask = local(
                &documents,
                &tokens,
                |row, token| i64::from(feature(row, token).is_some()),
                |_, _| 0,
            );
            assert_eq!(ints(&step.media_mask().int()), mask);
            let features = Tensor::<B, 2>::from_data(
                TensorData::new((0..7).map(|i| 10.0 + i as f32).collect::<Vec<_>>(), [7, 1]),
                &device,
            )
            .require_grad();
            let scattered = step.scatter_media(features.clone());
            let want = local(
                &documents,
                &tokens,
                |row, token| feature(row, token).map_or(0.0, |row| 10.0 + row as f64),
                |_, _| 0.0,
            );
            assert_eq!(floats(&scattered), want);
            deepstack_rows_land_at_the_tokens(&step, &image);
            let gradients = backward(
                &(scattered.clone() * scattered.detach()).sum(),
                step.group(),
            );
            floats(&features.grad(&gradients).unwrap())
        });
        let sum: Vec<f64> = (0..7)
            .map(|i| gradients.iter().map(|gradient| gradient[i]).sum())
            .collect();
        assert_eq!(sum, (10..17).map(f64::from).collect::<Vec<_>>());
    }
}
