//! The control plane of ranks that are processes: one TCP connection from every rank to rank 0.
//!
//! Rank 0's process keeps the same table ([`Hub`](super::hub::Hub)) as a world of threads does. For every other rank it has a
//! connection and threads that stand in for that rank: one meets on its behalf, so that signatures, mismatches, deadlines and
//! the first failure are those of threads; one reads, so that a connection that ends is noticed while the rank waits; one
//! tells the rank of the world's failure at once, and otherwise that rank 0 is alive. The rank has a thread that reads, so
//! that it hears of failures whatever it is doing.
//!
//! *Opening.* Each side sends eight fixed bytes and a protocol version before anything else; who sends something else is no
//! rank, and is let go without disturbing the others. The rank then says its rank, the size of its world and its job, and is
//! welcomed when all ranks have come, or refused with a reason. *Silence.* Each side sends a sign of life several times within
//! a deadline; a side that has heard nothing for a whole deadline takes the other for lost. *Ending.* A rank says how its
//! program ended, and waits until all have. A connection that ends without this word is a rank that was killed.
//!
//! Bytes of host messages are opaque here. Nothing is encrypted, and a job's name is no secret: it keeps jobs apart that meet on
//! one port by accident, not attackers out.

mod client;
mod door;
mod frames;
mod reach;
mod server;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub(crate) use client::Client;
pub(crate) use door::Listener;
pub use frames::Refusal;
pub(crate) use server::Server;

/// How long a rank that knows of a failure, or has ended, waits for a last word before it closes its connection.
const GRACE: Duration = Duration::from_secs(1);

/// How often a side says that it is alive.
fn pulse(deadline: Duration) -> Duration {
    (deadline / 5).clamp(Duration::from_millis(10), Duration::from_secs(5))
}

/// Why ranks that are processes could not be connected.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Rank 0 cannot listen where the others will look for it.
    #[error(
        "rank 0 cannot listen at {address}: {reason}; is another program, or another rank 0, using the port?"
    )]
    Listen {
        /// Address and port.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// Rank 0 does not answer.
    #[error("after {waited:?}, rank 0 could not be reached at {address}: {reason}")]
    Unreachable {
        /// Address and port.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// The last attempt's error.
        reason: String,
    },
    /// Something answers that is not rank 0 of a world like this.
    #[error(
        "what answers at {address} is not rank 0 of this program: expected {expected}, got {got}"
    )]
    Foreign {
        /// Address and port.
        address: String,
        /// What rank 0 says first.
        expected: String,
        /// What was read.
        got: String,
    },
    /// Rank 0 does not want this process.
    #[error("rank 0 at {address} refuses rank {rank}: {refusal}")]
    Refused {
        /// Address and port.
        address: String,
        /// The rank that this process asked for.
        rank: usize,
        /// Why.
        refusal: Refusal,
    },
    /// Some ranks did not come before the deadline.
    #[error("after {waited:?}, ranks {missing:?} had not connected to rank 0 at {address}{}", turned_away(.refused))]
    Missing {
        /// Address and port.
        address: String,
        /// Ranks that did not come.
        missing: Vec<usize>,
        /// How long rank 0 waited.
        waited: Duration,
        /// Who came and was refused, and why.
        refused: Vec<String>,
    },
}

fn turned_away(refused: &[String]) -> String {
    match refused {
        [] => String::new(),
        all => format!("; refused: {}", all.join("; ")),
    }
}
