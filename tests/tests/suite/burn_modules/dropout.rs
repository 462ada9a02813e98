//! Dropout of layers made from Burn's: the same on any number of ranks, for one seed.

use burn::{
    backend::{Autodiff, NdArray},
    nn::{attention::MultiHeadAttentionConfig, transformer::TransformerEncoder},
    tensor::{Tensor, backend::AutodiffBackend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::SequenceBatch,
    collectives::CollectiveBackend,
    layout::{Documents, LayoutPolicy},
    nn::{ContextParallelAttention, ContextParallelEncoder},
    sharder::{ContextParallelConfig, CpStep, StepError},
};
use burn_cp_tests::{TestBackend, device, floats, on_groups, relative_error, sharder};

use super::{
    D_MODEL, Encoder, NUM_HEADS, Outcome, Pair, by_ranks_with,
    decoder::{Decoder, decoder, memory},
    encoder, filled, numbers, packed, worlds,
};

type F64 = Autodiff<NdArray<f64>>;

/// The layer alone, with dropout.
struct Attention;

impl<B> Pair<B> for Attention
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: CollectiveBackend,
{
    type Burns = burn::nn::attention::MultiHeadAttention<B>;
    type Ours = ContextParallelAttention<B>;

    fn burns(&self) -> Self::Burns {
        let config = MultiHeadAttentionConfig::new(D_MODEL, NUM_HEADS).with_dropout(0.3);
        filled(config.init(&device()), 21)
    }

    fn ours(&self, full: bool) -> Self::Ours {
        let layer = ContextParallelAttention::try_from(Pair::<B>::burns(self)).unwrap();
        if full { layer.full() } else { layer }
    }

    fn run_burns(
        &self,
        _: &Self::Burns,
        x: Tensor<B, 3>,
        _: Tensor<B, 3, burn::tensor::Bool>,
    ) -> Tensor<B, 3> {
        x
    }

    fn run_ours(&self, layer: &Self::Ours, x: Tensor<B, 3>, step: &CpStep<B>) -> Tensor<B, 3> {
        layer.forward(x, step)
    }
}

fn run<P>(pair: &P, full: bool, world: (usize, &LayoutPolicy), seed: u64) -> Outcome
where
    P: Pair<F64> + Sync,
    P::Ours: Sync,
{
    let mut ranks = by_ranks_with::<F64, _>(pair, &packed(), full, world, Some(seed));
    ranks.remove(0)
}

/// Outputs, and gradients of the input and of every parameter, in f64: one mask that differs would be off by far more.
fn drops_alike<P>(pair: &P)
where
    P: Pair<F64> + Sync,
    P::Ours: Sync,
{
    let one = (1, &LayoutPolicy::Identity);
    for full in [false, true] {
        let want = run(pair, full, one, 7);
        assert_eq!(run(pair, full, one, 7), want);
        assert!(relative_error(&run(pair, full, one, 8)[0], &want[0]) > 0.05);
        for (world_size, layout) in worlds() {
            let got = run(pair, full, (world_size, &layout), 7);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                if want.iter().all(|value| value.abs() < 1e-12) {
                    continue;
                }
                let error = relative_error(got, want);
                assert!(
                    error <= 1e-9,
                    "{world_size} {layout:?} full {full}: part {i} is off by {error:e}"
                );
            }
        }
    }
}

#[test]
fn attention_drops_the_same_weights_on_any_number_of_ranks() {
    drops_alike(&Attention);
}

#[test]
fn encoders_drop_the_same_on_any_number_of_ranks() {
    drops_alike(&Encoder(encoder().with_dropout(0.3).with_norm_first(true)));
}

#[test]
fn decoders_drop_the_same_on_any_number_of_ranks() {
    drops_alike(&Decoder {
        config: decoder().with_dropout(0.3),
        documents: packed(),
        memory: memory(),
    });
}

/// Outputs of an encoder over whole documents, with a seed or not, on a backend with autodiff or not.
fn outputs<B: ContextParallelBackend>(
    change: fn(&mut TransformerEncoder<B>),
    seed: Option<u64>,
) -> Result<Vec<f64>, StepError> {
    let mut layer = filled::<B, TransformerEncoder<B>>(encoder().init(&device()), 22);
    change(&mut layer);
    let layer = ContextParallelEncoder::try_from(layer).unwrap();
    let mut ranks = on_groups(&[("cp", 1)], |groups| {
        let batch = SequenceBatch::from_embeddings(numbers::<B>(33, 13))
            .with_documents(Documents::full(2, 13).unwrap());
        let batch = seed
            .into_iter()
            .fold(batch, SequenceBatch::with_dropout_seed);
        let cp = sharder(&groups, ContextParallelConfig::default());
        let step = cp.shard(batch, &device()).unwrap();
        let out = layer.forward(step.embeddings().unwrap(), &step)?;
        Ok(floats(&out))
    });
    ranks.remove(0)
}

#[test]
fn nothing_is_dropped_outside_of_training_and_every_dropout_counts_within() {
    let plain = outputs::<TestBackend>(|_| (), None).unwrap();
    let drops: [fn(&mut TransformerEncoder<TestBackend>); 3] = [
        |layer| layer.layers[1].mha.dropout.prob = 0.5,
        |layer| layer.layers[1].dropout.prob = 0.5,
        |layer| layer.layers[1].pwff.dropout.prob = 0.5,
    ];
    for change in drops {
        assert_eq!(outputs(change, None).unwrap(), plain);
    }
    type B = Autodiff<TestBackend>;
    // Autodiff takes other operations of the backend for some layers.
    assert!(relative_error(&outputs::<B>(|_| (), None).unwrap(), &plain) < 1e-6);
    let drops: [fn(&mut TransformerEncoder<B>); 3] = [
        |layer| layer.layers[1].mha.dropout.prob = 0.5,
        |layer| layer.layers[1].dropout.prob = 0.5,
        |layer| layer.layers[1].pwff.dropout.prob = 0.5,
    ];
    for change in drops {
        assert!(relative_error(&outputs(change, Some(1)).unwrap(), &plain) > 0.01);
        let error = outputs(change, None).unwrap_err();
        assert!(
            matches!(&error, StepError::Missing { what, .. } if what.starts_with("dropout seed")),
            "{error}"
        );
    }
}
