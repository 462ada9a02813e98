//! What other implementations of context parallelism get wrong without saying so; see `docs/exactness.md`.

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{DType, Tensor, TensorData},
};
use burn_cp::{
    attention::AttentionOptions,
    batch::SequenceBatch,
    layout::{Documents, LayoutPolicy},
    plan::{ExchangeStrategy, MaskKind},
    sharder::{ContextParallel, ContextParallelConfig, Coordinates},
};
use burn_cp_tests::{
    Form, Host, Problem, Random, TestBackend, attention_in_f64, backward, device, floats, head_dim,
    on_groups, relative_error, sharder, to_bits,
};

use crate::{
    attention::{Case, run},
    steps::config,
    verbs::panic_of,
};

fn causal_problem(tokens: usize) -> Problem {
    Problem {
        batch: 1,
        num_heads: 2,
        num_kv_heads: 1,
        tokens,
        head_dim: head_dim(4),
        v_head_dim: head_dim(4),
        scale: None,
    }
}

/// Who sees whom, written out from ids per token whose runs are documents: `run` numbers them, 0 is padding.
fn square(run: &[u8]) -> Vec<Vec<bool>> {
    let n = run.len();
    let sees = |q: usize, k: usize| run[q] == run[k] && run[q] > 0 && q >= k;
    vec![(0..n * n).map(|i| sees(i / n, i % n)).collect()]
}

#[test]
fn padding_anywhere_gives_what_dense_attention_gives() {
    let mut random = Random::new(81);
    // Ids as given, and their runs.
    let table: [(&[i64], &[u8]); 4] = [
        (&[0, 0, 1, 1, 1, 1, 2, 2], &[0, 0, 1, 1, 1, 1, 2, 2]),
        (&[1, 1, 0, 2, 2, 2, 2, 0], &[1, 1, 0, 2, 2, 2, 2, 0]),
        (&[1, 1, 2, 2, 1, 1, 1, 0], &[1, 1, 2, 2, 3, 3, 3, 0]),
        (&[7, 0, 7, 7, 0, 0, 7, 1], &[1, 0, 2, 2, 0, 0, 3, 4]),
    ];
    for (ids, runs) in table {
        for exchange in [ExchangeStrategy::AllGather, ExchangeStrategy::NeededOnly] {
            let case = Case {
                documents: Documents::from_ids(&[ids.to_vec()]).unwrap(),
                form: Form::Ids,
                placed: None,
                layout: LayoutPolicy::Contiguous { multiple: 1 },
                exchange,
                overlap: false,
                world_size: 2,
                sinks: None,
                options: AttentionOptions::causal(),
                problem: causal_problem(8),
            };
            let inputs = case.inputs(&mut random);
            let got = run::<Autodiff<NdArray<f64>>>(&case, &inputs, DType::F64).0;
            let slices: [&[f64]; 4] = std::array::from_fn(|i| inputs[i].as_slice());
            let want = attention_in_f64(&case.problem, slices, &square(runs));
            for (what, got, want) in [
                ("out", got.out, want.out),
                ("dq", got.dq, want.dq),
                ("dk", got.dk, want.dk),
                ("dv", got.dv, want.dv),
            ] {
                assert!(relative_error(&got, &want) < 1e-14, "{what} of {ids:?}");
            }
        }
    }
}

/// Other keys and values in the first document change no bit of the second one.
#[test]
fn packed_documents_stay_apart_in_every_layout() {
    let documents = Documents::from_lengths(&[vec![8, 16]], 24).unwrap();
    let layouts = [
        LayoutPolicy::Contiguous { multiple: 1 },
        LayoutPolicy::HeadTail,
        LayoutPolicy::DualChunkSwap,
    ];
    for layout in layouts {
        let output = |shift: f64| {
            on_groups(&[("cp", 2)], |groups| {
                let ids = TensorData::zeros::<i64, _>([1, 24]);
                let batch =
                    SequenceBatch::<TestBackend>::from_ids(ids).with_documents(documents.clone());
                let step = sharder(&groups, config(&layout))
                    .shard(batch, &device())
                    .unwrap();
                let values = Host::from_fn([1, 24, head_dim(4)], |[_, token, i]| {
                    let value = ((token * 4 + i) as f64).sin();
                    if token < 8 { value + shift } else { value }
                });
                let whole = values
                    .tensor::<TestBackend>(DType::F32)
                    .unsqueeze_dim::<4>(1);
                let x = step.shard_tokens(whole, 2, Coordinates::Input, None);
                let out = step.attention(x.clone(), x.clone(), x, &AttentionOptions::causal());
                to_bits(&step.gather_tokens(out, 2, Coordinates::Input, None))
            })
            .swap_remove(0)
        };
        let (before, after) = (output(0.0), output(5.0));
        let changed = 8 * head_dim(4);
        assert_ne!(before[..changed], after[..changed], "{layout:?}");
        assert_eq!(before[changed..], after[changed..], "{layout:?}");
    }
}

/// Padding that was dealt out with its document is no key of the document's tokens, also where they look ahead.
#[test]
fn padding_of_a_document_is_no_key_in_full_attention() {
    let mut random = Random::new(82);
    let documents = Documents::from_padded_lengths(&[vec![3, 5]], &[vec![4, 8]], 12).unwrap();
    let case = Case {
        documents,
        form: Form::PaddedSeqLens,
        placed: None,
        layout: LayoutPolicy::DualChunkSwap,
        exchange: ExchangeStrategy::NeededOnly,
        overlap: false,
        world_size: 2,
        sinks: None,
        options: AttentionOptions {
            mask: MaskKind::Full,
            ..Default::default()
        },
        problem: causal_problem(12),
    };
    let inputs = case.inputs(&mut random);
    let got = run::<Autodiff<NdArray<f64>>>(&case, &inputs, DType::F64).0;
    let runs = [1, 1, 1, 0, 2, 2, 2, 2, 2, 0, 0, 0];
    let full = (0..144).map(|i| runs[i / 12] == runs[i % 12] && runs[i / 12] > 0);
    let slices: [&[f64]; 4] = std::array::from_fn(|i| inputs[i].as_slice());
    let want = attention_in_f64(&case.problem, slices, &[full.collect()]);
    assert!(relative_error(&got.out, &want.out) < 1e-14);
    assert!(relative_error(&got.dv, &want.dv) < 1e-14);
}

/// Keys and values of padding may hold anything. The rank takes part in backward all the same.
#[test]
fn a_rank_of_padding_with_infinite_keys_has_gradients_of_zero() {
    type B = Autodiff<TestBackend>;
    let documents = Documents::from_lengths(&[vec![5]], 16).unwrap();
    for exchange in [ExchangeStrategy::AllGather, ExchangeStrategy::NeededOnly] {
        on_groups(&[("cp", 4)], |groups| {
            let config = ContextParallelConfig {
                exchange,
                ..config(&LayoutPolicy::Contiguous { multiple: 1 })
            };
            let ids = TensorData::zeros::<i64, _>([1, 16]);
            let batch = SequenceBatch::<B>::from_ids(ids).with_documents(documents.clone());
            let step = sharder(&groups, config).shard(batch, &device()).unwrap();
            let values = Host::from_fn([1, 16, head_dim(4)], |[_, token, i]| match token {
                0..5 => (token + i) as f64 / 8.0,
                5..10 => f64::INFINITY,
                _ => f64::NAN,
            });
            let leaves: [Tensor<B, 4>; 3] = [(); 3].map(|()| {
                values
                    .tensor::<B>(DType::F32)
                    .unsqueeze_dim(1)
                    .require_grad()
            });
            let [q, k, v] = leaves
                .clone()
                .map(|leaf| step.shard_tokens(leaf, 2, Coordinates::Input, None));
            let out = step.attention(q, k, v, &AttentionOptions::causal());
            assert!(floats(&out).iter().all(|value| value.is_finite()));
            let gradients = backward(&out.sum(), step.group());
            for leaf in &leaves {
                let gradient = floats(&leaf.grad(&gradients).expect("every rank is on the graph"));
                assert!(gradient.iter().all(|value| value.is_finite()));
                if step.group().rank() >= 2 {
                    assert!(gradient.iter().all(|value| *value == 0.0));
                }
            }
        });
    }
}

#[test]
fn attention_of_other_tokens_than_the_step_has_is_refused_on_one_rank_too() {
    let cp = ContextParallel::solo(config(&LayoutPolicy::Identity));
    let ids = TensorData::zeros::<i64, _>([1, 6]);
    let batch = SequenceBatch::<TestBackend>::from_ids(ids)
        .with_documents(Documents::from_lengths(&[vec![2, 4]], 6).unwrap());
    let step = cp.shard(batch, &device()).unwrap();
    let x = |tokens: usize| Tensor::<TestBackend, 4>::ones([1, 2, tokens, 4], &device());
    for tokens in [5, 7, 12] {
        let message = panic_of(|| {
            drop(step.attention(x(tokens), x(tokens), x(tokens), &AttentionOptions::causal()));
        });
        assert!(message.contains(&format!("{tokens}")), "{message}");
    }
}

/// Every row of the table names tests that exist.
#[test]
fn the_table_of_what_others_get_wrong_names_tests_that_exist() {
    let table = include_str!("../../../docs/exactness.md");
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut sources = String::new();
    let mut folders = vec![root.join("burn-cp/src"), root.join("tests/tests")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                sources.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let rows: Vec<&str> = table
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains('`'))
        .collect();
    assert!(rows.len() >= 15, "{} rows", rows.len());
    for row in rows {
        let tests = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        let names = tests.split('`').skip(1).step_by(2);
        assert!(names.clone().next().is_some(), "{row} names no test");
        for name in names {
            let definition = format!("fn {name}(");
            assert!(sources.contains(&definition), "no test {name}");
        }
    }
}
