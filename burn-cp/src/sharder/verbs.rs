//! The token verbs: whole to local, and back.

use burn::tensor::Tensor;

use super::{CpStep, arrangement::in_order};
use crate::{
    attention::ContextParallelBackend,
    batch::shard_payload,
    collectives::{CollectiveElement, Payload, all_gather_sized},
};

/// Which tokens a whole tensor holds. A shard always holds a rank's own, in the rank's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Coordinates {
    /// Those of the batch as it came: `[.., seq, ..]`. If the batch has a placement, its rows run along the dim ahead:
    /// `[.., batch, seq, ..]`.
    Input,
    /// Those that the layout deals out, padding included.
    Padded,
}

impl<B: ContextParallelBackend> CpStep<B> {
    /// This rank's tokens of a whole tensor: `[.., seq, ..]` -> `[.., local_tokens, ..]` along `dim`.
    ///
    /// Tokens that are not the batch's hold `fill` (exact for integers up to 2⁵³; in a bool tensor anything but 0 is true).
    /// With a placement the rows change too: `[.., batch, seq, ..]` -> `[.., rows, local_tokens, ..]`. No communication, and
    /// every rank may call it or not; the gradient of a token lands where the token came from.
    ///
    /// # Panics
    /// Another number of tokens or rows than `from` says; tokens of the input where the layout adds some, without a `fill`.
    pub fn shard_tokens<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        from: Coordinates,
        fill: Option<f64>,
    ) -> Tensor<B, D, K> {
        self.check_whole("shard_tokens", &tensor.shape(), dim, from);
        let ranges = self.layout().ranges(self.group().rank());
        let payload = K::into_payload(tensor);
        K::from_payload(match from {
            Coordinates::Padded => shard_payload(&payload, dim, ranges, 0.0),
            Coordinates::Input => {
                assert!(
                    fill.is_some() || !self.arrangement().adds_tokens(),
                    "shard_tokens: the layout adds tokens to those of the batch, so a fill is needed"
                );
                let fill = fill.unwrap_or_default();
                self.arrangement().shard(&payload, dim, ranges, fill)
            }
        })
    }

    /// The whole tensor of every rank's tokens: `[.., local_tokens, ..]` -> `[.., seq, ..]` along `dim`.
    ///
    /// Tokens of the batch that no rank has, since its placement drops them, hold `fill`. With a placement the rows change too,
    /// see [`Coordinates::Input`]. Every rank of the group must call it. Its adjoint gives each token the sum of the gradients
    /// that all ranks have for it: for losses of which every rank computes its own part. If every rank computes the same loss
    /// from the whole tensor, that is the number of ranks times the gradient of one; see
    /// [`gather_tokens_for_replicated_loss`](Self::gather_tokens_for_replicated_loss).
    ///
    /// # Panics
    /// Before anything travels: the tensor does not have this rank's number of tokens, or to a batch with a placement its number
    /// of rows; tokens of the input where some are dropped, without a `fill`.
    pub fn gather_tokens<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        to: Coordinates,
        fill: Option<f64>,
    ) -> Tensor<B, D, K> {
        self.check_local(&tensor.shape(), dim, to, fill);
        let gathered = self.gathered(tensor, dim);
        K::from_payload(self.ordered(gathered, dim, to, fill))
    }

    /// [`gather_tokens`](Self::gather_tokens) for a loss that every rank computes from the whole tensor, and computes alike: the
    /// gradient of this rank's tokens is that of its own loss, not multiplied by the number of ranks.
    ///
    /// Every rank of the group must call it; its adjoint communicates nothing. Where ranks compute different losses, the
    /// gradients that other ranks have for this rank's tokens are lost.
    ///
    /// # Panics
    /// As [`gather_tokens`](Self::gather_tokens).
    pub fn gather_tokens_for_replicated_loss<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        to: Coordinates,
        fill: Option<f64>,
    ) -> Tensor<B, D, K> {
        self.check_local(&tensor.shape(), dim, to, fill);
        let (own, rank) = (K::into_payload(tensor), self.group().rank());
        let others = self.gathered(K::from_payload::<D>(own.clone().detached()), dim);
        let start = self.layout().offset(rank);
        let end = start + self.local_len();
        let rest = end..self.layout().seq_len();
        let mut parts = Vec::with_capacity(3);
        if start > 0 {
            parts.push(others.rows(dim, &(0..start)));
        }
        parts.push(own);
        if !rest.is_empty() {
            parts.push(others.rows(dim, &rest));
        }
        let gathered = Payload::concat(parts, dim, &others);
        K::from_payload(self.ordered(gathered, dim, to, fill))
    }

    /// Every rank's tokens, one rank behind the other.
    fn gathered<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
    ) -> Payload<B> {
        let layout = self.layout();
        let sizes: Vec<usize> = (0..layout.world_size())
            .map(|rank| layout.local_len(rank))
            .collect();
        K::into_payload(all_gather_sized(tensor, dim, &sizes, self.group()))
    }

    /// Every rank's tokens, one rank behind the other, in the order of `to`.
    fn ordered(
        &self,
        gathered: Payload<B>,
        dim: usize,
        to: Coordinates,
        fill: Option<f64>,
    ) -> Payload<B> {
        let layout = self.layout();
        match to {
            Coordinates::Padded => in_order(gathered, dim, &layout.inverse()),
            Coordinates::Input => {
                let fill = fill.unwrap_or_default();
                self.arrangement().restore(gathered, dim, layout, fill)
            }
        }
    }

    /// Panics unless a rank's tensor can be gathered to `to`; before anything travels.
    fn check_local(&self, shape: &[usize], dim: usize, to: Coordinates, fill: Option<f64>) {
        assert!(
            shape.get(dim) == Some(&self.local_len()),
            "gather_tokens: expected {} tokens in dim {dim}, got {shape:?}",
            self.local_len()
        );
        if to == Coordinates::Padded {
            return;
        }
        self.check_rows("gather_tokens", shape, dim, self.batch_size());
        assert!(
            fill.is_some() || !self.arrangement().drops_tokens(),
            "gather_tokens: the placement drops tokens of the batch, so a fill is needed"
        );
    }

    /// Panics unless `dim` holds as many tokens, and the dim ahead as many rows if they matter, as `coordinates` say.
    fn check_whole(&self, what: &str, shape: &[usize], dim: usize, coordinates: Coordinates) {
        let arrangement = self.arrangement();
        let [num_rows, num_tokens] = match coordinates {
            Coordinates::Input => arrangement.input_size(),
            Coordinates::Padded => arrangement.padded_size(),
        };
        assert!(
            shape.get(dim) == Some(&num_tokens),
            "{what}: expected {num_tokens} tokens in dim {dim} ({coordinates:?} coordinates), got {shape:?}"
        );
        self.check_rows(what, shape, dim, num_rows);
    }

    /// With a placement, rows must stand ahead of tokens.
    fn check_rows(&self, what: &str, shape: &[usize], dim: usize, num_rows: usize) {
        let has_rows = dim > 0 && shape[dim - 1] == num_rows;
        assert!(
            has_rows || !self.arrangement().has_placement(),
            "{what}: expected {num_rows} rows in the dim ahead of dim {dim}, since the batch has a placement, got {shape:?}"
        );
    }
}
