//! Process groups: who talks to whom, and how.
//!
//! A [`ProcessGroup`] knows its ranks, numbers its operations, and carries two transports: one for tensors (opaque parcels
//! here) and a host control plane for small messages. This room moves values between ranks and compares what they say of them
//! ([`Signature`]); it imports no tensor type and computes nothing.
//!
//! # Protocol
//!
//! Every operation of a group has a number, drawn in program order by each of its ranks, and a [`Signature`]. Ranks meet
//! under the pair (group, number): each leaves its parcel with its signature, and takes the others' once all have arrived
//! and all signatures agree. What can go wrong ends the wait of every rank:
//!
//! * another rank failed: [`CommError::PeerFailed`] with its rank, what it was doing, and why;
//! * the ranks are not in the same operation: [`CommError::Mismatch`] with both signatures, on every rank; where host messages
//!   and tensor operations cross, on the rank that finds out, and as the cause of the others' [`CommError::PeerFailed`];
//! * a rank does not arrive before the deadline, or ended without arriving: [`CommError::Timeout`], [`CommError::PeerLeft`].
//!
//! The first failure of a world is kept and is the one that the launcher reports.
//!
//! Ranks that are threads meet in memory. Ranks that are processes meet in rank 0's process, over TCP (`tcp`), with host messages
//! as bytes, and send each other the rows of tensors over a wire of their own (`mpi`).

mod bind;
#[cfg(any(test, feature = "cuda"))]
mod claims;
mod error;
mod group;
#[cfg(any(test, feature = "cuda"))]
mod helpers;
mod hub;
mod meeting;
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
#[allow(
    dead_code,
    reason = "for transports whose ranks do not meet, which not every build has"
)]
mod observer;
mod order;
#[cfg(any(test, feature = "cuda"))]
mod peers;
mod posted;
mod records;
mod signature;
mod tcp;
#[cfg(test)]
mod tests;
mod world;

pub use bind::{Groups, bind};
pub use error::{CommError, FailureCause, RankFailure};
pub use group::{ProcessGroup, Transport};
pub use mpi::MpiError;
pub use order::ProgramOrder;
pub use signature::{CollectiveKind, Signature};
pub use tcp::{ConnectError, Refusal};
pub use world::RankContext;

pub(crate) use error::panic_message;
#[cfg(feature = "cuda")]
pub(crate) use helpers::{Helper, wait_for_helpers};
pub(crate) use hub::{Hub, odd_one_out};
pub(crate) use mpi::{MPI_AVAILABLE, MpiWire};
#[cfg(feature = "cuda")]
pub(crate) use nccl::{
    Announced, Communicator, Element, Flush, NcclError, Place, Queue, Ticket, UniqueId,
};
#[cfg(feature = "cuda")]
pub(crate) use observer::Observer;
pub(crate) use order::WeakProgramOrder;
#[cfg(feature = "cuda")]
pub(crate) use peers::{Block, Move, Moves, Steps};
pub(crate) use tcp::{Client, Listener};
pub(crate) use world::{Control, Processes, World};

/// How long a rank waits for its peers unless told otherwise: ten minutes.
pub const DEFAULT_DEADLINE: std::time::Duration = std::time::Duration::from_secs(600);
