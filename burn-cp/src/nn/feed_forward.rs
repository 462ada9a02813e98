//! What encoders and decoders of Burn have in common besides attention.

use burn::{
    module::Module,
    nn::transformer::PositionWiseFeedForward,
    tensor::{Tensor, backend::Backend},
};

use super::{
    DropoutSite, NnError, StepDropout,
    dropout::places::{INNER, OUTER},
    multi_head::{check_dropout, unconvertible},
};

/// The feed-forward part of a layer with its dropout, and the dropout behind it. Nothing is exchanged.
pub(super) fn feed_forward<B: Backend>(
    part: &PositionWiseFeedForward<B>,
    x: Tensor<B, 3>,
    dropout: &StepDropout,
    (layer, p): (u64, f64),
) -> Tensor<B, 3> {
    let x = part.activation.forward(part.linear_inner.forward(x));
    let x = dropout.apply(x, part.dropout.prob, DropoutSite::new(layer, INNER));
    let x = part.linear_outer.forward(x);
    dropout.apply(x, p, DropoutSite::new(layer, OUTER))
}

/// Can ranks run it alike? `path` is where the layer stands, empty or ending in a dot.
pub(super) fn check_feed_forward<B: Backend>(
    path: &str,
    part: &PositionWiseFeedForward<B>,
) -> Result<(), NnError> {
    check_dropout(path, "pwff.dropout", part.dropout.prob)?;
    match part.activation.num_params() {
        0 => Ok(()),
        parameters => Err(unconvertible(
            path,
            "pwff.activation",
            "no parameters, since Burn neither trains nor saves those of a layer's activation",
            parameters,
        )),
    }
}
