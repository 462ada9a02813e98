//! What a plan costs: work per rank and bytes per exchange.

use super::{AttentionPlan, ExchangeStrategy};

/// Size of the keys and values of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Heads of keys and of values.
    pub num_kv_heads: usize,
    /// Elements of a head, of keys as of values.
    pub head_dim: usize,
    /// Bytes of one element on the wire.
    pub bytes_per_element: usize,
}

impl KvShape {
    /// Bytes of one token's keys and values together.
    pub fn bytes_per_token(&self) -> u64 {
        [2, self.num_kv_heads, self.head_dim, self.bytes_per_element]
            .iter()
            .fold(1, |bytes: u64, &factor| bytes.saturating_mul(factor as u64))
    }
}

/// Bytes that cross the border of one rank in one exchange of keys and values. What a rank hands to
/// itself is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExchangeBytes {
    /// From other ranks.
    pub received: u64,
    /// To other ranks, counted once for each of them.
    pub sent: u64,
}

impl AttentionPlan {
    /// Bytes that one exchange moves into and out of `rank` in the forward pass. The backward pass moves
    /// as many the other way round.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn exchange_bytes(
        &self,
        strategy: ExchangeStrategy,
        shape: &KvShape,
        rank: usize,
    ) -> ExchangeBytes {
        let (received, sent) = match strategy {
            ExchangeStrategy::AllGather => {
                let batch_size = self.documents().batch_size();
                let local = batch_size * self.layout().local_len(rank);
                let total = batch_size * self.layout().seq_len();
                (total - local, local.saturating_mul(self.world_size() - 1))
            }
            _ => {
                let rank = self.rank(rank);
                (rank.kv_tokens_received, rank.kv_tokens_sent)
            }
        };
        let bytes = |tokens: usize| shape.bytes_per_token().saturating_mul(tokens as u64);
        ExchangeBytes {
            received: bytes(received),
            sent: bytes(sent),
        }
    }

    /// Visible (query, key) pairs of one head, over all ranks.
    pub fn total_area(&self) -> u64 {
        // Saturation can only be met by batches far beyond any memory.
        let areas = self.ranks().iter().map(|rank| rank.area);
        areas.fold(0, u64::saturating_add)
    }

    /// Mean work of a rank over the work of the busiest one: 1 is perfect, `1 / world_size` the worst.
    ///
    /// Work is the number of visible pairs. Without any work the balance is 1.
    pub fn balance(&self) -> f64 {
        let max = self.ranks().iter().map(|rank| rank.area).max().unwrap_or(0);
        if max == 0 {
            return 1.0;
        }
        self.total_area() as f64 / self.world_size() as f64 / max as f64
    }
}
