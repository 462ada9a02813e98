//! What can go wrong between ranks.

use std::{any::Any, error::Error, fmt, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::mesh::MeshError;

/// A failure of communication, or a failure elsewhere that communication had to report.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CommError {
    /// Another rank of the world failed; nothing can be exchanged any more.
    #[error("rank {rank} failed in {op}: {cause}")]
    PeerFailed {
        /// Global rank that failed first.
        rank: usize,
        /// What it was doing.
        op: String,
        /// Why it failed.
        cause: String,
    },
    /// A rank is in another operation than the others, or passes another shape or dtype.
    #[error(
        "ranks of group {group} disagree on operation #{number}: rank {rank} calls {got}, expected {expected}"
    )]
    Mismatch {
        /// Name of the group.
        group: String,
        /// Number of the operation within the group.
        number: u64,
        /// Global rank that differs from the majority.
        rank: usize,
        /// The operation that most ranks are in.
        expected: String,
        /// The operation that `rank` is in.
        got: String,
    },
    /// Ranks that must hold equal values do not.
    #[error(
        "ranks of group {group} disagree on {what}: rank {rank} has {got}, expected {expected}"
    )]
    Disagreement {
        /// Name of the group.
        group: String,
        /// What should have been equal.
        what: String,
        /// Global rank that differs.
        rank: usize,
        /// The value of most ranks.
        expected: String,
        /// The value of `rank`.
        got: String,
    },
    /// Some ranks did not arrive before the deadline.
    #[error("after {waited:.1?}, ranks {missing:?} had not arrived at {op}{}{}", seen(.last_seen), hint(.op))]
    Timeout {
        /// The operation that was waited in.
        op: String,
        /// Global ranks that did not arrive.
        missing: Vec<usize>,
        /// How long this rank waited.
        waited: Duration,
        /// What the rank that this wait comes down to was last seen doing.
        last_seen: Option<String>,
    },
    /// A rank's program ended although its peers still need it.
    #[error("rank {rank} ended without arriving at {op}")]
    PeerLeft {
        /// The operation that was waited in.
        op: String,
        /// Global rank that ended.
        rank: usize,
    },
    /// The group's ranks have no way of exchanging what they were asked to exchange.
    #[error("group {group} cannot exchange {what}: {reason}")]
    Transport {
        /// Name of the group.
        group: String,
        /// What should have travelled.
        what: String,
        /// What is missing, and how to get it.
        reason: String,
    },
    /// The mesh does not fit the world, or an axis is unknown.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

fn seen(op: &Option<String>) -> String {
    match op {
        Some(op) => format!(" (last seen in {op})"),
        None => " (never seen)".to_owned(),
    }
}

/// The usual reason for a backward pass in which ranks that are threads wait for each other.
fn hint(op: &str) -> &'static str {
    match op.contains(" adjoint of ") {
        true => {
            "; ranks that are threads and share parameters wait for each other like this: each needs its own, `model.clone().fork(device)`"
        }
        false => "",
    }
}

impl CommError {
    /// Ends this rank's closure with `self` as a typed panic payload, which [`launch`](crate::launch) turns back into an error.
    ///
    /// Used inside the autodiff graph, where nothing can be returned. The panic hook is not run: the launcher reports the
    /// first failure of the world once, not one message per rank.
    pub fn raise(self) -> ! {
        tracing::error!(error = %self, "collective failed");
        std::panic::resume_unwind(Box::new(self))
    }
}

/// The message of a panic.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&'static str>()
        .map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a value that is not a message".to_owned())
}

/// Why a rank failed.
#[derive(Debug, Clone)]
pub enum FailureCause {
    /// The rank's closure panicked with this message.
    Panic(String),
    /// The rank's closure returned this error.
    Error(Arc<dyn Error + Send + Sync>),
    /// The rank reported this failure to its peers.
    Reported(String),
    /// Communication failed.
    Comm(CommError),
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panic(message) => write!(f, "panicked: {message}"),
            Self::Error(error) => {
                write!(f, "{error}")?;
                let mut source = error.source();
                while let Some(cause) = source {
                    write!(f, ": {cause}")?;
                    source = cause.source();
                }
                Ok(())
            }
            Self::Reported(message) => f.write_str(message),
            Self::Comm(error) => write!(f, "{error}"),
        }
    }
}

/// The failure of one rank.
#[derive(Debug, Clone, thiserror::Error)]
#[error("rank {rank} {} {op}: {cause}", did(.cause))]
pub struct RankFailure {
    /// Global rank.
    pub rank: usize,
    /// What it was doing: the operation, or the last operation that it had been seen in.
    pub op: String,
    /// Why it failed.
    pub cause: FailureCause,
}

fn did(cause: &FailureCause) -> &'static str {
    match cause {
        FailureCause::Comm(CommError::Timeout { .. }) => "did not come to",
        _ => "failed in",
    }
}

/// A [`RankFailure`] as it travels between processes: an error of a type of its own becomes its message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SentFailure {
    pub(crate) rank: usize,
    pub(crate) op: String,
    pub(crate) cause: SentCause,
}

/// A [`FailureCause`] as it travels between processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum SentCause {
    Panic(String),
    Reported(String),
    Comm(CommError),
}

impl From<&FailureCause> for SentCause {
    fn from(cause: &FailureCause) -> Self {
        match cause {
            FailureCause::Panic(message) => Self::Panic(message.clone()),
            FailureCause::Comm(error) => Self::Comm(error.clone()),
            other => Self::Reported(other.to_string()),
        }
    }
}

impl From<SentCause> for FailureCause {
    fn from(cause: SentCause) -> Self {
        match cause {
            SentCause::Panic(message) => Self::Panic(message),
            SentCause::Reported(message) => Self::Reported(message),
            SentCause::Comm(error) => Self::Comm(error),
        }
    }
}

impl From<&RankFailure> for SentFailure {
    fn from(failure: &RankFailure) -> Self {
        Self {
            rank: failure.rank,
            op: failure.op.clone(),
            cause: (&failure.cause).into(),
        }
    }
}

impl From<SentFailure> for RankFailure {
    fn from(failure: SentFailure) -> Self {
        Self {
            rank: failure.rank,
            op: failure.op,
            cause: failure.cause.into(),
        }
    }
}

impl RankFailure {
    pub(crate) fn as_peer_failure(&self) -> CommError {
        CommError::PeerFailed {
            rank: self.rank,
            op: self.op.clone(),
            cause: self.cause.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_waited_for_in_a_backward_pass_is_told_of_shared_parameters() {
        let shown = |op: &str| {
            let timeout = CommError::Timeout {
                op: op.to_owned(),
                missing: vec![1],
                waited: Duration::from_secs(5),
                last_seen: None,
            };
            let failure = RankFailure {
                rank: 1,
                op: op.to_owned(),
                cause: FailureCause::Comm(timeout),
            };
            failure.to_string()
        };
        let (forward, backward) = (shown("exchange #0"), shown("exchange adjoint of #0 #1"));
        assert_eq!(
            forward,
            "rank 1 did not come to exchange #0: after 5.0s, ranks [1] had not arrived at exchange #0 (never seen)"
        );
        assert!(
            backward.contains("model.clone().fork(device)"),
            "{backward}"
        );
    }
}
