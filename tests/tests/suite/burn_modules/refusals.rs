//! Burn's layers that cannot be run by several ranks with the results of one.

use burn::nn::{
    SwiGluConfig,
    attention::{MultiHeadAttention, MultiHeadAttentionConfig},
    transformer::{TransformerEncoder, TransformerEncoderConfig},
};
use burn_cp::nn::{ContextParallelAttention, ContextParallelEncoder, NnError};

use super::encoder;
use burn_cp_tests::device;

type B = burn_cp_tests::TestBackend;

const NO_SINKS: &str = "false: quiet softmax is not converted";
const NO_DROPOUT: &str = "at least 0 and less than 1, since nothing would be kept";

fn refusal(path: &str, expected: &str, got: &str) -> NnError {
    NnError::Unconvertible {
        path: path.into(),
        expected: expected.into(),
        got: got.into(),
    }
}

#[test]
fn attention_that_the_kernels_do_not_compute_is_refused() {
    let layer = |change: fn(&mut MultiHeadAttention<B>)| {
        let config = MultiHeadAttentionConfig::new(12, 3).with_dropout(0.0);
        let mut layer = config.init::<B>(&device());
        change(&mut layer);
        ContextParallelAttention::try_from(layer).map(|_| ())
    };
    assert_eq!(layer(|_| ()), Ok(()));
    assert_eq!(layer(|layer| layer.min_float = f64::NEG_INFINITY), Ok(()));
    assert_eq!(
        layer(|layer| layer.quiet_softmax = true),
        Err(refusal("quiet_softmax", NO_SINKS, "true"))
    );
    assert_eq!(
        layer(|layer| layer.dropout.prob = 1.0),
        Err(refusal("dropout", NO_DROPOUT, "1"))
    );
    for min_float in [-10.0, f64::NAN] {
        let expected = "at most -1000, so that hidden keys have weight 0 here as there";
        let got = match min_float {
            -10.0 => layer(|layer| layer.min_float = -10.0),
            _ => layer(|layer| layer.min_float = f64::NAN),
        };
        assert_eq!(
            got,
            Err(refusal("min_float", expected, &min_float.to_string()))
        );
    }
    assert_eq!(
        layer(|layer| layer.n_heads = 5),
        Err(refusal(
            "d_model",
            "n_heads times d_k",
            "12 for 5 heads of 4"
        ))
    );
}

#[test]
fn encoders_that_ranks_cannot_run_alike_are_refused() {
    let encoder_with = |config: TransformerEncoderConfig,
                        change: fn(&mut TransformerEncoder<B>)| {
        let mut encoder = config.init::<B>(&device());
        change(&mut encoder);
        ContextParallelEncoder::try_from(encoder).map(|_| ())
    };
    assert_eq!(encoder_with(encoder(), |_| ()), Ok(()));
    assert_eq!(
        encoder_with(encoder().with_quiet_softmax(true), |_| ()),
        Err(refusal("layers.0.mha.quiet_softmax", NO_SINKS, "true"))
    );
    assert_eq!(
        encoder_with(encoder().with_dropout(1.0), |_| ()),
        Err(refusal("layers.0.mha.dropout", NO_DROPOUT, "1"))
    );
    assert_eq!(
        encoder_with(encoder(), |encoder| encoder.layers[1].dropout.prob = 1.0),
        Err(refusal("layers.1.dropout", NO_DROPOUT, "1"))
    );
    assert_eq!(
        encoder_with(encoder(), |encoder| encoder.layers[1].pwff.dropout.prob =
            1.0),
        Err(refusal("layers.1.pwff.dropout", NO_DROPOUT, "1"))
    );
    assert_eq!(
        encoder_with(
            encoder().with_activation(SwiGluConfig::new(20, 20).into()),
            |_| ()
        ),
        Err(refusal(
            "layers.0.pwff.activation",
            "no parameters, since Burn neither trains nor saves those of a layer's activation",
            "800"
        ))
    );
}
