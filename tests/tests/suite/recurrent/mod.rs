//! Recurrent layers over several ranks, against recurrences over each document alone and against one rank.

mod gated;

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{DType, Tensor, TensorData},
};
use burn_cp::{
    batch::SequenceBatch,
    comm::Groups,
    layout::{Documents, LayoutPolicy},
    recurrent::{Recurrence, Transition},
    sharder::{ContextParallelConfig, Coordinates, CpStep},
};
use burn_cp_tests::{
    DEADLINE, Host, Random, backward, device, floats, on_groups, random_documents, random_layout,
    random_placement, relative_error, sharder, with_deadline,
};

/// In f64 nothing but the order of sums differs.
type B = Autodiff<NdArray<f64>>;

const TOLERANCE: f64 = 1e-11;

/// Documents of a batch and how they are dealt out.
#[derive(Debug, Clone)]
struct Case {
    documents: Documents,
    layout: LayoutPolicy,
    world_size: usize,
}

impl Case {
    /// Any documents, layouts and worlds; every fourth case is one stream of aligned documents, dealt out by chunks.
    fn random(random: &mut Random) -> Self {
        let world_size = random.int(1..=5);
        let batch = random.int(1..=3);
        let documents = random_documents(random, batch);
        if random.once_in(4) {
            let (placed, layout) = random_placement(random, &documents, world_size);
            return Self {
                documents: placed.documents,
                layout,
                world_size,
            };
        }
        let layout = random_layout(random, world_size, documents.seq_len());
        Self {
            documents,
            layout,
            world_size,
        }
    }

    fn step(&self, groups: &Groups) -> CpStep<B> {
        let config = ContextParallelConfig {
            layout: self.layout.clone(),
            ..ContextParallelConfig::default()
        };
        let size = [self.documents.batch_size(), self.documents.seq_len()];
        let batch = SequenceBatch::from_ids(TensorData::zeros::<i64, _>(size))
            .with_documents(self.documents.clone());
        sharder(groups, config).shard(batch, &device()).unwrap()
    }

    /// `[rows, padded seq]`.
    fn padded_size(&self) -> [usize; 2] {
        let layout = self
            .layout
            .layout(&self.documents, self.world_size)
            .unwrap();
        [self.documents.batch_size(), layout.seq_len()]
    }

    /// The real tokens of every document, as indices of the padded rows one behind the other.
    fn tokens(&self) -> Vec<Vec<usize>> {
        let len = self.padded_size()[1];
        let rows = self.documents.rows().enumerate();
        rows.flat_map(|(row, documents)| {
            documents.iter().map(move |document| {
                let tokens = document.runs.iter().cloned().flatten();
                tokens.map(|token| row * len + token).collect()
            })
        })
        .collect()
    }
}

fn whole(values: &[f64], shape: [usize; 3]) -> Tensor<B, 3> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &device())
}

fn sum(parts: impl IntoIterator<Item = Vec<f64>>) -> Vec<f64> {
    parts
        .into_iter()
        .reduce(|total, part| total.iter().zip(part).map(|(a, b)| a + b).collect())
        .unwrap()
}

/// What every rank makes of whole tensors `[rows, padded seq, width]` by `f`, weighed by another such tensor: the result in the order
/// of the rows, and the summed gradients of the tensors and of further leaves.
fn run(
    case: &Case,
    inputs: &[&Host],
    weights: &Host,
    leaves: &[&Host],
    f: impl Fn(&Recurrence<B>, Vec<Tensor<B, 3>>, Vec<Tensor<B, 3>>) -> Tensor<B, 3> + Sync,
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let results = on_groups(&[("cp", case.world_size)], |groups| {
        let step = case.step(&groups);
        let recurrence = step.recurrence();
        let leaf = |host: &&Host| whole(&host.values, host.shape).require_grad();
        let wholes: Vec<_> = inputs.iter().map(leaf).collect();
        let leaves: Vec<_> = leaves.iter().map(leaf).collect();
        let shard = |x: &Tensor<B, 3>| {
            let shard = step.shard_tokens(x.clone(), 1, Coordinates::Padded, None);
            recurrence.to_contiguous(shard, 1)
        };
        let out = f(
            &recurrence,
            wholes.iter().map(shard).collect(),
            leaves.clone(),
        );
        let out = recurrence.from_contiguous(out, 1);
        let weights = whole(&weights.values, weights.shape);
        let weights = step.shard_tokens(weights, 1, Coordinates::Padded, None);
        let loss = (out.clone() * weights).sum();
        let gradients = backward(&loss, step.group());
        // A rank whose documents are all of one token uses no transition.
        let of_leaf = |leaf: &Tensor<B, 3>| {
            let gradient = leaf.grad(&gradients);
            floats(&gradient.unwrap_or_else(|| leaf.clone().inner().zeros_like()))
        };
        let gradients: Vec<Vec<f64>> = (wholes.iter().chain(&leaves)).map(of_leaf).collect();
        let out = out.inner();
        let local = floats(&out);
        (local, step.layout().indices(step.group().rank()), gradients)
    });
    let [rows, width] = [weights.shape[0], weights.shape[2]];
    let mut out = Host::zeros(weights.shape);
    for (local, tokens, _) in &results {
        for row in 0..rows {
            for (at, token) in tokens.iter().enumerate() {
                let from = (row * tokens.len() + at) * width;
                let to = (row * weights.shape[1] + token) * width;
                out.values[to..to + width].copy_from_slice(&local[from..from + width]);
            }
        }
    }
    let num_leaves = results[0].2.len();
    let gradients = (0..num_leaves)
        .map(|leaf| sum(results.iter().map(|result| result.2[leaf].clone())))
        .collect();
    (out.values, gradients)
}

fn random_host(random: &mut Random, shape: [usize; 3]) -> Host {
    Host {
        shape,
        values: random.floats(shape.iter().product()),
    }
}

fn assert_close(got: &[f64], want: &[f64], what: &str, case: &Case) {
    let error = relative_error(got, want);
    assert!(error < TOLERANCE, "{what}: {error:e} of {case:?}");
}

#[test]
fn any_layout_is_brought_into_the_order_of_the_sequence_and_back() {
    let mut random = Random::new(61);
    for _ in 0..60 {
        let case = Case::random(&mut random);
        let [rows, len] = case.padded_size();
        let x = random_host(&mut random, [rows, len, 2]);
        let y = random_host(&mut random, [rows, len, 2]);
        // There and back: whatever is done in between is done to whole runs of the sequence.
        let (out, gradients) = run(&case, &[&x], &y, &[], |recurrence, mut x, _| {
            let x = x.swap_remove(0);
            let start = recurrence.layout().offset(recurrence.step().group().rank());
            let tokens = whole(&places(&x, start), x.dims());
            x * tokens
        });
        let place = |i: usize| (i / 2 % len) as f64;
        let scaled = |values: &[f64]| -> Vec<f64> {
            let values = values.iter().enumerate();
            values.map(|(i, value)| value * (1.0 + place(i))).collect()
        };
        assert_close(&out, &scaled(&x.values), "tokens by their place", &case);
        assert_close(&gradients[0], &scaled(&y.values), "the adjoint", &case);
    }
}

/// One more than each token's place in its row, for a contiguous shard that begins at `start`.
fn places(x: &Tensor<B, 3>, start: usize) -> Vec<f64> {
    let [rows, len, width] = x.dims();
    (0..rows * len * width)
        .map(|i| (1 + start + i / width % len) as f64)
        .collect()
}

/// A convolution over each document alone, and the gradients of `x`, weight and bias for `dout`.
fn convolution(
    case: &Case,
    x: &[f64],
    weight: &[f64],
    bias: &[f64],
    dout: &[f64],
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let width = bias.len();
    let kernel = weight.len() / width;
    let mut out: Vec<f64> = (0..x.len()).map(|i| bias[i % width]).collect();
    let (mut dx, mut dweight) = (vec![0.0; x.len()], vec![0.0; weight.len()]);
    let mut dbias = vec![0.0; width];
    for (i, dout) in dout.iter().enumerate() {
        dbias[i % width] += dout;
    }
    for tokens in case.tokens() {
        for (at, token) in tokens.iter().enumerate() {
            for back in 0..kernel.min(at + 1) {
                for channel in 0..width {
                    let [to, from] =
                        [*token, tokens[at - back]].map(|token| token * width + channel);
                    let tap = (kernel - 1 - back) * width + channel;
                    out[to] += weight[tap] * x[from];
                    dx[from] += weight[tap] * dout[to];
                    dweight[tap] += x[from] * dout[to];
                }
            }
        }
    }
    (out, vec![dx, dweight, dbias])
}

#[test]
fn a_causal_convolution_sees_each_document_alone_however_many_ranks_hold_it() {
    let mut random = Random::new(62);
    for number in 0..80 {
        let case = Case::random(&mut random);
        let kernel = random.one_of(&[1, 2, 4, 4, 9, 30]);
        let [rows, len] = case.padded_size();
        let [x, y] = [0; 2].map(|_| random_host(&mut random, [rows, len, 3]));
        let weight = random_host(&mut random, [1, kernel, 3]);
        let bias = random_host(&mut random, [1, 1, 3]);
        let (want, want_gradients) =
            convolution(&case, &x.values, &weight.values, &bias.values, &y.values);
        let (out, gradients) = run(
            &case,
            &[&x],
            &y,
            &[&weight, &bias],
            |recurrence, mut x, leaves| {
                let x = x.swap_remove(0);
                let weight = leaves[0].clone().squeeze_dim::<2>(0);
                if number % 2 == 0 {
                    let bias = leaves[1].clone().reshape([3]);
                    return recurrence.causal_conv1d(x, weight, Some(bias));
                }
                // The same from the streams.
                let shifted = recurrence.shifted(x, kernel);
                let weight = weight.reshape([1, kernel, 1, 3]);
                (shifted * weight).sum_dim(1).squeeze_dim::<3>(1) + leaves[1].clone()
            },
        );
        assert_close(&out, &want, &format!("{kernel} taps"), &case);
        for (what, (got, want)) in ["x", "weight", "bias"]
            .iter()
            .zip(gradients.iter().zip(&want_gradients))
        {
            assert_close(
                got,
                want,
                &format!("gradient of {what}, {kernel} taps"),
                &case,
            );
        }
    }
}

/// Token numbers from 1, so that 0 is nothing.
#[test]
fn a_halo_is_what_stands_left_of_the_rank_in_its_document() {
    let documents = Documents::from_lengths(&[vec![2, 9, 3, 2], vec![16, 0]], 16).unwrap();
    let case = Case {
        documents,
        layout: LayoutPolicy::Contiguous { multiple: 1 },
        world_size: 4,
    };
    let halos = on_groups(&[("cp", 4)], |groups| {
        let recurrence = case.step(&groups).recurrence();
        let rank = recurrence.step().group().rank();
        let x = Host::from_fn([2, 4, 1], |[row, token, _]| {
            (1 + row * 16 + rank * 4 + token) as f64
        });
        floats(&recurrence.left_halo(x.tensor::<B>(DType::F64), 5))
    });
    let expected = [
        [[0.0; 5], [0.0; 5]],
        [[0.0, 0.0, 0.0, 3.0, 4.0], [0.0, 17.0, 18.0, 19.0, 20.0]],
        [[4.0, 5.0, 6.0, 7.0, 8.0], [20.0, 21.0, 22.0, 23.0, 24.0]],
        [[0.0, 0.0, 0.0, 0.0, 12.0], [24.0, 25.0, 26.0, 27.0, 28.0]],
    ];
    for (rank, (got, want)) in halos.iter().zip(expected).enumerate() {
        assert_eq!(*got, want.concat(), "rank {rank}");
    }
}

/// States `[tokens, 2, 3]` of each document alone with transitions `[tokens, 2, 1]`, and the gradients of both inputs.
fn recursion(case: &Case, a: &[f64], b: &[f64], dout: &[f64]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let mut out = vec![0.0; b.len()];
    let (mut da, mut db) = (vec![0.0; a.len()], vec![0.0; b.len()]);
    for tokens in case.tokens() {
        for i in 0..6 {
            let mut state = 0.0;
            for token in &tokens {
                state = a[token * 2 + i / 3] * state + b[token * 6 + i];
                out[token * 6 + i] = state;
            }
            let mut gradient = 0.0;
            for (at, token) in tokens.iter().enumerate().rev() {
                gradient += dout[token * 6 + i];
                db[token * 6 + i] = gradient;
                if at > 0 {
                    da[token * 2 + i / 3] += gradient * out[tokens[at - 1] * 6 + i];
                }
                gradient *= a[token * 2 + i / 3];
            }
        }
    }
    (out, vec![da, db])
}

#[test]
fn a_scan_over_ranks_is_the_recurrence_of_each_document_alone() {
    let mut random = Random::new(63);
    for number in 0..80 {
        let case = Case::random(&mut random);
        let [rows, len] = case.padded_size();
        let mut a = random_host(&mut random, [rows, len, 2]);
        if number % 2 == 0 {
            a.values.iter_mut().for_each(|a| *a = 0.98 + 0.01 * *a);
        }
        let [b, y] = [0; 2].map(|_| random_host(&mut random, [rows, len, 6]));
        let (want, want_gradients) = recursion(&case, &a.values, &b.values, &y.values);
        let (out, gradients) = run(&case, &[&a, &b], &y, &[], |recurrence, mut inputs, _| {
            let [rows, len, _] = inputs[0].dims();
            let b = inputs.remove(1).reshape([rows, len, 2, 3]);
            let a = inputs.remove(0).reshape([rows, len, 2, 1]);
            recurrence.affine_scan(a, b).reshape([rows, len, 6])
        });
        assert_close(&out, &want, "states", &case);
        assert_close(&gradients[0], &want_gradients[0], "gradient of a", &case);
        assert_close(&gradients[1], &want_gradients[1], "gradient of b", &case);
    }
}

/// A state that is not finite stays in its document, although ranks hold several.
#[test]
fn states_of_other_documents_are_not_even_multiplied_by_zero() {
    let case = Case {
        documents: Documents::from_lengths(&[vec![7, 9]], 16).unwrap(),
        layout: LayoutPolicy::Contiguous { multiple: 1 },
        world_size: 4,
    };
    let shape = [1, 16, 2];
    let a = Host::from_fn(shape, |_| 0.5);
    let b = Host::from_fn(
        [1, 16, 6],
        |[_, token, _]| {
            if token == 2 { f64::INFINITY } else { 1.0 }
        },
    );
    let y = Host::zeros([1, 16, 6]);
    let (out, _) = run(&case, &[&a, &b], &y, &[], |recurrence, mut inputs, _| {
        let [rows, len, _] = inputs[0].dims();
        let b = inputs.remove(1).reshape([rows, len, 2, 3]);
        let a = inputs.remove(0).reshape([rows, len, 2, 1]);
        recurrence.affine_scan(a, b).reshape([rows, len, 6])
    });
    for (token, states) in out.chunks(6).enumerate() {
        let infinite = (2..7).contains(&token);
        assert!(
            states
                .iter()
                .all(|state| state.is_infinite() == infinite && !state.is_nan()),
            "token {token}: {states:?}"
        );
    }
}

/// Matrices carry states from rank to rank, from left to right.
#[test]
fn states_are_carried_by_matrices_over_the_ranks_of_their_document_only() {
    // Ranks hold two tokens of each row; documents of the second row begin at 3, 4 and 9.
    let documents = Documents::from_lengths(&[vec![10], vec![3, 1, 5, 1]], 10).unwrap();
    let case = Case {
        documents,
        layout: LayoutPolicy::Contiguous { multiple: 1 },
        world_size: 5,
    };
    let mut random = Random::new(64);
    let a: Vec<Host> = (0..5)
        .map(|_| random_host(&mut random, [2, 2, 2]))
        .collect();
    let s: Vec<Host> = (0..5)
        .map(|_| random_host(&mut random, [2, 2, 3]))
        .collect();
    let entering = on_groups(&[("cp", 5)], |groups| {
        let recurrence = case.step(&groups).recurrence();
        let rank = recurrence.step().group().rank();
        let [a, s] = [&a[rank], &s[rank]].map(|host| host.tensor::<B>(DType::F64));
        Host::of(&recurrence.carry(a, s, Transition::Matrix))
    });
    // Ranks from which the document that enters a rank comes.
    let chains: [[&[usize]; 2]; 5] = [
        [&[], &[]],
        [&[0], &[0]],
        [&[0, 1], &[]],
        [&[0, 1, 2], &[2]],
        [&[0, 1, 2, 3], &[2, 3]],
    ];
    for (rank, chains) in chains.iter().enumerate() {
        for (row, chain) in chains.iter().enumerate() {
            let mut want = vec![[0.0; 3]; 2];
            for &from in *chain {
                want = (0..2)
                    .map(|i| {
                        std::array::from_fn(|j| {
                            let carried: f64 =
                                (0..2).map(|m| a[from].at([row, i, m]) * want[m][j]).sum();
                            carried + s[from].at([row, i, j])
                        })
                    })
                    .collect();
            }
            for (i, want) in want.iter().enumerate() {
                for (j, want) in want.iter().enumerate() {
                    let got = entering[rank].at([row, i, j]);
                    assert!(
                        (got - want).abs() < 1e-12,
                        "rank {rank}, row {row}: {got} {want}"
                    );
                }
            }
        }
    }
}

/// The other rank calls nothing: anything that were sent would wait for it.
#[test]
fn nothing_travels_where_no_document_crosses_a_border() {
    let documents = Documents::from_lengths(&[vec![3, 5, 8], vec![8, 6]], 16).unwrap();
    let case = Case {
        documents,
        layout: LayoutPolicy::Contiguous { multiple: 1 },
        world_size: 2,
    };
    with_deadline(&[("cp", 2)], DEADLINE, |groups| {
        let recurrence = case.step(&groups).recurrence();
        assert!(!recurrence.straddles());
        if recurrence.step().group().rank() == 0 {
            let x = Tensor::<B, 3>::ones([2, 8, 4], &device()).require_grad();
            let y = recurrence.to_contiguous(x.clone(), 1);
            let y = recurrence.causal_conv1d(y, Tensor::ones([4, 4], &device()), None);
            let y = recurrence.affine_scan(x.clone() * 0.5, y);
            let y = recurrence.from_contiguous(y, 1);
            x.grad(&y.sum().backward()).unwrap();
        }
    })
    .unwrap();
}
