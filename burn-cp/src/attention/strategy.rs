//! Which strategy a call takes, and which it cannot.

use crate::plan::{AttentionPlan, ExchangeStrategy};

/// Sizes of an attention call, on every rank the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Heads of queries.
    pub num_heads: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Elements of a head of queries and keys.
    pub head_dim: usize,
    /// Elements of a head of values.
    pub v_head_dim: usize,
    /// Bytes of one element on the wire.
    pub bytes_per_element: usize,
}

/// A strategy that cannot serve a call. Every rank finds the same, before anything travels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StrategyError {
    /// A rank needs keys that are not its left neighbour's.
    #[error(
        "exchange left-halo with this layout, these documents and mask {mask}: expected that rank {rank} needs keys of rank {left} only, \
         got that it needs keys of rank {source_rank} too; use needed-only",
        left = rank.checked_sub(1).map_or_else(|| "none".to_owned(), |left| left.to_string())
    )]
    BeyondLeftNeighbour {
        /// The mask.
        mask: String,
        /// Rank that needs the keys, in the group.
        rank: usize,
        /// Rank that has them.
        source_rank: usize,
    },
    /// Heads cannot be dealt out evenly.
    #[error(
        "exchange head-all-to-all with {got} {what}: expected a multiple of {expected}, the number of ranks; use ring or needed-only"
    )]
    Heads {
        /// `num_heads` or `num_kv_heads`.
        what: &'static str,
        /// Number of ranks.
        expected: usize,
        /// Number of heads.
        got: usize,
    },
}

/// The strategy that a call of this shape takes where `asked` was asked for: `asked` itself, or the one that is predicted to be
/// fastest for [`ExchangeStrategy::Auto`]. Pure host; equal on all ranks.
///
/// # Errors
/// The strategy cannot serve the call.
pub fn resolve(
    plan: &AttentionPlan,
    asked: ExchangeStrategy,
    shape: &AttentionShape,
) -> Result<ExchangeStrategy, StrategyError> {
    match asked {
        ExchangeStrategy::LeftHalo => check_left_halo(plan).map(|()| asked),
        ExchangeStrategy::HeadAllToAll => check_heads(plan, shape).map(|()| asked),
        ExchangeStrategy::Auto => Ok(choose(plan, shape)),
        _ => Ok(asked),
    }
}

fn check_left_halo(plan: &AttentionPlan) -> Result<(), StrategyError> {
    for (rank, of) in plan.ranks().iter().enumerate() {
        let served = |source: usize| source == rank || source + 1 == rank;
        if let Some(piece) = of.pieces.iter().find(|piece| !served(piece.source)) {
            return Err(StrategyError::BeyondLeftNeighbour {
                mask: format!("{:?}", plan.mask()),
                rank,
                source_rank: piece.source,
            });
        }
    }
    Ok(())
}

fn check_heads(plan: &AttentionPlan, shape: &AttentionShape) -> Result<(), StrategyError> {
    let expected = plan.world_size();
    let counts = [
        ("num_heads", shape.num_heads),
        ("num_kv_heads", shape.num_kv_heads),
    ];
    match counts.into_iter().find(|(_, got)| got % expected != 0) {
        Some((what, got)) => Err(StrategyError::Heads {
            what,
            expected,
            got,
        }),
        None => Ok(()),
    }
}

/// By elements that the busiest rank receives in a forward pass: the keys and values that it needs of others, or, where heads can be
/// dealt out, its heads of everybody's tokens and its tokens' outputs of everybody's heads. Exactly what is needed always beats
/// everything, so that gathering is never chosen.
fn choose(plan: &AttentionPlan, shape: &AttentionShape) -> ExchangeStrategy {
    if check_heads(plan, shape).is_err() {
        return ExchangeStrategy::NeededOnly;
    }
    let kv = shape.num_kv_heads * (shape.head_dim + shape.v_head_dim);
    let q = shape.num_heads * shape.head_dim;
    let out = shape.num_heads * shape.v_head_dim;
    let tokens: usize = plan.ranks().iter().map(|rank| rank.tokens).sum();
    let (mut needed, mut heads) = (0, 0);
    for rank in plan.ranks() {
        let others = tokens - rank.tokens;
        let own = rank.tokens * (plan.world_size() - 1);
        needed = needed.max(rank.kv_tokens_received.saturating_mul(kv));
        heads = heads.max((others * (q + kv) + own * out) / plan.world_size());
    }
    if heads < needed {
        ExchangeStrategy::HeadAllToAll
    } else {
        ExchangeStrategy::NeededOnly
    }
}
