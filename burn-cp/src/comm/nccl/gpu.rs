//! A GPU as a device that others copy from: by the copy engines, which take no multiprocessors from the kernels that run meanwhile.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::{
    cuda::{Event, Stream},
    error::NcclError,
};
use crate::comm::peers::{Device, Peers, Rectangle};

/// A rank's streams for copies from each rank: one that waits for a rank's kernels holds up no copies from others.
pub(super) type Streams = Arc<[Stream]>;

/// A GPU.
pub(super) struct Gpu {
    /// The rank's rows are written, and its buffers are free to be written.
    pub(super) ready: Event,
    pub(super) streams: Streams,
}

impl Device for Gpu {
    type End = Event;
    type Error = NcclError;

    /// Leaves this device's context to the thread.
    fn copy_from(
        &self,
        (source, from): (usize, &Self),
        copies: &[Rectangle],
    ) -> Result<Event, NcclError> {
        let stream = &self.streams[source];
        stream.enter()?;
        stream.wait(&self.ready)?;
        stream.wait(&from.ready)?;
        for copy in copies {
            stream.copy_from(&from.streams[source], copy)?;
        }
        stream.record()
    }

    fn in_vain() -> NcclError {
        NcclError::Aborted
    }

    fn are_over(end: &Event) -> bool {
        end.has_happened().unwrap_or(false)
    }
}

/// What ranks with the same id share.
type OfId = (Vec<u8>, Weak<Peers<Gpu>>);

/// Until all of its ranks have gone.
static SHARED: Mutex<Vec<OfId>> = Mutex::new(Vec::new());

/// Of the ranks of this process that joined with an id.
pub(super) fn peers_of(id: &[u8], size: usize) -> Arc<Peers<Gpu>> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.retain(|(_, peers)| peers.strong_count() > 0);
    let mut all = shared.iter();
    let found = all.find(|(of, _)| of == id);
    if let Some(peers) = found.and_then(|(_, peers)| peers.upgrade()) {
        return peers;
    }
    let peers = Arc::new(Peers::new(size));
    shared.push((id.to_vec(), Arc::downgrade(&peers)));
    peers
}
