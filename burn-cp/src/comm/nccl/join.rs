//! How a communicator comes to be: an id that its ranks share, and connections between all of them.

use std::{
    mem::MaybeUninit,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use cudarc::nccl::sys;

use super::{
    communicator::Raw,
    cuda::Stream,
    error::{NcclError, check_libraries},
    queue::{Element, Queue, call},
};
use crate::comm::{Block, Move, Moves, Observer};

/// What the ranks of a communicator have in common before it exists. Made by one of them.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct UniqueId(Vec<u8>);

impl UniqueId {
    /// A new one.
    ///
    /// # Errors
    /// NCCL or the driver is not there, or no network interface can be used.
    pub(crate) fn new() -> Result<Self, NcclError> {
        check_libraries()?;
        let id = cudarc::nccl::result::get_uniqueid()
            .map_err(|error| call("making a unique id", error.0, None))?;
        Ok(Self(id.internal.iter().map(|byte| *byte as u8).collect()))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn raw(&self) -> sys::ncclUniqueId {
        let mut internal = [0; 128];
        for (to, from) in internal.iter_mut().zip(&self.0) {
            *to = *from as _;
        }
        sys::ncclUniqueId { internal }
    }
}

/// Makes a communicator and its connections in a thread of its own, since NCCL waits for the other ranks without a limit.
pub(super) fn connected(
    id: &UniqueId,
    place: [usize; 2],
    stream: &Arc<Stream>,
    observer: Option<&Observer>,
    deadline: Duration,
) -> Result<Raw, NcclError> {
    const WHAT: &str = "joining the communicator";
    let (done, made) = mpsc::channel();
    let (id, of_thread) = (id.raw(), stream.clone());
    let make = move || {
        let raw = of_thread
            .enter()
            .and_then(|()| connect(id, place, &of_thread));
        if let Err(mpsc::SendError(Ok(raw))) = done.send(raw) {
            // Too late: nobody waits for it. SAFETY: nobody else has it.
            unsafe { sys::ncclCommAbort(raw.0) };
        }
    };
    let start = Instant::now();
    let thread = std::thread::Builder::new().name("nccl-join".into());
    let slow = |_| NcclError::Slow {
        what: WHAT,
        waited: start.elapsed(),
    };
    thread.spawn(make).map_err(slow)?;
    loop {
        match made.recv_timeout(Duration::from_millis(2)) {
            Ok(made) => return made,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(NcclError::Aborted),
        }
        let waited = start.elapsed();
        if observer.is_some_and(|world| world.failure().is_some()) || waited > deadline {
            return Err(NcclError::Slow { what: WHAT, waited });
        }
    }
}

/// Waits for all ranks.
fn connect(id: sys::ncclUniqueId, place: [usize; 2], stream: &Stream) -> Result<Raw, NcclError> {
    let mut raw = MaybeUninit::uninit();
    let [rank, size] = place.map(|n| i32::try_from(n).unwrap_or(i32::MAX));
    // SAFETY: the out pointer outlives the call.
    let code = unsafe { sys::ncclCommInitRank(raw.as_mut_ptr(), size, id, rank) };
    if code != sys::ncclResult_t::ncclSuccess {
        return Err(call("joining the communicator", code, None));
    }
    // SAFETY: the call has succeeded, so it has written the handle.
    let raw = Raw(unsafe { raw.assume_init() });
    reach_all(raw, place, stream).inspect_err(|_| {
        // SAFETY: nobody else has it.
        unsafe { sys::ncclCommAbort(raw.0) };
    })?;
    Ok(raw)
}

/// Connects with all ranks for all that a [`Queue`] can do.
fn reach_all(raw: Raw, [rank, size]: [usize; 2], stream: &Stream) -> Result<(), NcclError> {
    let queue = Queue { raw, stream };
    let all = stream.scratch(4 * size)?;
    let part = stream.scratch(4)?;
    queue.all_gather(part.address(), all.address(), 4)?;
    queue.reduce_scatter(all.address(), part.address(), 1, Element::F32)?;
    queue.all_reduce(part.address(), part.address(), 1, Element::F32)?;
    queue.broadcast(part.address(), part.address(), 4, 0)?;
    let with = |address: &dyn Fn(usize) -> u64| {
        let others = (0..size).filter(|other| *other != rank);
        let one = |peer| Move {
            peer,
            block: Block::one(address(peer), 4),
        };
        others.map(one).collect()
    };
    queue.exchange(&Moves {
        gives: with(&|_| part.address()),
        takes: with(&|other| all.address() + 4 * other as u64),
    })
}
