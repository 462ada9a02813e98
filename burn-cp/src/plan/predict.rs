//! How long attention will take with each strategy, and which one is fastest.
//!
//! A model with three resources per rank: arithmetic at a constant rate, a link that sends and receives at the same time, with
//! a time per message, and memory in which rows are put together for it. It ranks strategies and layouts; it does not know kernels, topologies or what else a device does.

use super::{AttentionPlan, CostShape, ExchangeBytes, ExchangeStrategy, MaskKind, PlanError};
use crate::layout::Visibility;

/// What ranks compute and communicate with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hardware {
    /// Gigabytes (10^9) per second that a rank sends, and as many that it receives at the same time.
    pub link_gbs: f64,
    /// Floating-point operations that attention reaches on one rank, in 10^12 per second.
    pub tflops: f64,
    /// Microseconds that a message takes besides its bytes.
    pub latency_us: f64,
    /// Gigabytes per second at which a rank puts rows together that travel, takes them apart, and adds up gradients.
    pub copy_gbs: f64,
    /// Whether a rank computes while its messages travel, as in a ring it always does, and never where heads are traded.
    pub overlap: bool,
}

impl Default for Hardware {
    /// Round figures of two H200 on NVLink in bf16 (`benches/results`). For anything else, measure.
    fn default() -> Self {
        Self {
            link_gbs: 280.0,
            tflops: 500.0,
            latency_us: 10.0,
            copy_gbs: 600.0,
            overlap: true,
        }
    }
}

/// What one attention layer costs one rank, forward and backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankCost {
    /// Real tokens of the shard.
    pub tokens: usize,
    /// Visible (query, key) pairs that it computes, of one head; a share of all where heads are dealt out.
    pub area: u64,
    /// Bytes that a forward pass moves.
    pub bytes: ExchangeBytes,
    /// Bytes that it holds besides its shard.
    pub buffer_bytes: u64,
    /// Milliseconds of arithmetic.
    pub compute_ms: f64,
    /// Milliseconds in which its link is busy.
    pub transfer_ms: f64,
    /// Milliseconds in which its memory is busy with rows that travel.
    pub copy_ms: f64,
    /// Milliseconds in all: less than the sum where they overlap.
    pub predicted_ms: f64,
}

/// What one attention layer costs, forward and backward.
#[derive(Debug, Clone, PartialEq)]
pub struct StrategyCost {
    /// The strategy; never `Auto`.
    pub strategy: ExchangeStrategy,
    /// By rank.
    pub ranks: Vec<RankCost>,
    /// Milliseconds until the last rank has finished.
    pub predicted_ms: f64,
}

/// Of two strategies that are predicted to take equally long the first is chosen. A left halo moves what `NeededOnly` moves.
const CANDIDATES: [ExchangeStrategy; 4] = [
    ExchangeStrategy::NeededOnly,
    ExchangeStrategy::AllGather,
    ExchangeStrategy::Ring,
    ExchangeStrategy::HeadAllToAll,
];

impl AttentionPlan {
    /// Whether the strategy can carry out this plan.
    ///
    /// # Errors
    ///
    /// [`PlanError::NotLeftNeighbour`] for `LeftHalo` where a needed token is not the left neighbour's,
    /// [`PlanError::HeadDivisibility`] for `HeadAllToAll` where the number of ranks does not divide the heads of queries or of keys and values.
    pub fn check_strategy(
        &self,
        strategy: ExchangeStrategy,
        shape: &CostShape,
    ) -> Result<(), PlanError> {
        let world_size = self.world_size();
        match strategy {
            ExchangeStrategy::LeftHalo => {
                for (rank, plan) in self.ranks().iter().enumerate() {
                    let left = rank.checked_sub(1);
                    let far = |source: usize| source != rank && Some(source) != left;
                    if let Some(piece) = plan.pieces.iter().find(|piece| far(piece.source)) {
                        return Err(PlanError::NotLeftNeighbour {
                            rank,
                            expected: left,
                            got: piece.source,
                        });
                    }
                }
                Ok(())
            }
            _ => strategy.check_heads(world_size, shape.num_heads, shape.num_kv_heads),
        }
    }

    /// What one attention layer over this plan costs with a strategy, forward and backward. `Auto` is what
    /// [`choose`](Self::choose) chooses.
    ///
    /// # Errors
    ///
    /// As [`check_strategy`](Self::check_strategy).
    pub fn predict(
        &self,
        strategy: ExchangeStrategy,
        shape: &CostShape,
        hardware: &Hardware,
    ) -> Result<StrategyCost, PlanError> {
        let strategy = match strategy {
            ExchangeStrategy::Auto => self.choose(shape, hardware),
            named => named,
        };
        self.check_strategy(strategy, shape)?;
        let ranks: Vec<_> = (0..self.world_size())
            .map(|rank| self.rank_cost(strategy, shape, hardware, rank))
            .collect();
        let last = ranks
            .iter()
            .map(|rank| rank.predicted_ms)
            .fold(0.0, f64::max);
        Ok(StrategyCost {
            strategy,
            ranks,
            predicted_ms: last,
        })
    }

    /// The strategy that is predicted to be fastest, of those that can carry out this plan; `NeededOnly` where none is faster.
    ///
    /// Basic arithmetic in a fixed order: every rank that asks about the same plan gets the same answer.
    pub fn choose(&self, shape: &CostShape, hardware: &Hardware) -> ExchangeStrategy {
        let mut best = (ExchangeStrategy::NeededOnly, f64::INFINITY);
        for strategy in CANDIDATES {
            match self.predict(strategy, shape, hardware) {
                Ok(cost) if cost.predicted_ms < best.1 => best = (strategy, cost.predicted_ms),
                _ => {}
            }
        }
        best.0
    }

    fn rank_cost(
        &self,
        strategy: ExchangeStrategy,
        shape: &CostShape,
        hardware: &Hardware,
        rank: usize,
    ) -> RankCost {
        let plan = self.rank(rank);
        let bytes = if self.moves_tokens() || strategy == ExchangeStrategy::HeadAllToAll {
            self.exchange_bytes(strategy, shape, rank)
        } else {
            // Where no rank needs a token of another, nothing travels.
            ExchangeBytes {
                received: 0,
                sent: 0,
            }
        };
        let world_size = self.world_size();
        let by_heads = strategy == ExchangeStrategy::HeadAllToAll;
        let area = if by_heads {
            self.total_area() / world_size as u64
        } else {
            plan.area
        };
        // Scores and output forward; scores again and four products backward, two of them as wide as values.
        let pairs = area as f64 * shape.num_heads as f64 / (hardware.tflops * 1e9);
        let (qk, v) = (shape.head_dim as f64, shape.v_head_dim as f64);
        let (forward, backward) = (pairs * 2.0 * (qk + v), pairs * (6.0 * qk + 4.0 * v));
        let latency = self.num_messages(strategy, rank) as f64 * hardware.latency_us / 1e3;
        let link = |bytes: u64| bytes as f64 / (hardware.link_gbs * 1e6);
        // One exchange there, in either direction; both directions at once.
        let exchange = if bytes.received == 0 && bytes.sent == 0 {
            0.0
        } else {
            link(bytes.received.max(bytes.sent)) + latency
        };
        // Heads go back and forth as often backward as forward. Keys and values are sent again, and their gradients returned.
        let (out, back) = if by_heads {
            (exchange, exchange)
        } else {
            (exchange, 2.0 * exchange)
        };
        // A ring overlaps whatever is asked for.
        let hidden = if hardware.overlap || strategy == ExchangeStrategy::Ring {
            self.hidden_share(strategy, rank)
        } else {
            0.0
        };
        // What is hidden costs exactly nothing.
        let pass = |compute: f64, transfer: f64| compute + (transfer - compute * hidden).max(0.0);
        let copy_ms = if bytes.received == 0 && bytes.sent == 0 {
            0.0
        } else {
            copied_bytes(strategy, shape, plan.tokens) / (hardware.copy_gbs * 1e6)
        };
        RankCost {
            tokens: plan.tokens,
            area,
            bytes,
            buffer_bytes: self.buffer_bytes(strategy, shape, rank),
            compute_ms: forward + backward,
            transfer_ms: out + back,
            copy_ms,
            predicted_ms: pass(forward, out) + pass(backward, back) + copy_ms,
        }
    }

    /// Messages that a rank waits for in one exchange, at least.
    fn num_messages(&self, strategy: ExchangeStrategy, rank: usize) -> usize {
        let others = self.world_size() - 1;
        match strategy {
            ExchangeStrategy::AllGather | ExchangeStrategy::Ring => others,
            ExchangeStrategy::HeadAllToAll => 2 * others,
            _ => (0..self.world_size())
                .filter(|&other| other != rank)
                .filter(|&other| {
                    self.num_transferred(other, rank) > 0 || self.num_transferred(rank, other) > 0
                })
                .count(),
        }
    }

    /// The share of a rank's work that does not wait for an exchange.
    fn hidden_share(&self, strategy: ExchangeStrategy, rank: usize) -> f64 {
        let rank = self.rank(rank);
        let local = 1.0 - rank.kv_tokens_received as f64 / rank.buffer_len.max(1) as f64;
        match strategy {
            // All work waits for the heads.
            ExchangeStrategy::HeadAllToAll => 0.0,
            // While one shard travels, the one before it is worked on: all but the last.
            ExchangeStrategy::Ring => 1.0 - 1.0 / self.world_size() as f64,
            _ => local,
        }
    }
}

/// Bytes of a rank's own shard that are copied for an exchange, forward and backward: heads are cut up and put together again on
/// either way; keys and values are put together in both passes, and so are their gradients, which are added up in one and a half.
fn copied_bytes(strategy: ExchangeStrategy, shape: &CostShape, tokens: usize) -> f64 {
    let kv = shape.kv_bytes_per_token() as f64;
    let heads = (shape.q_bytes_per_token() + shape.out_bytes_per_token()) as f64 + kv;
    tokens as f64
        * match strategy {
            ExchangeStrategy::HeadAllToAll => 4.0 * heads,
            _ => 4.5 * kv,
        }
}

impl From<MaskKind> for Visibility {
    /// What a balanced layout should take for this mask.
    fn from(mask: MaskKind) -> Self {
        if mask.is_causal() {
            Self::Causal {
                window: mask.window(),
            }
        } else {
            Self::Full
        }
    }
}
