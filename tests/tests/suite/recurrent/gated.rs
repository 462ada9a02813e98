//! Gated linear attention over several ranks: against its recurrence, and a model of it against one rank.

use std::collections::BTreeMap;

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Tensor, TensorData, backend::AutodiffBackend},
};
use burn_cp::{
    batch::SequenceBatch,
    comm::Groups,
    layout::{Documents, LayoutPolicy},
    nn::SequenceModel,
    sharder::ContextParallelConfig,
};
use burn_cp_examples::models::gated_linear_attention::{
    GatedInputs, GatedLinearConfig, GatedLinearModel, gated_attention,
};
use burn_cp_tests::{Host, Random, device, floats, on_groups, relative_error, sharder};

use super::{B, Case, assert_close, random_host, run, sum};

/// Gated linear attention token by token: `[tokens, 2 heads, 3]` of keys of width 2.
fn gated_recursion(case: &Case, [q, k, v, decay]: [&Host; 4]) -> Vec<f64> {
    let mut out = vec![0.0; v.values.len()];
    for tokens in case.tokens() {
        for head in 0..2 {
            let mut state = [[0.0; 3]; 2];
            for token in &tokens {
                let key = |host: &Host, i: usize| host.values[token * 4 + head * 2 + i];
                for (i, state) in state.iter_mut().enumerate() {
                    for (j, state) in state.iter_mut().enumerate() {
                        *state *= key(decay, i).exp();
                        *state += key(k, i) * v.values[token * 6 + head * 3 + j];
                    }
                }
                for j in 0..3 {
                    out[token * 6 + head * 3 + j] = (0..2).map(|i| key(q, i) * state[i][j]).sum();
                }
            }
        }
    }
    out
}

#[test]
fn gated_linear_attention_by_chunks_is_its_recurrence() {
    let mut random = Random::new(65);
    for _ in 0..40 {
        let case = Case::random(&mut random);
        let chunk = random.one_of(&[1, 3, 4, 16]);
        let [rows, len] = case.padded_size();
        let [q, k] = [0; 2].map(|_| random_host(&mut random, [rows, len, 4]));
        let mut decay = random_host(&mut random, [rows, len, 4]);
        decay
            .values
            .iter_mut()
            .for_each(|decay| *decay = -0.3 * decay.abs());
        let v = random_host(&mut random, [rows, len, 6]);
        // What is read at padding is nobody's business.
        let mut y = Host::zeros([rows, len, 6]);
        for token in case.tokens().into_iter().flatten() {
            y.values[token * 6..token * 6 + 6].fill(1.0);
        }
        let inputs = [&q, &k, &v, &decay];
        let (out, _) = run(&case, &inputs, &y, &[], |recurrence, inputs, _| {
            let heads = |at: usize, width: usize| {
                let [rows, len, _] = inputs[at].dims();
                inputs[at]
                    .clone()
                    .reshape([rows, len, 2, width])
                    .swap_dims(1, 2)
            };
            let inputs = GatedInputs {
                q: heads(0, 2),
                k: heads(1, 2),
                v: heads(2, 3),
                log_decay: heads(3, 2),
            };
            let out = gated_attention(inputs, chunk, recurrence);
            let [rows, _, len, _] = out.dims();
            out.swap_dims(1, 2).reshape([rows, len, 6])
        });
        let out: Vec<f64> = out.iter().zip(&y.values).map(|(out, y)| out * y).collect();
        let want = gated_recursion(&case, inputs);
        assert_close(&out, &want, &format!("chunks of {chunk}"), &case);
    }
}

/// Gives every parameter values of its own that depend on its order only.
struct Fill(Random);

impl ModuleMapper<B> for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let shape = tensor.dims();
        let scale = 0.5 / (shape[0] as f64).sqrt().min(3.0);
        let values = self.0.floats(shape.iter().product());
        let values: Vec<f64> = values.iter().map(|value| value * scale).collect();
        let data = TensorData::new(values, shape);
        let filled = Tensor::from_data(data, &tensor.device()).require_grad();
        Param::from_mapped_value(id, filled, mapper)
    }
}

struct Collect<'a> {
    gradients: &'a <B as AutodiffBackend>::Gradients,
    found: Vec<Vec<f64>>,
}

impl ModuleVisitor<B> for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = param.val().grad(self.gradients);
        self.found
            .push(floats(&gradient.expect("every parameter is used")));
    }
}

const SIZE: [usize; 2] = [2, 26];

/// The loss, and this rank's gradients of all parameters.
fn train(groups: &Groups, layout: &LayoutPolicy, documents: &Documents) -> (f64, Vec<Vec<f64>>) {
    let config = GatedLinearConfig {
        vocab_size: 11,
        hidden_size: 8,
        num_heads: 2,
        num_layers: 2,
        kernel_size: 4,
        chunk_size: 4,
    };
    let model: GatedLinearModel<B> = config.init(&device());
    let model = model.map(&mut Fill(Random::new(8)));
    let num_tokens = SIZE[0] * SIZE[1];
    let ids: Vec<i64> = (0..num_tokens).map(|i| (i * 5 % 11) as i64).collect();
    let padding: Vec<bool> = (0..SIZE[0])
        .flat_map(|row| documents.padding_mask(row))
        .collect();
    let labels: Vec<i64> = (0..num_tokens)
        .map(|i| match i % 4 {
            2 => -100,
            _ if padding[i] => -100,
            _ => (i * 3 % 11) as i64,
        })
        .collect();
    let batch = SequenceBatch::from_ids(TensorData::new(ids, SIZE))
        .with_labels(TensorData::new(labels, SIZE));
    let batch = if *layout == LayoutPolicy::DualChunkSwap {
        let world_size = groups.along(&["cp"]).unwrap().size();
        let aligned = documents.aligned(2 * world_size).unwrap();
        batch.with_aligned_documents(aligned.flattened())
    } else {
        batch.with_documents(documents.clone())
    };
    let config = ContextParallelConfig {
        layout: layout.clone(),
        ..ContextParallelConfig::default()
    };
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

#[test]
fn a_model_of_gated_linear_attention_trains_as_on_one_rank() {
    let many = Documents::from_lengths(&[vec![1, 9, 0, 16], vec![2, 3, 11, 7]], SIZE[1]);
    let one = Documents::from_lengths(&[vec![26], vec![20]], SIZE[1]);
    for documents in [many.unwrap(), one.unwrap()] {
        let contiguous = LayoutPolicy::Contiguous { multiple: 1 };
        let alone = on_groups(&[("cp", 1)], |groups| {
            train(&groups, &contiguous, &documents)
        });
        let (want, want_gradients) = &alone[0];
        for world_size in 2..=5 {
            // Uneven, out of order, shards shorter than a convolution reaches, and ranks without a token of the batch.
            let mut custom = vec![Vec::new(); world_size];
            custom[world_size - 1] = vec![21..26, 0..5];
            custom[0].push(5..20);
            custom[1].push(20..21);
            let layouts: BTreeMap<&str, LayoutPolicy> = BTreeMap::from([
                ("contiguous", contiguous.clone()),
                ("head-tail", LayoutPolicy::HeadTail),
                ("dual-chunk", LayoutPolicy::DualChunkSwap),
                ("custom", LayoutPolicy::Custom(custom)),
            ]);
            for (name, layout) in &layouts {
                let results = on_groups(&[("cp", world_size)], |groups| {
                    train(&groups, layout, &documents)
                });
                for (loss, _) in &results {
                    assert!(
                        (loss - want).abs() < 1e-12 * want,
                        "{name} {world_size}: {loss} {want}"
                    );
                }
                for (at, want) in want_gradients.iter().enumerate() {
                    let got = sum(results.iter().map(|result| result.1[at].clone()));
                    let error = relative_error(&got, want);
                    assert!(
                        error < 1e-10,
                        "{name} on {world_size}, parameter {at}: {error:e}"
                    );
                }
            }
        }
    }
}
