//! Batches whose tokens are moved before they are dealt out: every stream as if it had been moved by hand, and nothing lost.

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{Bool, DType, Float, Int, Tensor, TensorData},
};
use burn_cp::{
    batch::{BatchError, Media, PadRule, SequenceBatch, Stream, StreamDeclaration},
    layout::{AlignedDocuments, Documents, LayoutPolicy, Placement},
    sharder::{ContextParallelConfig, Coordinates, CpStep, StepError},
};
use burn_cp_tests::{
    Host, Random, TestBackend, backward, device, floats, ints, on_groups, random_documents,
    random_placement, sharder, to_bits,
};

use crate::{bad_input::refused_with, steps::config, verbs::panic_of};

fn cases() -> impl Iterator<Item = (Random, Documents, AlignedDocuments, LayoutPolicy, usize)> {
    (0..30).map(|seed| {
        let mut random = Random::new(2000 + seed);
        let batch = random.int(1..=3);
        let documents = random_documents(&mut random, batch);
        let world_size = random.int(1..=5);
        let (placed, layout) = random_placement(&mut random, &documents, world_size);
        (random, documents, placed, layout, world_size)
    })
}

fn config_with_streams(layout: &LayoutPolicy) -> ContextParallelConfig {
    let declare = |name: &str, dim, pad| StreamDeclaration {
        name: name.into(),
        dim,
        pad: PadRule::Value(pad),
    };
    ContextParallelConfig {
        streams: vec![declare("weights", 1, 0.5), declare("flags", 2, 1.0)],
        ..config(layout)
    }
}

/// What a batch is made of: `[batch, seq]` values that name their place, and features that some tokens wait for.
struct Streams {
    size: [usize; 2],
    ids: Vec<i64>,
    labels: Vec<i64>,
    /// Of two axes.
    positions: [Vec<i64>; 2],
    image: Vec<bool>,
    weights: Vec<f64>,
    flags: Vec<f64>,
}

impl Streams {
    /// Labels and images stand at real tokens only, as a placement that drops padding demands.
    fn of(documents: &Documents) -> Self {
        let size = [documents.batch_size(), documents.seq_len()];
        let num_tokens = size[0] * size[1];
        let padding: Vec<bool> = (0..size[0])
            .flat_map(|row| documents.padding_mask(row))
            .collect();
        let places = 0..num_tokens as i64;
        Self {
            size,
            ids: places.clone().map(|place| 100 + place).collect(),
            labels: places
                .clone()
                .zip(&padding)
                .map(|(place, padding)| if *padding { -100 } else { place })
                .collect(),
            positions: [3, 5].map(|factor| places.clone().map(|place| factor * place).collect()),
            image: (0..num_tokens)
                .map(|place| !padding[place] && place % 3 == 1)
                .collect(),
            weights: places.clone().map(|place| place as f64 / 4.0).collect(),
            flags: places.map(|place| f64::from(place % 2 == 0)).collect(),
        }
    }

    /// The same, moved by hand.
    fn moved(&self, placement: &Placement) -> Self {
        fn place<T: Clone>(placement: &Placement, values: &[T], fill: T) -> Vec<T> {
            placement.place(values, fill).unwrap()
        }
        let width = placement.placed_size()[1];
        let positions = self.positions.each_ref().map(|axis| {
            let mut positions = place(placement, axis, i64::MIN);
            for row in positions.chunks_mut(width) {
                let mut next = 0;
                for position in row {
                    if *position == i64::MIN {
                        *position = next;
                    }
                    next = *position + 1;
                }
            }
            positions
        });
        Self {
            size: placement.placed_size(),
            ids: place(placement, &self.ids, 9),
            labels: place(placement, &self.labels, -100),
            positions,
            image: place(placement, &self.image, false),
            weights: place(placement, &self.weights, 0.5),
            flags: place(placement, &self.flags, 1.0),
        }
    }

    fn batch(&self) -> SequenceBatch<TestBackend> {
        let [rows, seq] = self.size;
        let device = device();
        let deepstack = self.image.iter().filter(|marked| **marked).count();
        let flags = Host {
            shape: [1, rows, seq],
            values: self.flags.clone(),
        };
        let weights = Host {
            shape: [rows, seq, 1],
            values: self.weights.clone(),
        };
        let mut batch = SequenceBatch::from_ids(TensorData::new(self.ids.clone(), self.size))
            .with_labels(TensorData::new(self.labels.clone(), self.size))
            .with_positions(TensorData::new(self.positions.concat(), [2, rows, seq]))
            .with_stream(
                "weights",
                Stream::new(weights.tensor::<TestBackend>(DType::F32)),
            )
            .with_stream(
                "flags",
                Stream::new(flags.int_tensor::<TestBackend>().equal_elem(1)),
            );
        if deepstack > 0 {
            let mask = TensorData::new(self.image.clone(), self.size);
            let layer = Tensor::arange(0..2 * deepstack as i64, &device).float();
            let grid = [deepstack, 2, 2];
            batch = batch
                .with_media(Media {
                    name: "image".into(),
                    pixels: Tensor::zeros([4 * deepstack, 3], &device),
                    grids: vec![grid],
                    spatial_merge_size: 2,
                    placeholders: mask.clone(),
                })
                .with_deepstack(mask, vec![layer.reshape([deepstack, 2])]);
        }
        batch
    }
}

fn everything(step: &CpStep<TestBackend>) -> (Vec<Vec<i64>>, Vec<Vec<u64>>) {
    let features = step.media_mask().bool_not().bool_not().int();
    let ints = vec![
        ints(&step.ids().unwrap()),
        step.labels().unwrap().to_vec(),
        ints(&step.positions()),
        ints(&step.padding_mask().int()),
        ints(&features),
        ints(&step.stream::<3, Bool>("flags").unwrap().int()),
    ];
    let mut values = vec![to_bits(&step.stream::<3, Float>("weights").unwrap())];
    values.extend(step.deepstack().iter().map(to_bits));
    (ints, values)
}

#[test]
fn a_placed_batch_is_the_batch_whose_streams_were_moved_by_hand() {
    for (_, documents, placed, layout, world_size) in cases() {
        let streams = Streams::of(&documents);
        let moved = streams.moved(&placed.placement);
        on_groups(&[("cp", world_size)], |groups| {
            let shard = |batch| {
                sharder(&groups, config_with_streams(&layout))
                    .shard(batch, &device())
                    .unwrap()
            };
            let step = shard(streams.batch().with_aligned_documents(placed.clone()));
            let by_hand = shard(moved.batch().with_documents(placed.documents.clone()));
            assert_eq!(step.input_size(), streams.size);
            assert_eq!(step.batch_size(), moved.size[0]);
            assert_eq!(everything(&step), everything(&by_hand));
        });
    }
}

#[test]
fn gathered_shards_of_a_placed_batch_are_the_batch_with_dropped_tokens_filled() {
    type B = TestBackend;
    for (mut random, documents, placed, layout, world_size) in cases() {
        let [rows, seq] = [documents.batch_size(), documents.seq_len()];
        let whole = Host {
            shape: [rows, seq, 2],
            values: random.small_ints(rows * seq * 2),
        };
        let filled = |fill: f64| {
            Host::from_fn(whole.shape, |[row, token, i]| {
                match placed.placement.target(row, token) {
                    Some(_) => whole.at([row, token, i]),
                    None => fill,
                }
            })
        };
        on_groups(&[("cp", world_size)], |groups| {
            let batch = Streams::of(&documents).batch();
            let step = sharder(&groups, config_with_streams(&layout))
                .shard(batch.with_aligned_documents(placed.clone()), &device())
                .unwrap();
            let to = Coordinates::Input;
            let shard = step.shard_tokens(whole.tensor::<B>(DType::F32), 1, to, Some(5.0));
            assert_eq!(shard.dims()[..2], [step.batch_size(), step.local_len()]);
            let again = step.gather_tokens(shard.clone(), 1, to, Some(-9.0));
            assert_eq!(Host::of(&again), filled(-9.0));
            // The padded rows are the moved ones, and cutting them again gives the same shard.
            let padded = step.gather_tokens(shard.clone(), 1, Coordinates::Padded, None);
            let cut = step.shard_tokens(padded, 1, Coordinates::Padded, None);
            assert_eq!(to_bits(&cut), to_bits(&shard));

            let ints = step.shard_tokens(whole.int_tensor::<B>(), 1, to, Some(1.0));
            let again = step.gather_tokens(ints, 1, to, Some(4.0));
            assert_eq!(Host::of(&again), filled(4.0));
            let bools = whole.int_tensor::<B>().greater_elem(0);
            let shard = step.shard_tokens(bools, 1, to, Some(1.0));
            let again = step.gather_tokens(shard, 1, to, Some(0.0)).int();
            let want = filled(0.0);
            let want = Host::from_fn(want.shape, |at| f64::from(want.at(at) > 0.0));
            assert_eq!(Host::of(&again), want);
        });
    }
}

/// Every rank weights the whole by its own weights. A token's gradient is the sum of them on the rank that owns it; dropped
/// tokens have none.
#[test]
fn the_gradient_of_placed_tokens_lands_where_they_came_from() {
    type B = Autodiff<NdArray<f64>>;
    for (mut random, documents, placed, layout, world_size) in cases() {
        let shape = [documents.batch_size(), documents.seq_len(), 2];
        let weights: Vec<Host> = (0..world_size)
            .map(|_| Host {
                shape,
                values: random.small_ints(shape.iter().product()),
            })
            .collect();
        let gradients = on_groups(&[("cp", world_size)], |groups| {
            let ids = TensorData::zeros::<i64, _>([shape[0], shape[1]]);
            let batch = SequenceBatch::<B>::from_ids(ids).with_aligned_documents(placed.clone());
            let step = sharder(&groups, config(&layout))
                .shard(batch, &device())
                .unwrap();
            let leaf: Tensor<B, 3> = Host::zeros(shape).tensor::<B>(DType::F64).require_grad();
            let shard = step.shard_tokens(leaf.clone(), 1, Coordinates::Input, Some(0.0));
            let whole = step.gather_tokens(shard, 1, Coordinates::Input, Some(0.0));
            let loss = (whole * weights[step.group().rank()].tensor(DType::F64)).sum();
            let gradients = backward(&loss, step.group());
            // Also on a rank that owns no token of the batch.
            Host::of(&leaf.grad(&gradients).expect("every rank is on the graph"))
        });
        let sum = Host::sum(&weights);
        let want = Host::from_fn(shape, |[row, token, i]| {
            match placed.placement.target(row, token) {
                Some(_) => sum.at([row, token, i]),
                None => 0.0,
            }
        });
        assert_eq!(Host::sum(&gradients), want);
    }
}

#[test]
fn embeddings_and_their_gradients_follow_the_placement() {
    type B = Autodiff<TestBackend>;
    let targets = [
        vec![Some(0), Some(1), None, Some(4)],
        vec![Some(2), None, None, Some(5)],
    ];
    let placement = Placement::from_rows(&targets, 6).unwrap();
    let documents = Documents::from_lengths(&[vec![2, 4], vec![3, 3]], 6).unwrap();
    let gradients = on_groups(&[("cp", 3)], |groups| {
        let leaf = Tensor::<B, 3>::ones([2, 4, 1], &device()).require_grad();
        let batch = SequenceBatch::from_embeddings(leaf.clone())
            .with_documents(documents.clone())
            .with_placement(placement.clone());
        let step = sharder(&groups, config(&LayoutPolicy::HeadTail))
            .shard(batch, &device())
            .unwrap();
        let local = step.embeddings().unwrap();
        let slots = Tensor::<B, 1, Int>::arange(1..7, &device()).float();
        let slots = slots.reshape([1, 6, 1]).repeat_dim(0, 2);
        let slots = step.shard_tokens(slots, 1, Coordinates::Padded, None);
        let gradients = backward(&(local * slots).sum(), step.group());
        floats(&leaf.grad(&gradients).unwrap())
    });
    let sum: Vec<f64> = (0..8)
        .map(|i| gradients.iter().map(|gradient| gradient[i]).sum())
        .collect();
    assert_eq!(sum, [1.0, 2.0, 0.0, 5.0, 3.0, 0.0, 0.0, 6.0]);
}

#[test]
fn repositioned_rows_are_cut_and_come_back() {
    let targets = [
        vec![Some(0), Some(1), None, Some(4)],
        vec![Some(2), None, None, None],
    ];
    let placement = Placement::from_rows(&targets, 6).unwrap();
    on_groups(&[("cp", 3)], |groups| {
        let batch = SequenceBatch::<TestBackend>::from_ids(TensorData::zeros::<i64, _>([2, 4]))
            .with_documents(Documents::full(2, 6).unwrap())
            .with_placement(placement.clone());
        let step = sharder(&groups, config(&LayoutPolicy::HeadTail))
            .shard(batch, &device())
            .unwrap();
        let values = [[7.0, 8.0, 9.0, 10.0], [5.0, 6.0, 7.0, 8.0]];
        let values = Tensor::<TestBackend, 2>::from_data(values, &device());
        let local = step.shard_tokens(values, 1, Coordinates::Input, Some(0.0));
        let padded = step.gather_tokens(local.clone(), 1, Coordinates::Padded, None);
        let rows = [7, 8, 0, 0, 10, 0, 0, 0, 5, 0, 0, 0].map(f64::from);
        assert_eq!(floats(&padded), rows);
        let again = step.gather_tokens(local, 1, Coordinates::Input, Some(-9.0));
        assert_eq!(floats(&again), [7, 8, -9, 10, 5, -9, -9, -9].map(f64::from));
    });
}

fn refused(
    batch: impl Fn(SequenceBatch<TestBackend>) -> SequenceBatch<TestBackend> + Sync,
) -> BatchError {
    let placement = Placement::from_rows(&[vec![Some(0), Some(1), None]], 4).unwrap();
    let documents = Documents::full(1, 4).unwrap();
    let ids = || SequenceBatch::from_ids(TensorData::zeros::<i64, _>([1, 3]));
    let config = config_with_streams(&LayoutPolicy::HeadTail);
    let error = refused_with(&config, || {
        batch(
            ids()
                .with_placement(placement.clone())
                .with_documents(documents.clone()),
        )
    });
    match error {
        StepError::Batch(error) => error,
        other => panic!("expected an error of the batch, got {other}"),
    }
}

#[test]
fn a_placement_that_loses_something_or_does_not_fit_is_refused() {
    let flags = |values: [bool; 3]| TensorData::new(values.to_vec(), [1, 3]);
    let label = refused(|batch| batch.with_labels(TensorData::new(vec![1_i64; 3], [1, 3])));
    let expected = BatchError::Dropped {
        what: "a label",
        row: 0,
        token: 2,
    };
    assert_eq!(label, expected);
    let feature = refused(|batch| {
        let layer = Tensor::ones([1, 2], &device());
        batch.with_deepstack(flags([false, false, true]), vec![layer])
    });
    assert_eq!(
        feature.to_string(),
        "placement: expected a slot within a document for token 2 of row 0, which has a feature, got none"
    );
    // Tokens of which the batch says that they are real.
    let real = refused(|batch| batch.with_padding_mask(flags([false; 3])));
    let what = "no mark of padding";
    assert_eq!(
        real,
        BatchError::Dropped {
            what,
            row: 0,
            token: 2
        }
    );
    // A slot outside every document is no place for a label either.
    let short = Documents::from_lengths(&[vec![1]], 4).unwrap();
    let outside = refused(|batch| {
        let labels = TensorData::new(vec![-100_i64, 7, -100], [1, 3]);
        batch.with_documents(short.clone()).with_labels(labels)
    });
    let what = "a label";
    assert_eq!(
        outside,
        BatchError::Dropped {
            what,
            row: 0,
            token: 1
        }
    );
    let other = Placement::flat(1, 4).unwrap();
    let size = refused(|batch| batch.with_placement(other.clone()));
    let (expected, got) = ([1, 3], [1, 4]);
    assert_eq!(size, BatchError::Placement { expected, got });
    let documents = Documents::full(1, 3).unwrap();
    let table = refused(|batch| batch.with_documents(documents.clone()));
    let (expected, got) = ([1, 4], [1, 3]);
    assert_eq!(table, BatchError::Documents { expected, got });
    let stream = refused(|batch| {
        let tensor: Tensor<TestBackend, 3> = Tensor::zeros([2, 3, 1], &device());
        batch.with_stream("weights", Stream::new(tensor))
    });
    let message = stream.to_string();
    assert!(
        message.contains("3 tokens in dim 1, and 1 rows in the dim ahead"),
        "{message}"
    );
    let none = refused_with(&config(&LayoutPolicy::HeadTail), || {
        let ids = TensorData::zeros::<i64, _>([1, 3]);
        SequenceBatch::from_ids(ids).with_placement(Placement::flat(1, 3).unwrap())
    });
    assert!(none.to_string().contains("documents of the placed rows"));
}

#[test]
fn verbs_of_a_placed_batch_ask_for_rows_and_fills() {
    let placement = Placement::from_rows(&[vec![Some(0), None, Some(3)]], 4).unwrap();
    let ids = TensorData::zeros::<i64, _>([1, 3]);
    let batch = SequenceBatch::<TestBackend>::from_ids(ids)
        .with_documents(Documents::full(1, 4).unwrap())
        .with_placement(placement);
    let cp = burn_cp::sharder::ContextParallel::solo(config(&LayoutPolicy::Identity));
    let step = cp.shard(batch, &device()).unwrap();
    let zeros = |shape| Tensor::<TestBackend, 3>::zeros(shape, &device());
    let to = Coordinates::Input;
    for (message, run) in [
        (
            "so a fill is needed",
            Box::new(|| step.shard_tokens(zeros([1, 3, 2]), 1, to, None)) as Box<dyn Fn() -> _>,
        ),
        (
            "the placement drops tokens of the batch, so a fill is needed",
            Box::new(|| step.gather_tokens(zeros([1, 4, 2]), 1, to, None)),
        ),
        (
            "expected 1 rows in the dim ahead of dim 1",
            Box::new(|| step.shard_tokens(zeros([2, 3, 2]), 1, to, Some(0.0))),
        ),
        (
            "expected 3 tokens in dim 1 (Input coordinates), got [1, 4, 2]",
            Box::new(|| step.shard_tokens(zeros([1, 4, 2]), 1, to, Some(0.0))),
        ),
        (
            "expected 4 tokens in dim 1 (Padded coordinates), got [1, 3, 2]",
            Box::new(|| step.shard_tokens(zeros([1, 3, 2]), 1, Coordinates::Padded, None)),
        ),
        (
            "expected 1 rows in the dim ahead of dim 0",
            Box::new(|| step.gather_tokens(zeros([4, 1, 2]), 0, to, Some(0.0))),
        ),
        (
            "expected 4 tokens in dim 1, got",
            Box::new(|| step.gather_tokens(zeros([1, 5, 2]), 1, to, Some(0.0))),
        ),
    ] {
        let got = panic_of(|| drop(run()));
        assert!(got.contains(message), "{got:?} lacks {message:?}");
    }
}
