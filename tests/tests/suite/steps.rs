//! What a step holds of a batch on every rank, against a computation on the host.

use burn::{
    backend::NdArray,
    tensor::{Bool, DType, Int, Tensor, TensorData, backend::Backend},
};
use burn_cp::{
    batch::{PadRule, SequenceBatch, Stream, StreamDeclaration},
    layout::{Documents, LayoutPolicy},
    sharder::ContextParallelConfig,
};
use burn_cp_tests::{
    Host, Random, TestBackend, device, ints, on_groups, random_documents, random_layout, sharder,
};

const NUM_CASES: u64 = 40;

pub(crate) fn cases() -> impl Iterator<Item = (Random, Documents, LayoutPolicy, usize)> {
    (0..NUM_CASES).map(|seed| {
        let mut random = Random::new(1000 + seed);
        let batch = random.int(1..=3);
        let documents = random_documents(&mut random, batch);
        let world_size = random.int(1..=6);
        let layout = random_layout(&mut random, world_size, documents.seq_len());
        (random, documents, layout, world_size)
    })
}

pub(crate) fn config(layout: &LayoutPolicy) -> ContextParallelConfig {
    ContextParallelConfig {
        layout: layout.clone(),
        padding_token_id: 9,
        ..ContextParallelConfig::default()
    }
}

/// `[batch, seq]` values that name their place.
fn numbered(documents: &Documents, from: i64) -> TensorData {
    let shape = [documents.batch_size(), documents.seq_len()];
    let len = i64::try_from(shape[0] * shape[1]).unwrap();
    TensorData::new((from..from + len).collect::<Vec<_>>(), shape)
}

pub(crate) fn batch<B: Backend>(documents: &Documents) -> SequenceBatch<B> {
    SequenceBatch::from_ids(numbered(documents, 100)).with_documents(documents.clone())
}

/// Row by row the value of each of a rank's tokens: `at` of a token of the batch, `pad` of an added one that is so far behind the
/// last.
pub(crate) fn local<T>(
    documents: &Documents,
    tokens: &[usize],
    at: impl Fn(usize, usize) -> T,
    pad: impl Fn(usize, usize) -> T,
) -> Vec<T> {
    let seq = documents.seq_len();
    let rows = 0..documents.batch_size();
    let value = |row, token| {
        if token < seq {
            at(row, token)
        } else {
            pad(row, token - seq)
        }
    };
    rows.flat_map(|row| {
        tokens
            .iter()
            .map(|&token| value(row, token))
            .collect::<Vec<_>>()
    })
    .collect()
}

/// Tokens counted from the start of the latest document that has any, or of the row.
fn position(documents: &Documents, row: usize, token: usize) -> i64 {
    let starts = documents
        .row(row)
        .iter()
        .filter(|document| document.extent.start < document.extent.end);
    let start = starts
        .map(|document| document.extent.start)
        .filter(|start| *start <= token)
        .max()
        .unwrap_or(0);
    i64::try_from(token - start).unwrap()
}

#[test]
fn every_rank_holds_its_own_tokens_of_every_stream() {
    type B = TestBackend;
    for (_, documents, layout, world_size) in cases() {
        let ignored = |place: i64| if place % 5 == 0 { -100 } else { place };
        let labels = numbered(&documents, 0)
            .iter::<i64>()
            .map(ignored)
            .collect::<Vec<_>>();
        let labels = TensorData::new(labels, [documents.batch_size(), documents.seq_len()]);
        on_groups(&[("cp", world_size)], |groups| {
            let batch = batch::<B>(&documents)
                .with_labels(labels.clone())
                .with_vocab_size(5000);
            let step = sharder(&groups, config(&layout))
                .shard(batch, &device())
                .unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let seq = documents.seq_len();
            let place = |row: usize, token: usize| i64::try_from(row * seq + token).unwrap();
            assert_eq!(
                (step.batch_size(), step.input_size()[1]),
                (documents.batch_size(), seq)
            );
            assert_eq!(
                (step.local_len(), step.layout().world_size()),
                (tokens.len(), world_size)
            );
            assert!(step.local_len() > 0);

            let want = local(
                &documents,
                &tokens,
                |row, token| 100 + place(row, token),
                |_, _| 9,
            );
            assert_eq!(ints(&step.ids().unwrap()), want);
            assert!(step.embeddings().is_err());
            let want = local(
                &documents,
                &tokens,
                |row, token| ignored(place(row, token)),
                |_, _| -100,
            );
            assert_eq!(step.labels().unwrap(), want);
            assert_eq!(
                step.num_local_labels(),
                step.labels()
                    .unwrap()
                    .iter()
                    .filter(|l| **l != -100)
                    .count() as u64
            );
        });
    }
}

#[test]
fn positions_and_padding_of_every_token_are_those_of_its_document() {
    type B = TestBackend;
    for (_, documents, layout, world_size) in cases() {
        on_groups(&[("cp", world_size)], |groups| {
            let step = sharder(&groups, config(&layout))
                .shard(batch::<B>(&documents), &device())
                .unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let seq = documents.seq_len();
            let end = |row| position(&documents, row, seq - 1) + 1;
            let want = local(
                &documents,
                &tokens,
                |row, token| position(&documents, row, token),
                |row, behind| end(row) + i64::try_from(behind).unwrap(),
            );
            assert_eq!(
                step.positions().dims(),
                [1, documents.batch_size(), tokens.len()]
            );
            assert_eq!(ints(&step.positions()), want);
            let real = |row: usize, token: usize| {
                documents
                    .row(row)
                    .iter()
                    .any(|document| document.runs.iter().any(|run| run.contains(&token)))
            };
            let want = local(
                &documents,
                &tokens,
                |row, token| i64::from(!real(row, token)),
                |_, _| 1,
            );
            assert_eq!(ints(&step.padding_mask().int()), want);
        });
    }
}

#[test]
fn given_positions_continue_through_padding_on_every_axis() {
    for (mut random, documents, layout, world_size) in cases() {
        let shape = [3, documents.batch_size(), documents.seq_len()];
        let values: Vec<i64> = (0..shape.iter().product())
            .map(|_| i64::try_from(random.int(0..=999)).unwrap())
            .collect();
        on_groups(&[("cp", world_size)], |groups| {
            let positions = TensorData::new(values.clone(), shape);
            let batch = batch::<TestBackend>(&documents).with_positions(positions);
            let step = sharder(&groups, config(&layout))
                .shard(batch, &device())
                .unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let [_, rows, seq] = shape;
            let want = (0..3).flat_map(|axis| {
                let at = |row: usize, token: usize| values[(axis * rows + row) * seq + token];
                local(&documents, &tokens, at, |row, behind| {
                    at(row, seq - 1) + 1 + i64::try_from(behind).unwrap()
                })
            });
            assert_eq!(step.positions().dims(), [3, rows, tokens.len()]);
            assert_eq!(ints(&step.positions()), want.collect::<Vec<_>>());
        });
    }
}

fn declaration(name: &str, dim: usize, pad: f64) -> StreamDeclaration {
    StreamDeclaration {
        name: name.into(),
        dim,
        pad: PadRule::Value(pad),
    }
}

#[test]
fn further_streams_are_cut_along_their_own_dim_and_padded_by_their_own_rule() {
    type B = NdArray<f64>;
    for (mut random, documents, layout, world_size) in cases() {
        let (rows, seq) = (documents.batch_size(), documents.seq_len());
        let floats = Host {
            shape: [rows, 2, seq],
            values: random.floats(rows * 2 * seq),
        };
        let ints = Host {
            shape: [seq, rows, 1],
            values: random.small_ints(rows * seq),
        };
        on_groups(&[("cp", world_size)], |groups| {
            let bools: Tensor<B, 3, Bool> = ints.int_tensor::<B>().greater_elem(0);
            let batch = batch::<B>(&documents)
                .with_stream("floats", Stream::new(floats.tensor::<B>(DType::F64)))
                .with_stream("ints", Stream::new(ints.int_tensor::<B>()))
                .with_stream("bools", Stream::new(bools));
            let streams = vec![
                declaration("floats", 2, 0.5),
                declaration("ints", 0, -7.0),
                declaration("bools", 0, 1.0),
            ];
            let config = ContextParallelConfig {
                streams,
                ..config(&layout)
            };
            let step = sharder(&groups, config).shard(batch, &device()).unwrap();
            let tokens = step.layout().indices(step.group().rank());
            let want = Host::from_fn([rows, 2, tokens.len()], |[i, j, k]| {
                if tokens[k] < seq {
                    floats.at([i, j, tokens[k]])
                } else {
                    0.5
                }
            });
            assert_eq!(
                Host::of(&step.stream::<3, burn::tensor::Float>("floats").unwrap()),
                want
            );
            let cut = |pad: f64| {
                let at = |[i, j, k]: [usize; 3]| {
                    if tokens[i] < seq {
                        ints.at([tokens[i], j, k])
                    } else {
                        pad
                    }
                };
                Host::from_fn([tokens.len(), rows, 1], at)
            };
            assert_eq!(Host::of(&step.stream::<3, Int>("ints").unwrap()), cut(-7.0));
            let got = Host::of(&step.stream::<3, Bool>("bools").unwrap().int());
            let want = cut(1.0);
            assert_eq!(
                got,
                Host::from_fn(want.shape, |index| f64::from(want.at(index) > 0.0))
            );
            let missing = step.stream::<3, Int>("other").unwrap_err().to_string();
            assert!(missing.contains(r#"no stream "other""#), "{missing}");
        });
    }
}
