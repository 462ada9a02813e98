//! Attention of Burn's that was left in a model whose sequences are sharded.

use burn::{
    module::Module,
    nn::{
        Linear, LinearConfig,
        attention::{
            CrossAttention, CrossAttentionConfig, MultiHeadAttention, MultiHeadAttentionConfig,
        },
        transformer::{
            TransformerDecoder, TransformerDecoderConfig, TransformerEncoder,
            TransformerEncoderConfig,
        },
    },
    tensor::{Tensor, backend::Backend},
};
use burn_cp::{
    attention::ContextParallelBackend,
    nn::{
        AttentionAudit, AuditError, ContextParallelAttention, ContextParallelDecoder,
        ContextParallelEncoder, ParameterError, SequenceModel, SequenceSharded,
    },
    sharder::{ContextParallelConfig, CpStep, StepError},
};
use burn_cp_tests::{TestBackend, device, on_groups, sharder};

use super::filled;

type B = TestBackend;

#[derive(Module, Debug)]
struct Tower<B: Backend> {
    attention: MultiHeadAttention<B>,
}

#[derive(Module, Debug)]
struct Burns<B: Backend> {
    encoder: TransformerEncoder<B>,
    tower: Option<Tower<B>>,
    heads: Vec<CrossAttention<B>>,
    decoder: TransformerDecoder<B>,
    output: Linear<B>,
}

#[derive(Module, Debug)]
struct Ours<B: Backend> {
    encoder: ContextParallelEncoder<B>,
    decoder: ContextParallelDecoder<B>,
    attention: ContextParallelAttention<B>,
    output: Linear<B>,
}

/// Called as Burn's attention is, and something else.
mod homonym {
    use super::{Backend, Linear, Module};

    #[derive(Module, Debug)]
    pub(super) struct MultiHeadAttention<B: Backend> {
        pub(super) heads: Vec<Linear<B>>,
    }
}

fn encoder() -> TransformerEncoder<B> {
    TransformerEncoderConfig::new(12, 20, 3, 2).init(&device())
}

fn decoder() -> TransformerDecoder<B> {
    TransformerDecoderConfig::new(12, 20, 3, 1).init(&device())
}

fn attention() -> MultiHeadAttention<B> {
    MultiHeadAttentionConfig::new(12, 3).init(&device())
}

fn output() -> Linear<B> {
    LinearConfig::new(12, 4).init(&device())
}

fn burns() -> Burns<B> {
    Burns {
        encoder: encoder(),
        tower: Some(Tower {
            attention: attention(),
        }),
        heads: vec![CrossAttentionConfig::new(12, 12, 3, 3, 4).init(&device())],
        decoder: decoder(),
        output: output(),
    }
}

fn ours() -> Ours<B> {
    Ours {
        encoder: ContextParallelEncoder::try_from(encoder()).unwrap(),
        decoder: ContextParallelDecoder::try_from(decoder()).unwrap(),
        attention: ContextParallelAttention::try_from(attention()).unwrap(),
        output: output(),
    }
}

fn found(error: &AuditError) -> Vec<String> {
    error.found.iter().map(ToString::to_string).collect()
}

impl<B: ContextParallelBackend> SequenceModel<B> for Burns<B> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        Ok(self.output.forward(step.embeddings()?))
    }
}

impl<B: ContextParallelBackend> SequenceModel<B> for Ours<B> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        let x = self.encoder.forward(step.embeddings()?, step)?;
        Ok(self.output.forward(self.attention.forward(x, step)))
    }
}

#[test]
fn every_layer_of_burns_is_found_by_its_path_unless_it_is_allowed() {
    let all = [
        "encoder.layers.0.mha (MultiHeadAttention)",
        "encoder.layers.1.mha (MultiHeadAttention)",
        "tower.attention (MultiHeadAttention)",
        "heads.0 (CrossAttention)",
        "decoder.layers.0.cross_attn (MultiHeadAttention)",
        "decoder.layers.0.self_attn (MultiHeadAttention)",
    ];
    let model = burns();
    let error = |audit: AttentionAudit| audit.check::<B, _>(&model).unwrap_err();
    assert_eq!(found(&error(AttentionAudit::new())), all);
    let message = error(AttentionAudit::new()).to_string();
    assert!(all.iter().all(|layer| message.contains(layer)), "{message}");
    assert!(message.contains("by hand is not found"), "{message}");
    let rest = AttentionAudit::new()
        .allow("tower")
        .allow("encoder.layers.1");
    assert_eq!(found(&error(rest)), [all[0], all[3], all[4], all[5]]);
    // A path is whole names.
    assert_eq!(found(&error(AttentionAudit::new().allow("tow"))), all);
    assert!(
        AttentionAudit::new()
            .allow("")
            .check::<B, _>(&model)
            .is_ok()
    );
}

#[test]
fn converted_layers_and_others_of_the_same_name_are_not_found() {
    assert_eq!(AttentionAudit::new().check::<B, _>(&ours()), Ok(()));
    let homonym = homonym::MultiHeadAttention::<B> {
        heads: vec![output()],
    };
    assert_eq!(AttentionAudit::new().check::<B, _>(&homonym), Ok(()));
}

#[test]
fn a_model_with_unconverted_attention_is_not_run_on_sharded_sequences() {
    let wrap = |world_size: usize, audit: AttentionAudit| {
        let (burns, ours) = (filled::<B, _>(burns(), 1), filled::<B, _>(ours(), 2));
        on_groups(&[("cp", world_size)], |groups| {
            let cp = sharder(&groups, ContextParallelConfig::default());
            let fork = |model: &Burns<B>| model.clone().fork(&device());
            let outcome = SequenceSharded::with_audit::<B>(fork(&burns), &cp, &audit);
            let ours = ours.clone().fork(&device());
            assert!(SequenceSharded::new::<B>(ours, &cp).is_ok());
            match outcome {
                Ok(_) => 0,
                Err(ParameterError::Unconverted(error)) => error.found.len(),
                Err(error) => panic!("{error}"),
            }
        })
    };
    assert_eq!(wrap(2, AttentionAudit::new()), [6, 6]);
    assert_eq!(wrap(2, AttentionAudit::new().allow("")), [0, 0]);
    // One rank sees all tokens.
    assert_eq!(wrap(1, AttentionAudit::new()), [0]);
}
