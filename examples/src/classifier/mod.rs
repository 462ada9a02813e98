//! A text classifier written with Burn alone, sharded: the program `shard-classifier`.
//!
//! [`stock`] is the model, which knows nothing of ranks; [`shard`] is what runs it over a step, [`step`] its training as README shows it; [`text`] are the passages that it
//! tells apart. [`train`] trains it on any number of ranks, and what it learns does not depend on how many.

pub mod shard;
#[allow(missing_docs)]
pub mod step;
pub mod stock;
pub mod text;

use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param},
    nn::transformer::TransformerEncoderConfig,
    optim::{AdamConfig, GradientsParams, Optimizer},
    tensor::{Tensor, TensorData, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::SequenceBatch,
    comm::{self, CommError, RankContext},
    launch::{self, LaunchError},
    layout::{Documents, LayoutError, LayoutPolicy},
    mesh::DeviceMesh,
    nn::{ParameterError, check_parameters},
    optim::sync_gradients,
    sharder::{ContextParallel, ContextParallelConfig, IGNORED_LABEL, StepError},
};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use shard::classify;
use stock::{TextClassifier, TextClassifierConfig};
use text::Passages;

type B = Autodiff<Flex>;

/// A training run. All but `ranks` decides what is learnt.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifierRun {
    /// Threads that share each row of passages.
    pub ranks: usize,
    /// Optimizer steps.
    pub steps: u64,
    /// Tokens of a step's row.
    pub tokens: usize,
    /// Probability of dropout in training.
    pub dropout: f64,
    /// Decides passages, weights and dropout.
    pub seed: u64,
}

/// What a run learnt.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClassifierOutcome {
    /// Loss of each step, of all ranks together.
    pub losses: Vec<f64>,
    /// Gradients of the first step, parameter by parameter.
    pub first_gradients: Vec<Vec<f64>>,
    /// Share of held-out passages whose class was found.
    pub accuracy: f64,
}

/// Why a rank stopped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ClassifierError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("{0}")]
    Classify(#[from] Box<dyn std::error::Error + Send + Sync>),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Parameters(#[from] ParameterError),
}

/// Trains the stock classifier over `run.ranks` threads.
///
/// # Errors
/// The first failure of the world.
pub fn train(run: &ClassifierRun) -> Result<ClassifierOutcome, LaunchError> {
    let device = Default::default();
    let encoder = TransformerEncoderConfig::new(48, 96, 4, 2).with_dropout(run.dropout);
    let config = TextClassifierConfig::new(
        text::VOCAB_SIZE,
        text::MAX_LEN,
        text::CLASSES.len(),
        encoder,
    );
    // Burn's parameters are drawn when they are first used, and from a generator that all threads share: here, once for all ranks
    // and from the seed alone.
    let model = config
        .init::<B>(&device)
        .map(&mut Fill(SmallRng::seed_from_u64(run.seed), false));
    let outcomes = launch::threads(run.ranks, |rank| {
        train_rank(run, &rank, model.clone().fork(&device))
    })?;
    Ok(outcomes.into_iter().next().unwrap_or_default())
}

fn train_rank(
    run: &ClassifierRun,
    rank: &RankContext,
    mut model: TextClassifier<B>,
) -> Result<ClassifierOutcome, ClassifierError> {
    let mesh = DeviceMesh::new([("cp", run.ranks)]).map_err(CommError::from)?;
    let groups = comm::bind(&mesh, rank)?;
    let config = ContextParallelConfig {
        loss_axes: vec!["cp".into()],
        layout: LayoutPolicy::Contiguous { multiple: 1 },
        ..Default::default()
    };
    let cp = ContextParallel::new(&groups, config)?;
    check_parameters::<B, _>(&model, cp.loss_group())?;
    let device = Default::default();
    let mut optimizer = AdamConfig::new().init();
    let mut outcome = ClassifierOutcome::default();
    for step in 0..run.steps {
        let seed = run.seed.wrapping_mul(1_000_003).wrapping_add(step);
        let batch = batch::<B>(&Passages::pack(seed, run.tokens, false))?.with_dropout_seed(seed);
        let step = cp.shard(batch, &device)?;
        let loss = step.cross_entropy(classify(&model, &step)?)?;
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grads = sync_gradients::<B, _>(grads, &model, &groups, &["cp"])?;
        if outcome.losses.is_empty() {
            outcome.first_gradients = gradients(&grads, &model);
        }
        outcome.losses.push(loss.global_value());
        model = optimizer.step(2e-3, model, grads);
    }
    outcome.accuracy = accuracy(run, &cp, &model.valid())?;
    Ok(outcome)
}

/// One row of passages, each a document whose class is the label of its first token.
fn batch<B: Backend>(passages: &Passages) -> Result<SequenceBatch<B>, LayoutError> {
    let tokens = passages.ids.len();
    let row = |values: Vec<i64>| TensorData::new(values, [1, tokens]);
    let documents = Documents::from_lengths(std::slice::from_ref(&passages.lengths), tokens)?;
    Ok(SequenceBatch::from_ids(row(passages.ids.clone()))
        .with_labels(row(passages.labels(IGNORED_LABEL)))
        .with_vocab_size(text::CLASSES.len())
        .with_documents(documents))
}

/// The share of held-out passages whose class was found, over all ranks.
fn accuracy<B: ContextParallelBackend>(
    run: &ClassifierRun,
    cp: &ContextParallel,
    model: &TextClassifier<B>,
) -> Result<f64, ClassifierError> {
    let (mut right, mut asked) = (0u64, 0u64);
    for seed in 0..4 {
        let passages = Passages::pack(seed, run.tokens, true);
        let step = cp.shard(batch::<B>(&passages)?, &Default::default())?;
        let choices = classify(model, &step)?.argmax(2).into_data();
        let labels = step.labels().unwrap_or_default();
        for (choice, label) in choices.iter::<i64>().zip(labels) {
            if *label != IGNORED_LABEL {
                asked += 1;
                right += u64::from(choice == *label);
            }
        }
    }
    let counts = cp
        .group()
        .host_all_gather("held-out passages", (right, asked))?;
    let sum = |of: fn(&(u64, u64)) -> u64| counts.iter().map(of).sum::<u64>();
    #[allow(clippy::cast_precision_loss)]
    Ok(sum(|count| count.0) as f64 / sum(|count| count.1).max(1) as f64)
}

/// The largest difference of two lists, relative to the largest number in the second.
pub fn max_rel_diff(got: &[f64], want: &[f64]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let largest = want
        .iter()
        .fold(0.0, |max: f64, value| max.max(value.abs()));
    let diff = (got.iter().zip(want)).fold(0.0, |max: f64, (got, want)| {
        // A NaN must not pass.
        if got.is_nan() || want.is_nan() {
            f64::INFINITY
        } else {
            max.max((got - want).abs())
        }
    });
    if diff == 0.0 { 0.0 } else { diff / largest }
}

/// Draws weights in proportion to their inputs, and leaves vectors as they are, but for biases of linear layers, which Burn draws.
struct Fill(SmallRng, bool);

impl<B: Backend> ModuleMapper<B> for Fill {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.1 = name == "bias" && container_type == "Struct:Linear";
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if D == 1 && !self.1 {
            param.val();
            return param;
        }
        param.map(|tensor| {
            let shape = tensor.shape();
            let bound = if D == 1 {
                0.0
            } else {
                1.0 / (shape.dims::<D>()[0] as f32).sqrt()
            };
            let values: Vec<f32> = (0..shape.num_elements())
                .map(|_| bound * self.0.random_range(-1.0f32..1.0))
                .collect();
            Tensor::from_data(TensorData::new(values, shape), &tensor.device()).require_grad()
        })
    }
}

/// The module with every parameter drawn.
#[cfg(test)]
fn materialised<B: Backend, M: Module<B>>(module: M) -> M {
    struct Draw;
    impl<B: Backend> ModuleVisitor<B> for Draw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            param.val();
        }
    }
    module.visit(&mut Draw);
    module
}

fn gradients<M: AutodiffModule<B>>(grads: &GradientsParams, module: &M) -> Vec<Vec<f64>> {
    struct Read<'a>(&'a GradientsParams, Vec<Vec<f64>>);
    impl ModuleVisitor<B> for Read<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let gradient = self.0.get::<Flex, D>(param.id);
            self.1
                .extend(gradient.map(|gradient| gradient.into_data().iter::<f64>().collect()));
        }
    }
    let mut read = Read(grads, Vec::new());
    module.visit(&mut read);
    read.1
}

#[cfg(test)]
mod tests {
    use burn::tensor::Bool;

    use super::*;

    #[test]
    fn readme_shows_the_lines_that_shard_the_classifier() {
        let shown = |source: &'static str| {
            let (_, rest) = source.split_once("// README begins.\n").unwrap();
            let (lines, _) = rest.split_once("// README ends.").unwrap();
            assert!(include_str!("../../../README.md").contains(lines));
            lines.lines().count()
        };
        assert!(shown(include_str!("shard.rs")) < 10);
        shown(include_str!("step.rs"));
        let stock = include_str!("stock.rs");
        assert!(!stock.contains("burn_cp"));
    }

    /// The classes of passages that share a row of several ranks, against the stock model with a text a row.
    #[test]
    fn the_sharded_classifier_says_what_the_stock_one_says() {
        let device = Default::default();
        let encoder = TransformerEncoderConfig::new(16, 24, 2, 1).with_dropout(0.1);
        let config = TextClassifierConfig::new(text::VOCAB_SIZE, text::MAX_LEN, 3, encoder);
        let model = materialised(config.init::<Flex>(&device));
        let passages = Passages::pack(5, 600, false);
        let rows = passages.lengths.len();
        let (mut ids, mut padding) = (
            vec![0; rows * text::MAX_LEN],
            vec![true; rows * text::MAX_LEN],
        );
        let mut start = 0;
        for (row, &len) in passages.lengths.iter().enumerate() {
            let at = row * text::MAX_LEN..row * text::MAX_LEN + len;
            ids[at.clone()].copy_from_slice(&passages.ids[start..start + len]);
            padding[at].fill(false);
            start += len;
        }
        let size = [rows, text::MAX_LEN];
        let want = model.forward(
            Tensor::from_data(TensorData::new(ids, size), &device),
            Tensor::<Flex, 2, Bool>::from_data(TensorData::new(padding, size), &device),
        );
        let want: Vec<f64> = want.into_data().iter().collect();
        let got = launch::threads(3, |rank| -> Result<_, ClassifierError> {
            let mesh = DeviceMesh::new([("cp", 3)]).map_err(CommError::from)?;
            let config = ContextParallelConfig {
                loss_axes: vec!["cp".into()],
                ..Default::default()
            };
            let cp = ContextParallel::new(&comm::bind(&mesh, &rank)?, config)?;
            let step = cp.shard(batch::<Flex>(&passages)?, &device)?;
            let logits: Vec<f64> = classify(&model, &step)?.into_data().iter().collect();
            let labels = step.labels().unwrap_or_default().to_vec();
            let first = labels.iter().enumerate().filter(|(_, label)| **label >= 0);
            Ok(first
                .flat_map(|(i, _)| logits[3 * i..3 * i + 3].to_vec())
                .collect::<Vec<f64>>())
        });
        assert!(max_rel_diff(&got.unwrap().concat(), &want) < 1e-5);
    }

    #[test]
    fn the_training_that_readme_shows_gives_one_model_on_any_number_of_ranks() {
        let encoder = TransformerEncoderConfig::new(16, 24, 2, 1).with_dropout(0.1);
        let config = TextClassifierConfig::new(text::VOCAB_SIZE, text::MAX_LEN, 3, encoder);
        let model = materialised(config.init::<B>(&Default::default()));
        let passages = Passages::pack(5, 600, false);
        let texts = step::Texts {
            labels: passages.labels(IGNORED_LABEL),
            ids: passages.ids,
            lengths: passages.lengths,
        };
        let run = |model, ranks| {
            let values = |logits: Tensor<Flex, 3>| logits.into_data().iter::<f64>().collect();
            let of_rank = |(model, loss, logits)| -> (_, f64, Vec<f64>) {
                assert_eq!(Tensor::dims(&logits), [1, texts.ids.len(), 3]);
                (model, loss, values(logits))
            };
            let ranks = step::train(model, &texts, ranks).unwrap().into_iter();
            ranks.map(of_rank).collect::<Vec<_>>()
        };
        let one = run(&model, 1).remove(0);
        for (_, loss, logits) in run(&model, 3) {
            assert!(max_rel_diff(&[loss], &[one.1]) < 1e-5);
            assert!(max_rel_diff(&logits, &one.2) < 1e-4);
        }
        assert!(run(&one.0, 2)[1].1 < one.1);
    }

    #[test]
    fn it_learns_the_same_on_any_number_of_ranks_with_dropout() {
        let run = |ranks| ClassifierRun {
            ranks,
            steps: 3,
            tokens: 400,
            dropout: 0.2,
            seed: 1,
        };
        let one = train(&run(1)).unwrap();
        let three = train(&run(3)).unwrap();
        assert!(max_rel_diff(&three.losses, &one.losses) < 1e-5);
        for (got, want) in three.first_gradients.iter().zip(&one.first_gradients) {
            // The gradient of the keys' bias is rounding.
            if want.iter().any(|value| value.abs() > 1e-6) {
                assert!(max_rel_diff(got, want) < 1e-4);
            }
        }
    }
}
