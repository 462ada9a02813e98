//! The token verbs: whole to local, and back.

use burn::tensor::Tensor;

use super::{CpStep, arrangement::runs_in_order};
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
    /// The tensor does not have this rank's number of tokens or rows; tokens of the input where some are dropped, without a
    /// `fill`.
    pub fn gather_tokens<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        to: Coordinates,
        fill: Option<f64>,
    ) -> Tensor<B, D, K> {
        let gathered = self.gathered(tensor, dim);
        K::from_payload(self.in_order(&gathered, dim, to, fill))
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
        let (own, rank) = (K::into_payload(tensor), self.group().rank());
        let others = self.gathered(K::from_payload::<D>(own.clone().detached()), dim);
        let (start, len) = (self.layout().offset(rank), self.local_len());
        let parts = vec![
            others.rows(dim, &(0..start)),
            own,
            others.rows(dim, &(start + len..self.layout().seq_len())),
        ];
        let gathered = Payload::concat(parts, dim, &others);
        K::from_payload(self.in_order(&gathered, dim, to, fill))
    }

    /// Every rank's tokens, one rank behind the other.
    fn gathered<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
    ) -> Payload<B> {
        let (layout, shape) = (self.layout(), tensor.shape());
        assert!(
            dim < D && shape[dim] == self.local_len(),
            "gather_tokens: expected {} tokens in dim {dim}, got {shape:?}",
            self.local_len()
        );
        let sizes: Vec<usize> = (0..layout.world_size())
            .map(|rank| layout.local_len(rank))
            .collect();
        K::into_payload(all_gather_sized(tensor, dim, &sizes, self.group()))
    }

    fn in_order(
        &self,
        gathered: &Payload<B>,
        dim: usize,
        to: Coordinates,
        fill: Option<f64>,
    ) -> Payload<B> {
        let parts = runs_in_order(self.layout())
            .iter()
            .map(|run| gathered.rows(dim, run))
            .collect();
        let padded = Payload::concat(parts, dim, gathered);
        if to == Coordinates::Padded {
            return padded;
        }
        self.check_whole("gather_tokens", &padded.shape(), dim, Coordinates::Padded);
        assert!(
            fill.is_some() || !self.arrangement().drops_tokens(),
            "gather_tokens: the placement drops tokens of the batch, so a fill is needed"
        );
        let fill = fill.unwrap_or_default();
        self.arrangement().restore(&padded, dim, fill)
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
        let has_rows = dim > 0 && shape[dim - 1] == num_rows;
        assert!(
            has_rows || !arrangement.has_placement(),
            "{what}: expected {num_rows} rows in the dim ahead of dim {dim}, since the batch has a placement, got {shape:?}"
        );
    }
}
