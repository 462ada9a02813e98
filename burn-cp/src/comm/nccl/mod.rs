//! NCCL: tensors of ranks that have a GPU each.
//!
//! A [`Communicator`] is one rank's end of a group's device transport. It knows device addresses and bytes, no tensors. Operations run
//! on a stream of its own, ordered among CubeCL's by events of the device's context, so that the host never waits: an operation
//! starts when all work that was submitted before has ended, and work that is submitted after
//! [`Ticket::order_before_later_work`] starts when the operation has ended. Buffers must be kept until then, and not longer.
//!
//! The calls themselves are made by the thread that works for the device ([`Announced::start`]), so that a rank's thread does not wait
//! for that one either. Communicators are blocking ones, since NCCL starts a thread per call of the others, which takes longer than a
//! small operation; ranks connect for all that they can do when they join, and few operations are on their way at once, so that a call
//! returns at once.
//!
//! Exchanges between ranks of one process whose GPUs reach each other's memory may be copies by the copy engines instead ([`peers`](super::peers)), which
//! start and end as any other operation does.
//!
//! # What can go wrong
//!
//! Ranks do not meet before they move tensors. Each records what it starts on the control plane; a watchdog looks for errors that NCCL
//! reports later, for operations that are not done by the deadline, and for failures that others report. It aborts the communicator,
//! so that kernels that wait for a peer end, and leaves the reason with the control plane: who differs, or who is missing and where it
//! was last seen.

mod communicator;
mod cuda;
mod direct;
mod error;
mod gpu;
mod join;
mod operation;
mod queue;
mod watchdog;

pub(crate) use communicator::{Communicator, Flush, Place};
pub(crate) use error::NcclError;
pub(crate) use join::UniqueId;
pub(crate) use operation::{Announced, Ticket};
pub(crate) use queue::{Element, Queue};
