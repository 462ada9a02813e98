//! Ranks trade their tokens of all heads for all tokens of some heads, compute with whole documents, and trade back.
//!
//! After DeepSpeed Ulysses (Jacobs et al., 2023, arXiv:2309.14509), for any layout: a rank receives the tokens in the order in which one
//! rank alone would have them. Queries, keys and values travel in one message. What a rank computed with is kept for backward: it is
//! as much as its own shard.

use burn::tensor::{Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};
use burn_cp_kernels::{
    AttentionBackwardInput, AttentionGradients, AttentionInput, AttentionOutput,
};

use super::{
    AttentionCall, InnerAttention,
    driver::Saved,
    heads_plan::HeadsPlan,
    rows::{place, to_payload, to_tensor, unwrap, wrap},
};
use crate::{
    collectives::{Call, Collective, Payload},
    plan::AttentionPlan,
};

/// Sizes of the shard.
struct Trade<'a> {
    call: &'a AttentionCall,
    heads: &'a HeadsPlan,
    size: usize,
    batch: usize,
    local_tokens: usize,
}

impl<'a> Trade<'a> {
    fn of(call: &'a AttentionCall) -> Self {
        let plan: &AttentionPlan = call.prepared().plan();
        Self {
            call,
            heads: call.prepared().heads(),
            size: plan.world_size(),
            batch: plan.documents().batch_size(),
            local_tokens: plan.layout().local_len(call.group().rank()),
        }
    }

    /// Tensors `[batch, heads, local_tokens, width]` -> `[1, heads / size, num_tokens, width]`, in one message.
    fn there<B: InnerAttention, const N: usize>(
        &self,
        tensors: [&FloatTensor<B>; N],
        operation: Call,
    ) -> [FloatTensor<B>; N] {
        let (size, num_rows) = (self.size, self.batch * self.local_tokens);
        let mut widths = [0; N];
        let mut parts = Vec::with_capacity(N);
        for (tensor, part) in tensors.into_iter().zip(&mut widths) {
            let tensor = wrap::<B, 4>(tensor);
            let [_, heads, _, width] = tensor.dims();
            *part = heads / size * width;
            let rows = tensor.swap_dims(1, 2).reshape([num_rows, size, *part]);
            parts.push(rows.swap_dims(0, 1));
        }
        let total: usize = widths.iter().sum();
        let rows = Tensor::cat(parts, 2).reshape([size * num_rows, total]);
        let plan = self.heads.there.clone();
        let op = Collective::Exchange { dim: 0, plan };
        let rows = B::collective(to_payload(rows), &op, self.call.group(), operation);
        let rows = to_tensor::<B, 2>(rows);
        let mut at = 0;
        let mut shapes = tensors.iter().zip(widths);
        std::array::from_fn(|_| {
            let (tensor, part) = shapes.next().expect("as many as there are tensors");
            let width = tensor.shape()[3];
            let own = rows.clone().narrow(1, at, part);
            at += part;
            let heads = own.reshape([1, self.heads.num_tokens, part / width, width]);
            unwrap(heads.swap_dims(1, 2))
        })
    }

    /// The way back: `[1, heads / size, num_tokens, width]` -> `[batch, heads, local_tokens, width]`, zeros at padding.
    fn back<B: InnerAttention, const N: usize>(
        &self,
        tensors: [&FloatTensor<B>; N],
        operation: Call,
    ) -> [FloatTensor<B>; N] {
        let size = self.size;
        let shapes = tensors.map(|tensor| (tensor.shape()[1], tensor.shape()[3]));
        let parts = tensors.map(|tensor| {
            let tensor = wrap::<B, 4>(tensor).swap_dims(1, 2);
            let [_, tokens, heads, width] = tensor.dims();
            tensor.reshape([tokens, heads * width])
        });
        let rows = Tensor::cat(parts.to_vec(), 1);
        let plan = self.heads.back.clone();
        let num_real = plan.output_len() / size;
        let op = Collective::Exchange { dim: 0, plan };
        let rows = B::collective(to_payload(rows), &op, self.call.group(), operation);
        let num_rows = self.batch * self.local_tokens;
        let mut at = 0;
        let mut shapes = shapes.into_iter();
        std::array::from_fn(|_| {
            let (heads, width) = shapes.next().expect("as many as there are tensors");
            let part = heads * width;
            let placed = if num_real == 0 {
                let row = rows.zeros_like(0, num_rows);
                let empty = to_tensor::<B, 2>(row).narrow(1, at, part);
                empty.repeat_dim(1, size)
            } else {
                let own = to_tensor::<B, 2>(rows.clone()).narrow(1, at, part);
                let own = own.reshape([size, num_real, part]).swap_dims(0, 1);
                let own = to_payload(own.reshape([num_real, size * part]));
                to_tensor(place(&own, &self.heads.own, num_rows))
            };
            at += part;
            let shape = [self.batch, self.local_tokens, size * heads, width];
            unwrap(placed.reshape(shape).swap_dims(1, 2))
        })
    }

    /// This rank's part of `[num_heads]`.
    fn own_heads<B: Backend>(&self, sinks: &FloatTensor<B>) -> FloatTensor<B> {
        let part = sinks.shape()[0] / self.size;
        let first = part * self.call.group().rank();
        unwrap(wrap::<B, 1>(sinks).narrow(0, first, part))
    }
}

/// Attention of this rank's queries, what backward needs, and the number of the first operation.
pub(super) fn forward<B: InnerAttention>(
    input: &AttentionInput<FloatTensor<B>>,
    call: &AttentionCall,
) -> (FloatTensor<B>, Saved<B>, u64) {
    let trade = Trade::of(call);
    let AttentionInput { q, k, v, sinks, .. } = input;
    let operation = call.forward();
    let first = operation.number;
    let [q, k, v] = trade.there::<B, 3>([q, k, v], operation);
    let own_sinks = sinks.as_ref().map(|sinks| trade.own_heads::<B>(sinks));
    let input = AttentionInput::new(q, k, v).with_sinks(own_sinks);
    let output = B::attention_forward(input.clone(), &trade.heads.segments, call.kernel());
    let AttentionOutput { out, lse, .. } = output;
    let [local] = trade.back::<B, 1>([&out], call.forward());
    (
        local,
        Saved {
            input,
            out,
            lse,
            exchanged: None,
        },
        first,
    )
}

/// `lse [1, num_heads / size, num_tokens]` of all tokens as `[batch, num_heads, local_tokens]` of this rank's; −∞ at padding. Every
/// rank must call it.
pub(super) fn local_lse<B: InnerAttention>(
    lse: &FloatTensor<B>,
    call: &AttentionCall,
) -> FloatTensor<B> {
    let trade = Trade::of(call);
    let lse = wrap::<B, 3>(lse);
    // A second column tells tokens that came back from padding.
    let both = Tensor::stack::<4>(vec![lse.clone(), lse.ones_like()], 3);
    let [local] = trade.back::<B, 1>([&unwrap(both)], call.forward());
    let both = wrap::<B, 4>(&local);
    let came = both.clone().narrow(3, 1, 1).squeeze_dim::<3>(3);
    let lse = both.narrow(3, 0, 1).squeeze_dim::<3>(3);
    unwrap(lse.mask_fill(came.equal_elem(0.0), f64::NEG_INFINITY))
}

/// Gradients of [`forward`], whose first operation had the number `of`.
pub(super) fn backward<B: InnerAttention>(
    saved: Saved<B>,
    dout: &FloatTensor<B>,
    call: &AttentionCall,
    of: u64,
) -> AttentionGradients<FloatTensor<B>> {
    let trade = Trade::of(call);
    let [dout] = trade.there::<B, 1>([dout], call.backward("attention out", of));
    let Saved {
        input, out, lse, ..
    } = saved;
    let AttentionInput { q, k, v, sinks, .. } = input;
    let input = AttentionBackwardInput::new(q, k, v, out, lse, dout).with_sinks(sinks);
    let gradients = B::attention_backward(input, &trade.heads.segments, call.kernel());
    let AttentionGradients {
        dq, dk, dv, dsinks, ..
    } = gradients;
    let [dq, dk, dv] = trade.back::<B, 3>([&dq, &dk, &dv], call.backward("attention", of));
    // The other heads' gradients are other ranks': the sum over ranks has all.
    let dsinks = dsinks.map(|own| {
        let own: Payload<B> = Payload::Float(own);
        let part = own.shape()[0];
        let first = part * call.group().rank();
        let heads = first..first + part;
        match place(&own, std::slice::from_ref(&heads), part * trade.size) {
            Payload::Float(all) => all,
            _ => unreachable!("sinks are floats"),
        }
    });
    AttentionGradients::new(dq, dk, dv).with_dsinks(dsinks)
}
