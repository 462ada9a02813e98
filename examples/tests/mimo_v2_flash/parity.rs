//! Hidden states, logits, losses and gradients against the reference, sequences sharded over 1, 2 and 4 ranks.

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{FloatDType, Tensor, TensorData},
};
use burn_cp::{
    batch::SequenceBatch,
    comm,
    launch::{self, RankDevice},
    layout::{Document, Documents, LayoutPolicy},
    mesh::DeviceMesh,
    nn::SequenceSharded,
    optim::GradientSync,
    plan::ExchangeStrategy,
    sharder::{ContextParallel, ContextParallelConfig, Coordinates, IGNORED_LABEL},
};
use burn_cp_examples::{
    hf::{WeightForm, WeightName, weight_names},
    models::mimo_v2_flash::{MimoV2Flash, MimoV2FlashConfig},
};

use crate::{
    device::{Plain, close, close_to_one_rank, close_to_reference},
    fixture::{Case, How, published},
};

type B = Autodiff<Plain>;

/// How much of the auxiliary loss joins the recorded gradients.
const AUXILIARY: f64 = 0.3;

/// What one world computed: rows of real tokens, document by document, and gradients by published name.
struct Computed {
    hidden: Vec<f64>,
    logits: Vec<f64>,
    loss: f64,
    auxiliary: f64,
    /// Expert by expert and layer by layer, over all ranks.
    counts: Vec<u64>,
    gradients: Vec<(String, Vec<f64>)>,
}

/// Labels of the tokens that follow, within the document.
fn shifted(labels: &[i64]) -> Vec<i64> {
    let next = labels.iter().skip(1).copied();
    next.chain([IGNORED_LABEL]).collect()
}

/// The batch of a case, and the tokens of the flattened batch that belong to documents.
fn batch(case: &Case) -> (SequenceBatch<B>, Vec<usize>) {
    let lengths: Vec<usize> = case.ids.iter().map(Vec::len).collect();
    let labels: Vec<Vec<i64>> = case.labels.iter().map(|labels| shifted(labels)).collect();
    if case.how == How::Packed {
        let tokens = lengths.iter().sum();
        let row = |rows: &[Vec<i64>]| TensorData::new(rows.concat(), [1, tokens]);
        let batch = SequenceBatch::from_ids(row(&case.ids))
            .with_labels(row(&labels))
            .with_documents(Documents::from_lengths(&[lengths], tokens).unwrap());
        return (batch, (0..tokens).collect());
    }
    let tokens = *lengths.iter().max().unwrap();
    let start = |length: usize| match case.how {
        How::Left => tokens - length,
        _ => 0,
    };
    let padded = |rows: &[Vec<i64>], fill: i64| {
        let mut values = vec![fill; rows.len() * tokens];
        for (row, own) in rows.iter().enumerate() {
            let at = row * tokens + start(own.len());
            values[at..at + own.len()].copy_from_slice(own);
        }
        TensorData::new(values, [rows.len(), tokens])
    };
    let runs = lengths
        .iter()
        .map(|&length| vec![Document::contiguous(start(length)..start(length) + length)])
        .collect();
    let batch = SequenceBatch::from_ids(padded(&case.ids, 0))
        .with_labels(padded(&labels, IGNORED_LABEL))
        .with_documents(Documents::from_runs(runs, tokens).unwrap());
    let rows = lengths.iter().enumerate();
    let real = rows
        .flat_map(|(row, &length)| {
            let at = row * tokens + start(length);
            at..at + length
        })
        .collect();
    (batch, real)
}

fn rows(tensor: Tensor<B, 3>, real: &[usize]) -> Vec<f64> {
    let width = tensor.dims()[2];
    let values: Vec<f64> = tensor.into_data().iter::<f64>().collect();
    real.iter()
        .flat_map(|&row| values[row * width..(row + 1) * width].to_vec())
        .collect()
}

/// Shape and values.
pub(crate) type Gradient = (Vec<usize>, Vec<f64>);

/// Gradients in the order of parameters.
pub(crate) struct Gradients<'a> {
    pub(crate) grads: &'a GradientsParams,
    pub(crate) found: Vec<Option<Gradient>>,
}

impl ModuleVisitor<B> for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let grad = self.grads.get::<Plain, D>(param.id);
        self.found.push(grad.map(|grad| {
            let data = grad.into_data();
            (data.shape.to_vec(), data.iter::<f64>().collect())
        }));
    }
}

/// Gradients by published name and in published order; correction biases have none.
fn gradients(
    grads: &GradientsParams,
    model: &MimoV2Flash<B>,
    config: &MimoV2FlashConfig,
) -> Vec<(String, Vec<f64>)> {
    let mut visitor = Gradients {
        grads,
        found: Vec::new(),
    };
    model.visit(&mut visitor);
    let names = weight_names(model, config);
    assert_eq!(names.len(), visitor.found.len());
    let published = |(weight, grad): (WeightName, Option<Gradient>)| {
        let trained = !weight.name.ends_with("e_score_correction_bias");
        assert_eq!(grad.is_some(), trained, "{}", weight.name);
        let (shape, values) = grad?;
        let values = match weight.form {
            WeightForm::AsIs => values,
            WeightForm::Transposed => (0..values.len())
                .map(|at| values[at % shape[0] * shape[1] + at / shape[0]])
                .collect(),
        };
        Some((weight.name, values))
    };
    let pairs = names.into_iter().zip(visitor.found);
    pairs.filter_map(published).collect()
}

fn compute(
    case: &Case,
    num_ranks: usize,
    layout: &LayoutPolicy,
    exchange: ExchangeStrategy,
) -> Computed {
    let directory = published();
    let ranks = launch::threads(
        num_ranks,
        |rank| -> Result<Computed, Box<dyn std::error::Error + Send + Sync>> {
            let device = <Plain as burn::tensor::backend::BackendTypes>::Device::of_rank(&rank)?;
            let groups = comm::bind(&DeviceMesh::new([("dp", 1), ("cp", num_ranks)])?, &rank)?;
            let config = ContextParallelConfig {
                layout: layout.clone(),
                exchange,
                ..ContextParallelConfig::default()
            };
            let cp = ContextParallel::new(&groups, config)?;
            let model =
                SequenceSharded::new::<B>(directory.load::<B>(&device, FloatDType::F32)?, &cp)?;
            let (batch, real) = batch(case);
            let step = cp.shard(batch, &device)?;
            let (hidden, routing) = model.inner().model.forward(&step)?;
            let logits = model.inner().logits(hidden.clone());
            let mut loss = step.cross_entropy(logits.clone())?;
            let auxiliary = routing.balance(&step)?;
            let value: f32 = auxiliary.clone().detach().into_scalar();
            let shares = cp.loss_group().host_all_gather("auxiliary loss", value)?;
            let counts: Vec<u64> = routing.counts().flatten().copied().collect();
            let counts = cp.loss_group().host_all_gather("counts", counts)?;
            loss.local = loss.local + auxiliary * AUXILIARY;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let grads = GradientSync::default().sync::<B, _>(grads, &model, cp.loss_group());
            let whole = |local: Tensor<B, 3>| {
                rows(
                    step.gather_tokens(local.detach(), 1, Coordinates::Input, Some(0.0)),
                    &real,
                )
            };
            Ok(Computed {
                hidden: whole(hidden),
                logits: whole(logits),
                loss: loss.global_value(),
                auxiliary: shares.into_iter().map(f64::from).sum(),
                counts: (0..counts[0].len())
                    .map(|at| counts.iter().map(|counts| counts[at]).sum())
                    .collect(),
                gradients: gradients(&grads, model.inner(), directory.config()),
            })
        },
    );
    ranks.unwrap().into_iter().next().unwrap()
}

fn check(name: &str) {
    let case = Case::read(name);
    let contiguous = LayoutPolicy::Contiguous { multiple: 1 };
    let mut alone: Option<Computed> = None;
    for (num_ranks, layout, exchange) in [
        (1, &contiguous, ExchangeStrategy::NeededOnly),
        (2, &LayoutPolicy::HeadTail, ExchangeStrategy::AllGather),
        (4, &contiguous, ExchangeStrategy::NeededOnly),
        (4, &LayoutPolicy::HeadTail, ExchangeStrategy::Ring),
    ] {
        let got = compute(&case, num_ranks, layout, exchange);
        let what = |part: &str| format!("{name}, {num_ranks} ranks, {layout:?}: {part}");
        let reference = |part: &str, got: &[f64], want: &[f64]| {
            close_to_reference(case.rounding.results, &what(part), got, want);
        };
        reference("hidden states", &got.hidden, case.tensor("hidden"));
        reference("logits", &got.logits, case.tensor("logits"));
        reference("loss", &[got.loss], case.tensor("loss"));
        let auxiliary = case.tensor("auxiliary");
        reference("auxiliary loss", &[got.auxiliary], auxiliary);
        // Padding goes to no expert: two layers of two experts for each real token.
        let num_tokens: usize = case.ids.iter().map(Vec::len).sum();
        let routed: u64 = got.counts.iter().sum();
        assert_eq!(routed, 4 * num_tokens as u64, "{}", what("tokens"));
        let recorded = case.gradients();
        for (path, values) in &got.gradients {
            let moved = case.rounding.gradients;
            close_to_reference(moved, &what(path), values, recorded[path.as_str()]);
        }
        assert_eq!(got.gradients.len(), recorded.len(), "{name}: parameters");
        match &alone {
            None => alone = Some(got),
            Some(alone) => close_to_one_rank(
                &what,
                (&got.hidden, &got.gradients),
                (&alone.hidden, &alone.gradients),
            ),
        }
    }
}

/// The last of four ranks holds nothing but padding, of which no router may hear.
#[test]
fn a_rank_of_padding_only_changes_nothing() {
    let ids = vec![7, 31, 5, 44, 12];
    let case = Case::of_row(ids.clone(), ids);
    let contiguous = LayoutPolicy::Contiguous { multiple: 1 };
    let one = compute(&case, 1, &contiguous, ExchangeStrategy::NeededOnly);
    let four = compute(&case, 4, &contiguous, ExchangeStrategy::NeededOnly);
    assert_eq!(one.counts, four.counts);
    close("loss", &[four.loss], &[one.loss]);
    close("auxiliary loss", &[four.auxiliary], &[one.auxiliary]);
    for ((name, want), (_, got)) in one.gradients.iter().zip(&four.gradients) {
        close(name, got, want);
    }
}

macro_rules! cases {
    ($($test:ident: $name:literal;)*) => { $(#[test] fn $test() { check($name); })* };
}

cases! {
    rows_of_one_length: "plain";
    packed_documents: "packed";
    padding_ahead: "left";
    padding_behind: "right";
}
