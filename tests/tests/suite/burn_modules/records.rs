//! What was saved of Burn's layers, and whose parameters they stay.

use burn::{
    module::Module,
    nn::{
        attention::{MultiHeadAttention, MultiHeadAttentionConfig},
        transformer::{TransformerEncoder, TransformerEncoderRecord},
    },
    record::{BinBytesRecorder, FullPrecisionSettings, NamedMpkBytesRecorder, Recorder},
    tensor::Tensor,
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::SequenceBatch,
    nn::{ContextParallelAttention, ContextParallelAttentionConfig, ContextParallelEncoder},
    sharder::{ContextParallelConfig, CpStep},
};
use burn_cp_tests::{TestBackend, device, on_groups, sharder, to_bits};

use super::{D_MODEL, NUM_HEADS, encoder, filled, ids, numbers, packed};

/// The bits of the outputs over packed documents on one rank.
fn run<B: ContextParallelBackend>(
    forward: impl Fn(Tensor<B, 3>, &CpStep<B>) -> Tensor<B, 3> + Sync,
) -> Vec<u64> {
    let outputs = on_groups(&[("cp", 1)], |groups| {
        let batch = SequenceBatch::from_embeddings(numbers::<B>(33, 13)).with_documents(packed());
        let step = sharder(&groups, ContextParallelConfig::default())
            .shard(batch, &device())
            .unwrap();
        to_bits(&forward(step.embeddings().unwrap(), &step))
    });
    outputs.concat()
}

#[test]
fn parameters_keep_their_ids() {
    type B = TestBackend;
    let device = device();
    let layer = MultiHeadAttentionConfig::new(12, 3)
        .with_dropout(0.0)
        .init::<B>(&device);
    let before = ids::<B, _>(&layer);
    assert_eq!(before.len(), 8);
    assert_eq!(
        ids::<B, _>(&ContextParallelAttention::try_from(layer).unwrap()),
        before
    );
    let layer = encoder().init::<B>(&device);
    let before = ids::<B, _>(&layer);
    assert_eq!(before.len(), 2 * 16);
    let ours = ContextParallelEncoder::try_from(layer).unwrap();
    assert_eq!(ids::<B, _>(&ours), before);
    assert_eq!(ids::<B, _>(&ours.into_inner()), before);
}

#[test]
fn what_was_saved_of_an_encoder_loads_into_ours_and_back() {
    type B = TestBackend;
    let device = device();
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let ours = |seed| {
        ContextParallelEncoder::try_from(filled::<B, _>(encoder().init(&device), seed)).unwrap()
    };
    let burns: TransformerEncoder<B> = filled(encoder().init(&device), 1);
    let want = run(|x, step| ours(1).forward(x, step).unwrap());
    let bytes = Recorder::<B>::record(&recorder, burns.clone().into_record(), ()).unwrap();
    let record: TransformerEncoderRecord<B> = recorder.load(bytes, &device).unwrap();
    let loaded = ours(2);
    assert!(run(|x, step| loaded.forward(x, step).unwrap()) != want);
    let loaded = loaded.load_record(record);
    assert!(run(|x, step| loaded.forward(x, step).unwrap()) == want);
    assert_eq!(ids::<B, _>(&loaded), ids::<B, _>(&burns));

    let bytes = Recorder::<B>::record(&recorder, loaded.into_record(), ()).unwrap();
    let back = filled::<B, _>(encoder().init(&device), 3)
        .load_record(recorder.load(bytes, &device).unwrap());
    let back = ContextParallelEncoder::try_from(back).unwrap();
    assert!(run(|x, step| back.forward(x, step).unwrap()) == want);
}

#[test]
fn what_was_saved_of_attention_loads_into_ours() {
    type B = TestBackend;
    let device = device();
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let config = MultiHeadAttentionConfig::new(D_MODEL, NUM_HEADS).with_dropout(0.0);
    let burns = |seed| filled::<B, MultiHeadAttention<B>>(config.init(&device), seed);
    let bytes = Recorder::<B>::record(&recorder, burns(1).into_record(), ()).unwrap();
    let record = || recorder.load(bytes.clone(), &device).unwrap();
    let want = ContextParallelAttention::try_from(burns(1)).unwrap();
    let want = run(|x, step| want.forward(x, step));

    let loaded = ContextParallelAttention::try_from(burns(2)).unwrap();
    let loaded = loaded.load_multi_head_record(record()).unwrap();
    assert!(run(|x, step| loaded.forward(x, step)) == want);
    let same =
        ContextParallelAttentionConfig::new(D_MODEL, NUM_HEADS, NUM_HEADS, D_MODEL / NUM_HEADS)
            .with_qkv_bias(true)
            .with_output_bias(true);
    let loaded = same.init::<B>(&device).unwrap();
    let loaded = loaded.load_multi_head_record(record()).unwrap();
    assert!(run(|x, step| loaded.forward(x, step)) == want);

    let refused = |config: ContextParallelAttentionConfig| {
        let layer = config.init::<B>(&device).unwrap();
        layer
            .load_multi_head_record(record())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refused(same.clone().with_qk_norm(Some(1e-6))),
        "q_norm: expected a layer without norms of its heads, got norms"
    );
    assert_eq!(
        refused(same.clone().with_qkv_bias(false)),
        format!(
            "query: expected [{D_MODEL}, {D_MODEL}] without bias, got [{D_MODEL}, {D_MODEL}] with bias"
        )
    );
    assert_eq!(
        refused(same.clone().with_output_bias(false)),
        format!(
            "output: expected [{D_MODEL}, {D_MODEL}] without bias, got [{D_MODEL}, {D_MODEL}] with bias"
        )
    );
    assert_eq!(
        refused(
            ContextParallelAttentionConfig::new(D_MODEL, 3, 1, D_MODEL / 3).with_qkv_bias(true)
        ),
        format!(
            "key: expected [{D_MODEL}, {}] with bias, got [{D_MODEL}, {D_MODEL}] with bias",
            D_MODEL / 3
        )
    );
}
