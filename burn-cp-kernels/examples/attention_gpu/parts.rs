//! Calls over parts of the keys, whose results are merged.

use burn::tensor::{DType, ops::FloatTensorOps};
use burn_cp_kernels::{
    AttentionBackend, AttentionBackwardInput, AttentionInput, AttentionOutput, Routine, Segment,
    Segments,
};

use crate::{
    Device,
    cases::{Case, Results, causal, read},
};

/// A list, and the same in two parts that share no key: of its segments two see keys of both parts, one of the first only, one of the
/// second only.
pub(crate) fn parted() -> (Segments, [Segments; 2]) {
    let (q, k) = (310, 703);
    let full = |segment| Segment {
        causal: false,
        ..segment
    };
    let new = |list| Segments::new(list, (1, q), (1, k)).expect("legal segments");
    let first = full(causal(300..310, 604..700, 0));
    let second = causal(240..300, 544..604, 0);
    let whole = new(vec![
        causal(3..103, 0..233, 0),
        causal(110..238, 233..544, 0),
        second.clone(),
        first.clone(),
    ]);
    let early = new(vec![
        full(causal(3..103, 0..133, 0)),
        full(causal(110..238, 233..416, 0)),
        first,
    ]);
    let late = new(vec![
        causal(3..103, 133..233, 133),
        causal(110..238, 416..544, 183),
        second,
    ]);
    (whole, [early, late])
}

impl Case {
    /// The case computed in two parts that share no key, merged in this dtype.
    pub(crate) fn in_parts(mut self, parts: [Segments; 2], merged: DType) -> Self {
        self.parts = Some((parts, merged));
        self
    }

    pub(crate) fn run_in_parts(&self, parts: &[Segments; 2], merged: DType) -> Results {
        let ([q, k, v, dout], _) = self.tensors();
        let [first, second] = parts.each_ref().map(|segments| {
            let input = AttentionInput::new(q.clone(), k.clone(), v.clone());
            Device::attention_forward(input, segments, &self.options)
        });
        let AttentionOutput { out, lse, .. } = Device::merge_attention(first, second, merged);
        let all = vec![("out", read(out.clone())), ("lse", read(lse.clone()))];
        // The one routine that takes no other dtype than that of the queries.
        let out = match self.options.routine {
            Some(Routine::Hopper) => {
                <Device as FloatTensorOps<Device>>::float_cast(out, self.dtype.into())
            }
            _ => out,
        };
        // Each part's share of the gradients; the shares sum to the whole.
        let [first, second] = parts.each_ref().map(|segments| {
            let input = AttentionBackwardInput::new(
                q.clone(),
                k.clone(),
                v.clone(),
                out.clone(),
                lse.clone(),
                dout.clone(),
            );
            let grads = Device::attention_backward(input, segments, &self.options);
            [grads.dq, grads.dk, grads.dv].map(read)
        });
        let shares = first.into_iter().zip(second);
        let sums = shares.map(|(first, second): (Vec<f64>, _)| {
            let pairs = first.iter().zip(&second);
            pairs.map(|(first, second)| first + second).collect()
        });
        let grads = ["dq", "dk", "dv"].into_iter().zip(sums);
        Results {
            all: all.into_iter().chain(grads).collect(),
        }
    }
}
