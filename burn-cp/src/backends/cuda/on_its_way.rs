//! Operations between their start and the moment from which others may use their buffers.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
};

use cubecl::{
    Runtime,
    cuda::{CudaDevice, CudaRuntime},
    device::Device,
    device_handle::DeviceHandle,
    server::ComputeServer,
    stream_id::StreamId,
};

use super::{Run, Tensor};
use crate::comm::{Announced, Flush, Moves, NcclError, Queue, Ticket, panic_message};

type Server = <CudaRuntime as Runtime>::Server;

/// Makes a GPU's thread run what it was given so far, from any other thread.
pub(super) fn flush(ordinal: usize) -> Flush {
    Box::new(move || DeviceHandle::<Server>::new(CudaDevice::new(ordinal).to_id()).flush_queue())
}

/// Waits until a GPU's thread has run what it was given so far.
pub(super) fn drain(ordinal: usize) {
    let device = DeviceHandle::<Server>::new(CudaDevice::new(ordinal).to_id());
    if let Err(error) = device.submit_blocking(|_| ()) {
        tracing::debug!(?error, gpu = ordinal, "its thread does not answer");
    }
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
            let begun = caught(|| {
                // Asking for its resource orders this stream behind all work on a buffer.
                let addresses = handles.into_iter().map(|handle| {
                    let resource = server.get_resource(handle.binding(), StreamId::current());
                    resource.map(|resource| resource.resource().ptr)
                });
                let addresses = addresses
                    .collect::<Result<Vec<u64>, _>>()
                    .map_err(|error| NcclError::Buffer(format!("{error:?}")))?;
                begin(&announced, &addresses)
            });
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

/// What a task of the device's thread does. That thread only logs a panic, such as that of an allocator without memory, and goes on; others
/// would wait for the operation, or take the next one for it.
fn caught<T>(task: impl FnOnce() -> Result<T, NcclError>) -> Result<T, NcclError> {
    catch_unwind(AssertUnwindSafe(task)).unwrap_or_else(|panic| {
        let reason = panic_message(panic.as_ref());
        Err(NcclError::Buffer(reason))
    })
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
            let ordered = ticket.map(|ticket| caught(|| ticket.order_before_later_work()));
            if let Some(Err(error)) = ordered {
                held.announced.fail(&held.what, error);
            }
            drop(held.tensors);
        });
    }
}
