//! The ways in which keys and values can travel.

use serde::{Deserialize, Serialize};

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
