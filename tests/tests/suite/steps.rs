//! What a step holds of a batch on every rank, against a computation on the host, and the token verbs.

use burn::{
    backend::{Autodiff, Flex, NdArray},
    tensor::{Bool, DType, Int, Tensor, TensorData, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::{Media, PadRule, SequenceBatch, Stream, StreamDeclaration},
    layout::{Documents, LayoutPolicy},
    sharder::{ContextParallelConfig, Extent, PrimaryStream},
};
use burn_cp_tests::{
    Host, Random, backward, floats, ints, on_groups, random_documents, random_layout, sharder, to_bits,
};

const NUM_CASES: u64 = 40;

fn cases() -> impl Iterator<Item = (Random, Documents, LayoutPolicy, usize)> {
    (0..NUM_CASES).map(|seed| {
        let mut random = Random::new(1000 + seed);
        let batch = random.int(1..=3);
        let documents = random_documents(&mut random, batch);
        let world_size = random.int(1..=6);
        let layout = random_layout(&mut random, world_size, documents.seq_len());
        (random, documents, layout, world_size)
    })
}

fn config(layout: &LayoutPolicy) -> ContextParallelConfig {
    ContextParallelConfig { layout: layout.clone(), padding_token_id: 9, ..ContextParallelConfig::default() }
}

/// `[batch, seq]` values that name their place.
fn numbered(documents: &Documents, from: i64) -> TensorData {
    let shape = [documents.batch_size(), documents.seq_len()];
    let len = i64::try_from(shape[0] * shape[1]).unwrap();
    TensorData::new((from..from + len).collect::<Vec<_>>(), shape)
}

fn batch<B: Backend>(documents: &Documents) -> SequenceBatch<B> {
    SequenceBatch::from_ids(numbered(documents, 100)).with_documents(documents.clone())
}

/// Row by row the value of each of a rank's tokens: `at` of a token of the batch, `pad` of an added one that is so far behind the
/// last.
fn local<T>(
    documents: &Documents,
    tokens: &[usize],
    at: impl Fn(usize, usize) -> T,
    pad: impl Fn(usize, usize) -> T,
) -> Vec<T> {
    let seq = documents.seq_len();
    let rows = 0..documents.batch_size();
    let value = |row, token| if token < seq { at(row, token) } else { pad(row, token - seq) };
    rows.flat_map(|row| tokens.iter().map(|&token| value(row, token)).collect::<Vec<_>>()).collect()
}

/// Tokens counted from the start of the latest document that has any, or of the row.
fn position(documents: &Documents, row: usize, token: usize) -> i64 {
    let starts = documents.row(row).iter().filter(|document| document.extent.start < document.extent.end);
    let start = starts.map(|document| document.extent.start).filter(|start| *start <= token).max().unwrap_or(0);
    i64::try_from(token - start).unwrap()
}

#[test]
fn every_rank_holds_its_own_tokens_of_every_stream() {
    type B = Flex;
    for (_, documents, layout, world_size) in cases() {
        let ignored = |place: i64| if place % 5 == 0 { -100 } else { place };
        let labels = numbered(&documents, 0).iter::<i64>().map(ignored).collect::<Vec<_>>();
        let labels = TensorData::new(labels, [documents.batch_size(), documents.seq_len()]);
        on_groups(&[("cp", world_size)], |groups| {
            let batch = batch::<B>(&documents).with_labels(labels.clone()).with_vocab_size(5000);
            let step = sharder(&groups, config(&layout)).shard(batch, &Default::default()).unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let seq = documents.seq_len();
            let place = |row: usize, token: usize| i64::try_from(row * seq + token).unwrap();
            assert_eq!((step.batch_size(), step.input_len()), (documents.batch_size(), seq));
            assert_eq!((step.local_len(), step.layout().world_size()), (tokens.len(), world_size));
            assert!(step.local_len() > 0);

            let want = local(&documents, &tokens, |row, token| 100 + place(row, token), |_, _| 9);
            assert_eq!(ints(&step.ids().unwrap()), want);
            assert!(step.embeddings().is_err());
            let want = local(&documents, &tokens, |row, token| ignored(place(row, token)), |_, _| -100);
            assert_eq!(step.labels().unwrap(), want);
            let end = |row| position(&documents, row, seq - 1) + 1;
            let want = local(
                &documents,
                &tokens,
                |row, token| position(&documents, row, token),
                |row, behind| end(row) + i64::try_from(behind).unwrap(),
            );
            assert_eq!(step.positions().dims(), [1, documents.batch_size(), tokens.len()]);
            assert_eq!(ints(&step.positions()), want);
            let real = |row: usize, token: usize| {
                documents.row(row).iter().any(|document| document.runs.iter().any(|run| run.contains(&token)))
            };
            let want = local(&documents, &tokens, |row, token| i64::from(!real(row, token)), |_, _| 1);
            assert_eq!(ints(&step.padding_mask().int()), want);
            assert_eq!(step.num_local_labels(), step.labels().unwrap().iter().filter(|l| **l != -100).count() as u64);
        });
    }
}

#[test]
fn given_positions_continue_through_padding_on_every_axis() {
    for (mut random, documents, layout, world_size) in cases() {
        let shape = [3, documents.batch_size(), documents.seq_len()];
        let values: Vec<i64> =
            (0..shape.iter().product()).map(|_| i64::try_from(random.int(0..=999)).unwrap()).collect();
        on_groups(&[("cp", world_size)], |groups| {
            let positions = TensorData::new(values.clone(), shape);
            let batch = batch::<Flex>(&documents).with_positions(positions);
            let step = sharder(&groups, config(&layout)).shard(batch, &Default::default()).unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let [_, rows, seq] = shape;
            let want = (0..3).flat_map(|axis| {
                let at = |row: usize, token: usize| values[(axis * rows + row) * seq + token];
                local(&documents, &tokens, at, |row, behind| at(row, seq - 1) + 1 + i64::try_from(behind).unwrap())
            });
            assert_eq!(step.positions().dims(), [3, rows, tokens.len()]);
            assert_eq!(ints(&step.positions()), want.collect::<Vec<_>>());
        });
    }
}

fn declaration(name: &str, dim: usize, pad: f64) -> StreamDeclaration {
    StreamDeclaration { name: name.into(), dim, pad: PadRule::Value(pad) }
}

#[test]
fn further_streams_are_cut_along_their_own_dim_and_padded_by_their_own_rule() {
    type B = NdArray<f32>;
    for (mut random, documents, layout, world_size) in cases() {
        let (rows, seq) = (documents.batch_size(), documents.seq_len());
        let floats = Host { shape: [rows, 2, seq], values: random.floats(rows * 2 * seq) };
        let ints = Host { shape: [seq, rows, 1], values: random.small_ints(rows * seq) };
        on_groups(&[("cp", world_size)], |groups| {
            let bools: Tensor<B, 3, Bool> = ints.int_tensor::<B>().greater_elem(0);
            let batch = batch::<B>(&documents)
                .with_stream("floats", Stream::new(floats.tensor::<B>(DType::F32)))
                .with_stream("ints", Stream::new(ints.int_tensor::<B>()))
                .with_stream("bools", Stream::new(bools));
            let streams = vec![declaration("floats", 2, 0.5), declaration("ints", 0, -7.0), declaration("bools", 0, 1.0)];
            let config = ContextParallelConfig { streams, ..config(&layout) };
            let step = sharder(&groups, config).shard(batch, &Default::default()).unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let want = Host::from_fn([rows, 2, tokens.len()], |[i, j, k]| {
                if tokens[k] < seq { floats.at([i, j, tokens[k]]) } else { 0.5 }
            });
            assert_eq!(Host::of(&step.stream::<3, burn::tensor::Float>("floats").unwrap()), want);
            let cut = |pad: f64| {
                let at = |[i, j, k]: [usize; 3]| if tokens[i] < seq { ints.at([tokens[i], j, k]) } else { pad };
                Host::from_fn([tokens.len(), rows, 1], at)
            };
            assert_eq!(Host::of(&step.stream::<3, Int>("ints").unwrap()), cut(-7.0));
            let got = Host::of(&step.stream::<3, Bool>("bools").unwrap().int());
            let want = cut(1.0);
            assert_eq!(got, Host::from_fn(want.shape, |index| f64::from(want.at(index) > 0.0)));
            assert!(step.stream::<3, Int>("other").is_err());
        });
    }
}

#[test]
fn gathered_shards_are_the_whole_for_every_kind_and_dim() {
    type B = Flex;
    for (mut random, documents, layout, world_size) in cases() {
        let dim = random.int(0..=2);
        let mut shape = [2, 3, 2];
        shape[dim] = documents.seq_len();
        let whole = Host { shape, values: random.small_ints(shape.iter().product()) };
        on_groups(&[("cp", world_size)], |groups| {
            let step = sharder(&groups, config(&layout)).shard(batch::<B>(&documents), &Default::default()).unwrap();
            let real: Tensor<B, 3> = whole.tensor(DType::F32);
            let shard = step.shard_tokens(real.clone(), dim, Some(5.0));
            assert_eq!(Host::of(&step.gather_tokens(shard.clone(), dim, Extent::Input)), whole);
            let padded = step.gather_tokens(shard.clone(), dim, Extent::Padded);
            let len = step.layout().seq_len();
            assert_eq!(padded.dims()[dim], len);
            let fill = Host::of(&padded).rows(dim, &(documents.seq_len()..len));
            assert!(fill.values.iter().all(|value| *value == 5.0));
            // Padded already: nothing is added, so no fill is needed.
            assert_eq!(to_bits(&step.shard_tokens(padded, dim, None)), to_bits(&shard));

            let ints = step.shard_tokens(whole.int_tensor::<B>(), dim, Some(1.0));
            assert_eq!(Host::of(&step.gather_tokens(ints, dim, Extent::Input)), whole);
            let bools = whole.int_tensor::<B>().greater_elem(0);
            let shard = step.shard_tokens(bools.clone(), dim, Some(1.0));
            let again = step.gather_tokens(shard, dim, Extent::Input);
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
        let weights: Vec<Host> =
            (0..world_size).map(|_| Host { shape, values: random.small_ints(shape.iter().product()) }).collect();
        on_groups(&[("cp", world_size)], |groups| {
            let step = sharder(&groups, config(&layout)).shard(batch::<B>(&documents), &Default::default()).unwrap();
            let leaf: Tensor<B, 3> = Host::zeros(shape).tensor::<B>(DType::F64).require_grad();
            let shard = step.shard_tokens(leaf.clone(), 1, Some(0.0));
            let whole = step.gather_tokens(shard, 1, Extent::Input);
            let rank = step.group().rank();
            let loss = (whole * weights[rank].tensor(DType::F64)).sum();
            // Also on a rank whose tokens were all added by the layout.
            let got = leaf.grad(&backward(&loss, step.group())).expect("every rank is on the graph");
            let own = step.layout().indices(rank);
            let sum = Host::sum(&weights);
            let want = Host::from_fn(shape, |index| if own.contains(&index[1]) { sum.at(index) } else { 0.0 });
            assert_eq!(Host::of(&got), want);
        });
    }
}

#[test]
fn a_primary_stream_left_whole_and_cut_later_equals_one_that_came_cut() {
    for (mut random, documents, layout, world_size) in cases() {
        let shape = [documents.batch_size(), documents.seq_len(), 3];
        let embeddings = Host { shape, values: random.floats(shape.iter().product()) };
        on_groups(&[("cp", world_size)], |groups| {
            let cut = |primary: PrimaryStream, batch: SequenceBatch<Flex>| {
                let config = ContextParallelConfig { primary, ..config(&layout) };
                sharder(&groups, config).shard(batch, &Default::default()).unwrap()
            };
            let ids = |primary| cut(primary, batch(&documents));
            let whole = ids(PrimaryStream::Whole);
            let all = whole.ids().unwrap();
            assert_eq!(all.dims(), [documents.batch_size(), whole.layout().seq_len()]);
            let later = whole.shard_tokens(all, 1, None);
            assert_eq!(ints(&later), ints(&ids(PrimaryStream::Sharded).ids().unwrap()));

            let batch = || SequenceBatch::from_embeddings(embeddings.tensor(DType::F32)).with_documents(documents.clone());
            let whole = cut(PrimaryStream::Whole, batch());
            assert_eq!(whole.positions().dims()[2], whole.local_len());
            let later = whole.shard_tokens(whole.embeddings().unwrap(), 1, None);
            assert_eq!(to_bits(&later), to_bits(&cut(PrimaryStream::Sharded, batch()).embeddings().unwrap()));
        });
    }
}

#[test]
fn gradients_flow_back_to_the_embeddings_of_the_batch() {
    type B = Autodiff<Flex>;
    for primary in [PrimaryStream::Sharded, PrimaryStream::Whole] {
        let gradients = on_groups(&[("cp", 3)], |groups| {
            let leaf = Tensor::<B, 3>::ones([2, 7, 2], &Default::default()).require_grad();
            let config = ContextParallelConfig { primary, ..config(&LayoutPolicy::HeadTail) };
            let batch = SequenceBatch::from_embeddings(leaf.clone());
            let step = sharder(&groups, config).shard(batch, &Default::default()).unwrap();
            let mut local = step.embeddings().unwrap();
            if primary == PrimaryStream::Whole {
                local = step.shard_tokens(local, 1, None);
            }
            let weights = local.clone().detach().mul(step.positions().float().swap_dims(0, 1).swap_dims(1, 2));
            let gradient = leaf.grad(&backward(&(local * weights).sum(), step.group()));
            gradient.map_or_else(|| vec![0.0; 28], |gradient| floats(&gradient))
        });
        let sum: Vec<f64> = (0..28).map(|i| gradients.iter().map(|gradient| gradient[i]).sum()).collect();
        assert_eq!(sum, (0..28).map(|i| f64::from(i / 2 % 7)).collect::<Vec<_>>());
    }
}

fn with_media<B: ContextParallelBackend>(marked: &[Vec<bool>]) -> SequenceBatch<B> {
    let device = Default::default();
    let [image, video] = [0, 1].map(|i| TensorData::new(marked[i].clone(), [2, 9]));
    let media = |name: &str, grid: [usize; 3], placeholders| Media {
        name: name.into(),
        pixels: Tensor::zeros([grid.iter().product(), 3], &device),
        grids: vec![grid],
        spatial_merge_size: 2,
        placeholders,
    };
    let deepstack: Vec<Tensor<B, 2>> =
        (1..=2).map(|i| Tensor::arange(0..8, &device).float().reshape([4, 2]).mul_scalar(i)).collect();
    SequenceBatch::from_ids(TensorData::zeros::<i64, _>([2, 9]))
        .with_media(media("image", [1, 4, 4], image.clone()))
        .with_media(media("video", [3, 2, 2], video))
        .with_deepstack(image, deepstack)
}

#[test]
fn feature_rows_land_at_the_tokens_that_wait_for_them() {
    type B = Autodiff<Flex>;
    // The image's four tokens and the video's three, over both rows of the batch.
    let marks = |tokens: &[usize]| (0..18).map(|token| tokens.contains(&token)).collect::<Vec<_>>();
    let (image, video) = ([1, 2, 9, 17], [0, 10, 11]);
    let marked = [marks(&image), marks(&video)];
    for layout in [LayoutPolicy::Contiguous { multiple: 1 }, LayoutPolicy::HeadTail] {
        let gradients = on_groups(&[("cp", 3)], |groups| {
            let device = Default::default();
            let step = sharder(&groups, config(&layout)).shard(with_media::<B>(&marked), &device).unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let documents = Documents::full(2, 9).unwrap();
            let feature = |row: usize, token: usize| {
                let place = row * 9 + token;
                let find = |tokens: &[usize]| tokens.iter().position(|token| *token == place);
                find(&image).or_else(|| find(&video).map(|row| row + 4))
            };
            let mask = local(&documents, &tokens, |row, token| i64::from(feature(row, token).is_some()), |_, _| 0);
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
            assert_eq!(step.deepstack().len(), 2);
            for (layer, factor) in step.deepstack().iter().zip([1.0, 2.0]) {
                let at = |row: usize, token: usize| match image.iter().position(|place| *place == row * 9 + token) {
                    Some(row) => [factor * 2.0 * row as f64, factor * (2.0 * row as f64 + 1.0)],
                    None => [0.0; 2],
                };
                let want: Vec<_> = local(&documents, &tokens, at, |_, _| [0.0; 2]).into_iter().flatten().collect();
                assert_eq!(floats(layer), want);
            }
            let gradients = backward(&(scattered.clone() * scattered.detach()).sum(), step.group());
            floats(&features.grad(&gradients).unwrap())
        });
        let sum: Vec<f64> = (0..7).map(|i| gradients.iter().map(|gradient| gradient[i]).sum()).collect();
        assert_eq!(sum, (10..17).map(f64::from).collect::<Vec<_>>());
    }
}
