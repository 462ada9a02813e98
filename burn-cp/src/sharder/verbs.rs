//! The token verbs: whole to local, and back.

use burn::tensor::Tensor;

use super::CpStep;
use crate::{
    attention::ContextParallelBackend,
    batch::shard_payload,
    collectives::{CollectiveElement, Payload, all_gather_sized},
};

/// How long a gathered sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// As the batch came, without the tokens that the layout added.
    Input,
    /// As the layout deals it out.
    Padded,
}

impl<B: ContextParallelBackend> CpStep<B> {
    /// This rank's tokens of a whole tensor: `[.., seq, ..]` -> `[.., local_tokens, ..]` along `dim`.
    ///
    /// `seq` is the batch's length, then added tokens hold `fill`, or the padded length. No communication; the gradient of
    /// a token lands where the token came from.
    ///
    /// # Panics
    /// Another length; or added tokens without a `fill`.
    pub fn shard_tokens<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        fill: Option<f64>,
    ) -> Tensor<B, D, K> {
        let padded = self.layout().seq_len();
        let len = tensor.shape()[dim];
        assert!(
            len == padded || len == self.input_len(),
            "shard_tokens: dim {dim} must have {} tokens, or {padded} with padding, got {len}",
            self.input_len()
        );
        assert!(
            len == padded || fill.is_some(),
            "shard_tokens: {} tokens are added behind {len}, so a fill is needed",
            padded - len
        );
        let ranges = self.layout().ranges(self.group().rank());
        K::from_payload(shard_payload(
            &K::into_payload(tensor),
            dim,
            ranges,
            fill.unwrap_or_default(),
        ))
    }

    /// The whole tensor of every rank's tokens, in sequence order: `[.., local_tokens, ..]` -> `[.., seq, ..]` along `dim`.
    ///
    /// Every rank of the group must call it. Its adjoint gives each token the sum of the gradients that all ranks have for it:
    /// if every rank computes the same loss from the whole tensor, that is the number of ranks times the gradient of one.
    ///
    /// # Panics
    /// The tensor does not have this rank's number of tokens.
    pub fn gather_tokens<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        extent: Extent,
    ) -> Tensor<B, D, K> {
        let layout = self.layout();
        let len = tensor.shape()[dim];
        assert_eq!(
            len,
            self.local_len(),
            "gather_tokens: tokens of this rank in dim {dim}"
        );
        let sizes: Vec<usize> = (0..layout.world_size())
            .map(|rank| layout.local_len(rank))
            .collect();
        let gathered = K::into_payload(all_gather_sized(tensor, dim, &sizes, self.group()));
        let mut runs = Vec::new();
        for rank in 0..layout.world_size() {
            let mut at = layout.offset(rank);
            for range in layout.ranges(rank) {
                runs.push((range.start, at..at + range.len()));
                at += range.len();
            }
        }
        runs.sort_unstable_by_key(|(start, _)| *start);
        let parts = runs
            .iter()
            .map(|(_, run)| gathered.rows(dim, run))
            .collect();
        let whole = Payload::concat(parts, dim, &gathered);
        K::from_payload(match extent {
            Extent::Input => whole.rows(dim, &(0..self.input_len())),
            Extent::Padded => whole,
        })
    }
}
