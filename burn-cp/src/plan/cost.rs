//! What a plan costs: work, balance, and the bytes that each strategy moves and holds.

use super::{AttentionPlan, ExchangeStrategy};

/// Sizes of the queries, keys and values of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CostShape {
    /// Heads of queries.
    pub num_heads: usize,
    /// Heads of keys and of values.
    pub num_kv_heads: usize,
    /// Elements of a head of queries and of keys.
    pub head_dim: usize,
    /// Elements of a head of values, and of the output.
    pub v_head_dim: usize,
    /// Bytes of one element, in memory as on the wire.
    pub bytes_per_element: usize,
}

impl CostShape {
    /// Bytes of one token's keys and values together.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.bytes(
            self.num_kv_heads,
            self.head_dim.saturating_add(self.v_head_dim),
        )
    }

    /// Bytes of one token's queries.
    pub fn q_bytes_per_token(&self) -> u64 {
        self.bytes(self.num_heads, self.head_dim)
    }

    /// Bytes of one token's output.
    pub fn out_bytes_per_token(&self) -> u64 {
        self.bytes(self.num_heads, self.v_head_dim)
    }

    fn bytes(&self, num_heads: usize, len: usize) -> u64 {
        (num_heads as u64)
            .saturating_mul(len as u64)
            .saturating_mul(self.bytes_per_element as u64)
    }
}

/// Bytes that cross the border of one rank in the exchanges of one forward pass. What a rank hands to itself is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExchangeBytes {
    /// From other ranks.
    pub received: u64,
    /// To other ranks, counted once for each of them.
    pub sent: u64,
}

impl AttentionPlan {
    /// Bytes that the exchanges of a forward pass move into and out of `rank`. Their adjoints, in the backward pass, move as many
    /// the other way round.
    ///
    /// In a ring every rank also hands on what only others need. For `Auto`, those of `NeededOnly`, since what it
    /// stands for is known only with [`choose`](Self::choose).
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn exchange_bytes(
        &self,
        strategy: ExchangeStrategy,
        shape: &CostShape,
        rank: usize,
    ) -> ExchangeBytes {
        let world_size = self.world_size() as u64;
        let (local, total) = (self.num_local(rank), self.num_tokens());
        let kv = |tokens: u64| tokens.saturating_mul(shape.kv_bytes_per_token());
        let (received, sent) = match strategy {
            ExchangeStrategy::AllGather => {
                (kv(total - local), kv(local).saturating_mul(world_size - 1))
            }
            ExchangeStrategy::Ring => {
                // All shards but the one that the next rank started with pass through.
                let next = self.num_local((rank + 1) % self.world_size());
                (kv(total - local), kv(total - next))
            }
            ExchangeStrategy::HeadAllToAll => {
                let inputs = shape
                    .q_bytes_per_token()
                    .saturating_add(shape.kv_bytes_per_token());
                let output = shape.out_bytes_per_token();
                // Of the others' tokens a part of the heads comes in, of its own the others' heads go out; outputs go back.
                let (others, own) = (total - local, local.saturating_mul(world_size - 1));
                let moved = |into: u64, back: u64| {
                    into.saturating_mul(inputs)
                        .saturating_add(back.saturating_mul(output))
                        / world_size
                };
                (moved(others, own), moved(own, others))
            }
            ExchangeStrategy::NeededOnly | ExchangeStrategy::LeftHalo | ExchangeStrategy::Auto => {
                let rank = self.rank(rank);
                (
                    kv(rank.kv_tokens_received as u64),
                    kv(rank.kv_tokens_sent as u64),
                )
            }
        };
        ExchangeBytes { received, sent }
    }

    /// Bytes that `rank` holds during attention besides the queries, keys, values and output of its shard.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn buffer_bytes(&self, strategy: ExchangeStrategy, shape: &CostShape, rank: usize) -> u64 {
        let kv = |tokens: u64| tokens.saturating_mul(shape.kv_bytes_per_token());
        let planned = kv(self.rank(rank).buffer_len as u64);
        match strategy {
            // All shards, then rows in the order of the plan.
            ExchangeStrategy::AllGather => kv(self.num_tokens()).saturating_add(planned),
            ExchangeStrategy::Ring => {
                let largest = (0..self.world_size())
                    .map(|rank| self.num_local(rank))
                    .max();
                // One in use, one on its way, and the output so far and its next part in f32.
                let outputs =
                    (shape.num_heads as u64 * shape.v_head_dim as u64).saturating_mul(2 * 4);
                kv(2 * largest.unwrap_or(0))
                    .saturating_add(outputs.saturating_mul(self.num_local(rank)))
            }
            ExchangeStrategy::HeadAllToAll => {
                let token = (shape.q_bytes_per_token())
                    .saturating_add(shape.kv_bytes_per_token())
                    .saturating_add(shape.out_bytes_per_token());
                self.num_tokens().saturating_mul(token) / self.world_size() as u64
            }
            ExchangeStrategy::NeededOnly | ExchangeStrategy::LeftHalo | ExchangeStrategy::Auto => {
                if self.rank(rank).local_segments.is_some() {
                    0
                } else {
                    planned
                }
            }
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

    /// The largest number of K/V tokens that a rank needs of others, over what it would be if each needed all:
    /// `S - S / world_size` of `S` tokens.
    pub fn kv_fraction(&self) -> f64 {
        let most = self
            .ranks()
            .iter()
            .map(|rank| rank.kv_tokens_received)
            .max();
        self.fraction_of_others(most.unwrap_or(0))
    }

    /// `num_tokens` over `S - S / world_size`; 0 for one rank.
    pub fn fraction_of_others(&self, num_tokens: usize) -> f64 {
        let total = self.num_tokens() as f64;
        let others = total - total / self.world_size() as f64;
        if others > 0.0 {
            num_tokens as f64 / others
        } else {
            0.0
        }
    }

    /// Tokens of the shard of a rank, all rows and padding included.
    fn num_local(&self, rank: usize) -> u64 {
        self.documents().batch_size() as u64 * self.layout().local_len(rank) as u64
    }

    /// Tokens of all shards, padding included.
    fn num_tokens(&self) -> u64 {
        self.documents().batch_size() as u64 * self.layout().seq_len() as u64
    }
}
