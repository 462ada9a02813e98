//! Operations between their start and the moment from which others may use their buffers.

use std::sync::{Arc, Mutex, PoisonError};

use cubecl::{
    Runtime,
    cuda::{CudaDevice, CudaRuntime},
    device::Device,
    device_handle::DeviceHandle,
    server::ComputeServer,
    stream_id::StreamId,
};

use super::{Run, Tensor};
use crate::comm::{Announced, Flush, Moves, NcclError, Queue, Ticket};

type Server = <CudaRuntime as Runtime>::Server;

/// Makes a GPU's thread run what it was given so far, from any other thread.
pub(super) fn flush(ordinal: usize) -> Flush {
    Box::new(move || DeviceHandle::<Server>::new(CudaDevice::new(ordinal).to_id()).flush_queue())
}

impl Run<'_> {
    /// Starts an operation of NCCL on tensors, whose addresses it is given.
    pub(super) fn start(
        &self,
        tensors: Vec<Tensor>,
        enqueue: impl FnOnce(&Queue<'_>, &[u64]) -> Result<(), NcclError> + Send + 'static,
    ) -> OnItsWay {
        let (number, large) = (self.number, self.large);
        self.submit(tensors, move |announced, addresses| {
            announced.start(number, large, |queue| enqueue(queue, addresses))
        })
    }

    /// Starts moving runs of tensors' bytes between ranks; `moves` is given the tensors' addresses.
    pub(super) fn exchange(
        &self,
        tensors: Vec<Tensor>,
        moves: impl FnOnce(&[u64]) -> Moves + Send + 'static,
    ) -> OnItsWay {
        let (number, large) = (self.number, self.large);
        self.submit(tensors, move |announced, addresses| {
            announced.exchange(number, moves(addresses), large)
        })
    }

    /// Starts an operation on tensors, whose addresses it is given. The host waits for nothing, not even for the device's thread,
    /// which asks for the addresses and enqueues the operation behind all work that was submitted before; what goes wrong there
    /// fails the world, and this rank's next operation.
    fn submit(
        &self,
        tensors: Vec<Tensor>,
        begin: impl FnOnce(&Announced, &[u64]) -> Result<Ticket, NcclError> + Send + 'static,
    ) -> OnItsWay {
        let device = DeviceHandle::<Server>::new(tensors[0].device.to_id());
        let ticket = Arc::new(Mutex::new(None));
        let handles: Vec<_> = (tensors.iter())
            .map(|tensor| tensor.handle.clone())
            .collect();
        let (announced, started) = (self.communicator.announce(), ticket.clone());
        let what = self.what.to_owned();
        let of_end = announced.again();
        device.submit(move |server| {
            // Asking for its resource orders this stream behind all work on a buffer.
            let addresses = handles.into_iter().map(|handle| {
                let resource = server.get_resource(handle.binding(), StreamId::current());
                resource.map(|resource| resource.resource().ptr)
            });
            let begun = addresses
                .collect::<Result<Vec<u64>, _>>()
                .map_err(|error| NcclError::Buffer(format!("{error:?}")))
                .and_then(|addresses| begin(&announced, &addresses));
            match begun {
                Ok(begun) => {
                    *started.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun);
                }
                Err(error) => announced.fail(&what, error),
            }
        });
        // Tasks wait for others to share a batch with, unless told not to.
        device.flush_queue();
        OnItsWay(Some(Held {
            device,
            ticket,
            announced: of_end,
            what: self.what.to_owned(),
            tensors,
        }))
    }
}

/// An operation whose buffers nobody may reuse yet: later work of the device has not been ordered behind it.
pub(super) struct OnItsWay(Option<Held>);

/// What is held until then.
struct Held {
    device: DeviceHandle<Server>,
    /// Set by the device's thread.
    ticket: Arc<Mutex<Option<Ticket>>>,
    announced: Announced,
    what: String,
    /// The buffers.
    tensors: Vec<Tensor>,
}

impl OnItsWay {
    /// Orders all later work of the device behind the operation.
    pub(super) fn arrive(self) {
        drop(self);
    }
}

impl Drop for OnItsWay {
    /// Also where nobody takes the result, since its buffers go back to the allocator.
    fn drop(&mut self) {
        let Some(held) = self.0.take() else {
            return;
        };
        let device = held.device.clone();
        device.submit(move |_| {
            let ticket = (held.ticket.lock())
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            // There is none where the start has failed, and was reported.
            if let Some(Err(error)) = ticket.map(Ticket::order_before_later_work) {
                held.announced.fail(&held.what, error);
            }
            drop(held.tensors);
        });
    }
}
