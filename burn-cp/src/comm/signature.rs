//! What ranks compare before they exchange anything.

use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};

/// Kind of an operation between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CollectiveKind {
    /// Every rank receives the concatenation of all parts.
    AllGather,
    /// Every rank receives its part of the sum.
    ReduceScatter,
    /// Every rank receives the sum.
    AllReduce,
    /// Planned ranges travel between pairs of ranks.
    Exchange,
    /// The adjoint of [`Self::Exchange`].
    ExchangeReverse,
    /// Every rank receives the root's value.
    Broadcast,
    /// The root receives the sum, the others zeros: the adjoint of [`Self::Broadcast`].
    Reduce,
    /// Every rank waits for every rank.
    Barrier,
    /// Small host messages: hashes, status, sizes.
    Control,
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::Exchange => "exchange",
            Self::ExchangeReverse => "exchange_reverse",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Barrier => "barrier",
            Self::Control => "control",
        })
    }
}

/// What all ranks of a group must agree on before they exchange anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// Kind of operation.
    pub kind: CollectiveKind,
    /// What the caller does with it, for messages ("attention", "vision", ..).
    pub label: Cow<'static, str>,
    /// Element type, empty for host messages.
    pub dtype: String,
    /// Shape; `None` where ranks may differ.
    pub shape: Vec<Option<usize>>,
    /// Further arguments that must agree (dim, root, sizes).
    pub arguments: String,
    /// Number of the forward operation that this one is the adjoint of.
    pub adjoint_of: Option<u64>,
    /// Whether the operation is recorded for a backward pass, so that every rank will run its adjoint.
    pub tracked: bool,
}

impl Signature {
    /// Signature of a host message.
    pub fn control(label: &'static str) -> Self {
        Self {
            kind: CollectiveKind::Control,
            label: label.into(),
            dtype: String::new(),
            shape: Vec::new(),
            arguments: String::new(),
            adjoint_of: None,
            tracked: false,
        }
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.kind, self.label)?;
        if !self.dtype.is_empty() {
            write!(f, "({} [", self.dtype)?;
            for (i, size) in self.shape.iter().enumerate() {
                let comma = if i == 0 { "" } else { ", " };
                match size {
                    Some(size) => write!(f, "{comma}{size}")?,
                    None => write!(f, "{comma}*")?,
                }
            }
            write!(f, "]")?;
            if !self.arguments.is_empty() {
                write!(f, ", {}", self.arguments)?;
            }
            write!(f, ")")?;
        }
        if let Some(number) = self.adjoint_of {
            write!(f, " adjoint of #{number}")?;
        }
        if self.tracked {
            write!(f, " tracked")?;
        }
        Ok(())
    }
}
