//! Packed rows as streams of microbatches: pictures in one, none in the other, against one rank that knows no streams.

use burn::{
    backend::Autodiff,
    module::Module,
    optim::{GradientsAccumulator, GradientsParams},
    tensor::{Tensor, TensorData, backend::BackendTypes},
};
use burn_cp::{
    batch::{Media, SequenceBatch},
    comm,
    launch::{self, RankDevice},
    layout::LayoutPolicy,
    mesh::DeviceMesh,
    nn::SequenceSharded,
    optim::GradientSync,
    sharder::{
        ContextParallel, ContextParallelConfig, CpStep, IGNORED_LABEL, MediaEntries, MediaSlot,
        ThdConfig, ThdSharder,
    },
    vision::VisionShardingConfig,
};
use burn_cp_examples::{
    data::{MediaKind, Pack, Split, vocabulary},
    models::mimo_v2_flash::{MimoV2FlashVl, MimoV2FlashVlConfig},
    train::{ModelSize, TrainConfig},
};

use crate::{
    device::{Plain, close},
    parity::{Gradient, Gradients},
};

type B = Autodiff<Plain>;
/// Where a rank computes.
type PlainDevice = <Plain as BackendTypes>::Device;
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Twice the most ranks: documents are padded to multiples of it.
const ALIGNED: usize = 8;
/// No placeholder.
const WORD: i64 = 7;

/// Two rows whose documents are aligned, the first with pictures.
struct Rows {
    /// `[2, seq]`.
    ids: Vec<i64>,
    labels: Vec<i64>,
    seq: usize,
    /// Row by row.
    lengths: [Vec<usize>; 2],
    first: Pack,
}

impl Rows {
    fn new() -> Self {
        let config = TrainConfig::<MimoV2FlashVlConfig> {
            size: ModelSize::Tiny,
            tokens: 200,
            ..TrainConfig::default()
        };
        let source = config.packs(Split::Train).unwrap();
        let packs = [source.pack(0), source.pack(1)];
        let aligned = |pack: &Pack| -> usize {
            let lengths = pack.document_lengths.iter();
            lengths.map(|len| len.next_multiple_of(ALIGNED)).sum()
        };
        let seq = packs.iter().map(aligned).max().unwrap();
        let mut rows = Self {
            ids: vec![vocabulary::PAD; 2 * seq],
            labels: vec![IGNORED_LABEL; 2 * seq],
            seq,
            lengths: [vec![], vec![]],
            first: packs[0].clone(),
        };
        for (row, pack) in packs.iter().enumerate() {
            let (mut from, mut to) = (0, row * seq);
            for &len in &pack.document_lengths {
                rows.ids[to..to + len].copy_from_slice(&pack.ids[from..from + len]);
                rows.labels[to..to + len].copy_from_slice(&pack.labels[from..from + len]);
                (from, to) = (from + len, to + len.next_multiple_of(ALIGNED));
            }
            rows.lengths[row].clone_from(&pack.document_lengths);
        }
        for id in &mut rows.ids[seq..] {
            if [vocabulary::IMAGE, vocabulary::VIDEO].contains(id) {
                *id = WORD;
            }
        }
        rows
    }

    /// Ids, labels and documents, which cover the rows.
    fn batch(&self) -> SequenceBatch<B> {
        let most = self.lengths.iter().map(Vec::len).max().unwrap();
        let (mut real, mut padded) = (vec![-1000i64; 2 * most], vec![-1000i64; 2 * most]);
        for (row, lengths) in self.lengths.iter().enumerate() {
            let mut left = self.seq;
            for (at, &len) in lengths.iter().enumerate() {
                let last = at + 1 == lengths.len();
                let extent = if last {
                    left
                } else {
                    len.next_multiple_of(ALIGNED)
                };
                left -= extent;
                real[row * most + at] = len as i64;
                padded[row * most + at] = extent as i64;
            }
        }
        let table = |values| TensorData::new(values, [2, most]);
        let tokens = |values: &[i64]| TensorData::new(values.to_vec(), [2, self.seq]);
        SequenceBatch::from_ids(tokens(&self.ids))
            .with_labels(tokens(&self.labels))
            .with_seq_lens(&table(real), Some(&table(padded)))
            .unwrap()
    }

    /// The first row's media of a kind.
    fn entries(&self, kind: MediaKind, device: &PlainDevice) -> Option<MediaEntries<B>> {
        let vision = MimoV2FlashVlConfig::tiny().vision_config;
        let width = vision.patch_dim();
        let (mut at, mut pixels, mut grids) = (0, vec![], vec![]);
        for medium in &self.first.media {
            let end = at + medium.num_patches() * width;
            if medium.kind == kind {
                pixels.extend_from_slice(&self.first.pixels[at..end]);
                grids.push(medium.grid);
            }
            at = end;
        }
        let rows = pixels.len() / width;
        let data = TensorData::new(pixels, [rows, width]);
        (rows > 0).then(|| MediaEntries {
            pixels: Tensor::from_data(data, device),
            grids,
            spatial_merge_size: vision.spatial_merge_size,
        })
    }

    /// The batch with its media at their places, for a sharder that knows no streams.
    fn whole_batch(&self, device: &PlainDevice) -> SequenceBatch<B> {
        let kinds = [
            ("image", MediaKind::Image, vocabulary::IMAGE),
            ("video", MediaKind::Video, vocabulary::VIDEO),
        ];
        let mut batch = self.batch();
        for (name, kind, id) in kinds {
            let places: Vec<bool> = self.ids.iter().map(|&other| other == id).collect();
            if let Some(entries) = self.entries(kind, device) {
                batch = batch.with_media(Media {
                    name: name.into(),
                    pixels: entries.pixels,
                    grids: entries.grids,
                    spatial_merge_size: entries.spatial_merge_size,
                    placeholders: TensorData::new(places, [2, self.seq]),
                });
            }
        }
        batch
    }
}

/// Loss and gradients of one step.
struct Trained {
    loss: f64,
    gradients: Vec<Option<Gradient>>,
}

/// Every rank's vision tower runs where any token of a stream waits for a picture, and in the other stream none does.
fn train(num_ranks: usize, num_chunks: Option<usize>, balance: f64) -> Trained {
    let rows = Rows::new();
    let config = MimoV2FlashVlConfig {
        balance,
        ..MimoV2FlashVlConfig::tiny()
    };
    let ranks = launch::threads(num_ranks, |rank| -> Result<Trained, Failure> {
        let device = PlainDevice::of_rank(&rank)?;
        let groups = comm::bind(&DeviceMesh::new([("dp", 1), ("cp", num_ranks)])?, &rank)?;
        let sharding = ContextParallelConfig {
            layout: match num_chunks {
                Some(_) => LayoutPolicy::DualChunkSwap,
                None => LayoutPolicy::Contiguous { multiple: 1 },
            },
            vision: VisionShardingConfig::always(),
            padding_token_id: vocabulary::PAD,
            ..ContextParallelConfig::default()
        };
        let cp = ContextParallel::new(&groups, sharding)?;
        let model = SequenceSharded::new::<B>(config.init(&device, 3)?, &cp)?;
        let steps: Vec<CpStep<B>> = match num_chunks {
            None => vec![cp.shard(rows.whole_batch(&device), &device)?],
            Some(num_chunks) => {
                let thd = ThdConfig {
                    num_chunks,
                    image_token_id: Some(vocabulary::IMAGE),
                    video_token_id: Some(vocabulary::VIDEO),
                };
                let mut slots: Vec<MediaSlot<B>> = vec![MediaSlot::none(); num_chunks];
                slots[0] = MediaSlot {
                    images: rows.entries(MediaKind::Image, &device),
                    videos: rows.entries(MediaKind::Video, &device),
                };
                let sharder = ThdSharder::new(cp.clone(), thd)?;
                sharder
                    .shard(rows.batch(), slots, &device)?
                    .steps()
                    .to_vec()
            }
        };
        accumulate(&model, &steps, &cp)
    });
    ranks.unwrap().into_iter().next().unwrap()
}

fn accumulate(
    model: &SequenceSharded<MimoV2FlashVl<B>>,
    steps: &[CpStep<B>],
    cp: &ContextParallel,
) -> Result<Trained, Failure> {
    let mut total = steps[0].num_labels()?;
    for step in &steps[1..] {
        total.global += step.num_labels()?.global;
    }
    let mut sum = GradientsAccumulator::new();
    let mut loss = 0.0;
    for step in steps {
        let own = model
            .inner()
            .loss_over(step, total, 1.0 / steps.len() as f64)?;
        loss += own.global_value();
        sum.accumulate(model, GradientsParams::from_grads(own.backward(), model));
    }
    let grads = GradientSync::default().sync::<B, _>(sum.grads(), model, cp.loss_group());
    let mut gradients = Gradients {
        grads: &grads,
        found: vec![],
    };
    model.visit(&mut gradients);
    Ok(Trained {
        loss,
        gradients: gradients.found,
    })
}

fn alike(what: &str, got: &Trained, want: &Trained) {
    close(what, &[got.loss], &[want.loss]);
    assert_eq!(got.gradients.len(), want.gradients.len(), "{what}");
    let pairs = got.gradients.iter().zip(&want.gradients).enumerate();
    for (at, (got, want)) in pairs {
        // Correction biases have no gradient.
        assert_eq!(got.is_some(), want.is_some(), "{what}: parameter {at}");
        if let (Some((_, got)), Some((_, want))) = (got, want) {
            close(&format!("{what}: parameter {at}"), got, want);
        }
    }
}

#[test]
fn streams_over_ranks_train_as_rows_on_one_rank_do() {
    let rows = train(1, None, 0.0);
    for (num_ranks, num_chunks) in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)] {
        let got = train(num_ranks, Some(num_chunks), 0.0);
        let what = format!("{num_ranks} ranks, {num_chunks} chunks");
        alike(&what, &got, &rows);
    }
}

#[test]
fn experts_are_balanced_within_each_stream_alike_on_any_number_of_ranks() {
    let one = train(1, Some(2), 0.5);
    assert!((one.loss - train(1, Some(2), 0.0).loss).abs() > 0.1);
    for num_ranks in [2, 4] {
        let what = format!("{num_ranks} ranks");
        alike(&what, &train(num_ranks, Some(2), 0.5), &one);
    }
}
