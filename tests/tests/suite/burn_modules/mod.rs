//! Layers that were made from Burn's own against those, which the reference side runs as Burn has them: whole sequences, under
//! a mask that hides other documents.

mod audit;
mod decoder;
mod dropout;
mod records;
mod refusals;

use burn::{
    backend::{Autodiff, NdArray},
    module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    nn::{
        activation::ActivationConfig,
        attention::{
            MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
        },
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::GradientsParams,
    tensor::{
        Bool, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::SequenceBatch,
    collectives::CollectiveBackend,
    layout::{Documents, LayoutPolicy},
    nn::{ContextParallelAttention, ContextParallelEncoder},
    optim::sync_gradients,
    sharder::{ContextParallelConfig, Coordinates, CpStep},
};
use burn_cp_tests::{
    Random, TestBackend, backward, device, floats, on_groups, relative_error, sharder,
};

const BATCH: usize = 2;
/// A square of a power of two: Burn divides scores by a square root in `f32`, which must be exact for comparisons in `f64`.
const HEAD_DIM: usize = if burn_cp_tests::head_dim(4) == 4 {
    4
} else {
    16
};
const D_MODEL: usize = NUM_HEADS * HEAD_DIM;
const NUM_HEADS: usize = 3;

/// Replaces every parameter by values that depend on `seed` and its place, exact in f32.
struct Fill(Random);

impl<B: Backend> ModuleMapper<B> for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let values = self.0.floats(tensor.shape().num_elements());
            #[allow(clippy::cast_possible_truncation)]
            let values: Vec<f32> = values.into_iter().map(|value| 0.6 * value as f32).collect();
            Tensor::from_data(TensorData::new(values, tensor.shape()), &tensor.device())
                .require_grad()
        })
    }
}

fn filled<B: Backend, M: Module<B>>(module: M, seed: u64) -> M {
    module.map(&mut Fill(Random::new(seed)))
}

#[derive(Default)]
struct Ids(Vec<ParamId>);

impl<B: Backend> ModuleVisitor<B> for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push(param.id);
    }
}

fn ids<B: Backend, M: Module<B>>(module: &M) -> Vec<ParamId> {
    let mut ids = Ids::default();
    module.visit(&mut ids);
    ids.0
}

struct Gradients<'a>(&'a GradientsParams, Vec<Vec<f64>>);

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.0.get::<B::InnerBackend, D>(param.id);
        self.1
            .push(floats(&gradient.expect("every parameter has a gradient")));
    }
}

/// The outputs, the gradient of the input, and those of all parameters in the module's order, of Σ weights · outputs.
type Outcome = Vec<Vec<f64>>;

fn outcome<B: AutodiffBackend, M: Module<B>>(
    module: &M,
    out: &Tensor<B, 3>,
    input: Tensor<B::InnerBackend, 3>,
    gradients: &GradientsParams,
) -> Outcome {
    let mut read = Gradients(gradients, vec![floats(out), floats(&input)]);
    module.visit(&mut read);
    read.1
}

/// A layer of Burn, and the same made for steps.
trait Pair<B>
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: CollectiveBackend,
{
    type Burns: AutodiffModule<B>;
    type Ours: AutodiffModule<B>;

    fn burns(&self) -> Self::Burns;
    fn ours(&self, full: bool) -> Self::Ours;
    fn run_burns(
        &self,
        layer: &Self::Burns,
        x: Tensor<B, 3>,
        hidden: Tensor<B, 3, Bool>,
    ) -> Tensor<B, 3>;
    fn run_ours(&self, layer: &Self::Ours, x: Tensor<B, 3>, step: &CpStep<B>) -> Tensor<B, 3>;
}

struct Attention;

impl<B> Pair<B> for Attention
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: CollectiveBackend,
{
    type Burns = MultiHeadAttention<B>;
    type Ours = ContextParallelAttention<B>;

    fn burns(&self) -> Self::Burns {
        let config = MultiHeadAttentionConfig::new(D_MODEL, NUM_HEADS).with_dropout(0.0);
        filled(config.init(&device()), 21)
    }

    fn ours(&self, full: bool) -> Self::Ours {
        let layer = ContextParallelAttention::try_from(Pair::<B>::burns(self)).unwrap();
        if full { layer.full() } else { layer }
    }

    fn run_burns(
        &self,
        layer: &Self::Burns,
        x: Tensor<B, 3>,
        hidden: Tensor<B, 3, Bool>,
    ) -> Tensor<B, 3> {
        layer
            .forward(MhaInput::self_attn(x).mask_attn(hidden))
            .context
    }

    fn run_ours(&self, layer: &Self::Ours, x: Tensor<B, 3>, step: &CpStep<B>) -> Tensor<B, 3> {
        layer.forward(x, step)
    }
}

struct Encoder(TransformerEncoderConfig);

impl<B> Pair<B> for Encoder
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: CollectiveBackend,
{
    type Burns = TransformerEncoder<B>;
    type Ours = ContextParallelEncoder<B>;

    fn burns(&self) -> Self::Burns {
        filled(self.0.init(&device()), 22)
    }

    fn ours(&self, full: bool) -> Self::Ours {
        let encoder = ContextParallelEncoder::try_from(Pair::<B>::burns(self)).unwrap();
        if full { encoder.full() } else { encoder }
    }

    fn run_burns(
        &self,
        layer: &Self::Burns,
        x: Tensor<B, 3>,
        hidden: Tensor<B, 3, Bool>,
    ) -> Tensor<B, 3> {
        layer.forward(TransformerEncoderInput::new(x).mask_attn(hidden))
    }

    fn run_ours(&self, layer: &Self::Ours, x: Tensor<B, 3>, step: &CpStep<B>) -> Tensor<B, 3> {
        layer.forward(x, step).unwrap()
    }
}

fn encoder() -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(D_MODEL, 20, NUM_HEADS, 2).with_dropout(0.0)
}

/// Norms before and behind, and activations of several kinds.
fn encoders() -> [Encoder; 3] {
    [
        encoder().with_norm_first(false),
        encoder().with_norm_first(true),
        encoder()
            .with_norm_first(true)
            .with_activation(ActivationConfig::Relu),
    ]
    .map(Encoder)
}

/// `[batch, seq, D_MODEL]`, exact in f32.
fn numbers<B: Backend>(seed: u64, seq: usize) -> Tensor<B, 3> {
    #[allow(clippy::cast_possible_truncation)]
    let values: Vec<f32> = Random::new(seed)
        .floats(BATCH * seq * D_MODEL)
        .into_iter()
        .map(|value| value as f32)
        .collect();
    Tensor::from_data(TensorData::new(values, [BATCH, seq, D_MODEL]), &device())
}

/// Row by row, token by token: 1 where it is real, else 0.
fn real(documents: &Documents) -> Vec<Vec<bool>> {
    (0..BATCH)
        .map(|row| {
            documents
                .padding_mask(row)
                .iter()
                .map(|padding| !padding)
                .collect()
        })
        .collect()
}

/// 1 at every element of a real token, 0 at padding.
fn real_elements<B: Backend>(documents: &Documents) -> Tensor<B, 3> {
    let values: Vec<f32> = real(documents)
        .concat()
        .into_iter()
        .flat_map(|real| [f32::from(u8::from(real)); D_MODEL])
        .collect();
    let shape = [BATCH, documents.seq_len(), D_MODEL];
    Tensor::from_data(TensorData::new(values, shape), &device())
}

/// True where a key is hidden from a query; padding sees itself, so that no softmax is empty.
fn hidden<B: Backend>(documents: &Documents, full: bool) -> Tensor<B, 3, Bool> {
    let seq = documents.seq_len();
    let mut values = vec![true; BATCH * seq * seq];
    for row in 0..BATCH {
        let at = |q: usize, k: usize| (row * seq + q) * seq + k;
        for token in 0..seq {
            values[at(token, token)] = false;
        }
        for document in documents.row(row) {
            let tokens: Vec<usize> = document.runs.iter().cloned().flatten().collect();
            for &q in &tokens {
                for &k in tokens.iter().filter(|&&k| full || k <= q) {
                    values[at(q, k)] = false;
                }
            }
        }
    }
    Tensor::from_data(TensorData::new(values, [BATCH, seq, seq]), &device())
}

fn by_burn<B, P: Pair<B>>(pair: &P, documents: &Documents, hidden: Tensor<B, 3, Bool>) -> Outcome
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: CollectiveBackend,
{
    let layer = pair.burns();
    let x = numbers::<B>(31, documents.seq_len()).require_grad();
    let real = real_elements::<B>(documents);
    let out = pair.run_burns(&layer, x.clone(), hidden) * real;
    let mut gradients = (out.clone() * numbers(32, documents.seq_len()))
        .sum()
        .backward();
    let input = x.grad_remove(&mut gradients).unwrap();
    let gradients = GradientsParams::from_grads(gradients, &layer);
    outcome::<B, _>(&layer, &out, input, &gradients)
}

/// The same of every rank; the input's gradient is the ranks' sum.
fn by_ranks<B, P: Pair<B> + Sync>(
    pair: &P,
    documents: &Documents,
    full: bool,
    world_size: usize,
    layout: &LayoutPolicy,
) -> Vec<Outcome>
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: CollectiveBackend,
    P::Ours: Sync,
{
    by_ranks_with(pair, documents, full, (world_size, layout), None)
}

/// [`by_ranks`], with a seed for dropout.
fn by_ranks_with<B, P: Pair<B> + Sync>(
    pair: &P,
    documents: &Documents,
    full: bool,
    (world_size, layout): (usize, &LayoutPolicy),
    seed: Option<u64>,
) -> Vec<Outcome>
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: CollectiveBackend,
    P::Ours: Sync,
{
    let device = B::Device::default();
    let layer = pair.ours(full);
    let outcomes = on_groups(&[("cp", world_size)], |groups| {
        let config = ContextParallelConfig {
            layout: layout.clone(),
            ..Default::default()
        };
        let layer = layer.clone().fork(&device);
        let x = numbers::<B>(31, documents.seq_len()).require_grad();
        let batch = SequenceBatch::from_embeddings(x.clone()).with_documents(documents.clone());
        let batch = match seed {
            Some(seed) => batch.with_dropout_seed(seed),
            None => batch,
        };
        let step = sharder(&groups, config).shard(batch, &device).unwrap();
        let cut = |tensor| step.shard_tokens(tensor, 1, Coordinates::Input, Some(0.0));
        let out = pair.run_ours(&layer, step.embeddings().unwrap(), &step);
        let out = out * cut(real_elements::<B>(documents));
        let loss = (out.clone() * cut(numbers(32, documents.seq_len()))).sum();
        let mut gradients = backward(&loss, step.group());
        let input = x.grad_remove(&mut gradients).unwrap();
        let gradients = GradientsParams::from_grads(gradients, &layer);
        let gradients = sync_gradients::<B, _>(gradients, &layer, &groups, &["cp"]).unwrap();
        let out = step.gather_tokens(out.detach(), 1, Coordinates::Input, None);
        outcome::<B, _>(&layer, &out, input, &gradients)
    });
    let inputs: Vec<Vec<f64>> = outcomes.iter().map(|outcome| outcome[1].clone()).collect();
    let sum: Vec<f64> = (0..inputs[0].len())
        .map(|i| inputs.iter().map(|input| input[i]).sum())
        .collect();
    let with_sum = |mut outcome: Outcome| {
        outcome[1].clone_from(&sum);
        outcome
    };
    outcomes.into_iter().map(with_sum).collect()
}

/// Several documents in a row, one of them a single token, padding within and behind; lengths that no number of ranks divides.
fn packed() -> Documents {
    Documents::from_ids(&[
        vec![1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 0],
        vec![4, 4, 4, 4, 0, 0, 5, 5, 5, 0, 0, 0, 0],
    ])
    .unwrap()
}

fn worlds() -> impl Iterator<Item = (usize, LayoutPolicy)> {
    (1..=3).flat_map(|world_size| {
        [
            LayoutPolicy::Contiguous { multiple: 1 },
            LayoutPolicy::HeadTail,
        ]
        .map(|layout| (world_size, layout))
    })
}

/// Error of each part of an outcome, with its index.
fn errors<'a>(got: &'a Outcome, want: &'a Outcome) -> impl Iterator<Item = (usize, f64)> + 'a {
    assert_eq!(got.len(), want.len());
    got.iter()
        .zip(want)
        .map(|(got, want)| relative_error(got, want))
        .enumerate()
}

/// In f64 nothing but the order of sums differs. The gradient of the keys' bias is 0 in exact arithmetic, so its error is
/// taken relative to the bias of the queries.
fn equals_burn_in_f64<P>(pair: &P, documents: &Documents)
where
    P: Pair<Autodiff<NdArray<f64>>> + Sync,
    P::Ours: Sync,
{
    type B = Autodiff<NdArray<f64>>;
    for full in [false, true] {
        let want = by_burn::<B, _>(pair, documents, hidden(documents, full));
        let nonzero = want
            .iter()
            .filter(|part| part.iter().any(|value| value.abs() > 1e-3));
        assert!(nonzero.count() > want.len() / 2);
        for (world_size, layout) in worlds() {
            for got in by_ranks::<B, _>(pair, documents, full, world_size, &layout) {
                for (i, error) in errors(&got, &want) {
                    let vanishes = want[i].iter().all(|value| value.abs() < 1e-12);
                    let error = if vanishes {
                        got[i].iter().map(|value| value.abs()).fold(0.0, f64::max)
                    } else {
                        error
                    };
                    assert!(
                        error <= 1e-9,
                        "{world_size} {layout:?} full {full}: part {i} is off by {error:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn attention_made_from_burns_equals_it_on_any_number_of_ranks() {
    equals_burn_in_f64(&Attention, &packed());
    equals_burn_in_f64(&Attention, &Documents::full(BATCH, 10).unwrap());
}

#[test]
fn encoders_made_from_burns_equal_them_on_any_number_of_ranks() {
    for encoder in encoders() {
        equals_burn_in_f64(&encoder, &packed());
    }
}

/// One rank, one document a row, Burn's own causal mask: in f32 as near to the exact result as Burn is, times 2, plus 4 units in
/// the last place.
#[test]
fn in_f32_on_one_rank_they_are_as_exact_as_burns() {
    fn check<P>(pair: &P)
    where
        P: Pair<Autodiff<NdArray<f64>>> + Pair<Autodiff<TestBackend>> + Sync,
        <P as Pair<Autodiff<TestBackend>>>::Ours: Sync,
    {
        let documents = Documents::full(BATCH, 10).unwrap();
        let device = device();
        let exact = by_burn::<Autodiff<NdArray<f64>>, _>(
            pair,
            &documents,
            generate_autoregressive_mask(BATCH, 10, &device),
        );
        let plain = by_burn::<Autodiff<TestBackend>, _>(
            pair,
            &documents,
            generate_autoregressive_mask(BATCH, 10, &burn_cp_tests::device()),
        );
        let identity = LayoutPolicy::Identity;
        let got = by_ranks::<Autodiff<TestBackend>, _>(pair, &documents, false, 1, &identity);
        for ((i, error), (_, burns)) in errors(&got[0], &exact).zip(errors(&plain, &exact)) {
            let vanishes = exact[i].iter().all(|value| value.abs() < 1e-12);
            let bound = 2.0 * burns + 4.0 * f64::from(f32::EPSILON);
            assert!(
                vanishes || error <= bound,
                "part {i} is off by {error:e}, Burn's by {burns:e}"
            );
        }
    }
    check(&Attention);
    for encoder in encoders() {
        check(&encoder);
    }
}
