//! What a model does not declare to support never reaches it; and what needs no declaration, since every layout has it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use burn::{
    module::Module,
    nn::{Embedding, EmbeddingConfig},
    tensor::{Tensor, TensorData},
};
use burn_cp::{
    attention::AttentionOptions,
    batch::{Media, SequenceBatch},
    layout::{Documents, LayoutPolicy},
    nn::{ParameterError, SequenceModel, SequenceSharded},
    plan::ExchangeStrategy,
    sharder::{
        CapabilityError, ContextParallelConfig, CpStep, ModelCapabilities, PrimaryStream,
        StepError, Violation,
    },
    vision::VisionShardingConfig,
};
use burn_cp_tests::{
    DEADLINE, Random, TestBackend, device, on_groups, sharder, to_bits, with_deadline,
};

type B = TestBackend;

const SEQ: usize = 12;

#[derive(Module, Debug)]
struct Model<B: burn::tensor::backend::Backend> {
    embedding: Embedding<B>,
    #[module(skip)]
    capabilities: ModelCapabilities,
    #[module(skip)]
    num_runs: Arc<AtomicUsize>,
}

impl SequenceModel<B> for Model<B> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        self.num_runs.fetch_add(1, Ordering::SeqCst);
        Ok(self.embedding.forward(step.ids()?))
    }

    fn capabilities(&self) -> ModelCapabilities {
        self.capabilities
    }
}

fn model(capabilities: ModelCapabilities) -> Model<B> {
    Model {
        embedding: EmbeddingConfig::new(50, 4).init(&device()),
        capabilities,
        num_runs: Arc::default(),
    }
}

fn ids() -> SequenceBatch<B> {
    let ids: Vec<i64> = (0..2 * SEQ).map(|i| i as i64).collect();
    SequenceBatch::from_ids(TensorData::new(ids, [2, SEQ]))
}

/// Two tokens of the first row, as a mask.
fn marks() -> TensorData {
    let marks: Vec<bool> = (0..2 * SEQ).map(|token| token < 2).collect();
    TensorData::new(marks, [2, SEQ])
}

fn with_media(batch: SequenceBatch<B>) -> SequenceBatch<B> {
    batch.with_media(Media {
        name: "image".into(),
        pixels: Tensor::zeros([2, 3], &device()),
        grids: vec![[1, 1, 2]],
        spatial_merge_size: 1,
        placeholders: marks(),
    })
}

fn with_deepstack(batch: SequenceBatch<B>) -> SequenceBatch<B> {
    let layer = Tensor::zeros([2, 4], &device());
    batch.with_deepstack(marks(), vec![layer.clone(), layer.clone(), layer])
}

/// The second row holds three documents, one without a token.
fn packed(batch: SequenceBatch<B>) -> SequenceBatch<B> {
    let lengths = [vec![9], vec![4, 0, 3]];
    batch.with_documents(Documents::from_lengths(&lengths, SEQ).unwrap())
}

/// What each rank answers to a batch. A model that was refused it has not run, and its ranks can still talk to each other.
fn answers(
    capabilities: ModelCapabilities,
    config: &ContextParallelConfig,
    batch: impl Fn() -> SequenceBatch<B> + Sync,
    world_size: usize,
) -> Vec<Result<(), CapabilityError>> {
    on_groups(&[("cp", world_size)], |groups| {
        let step = sharder(&groups, config.clone())
            .shard(batch(), &device())
            .unwrap();
        let model = SequenceSharded::unchecked(model(capabilities));
        let answer = match model.forward(&step) {
            Ok(_) => Ok(()),
            Err(StepError::Unsupported(error)) => Err(error),
            Err(error) => panic!("{error}"),
        };
        let num_runs = model.inner().num_runs.load(Ordering::SeqCst);
        assert_eq!(num_runs, usize::from(answer.is_ok()));
        step.group().barrier().unwrap();
        answer
    })
}

#[test]
fn a_step_that_a_model_does_not_support_is_one_error_on_every_rank_and_the_model_does_not_run() {
    let whole = ContextParallelConfig {
        primary: PrimaryStream::Whole,
        ..Default::default()
    };
    let batch = || with_deepstack(with_media(packed(ids())));
    let violations = vec![
        Violation::PackedDocuments {
            row: 1,
            num_documents: 2,
        },
        Violation::Media { num_media: 1 },
        Violation::Deepstack { num_layers: 3 },
        Violation::WholeStream,
    ];
    let nothing = ModelCapabilities::text().without_packed_documents();
    for answer in answers(nothing, &whole, batch, 2) {
        let error = answer.unwrap_err();
        assert_eq!(error.violations, violations);
        let message = error.to_string();
        for part in [
            "(1) row 1 packs 2 documents",
            "give every row one document",
            "(2) the batch carries images or videos (1 sets)",
            "(3) the batch brings deepstack features for 3 layers",
            "(4) the model would be given the whole primary stream",
            "set primary = \"sharded\"",
        ] {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    for answer in answers(nothing.with_media().with_deepstack(), &whole, batch, 2) {
        let vision = Violation::VisionSharding { world_size: 2 };
        let expected = vec![violations[0].clone(), vision, Violation::WholeStream];
        assert_eq!(answer.unwrap_err().violations, expected);
    }
}

#[test]
fn what_is_declared_or_not_asked_for_is_let_through() {
    let text = ModelCapabilities::text();
    let config = ContextParallelConfig::default();
    let check = |capabilities,
                 config: &ContextParallelConfig,
                 batch: fn() -> SequenceBatch<B>,
                 world_size| {
        for answer in answers(capabilities, config, batch, world_size) {
            assert_eq!(answer, Ok(()));
        }
    };
    check(text, &config, || packed(ids()), 2);
    check(text.without_packed_documents(), &config, ids, 2);
    check(text.with_deepstack(), &config, || with_deepstack(ids()), 2);
    check(
        text.with_media().with_vision_sharding(),
        &config,
        || with_media(ids()),
        2,
    );
    // A tower that is not split is asked for nothing: on one rank, or by configuration.
    check(text.with_media(), &config, || with_media(ids()), 1);
    let replicated = ContextParallelConfig {
        vision: VisionShardingConfig::replicated(),
        ..config.clone()
    };
    check(text.with_media(), &replicated, || with_media(ids()), 2);
    let whole = ContextParallelConfig {
        primary: PrimaryStream::Whole,
        ..config
    };
    check(text.with_whole_stream(), &whole, ids, 2);
}

#[test]
fn a_configuration_that_a_model_does_not_support_is_refused_without_waiting_for_other_ranks() {
    let config = ContextParallelConfig {
        primary: PrimaryStream::Whole,
        ..Default::default()
    };
    let capabilities = ModelCapabilities::text().with_media();
    let outcome = with_deadline(&[("cp", 2)], DEADLINE, |groups| {
        let cp = sharder(&groups, config.clone());
        // The other rank never comes.
        (groups.global_rank() == 0).then(|| SequenceSharded::new(model(capabilities), &cp).err())
    });
    let Some(Some(ParameterError::Unsupported(error))) = &outcome.unwrap()[0] else {
        panic!("the first rank is refused");
    };
    let expected = [
        Violation::VisionSharding { world_size: 2 },
        Violation::WholeStream,
    ];
    assert_eq!(error.violations, expected);
    assert_eq!(
        error.to_string(),
        "the model does not support what it is asked for: (1) the vision tower would be split by frames over 2 ranks, which \
         the model does not declare to allow: set vision.enabled = false so that every rank encodes all frames, or declare \
         vision_sharding if no frame depends on another; (2) the model would be given the whole primary stream, which it does \
         not declare to cut: set primary = \"sharded\", or declare whole_stream in a model that shards its hidden states"
    );
}

/// Attention of a token depends on its own document, and within it on the window, whichever layout deals the tokens out.
#[test]
fn on_every_layout_a_token_sees_no_other_document_and_nothing_outside_its_window() {
    const LEN: usize = 24;
    // Two documents on one row, both of which dual-chunk-swap can cut for up to three ranks.
    let documents = Documents::from_lengths(&[vec![12, 12]], LEN).unwrap();
    let window = 3;
    let masks = [
        (AttentionOptions::causal(), LEN, 0),
        (AttentionOptions::causal().with_window(window), window, 0),
        (AttentionOptions::full(), LEN, LEN),
    ];
    for world_size in 1..=3 {
        let share = LEN / world_size;
        let reversed = (0..world_size)
            .map(|rank| LEN - (rank + 1) * share..LEN - rank * share)
            .map(|range| std::iter::once(range).collect());
        for layout in [
            LayoutPolicy::Contiguous { multiple: 1 },
            LayoutPolicy::HeadTail,
            LayoutPolicy::DualChunkSwap,
            LayoutPolicy::Custom(reversed.collect()),
        ] {
            for exchange in [ExchangeStrategy::AllGather, ExchangeStrategy::NeededOnly] {
                let config = ContextParallelConfig {
                    layout: layout.clone(),
                    exchange,
                    ..Default::default()
                };
                for (options, back, ahead) in masks {
                    let before = attended(&config, &documents, world_size, &options, None);
                    for changed in [0, 5, 11, 12, 20] {
                        let after =
                            attended(&config, &documents, world_size, &options, Some(changed));
                        for token in 0..LEN {
                            let sees = token / 12 == changed / 12
                                && token <= changed + back
                                && changed <= token + ahead;
                            assert_eq!(
                                before[token] != after[token],
                                sees,
                                "{world_size} ranks, {layout:?}, {exchange:?}, {options:?}: does {token} see {changed}?"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Size of the one head's vectors.
const WIDTH: usize = burn_cp_tests::head_dim(4);

/// The bits of each token's output, with the key and value of one token changed.
fn attended(
    config: &ContextParallelConfig,
    documents: &Documents,
    world_size: usize,
    options: &AttentionOptions,
    changed: Option<usize>,
) -> Vec<Vec<u64>> {
    let seq = documents.seq_len();
    let mut ranks = on_groups(&[("cp", world_size)], |groups| {
        let ids = TensorData::new(vec![0_i64; seq], [1, seq]);
        let batch = SequenceBatch::<B>::from_ids(ids).with_documents(documents.clone());
        let device = device();
        let step = sharder(&groups, config.clone())
            .shard(batch, &device)
            .unwrap();
        let tokens = step.layout().indices(step.group().rank());
        let heads = |seed: u64, changed: Option<usize>| {
            let value = |token: &usize| {
                let seed =
                    seed + 100 * *token as u64 + if changed == Some(*token) { 50 } else { 0 };
                Random::new(seed).floats(WIDTH)
            };
            let values: Vec<f64> = tokens.iter().flat_map(value).collect();
            Tensor::<B, 4>::from_data(
                TensorData::new(values, [1, 1, tokens.len(), WIDTH]),
                &device,
            )
        };
        let out = step.attention(
            heads(1, None),
            heads(2, changed),
            heads(3, changed),
            options,
        );
        let bits = to_bits(&out);
        let outputs = bits.chunks(WIDTH).map(<[u64]>::to_vec);
        tokens.iter().copied().zip(outputs).collect::<Vec<_>>()
    })
    .concat();
    ranks.sort_unstable();
    ranks
        .into_iter()
        .map(|(_, output)| output)
        .take(seq)
        .collect()
}
