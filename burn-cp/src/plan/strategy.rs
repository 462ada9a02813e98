//! The ways in which keys and values can travel.

use serde::{Deserialize, Serialize};

use super::PlanError;

/// How keys and values get to the ranks that need them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ExchangeStrategy {
    /// Every rank gets every shard, padding included.
    AllGather,
    /// Every rank gets exactly the tokens of its buffer that it does not own.
    NeededOnly,
    /// As `NeededOnly`, where every needed token is the left neighbour's; an error elsewhere.
    LeftHalo,
    /// Keys and values pass round the ranks, and partial results are merged by their lse.
    Ring,
    /// Ranks trade sequence shards for head shards, and back.
    HeadAllToAll,
    /// What the cost model predicts to be fastest.
    Auto,
}

impl ExchangeStrategy {
    /// Whether `world_size` ranks can exchange attention of so many heads in this way: what a model can ask before it is built.
    ///
    /// # Errors
    ///
    /// [`PlanError::HeadDivisibility`] for `HeadAllToAll` where the number of ranks does not divide one of them.
    pub fn check_heads(
        self,
        world_size: usize,
        num_heads: usize,
        num_kv_heads: usize,
    ) -> Result<(), PlanError> {
        if self != Self::HeadAllToAll {
            return Ok(());
        }
        let mut heads = [("heads", num_heads), ("K/V heads", num_kv_heads)].into_iter();
        match heads.find(|(_, num)| !num.is_multiple_of(world_size)) {
            Some((what, got)) => Err(PlanError::HeadDivisibility {
                what,
                expected: world_size,
                got,
            }),
            None => Ok(()),
        }
    }
}
