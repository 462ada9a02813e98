//! Decoders made from Burn's, over memories that every rank holds whole.

use burn::{
    backend::{Autodiff, NdArray},
    module::Module,
    nn::transformer::{
        TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput,
        TransformerDecoderRecord,
    },
    optim::GradientsParams,
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{
        Bool, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::SequenceBatch,
    collectives::CollectiveBackend,
    comm::ProgramOrder,
    layout::{Documents, LayoutPolicy},
    nn::{ContextParallelDecoder, ContextParallelEncoder, Memory, NnError},
    optim::sync_gradients,
    sharder::{ContextParallelConfig, CpStep, StepError},
};
use burn_cp_tests::{TestBackend, backward, device, floats, on_groups, relative_error, sharder};

use super::{
    BATCH, D_MODEL, Gradients, NUM_HEADS, Pair, encoder, equals_burn_in_f64, filled, hidden, ids,
    numbers, packed, real,
};

const MEMORY_LEN: usize = 7;

pub(super) struct Decoder {
    pub(super) config: TransformerDecoderConfig,
    pub(super) documents: Documents,
    /// One for each of `documents`.
    pub(super) memory: Documents,
}

pub(super) fn decoder() -> TransformerDecoderConfig {
    TransformerDecoderConfig::new(D_MODEL, 20, NUM_HEADS, 2).with_dropout(0.0)
}

/// Memories of uneven lengths, padding between and behind.
pub(super) fn memory() -> Documents {
    Documents::from_ids(&[vec![1, 1, 0, 2, 3, 3, 3], vec![4, 5, 5, 5, 5, 0, 0]]).unwrap()
}

/// The number of each token's document in its row, none for padding.
fn numbers_of(documents: &Documents, row: usize) -> Vec<Option<usize>> {
    let mut numbers = vec![None; documents.seq_len()];
    for (index, document) in documents.row(row).iter().enumerate() {
        for run in &document.runs {
            numbers[run.clone()].fill(Some(index));
        }
    }
    numbers
}

impl Decoder {
    /// True where a token of the memory is hidden; padding sees all, so that no softmax is empty.
    fn hidden<B: Backend>(&self) -> Tensor<B, 3, Bool> {
        let mut values = Vec::new();
        for row in 0..BATCH {
            let seen = numbers_of(&self.memory, row);
            for own in numbers_of(&self.documents, row) {
                values.extend(seen.iter().map(|seen| own.is_some() && *seen != own));
            }
        }
        let shape = [BATCH, self.documents.seq_len(), self.memory.seq_len()];
        Tensor::from_data(TensorData::new(values, shape), &device())
    }
}

impl<B> Pair<B> for Decoder
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: CollectiveBackend,
{
    type Burns = TransformerDecoder<B>;
    type Ours = ContextParallelDecoder<B>;

    fn burns(&self) -> Self::Burns {
        filled(self.config.init(&device()), 23)
    }

    fn ours(&self, full: bool) -> Self::Ours {
        let decoder = ContextParallelDecoder::try_from(Pair::<B>::burns(self)).unwrap();
        if full { decoder.full() } else { decoder }
    }

    fn run_burns(
        &self,
        layer: &Self::Burns,
        x: Tensor<B, 3>,
        hidden: Tensor<B, 3, Bool>,
    ) -> Tensor<B, 3> {
        let input = TransformerDecoderInput::new(x, numbers(34, MEMORY_LEN));
        layer.forward(
            input
                .target_mask_attn(hidden)
                .memory_mask_attn(self.hidden()),
        )
    }

    fn run_ours(&self, layer: &Self::Ours, x: Tensor<B, 3>, step: &CpStep<B>) -> Tensor<B, 3> {
        let memory = Memory::new(numbers(34, MEMORY_LEN)).with_documents(self.memory.clone());
        layer.forward(x, &memory, step).unwrap()
    }
}

#[test]
fn decoders_made_from_burns_equal_them_on_any_number_of_ranks() {
    for norm_first in [false, true] {
        let pair = Decoder {
            config: decoder().with_norm_first(norm_first),
            documents: packed(),
            memory: memory(),
        };
        equals_burn_in_f64(&pair, &packed());
    }
}

/// The gradients of an encoder and of the decoder that looks at what it makes of other documents, sharded too.
fn translation(world_size: usize) -> Vec<Vec<Vec<f64>>> {
    type B = Autodiff<NdArray<f64>>;
    let device = device();
    let first = encoder().init::<B>(&device);
    let first = ContextParallelEncoder::try_from(filled(first, 22))
        .unwrap()
        .full();
    let second = decoder().init::<B>(&device);
    let second = ContextParallelDecoder::try_from(filled(second, 23)).unwrap();
    on_groups(&[("cp", world_size)], |groups| {
        let (first, second) = (first.clone().fork(&device), second.clone().fork(&device));
        let config = ContextParallelConfig {
            layout: LayoutPolicy::Contiguous { multiple: 1 },
            ..Default::default()
        };
        let (cp, order) = (sharder(&groups, config), ProgramOrder::new());
        let step = |seed, documents: Documents| {
            let x = numbers::<B>(seed, documents.seq_len());
            let batch = SequenceBatch::from_embeddings(x).with_documents(documents);
            cp.shard_in_order(batch, &device, order.clone()).unwrap()
        };
        let (source, target) = (step(34, memory()), step(31, packed()));
        let states = first
            .forward(source.embeddings().unwrap(), &source)
            .unwrap();
        let states = Memory::gather(states, &source);
        let out = second.forward(target.embeddings().unwrap(), &states, &target);
        let padding = target.padding_mask().unsqueeze_dim::<3>(2).expand([
            BATCH,
            target.local_len(),
            D_MODEL,
        ]);
        let loss = out.unwrap().mask_fill(padding, 0.0).powi_scalar(2).sum();
        let mut gradients = backward(&loss, target.group());
        let both = [
            GradientsParams::from_module(&mut gradients, &first),
            GradientsParams::from_module(&mut gradients, &second),
        ];
        let [of_first, of_second] = both;
        let of_first = sync_gradients::<B, _>(of_first, &first, &groups, &["cp"]).unwrap();
        let of_second = sync_gradients::<B, _>(of_second, &second, &groups, &["cp"]).unwrap();
        let mut read = Gradients(&of_first, Vec::new());
        Module::<B>::visit(&first, &mut read);
        let mut all = read.1;
        let mut read = Gradients(&of_second, Vec::new());
        Module::<B>::visit(&second, &mut read);
        all.extend(read.1);
        all.push(floats(&loss));
        all
    })
}

#[test]
fn an_encoder_behind_a_gathered_memory_has_the_gradients_of_one_rank() {
    let one = translation(1).remove(0);
    assert!(
        one.iter()
            .filter(|part| part.iter().any(|x| x.abs() > 1e-6))
            .count()
            > 30
    );
    for world_size in [2, 3] {
        for got in translation(world_size) {
            // The last is the rank's own loss.
            for (i, (got, want)) in got.iter().zip(&one).enumerate().take(one.len() - 1) {
                if want.iter().all(|value| value.abs() < 1e-9) {
                    continue;
                }
                let error = relative_error(got, want);
                assert!(error < 1e-9, "{world_size}: part {i} is off by {error:e}");
            }
        }
    }
}

#[test]
fn a_memory_that_does_not_fit_the_documents_is_refused_on_every_rank() {
    type B = TestBackend;
    let layer = decoder().init::<B>(&device());
    let layer = ContextParallelDecoder::try_from(filled(layer, 23)).unwrap();
    let run = |memory: Memory<B>| {
        let errors = on_groups(&[("cp", 2)], |groups| {
            let x = numbers::<B>(31, packed().seq_len());
            let batch = SequenceBatch::from_embeddings(x.clone()).with_documents(packed());
            let cp = sharder(&groups, ContextParallelConfig::default());
            let step = cp.shard(batch, &device()).unwrap();
            let layer = layer.clone().fork(&device());
            match layer.forward(step.embeddings().unwrap(), &memory, &step) {
                Err(StepError::Invalid { what, .. }) => what,
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(errors[0], errors[1]);
        errors[0].clone()
    };
    let whole = || Memory::new(numbers::<B>(34, MEMORY_LEN));
    // Three documents in a row, and none of the memory.
    assert_eq!(run(whole()), "documents of the memory in row 0");
    let short = Documents::from_lengths(&[vec![2, 0, 2], vec![3, 4]], MEMORY_LEN).unwrap();
    assert_eq!(
        run(whole().with_documents(short)),
        "document 1 of the memory in row 0"
    );
    let other = Documents::full(BATCH, MEMORY_LEN + 1).unwrap();
    assert_eq!(
        run(whole().with_documents(other)),
        "memory [batch, memory_len] and its documents"
    );
}

#[test]
fn what_was_saved_of_a_decoder_loads_into_ours_and_back() {
    type B = TestBackend;
    let device = device();
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let burns: TransformerDecoder<B> = filled(decoder().init(&device), 1);
    let saved = Recorder::<B>::record(&recorder, burns.clone().into_record(), ()).unwrap();
    let record: TransformerDecoderRecord<B> = recorder.load(saved.clone(), &device).unwrap();
    let ours = filled(decoder().init::<B>(&device), 2);
    let ours = ContextParallelDecoder::try_from(ours)
        .unwrap()
        .load_record(record);
    assert_eq!(ids::<B, _>(&ours), ids::<B, _>(&burns));
    assert!(Recorder::<B>::record(&recorder, ours.into_record(), ()).unwrap() == saved);
}

#[test]
fn decoders_that_ranks_cannot_run_alike_are_refused() {
    let refused = |change: fn(&mut TransformerDecoder<TestBackend>)| {
        let mut layer = decoder().init::<TestBackend>(&device());
        change(&mut layer);
        match ContextParallelDecoder::try_from(layer) {
            Err(NnError::Unconvertible { path, .. }) => path,
            other => panic!("{:?}", other.map(|_| ())),
        }
    };
    assert_eq!(
        refused(|layer| layer.layers[1].cross_attn.quiet_softmax = true),
        "layers.1.cross_attn.quiet_softmax"
    );
    assert_eq!(
        refused(|layer| layer.layers[0].self_attn.dropout.prob = 1.0),
        "layers.0.self_attn.dropout"
    );
    assert_eq!(
        refused(|layer| layer.layers[1].pwff.dropout.prob = 1.0),
        "layers.1.pwff.dropout"
    );
}

/// The masks that the reference side is given hide what they should.
#[test]
fn the_references_masks_differ_from_no_mask() {
    assert!(real(&packed()).concat().contains(&false));
    let mask = hidden::<TestBackend>(&packed(), false).into_data();
    assert!(mask.iter::<bool>().any(|hidden| hidden));
}
