//! Collectives among threads whose devices have no connection of their own: the rows that a rank takes pass through the host, and it
//! computes its own result from them on its device, with the arithmetic of threads. A sum holds the parts of all ranks at once.
//!
//! CubeCL gives each thread a stream of its own. A buffer that one rank hands to another by reference may be reused by its owner before
//! the other's commands that read it are submitted, so nothing of a device is shared here.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Shape, TensorData, backend::Backend};

use super::{
    Call, Collective, Payload, Pending,
    host_read::read_to_host,
    start_by_messages, start_on_threads,
    wire::{Later, Wire},
};
use crate::comm::{CommError, ProcessGroup, Signature, Transport};

/// Starts a collective through the host; each rank waits for its device first. A group of one moves nothing; processes send messages.
///
/// Every rank of `group` must call it. A failure ends the rank with a typed panic.
///
/// # Panics
/// The device fails.
pub fn start_through_host<B: Backend>(
    payload: Payload<B>,
    op: &Collective,
    group: &ProcessGroup,
    call: Call,
) -> Pending<B> {
    match group.transport() {
        Transport::Solo => return start_on_threads(payload, op, group, call),
        Transport::Processes => return start_by_messages(payload, op, group, call),
        Transport::Threads => {}
    }
    let rank = group.rank();
    let mut wire = SharedWire {
        group,
        number: call.number,
        signature: op.signature(&payload, &call),
    };
    let work = op.decompose(&payload.shape(), rank, group.size());
    let later = work.start(payload, rank, &mut wire);
    let later = later.unwrap_or_else(|error| error.raise());
    Pending::new(move || later().unwrap_or_else(|error| error.raise()))
}

/// Values that a rank leaves.
struct Message {
    takers: Vec<usize>,
    /// How many have taken them. The last one gets them, the others copies.
    values: Mutex<(usize, Option<Arc<TensorData>>)>,
}

impl Message {
    fn new(takers: Vec<usize>, values: TensorData) -> Self {
        Self {
            takers,
            values: Mutex::new((0, Some(Arc::new(values)))),
        }
    }

    fn take(&self) -> Option<TensorData> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        values.0 += 1;
        let shared = if values.0 == self.takers.len() {
            values.1.take()
        } else {
            values.1.clone()
        };
        // Nobody waits for a copy.
        drop(values);
        shared.map(Arc::unwrap_or_clone)
    }
}

/// Memory of the host that all ranks see.
struct SharedWire<'a> {
    group: &'a ProcessGroup,
    number: u64,
    signature: Signature,
}

impl<B: Backend> Wire<B> for SharedWire<'_> {
    fn swap(
        &mut self,
        sends: Vec<(Vec<usize>, Payload<B>)>,
        receives: Vec<(usize, Shape)>,
        like: &Payload<B>,
    ) -> Result<Later<Vec<Payload<B>>>, CommError> {
        let read = |(takers, rows)| Message::new(takers, read_to_host(rows));
        let messages: Vec<Message> = sends.into_iter().map(read).collect();
        let posted = self
            .group
            .post(self.number, self.signature.clone(), messages)?;
        let (like, rank) = (like.clone(), self.group.rank());
        Ok(Box::new(move || {
            let ranks = posted.wait()?;
            let take = |(source, shape): (usize, Shape)| {
                let mine = ranks[source]
                    .iter()
                    .find(|sent| sent.takers.contains(&rank));
                // The ranks' signatures are equal, so that they carry out one plan.
                let values = mine.and_then(Message::take);
                let mut values = values.expect("a rank leaves what others take");
                values.shape = shape;
                like.with_values(values)
            };
            Ok(receives.into_iter().map(take).collect())
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_taker_gets_the_values_once() {
        let values = TensorData::from([1.0f32, 2.0]);
        let message = Message::new(vec![0, 2], values.clone());
        assert_eq!(message.take(), Some(values.clone()));
        assert_eq!(message.take(), Some(values));
        assert_eq!(message.take(), None);
    }
}
