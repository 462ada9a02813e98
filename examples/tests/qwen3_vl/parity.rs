//! Hidden states, logits, loss and gradients against the reference, sequences and vision tower sharded over 1, 2 and 4 ranks.

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{FloatDType, Tensor, backend::BackendTypes},
};
use burn_cp::{
    batch::SequenceBatch,
    comm,
    launch::{self, RankDevice},
    layout::{Document as Run, Documents, LayoutPolicy},
    mesh::DeviceMesh,
    nn::SequenceSharded,
    optim::GradientSync,
    sharder::{ContextParallel, ContextParallelConfig, Coordinates},
    vision::VisionShardingConfig,
};
use burn_cp_examples::{
    data::{Document, Marks, Media, MediaKind, Pack},
    hf::{ModelDirectory, WeightForm, weight_names},
    models::qwen3_vl::Qwen3Vl,
    train::to_batch,
};

use crate::{
    device::{Plain, close_to_one_rank, close_to_reference},
    fixture::{Case, How, directory},
};

type B = Autodiff<Plain>;

/// What one world computed: rows of real tokens, document by document, and gradients by published name.
struct Computed {
    hidden: Vec<f64>,
    logits: Vec<f64>,
    loss: f64,
    gradients: Vec<(String, Vec<f64>)>,
}

/// The documents with the reference's own patches, so that resampling plays no part.
fn documents(case: &Case, directory: &ModelDirectory) -> Vec<Document> {
    let patch_dim = directory.config().vision_config.patch_dim();
    let mut left = [
        case.tensor("pixel_values"),
        case.tensor("pixel_values_videos"),
    ]
    .map(|values| values.unwrap_or_default());
    let mut documents = case.documents(directory.processor());
    for document in &mut documents {
        document.pixels.clear();
        for Media { kind, grid } in &document.media {
            let source = &mut left[usize::from(*kind == MediaKind::Video)];
            let (own, rest) = source.split_at(grid.iter().product::<usize>() * patch_dim);
            document
                .pixels
                .extend(own.iter().map(|&value| value as f32));
            *source = rest;
        }
    }
    documents
}

/// The batch of a case, and the tokens of the flattened batch that belong to documents.
fn batch(
    case: &Case,
    documents: Vec<Document>,
    directory: &ModelDirectory,
    device: &<Plain as BackendTypes>::Device,
) -> (SequenceBatch<B>, Vec<usize>) {
    let config = directory.config();
    let processor = directory.processor();
    let marks = Marks {
        padding: processor.padding_id(),
        image: config.image_token_id,
        video: config.video_token_id,
    };
    let lengths: Vec<usize> = documents.iter().map(Document::len).collect();
    let rows: Vec<Vec<Document>> = match case.how {
        How::Packed => vec![documents],
        _ => documents
            .into_iter()
            .map(|document| vec![document])
            .collect(),
    };
    let tokens = rows
        .iter()
        .map(|row| row.iter().map(Document::len).sum())
        .max()
        .unwrap();
    let mut packs: Vec<Pack> = rows
        .into_iter()
        .map(|row| Pack::from_documents(row, tokens, marks))
        .collect();
    let mut starts = vec![0; packs.len()];
    if case.how == How::Left {
        for (pack, start) in packs.iter_mut().zip(&mut starts) {
            *start = tokens - pack.num_real_tokens();
            pack.ids.rotate_right(*start);
            pack.labels.rotate_right(*start);
            pack.image_mask.rotate_right(*start);
            pack.video_mask.rotate_right(*start);
            pack.positions
                .chunks_mut(tokens)
                .for_each(|axis| axis.rotate_right(*start));
        }
    }
    let shape = processor.shape();
    let mut batch =
        to_batch::<B>(&packs, &shape, config.text_config.vocab_size, None, device).unwrap();
    if case.how == How::Left {
        let runs = starts
            .iter()
            .map(|&start| vec![Run::contiguous(start..tokens)])
            .collect();
        batch = batch.with_documents(Documents::from_runs(runs, tokens).unwrap());
    }
    let real = match case.how {
        How::Packed => (0..lengths.iter().sum()).collect(),
        _ => (0..packs.len())
            .flat_map(|row| row * tokens + starts[row]..row * tokens + starts[row] + lengths[row])
            .collect(),
    };
    (batch, real)
}

fn rows(tensor: Tensor<B, 3>, real: &[usize]) -> Vec<f64> {
    let width = tensor.dims()[2];
    let values: Vec<f64> = tensor.into_data().iter::<f64>().collect();
    real.iter()
        .flat_map(|&row| values[row * width..(row + 1) * width].to_vec())
        .collect()
}

struct Gradients<'a> {
    grads: &'a GradientsParams,
    found: Vec<(Vec<usize>, Vec<f64>)>,
}

impl ModuleVisitor<B> for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let grad = self
            .grads
            .get::<Plain, D>(param.id)
            .expect("every parameter has a gradient after synchronisation");
        let data = grad.into_data();
        self.found
            .push((data.shape.to_vec(), data.iter::<f64>().collect()));
    }
}

fn gradients(
    grads: &GradientsParams,
    model: &Qwen3Vl<B>,
    directory: &ModelDirectory,
) -> Vec<(String, Vec<f64>)> {
    let mut visitor = Gradients {
        grads,
        found: Vec::new(),
    };
    model.visit(&mut visitor);
    let names = weight_names(model, directory.config());
    assert_eq!(names.len(), visitor.found.len());
    let published =
        |(weight, (shape, values)): (burn_cp_examples::hf::WeightName, (Vec<usize>, Vec<f64>))| {
            let values = match weight.form {
                WeightForm::AsIs => values,
                WeightForm::Transposed => (0..values.len())
                    .map(|at| values[at % shape[0] * shape[1] + at / shape[0]])
                    .collect(),
            };
            (weight.name, values)
        };
    names
        .into_iter()
        .zip(visitor.found)
        .map(published)
        .collect()
}

fn compute(name: &str, num_ranks: usize, layout: &LayoutPolicy) -> Computed {
    let directory = directory(name.split('-').next().unwrap());
    let case = Case::read(name);
    let documents = documents(&case, &directory);
    let ranks = launch::threads(
        num_ranks,
        |rank| -> Result<Computed, Box<dyn std::error::Error + Send + Sync>> {
            let device = <Plain as BackendTypes>::Device::of_rank(&rank)?;
            let groups = comm::bind(&DeviceMesh::new([("dp", 1), ("cp", num_ranks)])?, &rank)?;
            let config = ContextParallelConfig {
                layout: layout.clone(),
                vision: VisionShardingConfig::always(),
                padding_token_id: directory.processor().padding_id(),
                ..ContextParallelConfig::default()
            };
            let cp = ContextParallel::new(&groups, config)?;
            let model =
                SequenceSharded::new::<B>(directory.load::<B>(&device, FloatDType::F32)?, &cp)?;
            let (batch, real) = batch(&case, documents.clone(), &directory, &device);
            let step = cp.shard(batch, &device)?;
            let hidden = model.inner().model.forward(&step)?;
            let logits = model.inner().logits(hidden.clone());
            let loss = step.cross_entropy(logits.clone())?;
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
                gradients: gradients(&grads, model.inner(), &directory),
            })
        },
    );
    ranks.unwrap().into_iter().next().unwrap()
}

fn check(name: &str) {
    let case = Case::read(name);
    let mut alone: Option<Computed> = None;
    for (num_ranks, layout) in [
        (1, LayoutPolicy::Contiguous { multiple: 1 }),
        (2, LayoutPolicy::HeadTail),
        (4, LayoutPolicy::Contiguous { multiple: 1 }),
    ] {
        let got = compute(name, num_ranks, &layout);
        let what = |part: &str| format!("{name}, {num_ranks} ranks: {part}");
        let reference = |part: &str, got: &[f64], want: &[f64]| {
            close_to_reference(case.rounding.results, &what(part), got, want);
        };
        let recorded = |part: &str| case.tensor(part).unwrap();
        reference("hidden states", &got.hidden, recorded("hidden"));
        reference("logits", &got.logits, recorded("logits"));
        reference("loss", &[got.loss], recorded("loss"));
        let recorded = case.gradients();
        let mut compared = 0;
        for (path, values) in &got.gradients {
            match recorded.get(path.as_str()) {
                Some(want) => {
                    close_to_reference(case.rounding.gradients, &what(path), values, want);
                    compared += 1;
                }
                // What the reference's graph does not reach.
                None => assert!(values.iter().all(|&value| value == 0.0), "{}", what(path)),
            }
        }
        assert_eq!(compared, recorded.len(), "{name}: parameters compared");
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

macro_rules! cases {
    ($($test:ident: $name:literal;)*) => { $(#[test] fn $test() { check($name); })* };
}

cases! {
    text_only: "untied-text";
    one_image: "untied-image";
    images_of_several_sizes: "untied-images";
    a_video: "untied-video";
    images_and_a_video: "untied-mixed";
    packed_documents: "untied-packed";
    padding_ahead: "untied-left";
    padding_behind: "untied-right";
    a_tied_model_in_bf16: "tied-mixed";
}
