//! Small batches written out: what each rank holds of every stream, token by token.

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{DType, Float, Int, Tensor, TensorData},
};
use burn_cp::{
    attention::AttentionOptions,
    batch::{PadRule, SequenceBatch, Stream, StreamDeclaration},
    layout::{Documents, LayoutPolicy},
    plan::ExchangeStrategy,
    sharder::{ContextParallelConfig, Coordinates, PrimaryStream},
};
use burn_cp_tests::{
    Host, Random, TestBackend, backward, device, floats, ints, on_groups, sharder, to_bits,
};

use crate::{steps::config, verbs::panic_of};

const CONTIGUOUS: LayoutPolicy = LayoutPolicy::Contiguous { multiple: 1 };

/// Ids, labels, positions, padding mask, and positions of three axes, on one rank.
struct Row {
    ids: [i64; 4],
    labels: [i64; 4],
    positions: [i64; 4],
    padding: [i64; 4],
    axes: [[i64; 4]; 3],
}

/// What the two ranks hold of five tokens, of which the last is padding.
fn five_tokens_on_two_ranks() -> [(LayoutPolicy, [Row; 2]); 2] {
    [
        (
            CONTIGUOUS,
            [
                Row {
                    ids: [11, 12, 13, 14],
                    labels: [12, 13, 14, 15],
                    positions: [0, 1, 2, 3],
                    padding: [0, 0, 0, 0],
                    axes: [[0, 1, 1, 1], [0, 1, 1, 2], [0, 1, 2, 1]],
                },
                Row {
                    ids: [15, 9, 9, 9],
                    labels: [-100; 4],
                    positions: [4, 5, 6, 7],
                    padding: [1; 4],
                    axes: [[2, 3, 4, 5]; 3],
                },
            ],
        ),
        (
            LayoutPolicy::HeadTail,
            [
                Row {
                    ids: [11, 12, 9, 9],
                    labels: [12, 13, -100, -100],
                    positions: [0, 1, 6, 7],
                    padding: [0, 0, 1, 1],
                    axes: [[0, 1, 4, 5]; 3],
                },
                Row {
                    ids: [13, 14, 15, 9],
                    labels: [14, 15, -100, -100],
                    positions: [2, 3, 4, 5],
                    padding: [0, 0, 1, 1],
                    axes: [[1, 1, 2, 3], [1, 2, 2, 3], [2, 1, 2, 3]],
                },
            ],
        ),
    ]
}

/// Five tokens of which the last is padding, over two ranks, which adds three tokens.
#[test]
fn every_rank_holds_its_tokens_and_padding_is_marked_and_counted_on() {
    let ids = || TensorData::new(vec![11_i64, 12, 13, 14, 15], [1, 5]);
    let labels = || TensorData::new(vec![12_i64, 13, 14, 15, -100], [1, 5]);
    let mask = || TensorData::new(vec![1_i64, 1, 1, 1, 0], [1, 5]);
    let axes = [[0_i64, 1, 1, 1, 2], [0, 1, 1, 2, 2], [0, 1, 2, 1, 2]];
    for (layout, rows) in five_tokens_on_two_ranks() {
        on_groups(&[("cp", 2)], |groups| {
            let cp = sharder(&groups, config(&layout));
            let batch = || {
                SequenceBatch::<TestBackend>::from_ids(ids())
                    .with_labels(labels())
                    .with_attention_mask(&mask())
                    .unwrap()
            };
            let device = device();
            let (step, row) = (
                cp.shard(batch(), &device).unwrap(),
                &rows[cp.group().rank()],
            );
            assert_eq!(ints(&step.ids().unwrap()), row.ids);
            assert_eq!(step.labels().unwrap(), row.labels);
            assert_eq!(ints(&step.positions()), row.positions);
            assert_eq!(ints(&step.padding_mask().int()), row.padding);
            let axes = || TensorData::new(axes.concat(), [3, 1, 5]);
            let step = cp.shard(batch().with_positions(axes()), &device).unwrap();
            assert_eq!(ints(&step.positions()), row.axes.concat());
            // The same tokens as two documents and padding, with positions given.
            let documents = TensorData::new(vec![1_i64, 1, 2, 2, 0], [1, 5]);
            let packed = || batch().with_document_ids(&documents).unwrap();
            let arange = TensorData::new(vec![0_i64, 1, 2, 3, 4], [1, 5]);
            let step = cp.shard(packed().with_positions(arange), &device).unwrap();
            assert_eq!(ints(&step.ids().unwrap()), row.ids);
            assert_eq!(step.labels().unwrap(), row.labels);
            assert_eq!(ints(&step.positions()), row.positions);
            assert_eq!(ints(&step.padding_mask().int()), row.padding);
            let step = cp.shard(packed().with_positions(axes()), &device).unwrap();
            assert_eq!(ints(&step.positions()), row.axes.concat());
        });
    }
}

#[test]
fn positions_restart_with_documents_and_count_on_through_padding() {
    let ranks = on_groups(&[("cp", 2)], |groups| {
        let ids = TensorData::new(vec![1_i64, 1, 2, 2, 0], [1, 5]);
        let batch = SequenceBatch::<TestBackend>::from_ids(ids.clone())
            .with_document_ids(&ids)
            .unwrap();
        let step = sharder(&groups, config(&CONTIGUOUS))
            .shard(batch, &device())
            .unwrap();
        let metadata = step.documents().thd_metadata().unwrap();
        assert_eq!(metadata.padding, [4, 5, 6, 7]);
        // The padding is counted to the last document for kernels that cannot skip it.
        assert_eq!(metadata.cu_seqlens, [0, 2, 8]);
        ints(&step.positions())
    });
    assert_eq!(ranks, [[0, 1, 0, 1], [2, 3, 4, 5]]);
}

#[test]
fn values_are_cut_filled_and_gathered_again() {
    let table = [
        (
            CONTIGUOUS,
            [[10.0, 20.0, 30.0, 40.0], [50.0, -1.0, -1.0, -1.0]],
        ),
        (
            LayoutPolicy::HeadTail,
            [[10.0, 20.0, -1.0, -1.0], [30.0, 40.0, 50.0, -1.0]],
        ),
    ];
    for (layout, want) in table {
        let ranks = on_groups(&[("cp", 2)], |groups| {
            let ids = TensorData::zeros::<i64, _>([1, 5]);
            let step = sharder(&groups, config(&layout))
                .shard(SequenceBatch::<TestBackend>::from_ids(ids), &device())
                .unwrap();
            let values =
                Tensor::<TestBackend, 2>::from_data([[10.0, 20.0, 30.0, 40.0, 50.0]], &device());
            let local = step.shard_tokens(values.clone(), 1, Coordinates::Input, Some(-1.0));
            let again = step.gather_tokens(local.clone(), 1, Coordinates::Input, None);
            assert_eq!(to_bits(&again), to_bits(&values));
            let refused = |tensor, fill| {
                panic_of(|| {
                    drop(step.shard_tokens::<2, Float>(tensor, 1, Coordinates::Input, fill))
                })
            };
            let message = refused(values, None);
            assert!(message.contains("so a fill is needed"), "{message}");
            let message = refused(Tensor::zeros([1, 6], &device()), Some(-1.0));
            assert!(message.contains("expected 5 tokens"), "{message}");
            floats(&local)
        });
        assert_eq!(ranks, want, "{layout:?}");
    }
}

/// Marks, tokens of each rank, and the feature rows that stand there.
#[test]
fn deepstack_rows_are_those_of_a_ranks_marked_tokens() {
    type Table<'a> = (LayoutPolicy, &'a [u8], [(&'a [usize], &'a [f64]); 2]);
    let table: [Table<'_>; 2] = [
        (
            LayoutPolicy::HeadTail,
            &[1, 0, 1, 0, 1],
            [(&[0, 1, 6, 7], &[1.0]), (&[2, 3, 4, 5], &[2.0, 3.0])],
        ),
        (
            CONTIGUOUS,
            &[0, 1, 1, 0, 1, 1, 0, 1, 0],
            [
                (&[0, 1, 2, 3, 4, 5], &[1.0, 2.0, 3.0, 4.0]),
                (&[6, 7, 8, 9, 10, 11], &[5.0]),
            ],
        ),
    ];
    for (layout, marks, ranks) in table {
        on_groups(&[("cp", 2)], |groups| {
            let device = device();
            let mask = TensorData::new(marks.to_vec(), [1, marks.len()]);
            let num_rows = marks.iter().map(|mark| i64::from(*mark)).sum::<i64>();
            let layer = Tensor::<TestBackend, 1, Int>::arange(1..num_rows + 1, &device).float();
            let layer = layer.reshape([num_rows, 1]);
            let ids = TensorData::zeros::<i64, _>([1, marks.len()]);
            let batch = SequenceBatch::from_ids(ids).with_deepstack(mask, vec![layer; 2]);
            let step = sharder(&groups, config(&layout))
                .shard(batch, &device)
                .unwrap();
            let (tokens, rows) = ranks[step.group().rank()];
            assert_eq!(step.layout().indices(step.group().rank()), tokens);
            for layer in step.deepstack() {
                let mut rows = rows.iter();
                let want: Vec<f64> = tokens
                    .iter()
                    .map(|token| match marks.get(*token) {
                        Some(1) => *rows.next().unwrap(),
                        _ => 0.0,
                    })
                    .collect();
                assert_eq!(floats(layer), want);
            }
        });
    }
}

/// Everything but the primary stream is the same, bit for bit, whether or not the primary stream was cut before the model.
#[test]
fn a_batch_whose_primary_stream_is_left_whole_is_otherwise_cut_alike() {
    let mut random = Random::new(71);
    let (rows, seq) = (2, 21);
    let per_layer = random.floats(3 * rows * seq * 2);
    let documents = Documents::from_lengths(&[vec![4, 0, 9], vec![20]], seq).unwrap();
    let layouts = [
        CONTIGUOUS,
        LayoutPolicy::Contiguous { multiple: 6 },
        LayoutPolicy::HeadTail,
    ];
    for layout in layouts {
        on_groups(&[("cp", 3)], |groups| {
            let device = device();
            let shard = |primary| {
                let stream = StreamDeclaration {
                    name: "per layer".into(),
                    dim: 2,
                    pad: PadRule::Value(0.25),
                };
                let config = ContextParallelConfig {
                    primary,
                    streams: vec![stream],
                    ..config(&layout)
                };
                let count = |len: usize| (0..len as i64).collect::<Vec<_>>();
                let values = TensorData::new(per_layer.clone(), [3, rows, seq, 2]);
                let batch = SequenceBatch::<TestBackend>::from_ids(TensorData::new(
                    count(rows * seq),
                    [rows, seq],
                ))
                .with_labels(TensorData::new(count(rows * seq), [rows, seq]))
                .with_positions(TensorData::new(count(3 * rows * seq), [3, rows, seq]))
                .with_documents(documents.clone())
                .with_stream(
                    "per layer",
                    Stream::new(Tensor::<TestBackend, 4>::from_data(values, &device)),
                );
                sharder(&groups, config).shard(batch, &device).unwrap()
            };
            let (whole, cut) = (shard(PrimaryStream::Whole), shard(PrimaryStream::Sharded));
            assert_eq!(whole.labels(), cut.labels());
            assert_eq!(ints(&whole.positions()), ints(&cut.positions()));
            assert_eq!(
                ints(&whole.padding_mask().int()),
                ints(&cut.padding_mask().int())
            );
            let stream = |step: &burn_cp::sharder::CpStep<TestBackend>| {
                to_bits(&step.stream::<4, Float>("per layer").unwrap())
            };
            assert_eq!(stream(&whole), stream(&cut));
            let later = whole.shard_tokens(whole.ids().unwrap(), 1, Coordinates::Padded, None);
            assert_eq!(ints(&later), ints(&cut.ids().unwrap()));
        });
    }
}

/// Which tokens a rank holds follows from its place along the sharded axis, not from its place in the world.
#[test]
fn on_a_mesh_of_two_axes_every_group_shards_its_own_batch() {
    type B = Autodiff<TestBackend>;
    let ranks = on_groups(&[("dp", 2), ("cp", 2)], |groups| {
        let replica = groups.along(&["dp"]).unwrap().rank();
        let values = Tensor::<B, 1, Int>::arange(0..8, &device()).float();
        let leaf = values.add_scalar(100 * replica as i64).reshape([1, 8, 1]);
        let leaf = leaf.require_grad();
        let step = sharder(&groups, config(&LayoutPolicy::HeadTail))
            .shard(SequenceBatch::from_embeddings(leaf.clone()), &device())
            .unwrap();
        let local = step.embeddings().unwrap();
        let gradients = backward(&(local.clone() * 2.0).sum(), &groups.world().unwrap());
        (floats(&local), floats(&leaf.grad(&gradients).unwrap()))
    });
    let [head_tail, middle] = [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 4.0, 5.0]];
    for (rank, (local, gradient)) in ranks.into_iter().enumerate() {
        let own = if rank % 2 == 0 { head_tail } else { middle };
        assert_eq!(local, own.map(|value| value + 100.0 * (rank / 2) as f64));
        let want: Vec<f64> = (0..8)
            .map(|token| {
                if own.contains(&f64::from(token)) {
                    2.0
                } else {
                    0.0
                }
            })
            .collect();
        assert_eq!(gradient, want);
    }
}

/// World size, documents, outputs, and gradients of v for a gradient of 1 of every output.
fn fractions() -> [(usize, Documents, Vec<f64>, Vec<f64>); 2] {
    let case =
        |lengths: &[usize], seq: usize| Documents::from_lengths(&[lengths.to_vec()], seq).unwrap();
    [
        (
            4,
            case(&[2, 9, 3], 16),
            vec![
                1.0, 1.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 12.0, 12.5, 13.0, 0.0, 0.0,
            ],
            vec![
                1.5,
                0.5,
                7129.0 / 2520.0,
                4609.0 / 2520.0,
                3349.0 / 2520.0,
                2509.0 / 2520.0,
                1879.0 / 2520.0,
                275.0 / 504.0,
                191.0 / 504.0,
                17.0 / 72.0,
                1.0 / 9.0,
                11.0 / 6.0,
                5.0 / 6.0,
                1.0 / 3.0,
                0.0,
                0.0,
            ],
        ),
        (
            3,
            case(&[6, 5], 12),
            vec![1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 7.0, 7.5, 8.0, 8.5, 9.0, 0.0],
            vec![
                49.0 / 20.0,
                29.0 / 20.0,
                19.0 / 20.0,
                37.0 / 60.0,
                11.0 / 30.0,
                1.0 / 6.0,
                137.0 / 60.0,
                77.0 / 60.0,
                47.0 / 60.0,
                9.0 / 20.0,
                1.0 / 5.0,
                0.0,
            ],
        ),
    ]
}

/// With q = 0 every visible key weighs the same, so that outputs and gradients of v are fractions that can be written down.
#[test]
fn uniform_attention_gives_the_fractions_that_it_should() {
    type B = Autodiff<NdArray<f64>>;
    for (world_size, documents, out, dv) in fractions() {
        let seq = documents.seq_len();
        for exchange in [ExchangeStrategy::AllGather, ExchangeStrategy::NeededOnly] {
            let ranks = on_groups(&[("cp", world_size)], |groups| {
                let config = ContextParallelConfig {
                    exchange,
                    ..config(&CONTIGUOUS)
                };
                let ids = TensorData::zeros::<i64, _>([1, seq]);
                let batch = SequenceBatch::<B>::from_ids(ids).with_documents(documents.clone());
                let step = sharder(&groups, config).shard(batch, &device()).unwrap();
                let values = Host::from_fn([1, seq, 1], |[_, token, _]| token as f64 + 1.0);
                let leaf: Tensor<B, 4> = values
                    .tensor::<B>(DType::F64)
                    .unsqueeze_dim(1)
                    .require_grad();
                let v = step.shard_tokens(leaf.clone(), 2, Coordinates::Input, Some(0.0));
                let out = step.attention(
                    v.zeros_like(),
                    v.ones_like(),
                    v,
                    &AttentionOptions::causal(),
                );
                let gradients = backward(&out.clone().sum(), step.group());
                let out = step.gather_tokens(out.detach(), 2, Coordinates::Input, None);
                (floats(&out), floats(&leaf.grad(&gradients).unwrap()))
            });
            let close = |got: &[f64], want: &[f64]| {
                got.iter()
                    .zip(want)
                    .for_each(|(got, want)| assert!((got - want).abs() < 1e-14, "{got} {want}"));
            };
            close(&ranks[0].0, &out);
            let sum: Vec<f64> = (0..seq)
                .map(|i| ranks.iter().map(|(_, dv)| dv[i]).sum())
                .collect();
            close(&sum, &dv);
        }
    }
}
