//! What an operation enqueues: NCCL's calls, whose buffers are addresses of the device.

use cudarc::nccl::sys;

use super::{communicator::Raw, cuda::Stream, error::NcclError};
use crate::comm::{Move, Moves};

/// Elements that NCCL adds up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    BF16,
    F32,
    F64,
    I32,
    I64,
    U32,
    U64,
    U8,
    I8,
}

impl Element {
    fn raw(self) -> sys::ncclDataType_t {
        match self {
            Self::F16 => sys::ncclDataType_t::ncclFloat16,
            Self::BF16 => sys::ncclDataType_t::ncclBfloat16,
            Self::F32 => sys::ncclDataType_t::ncclFloat32,
            Self::F64 => sys::ncclDataType_t::ncclFloat64,
            Self::I32 => sys::ncclDataType_t::ncclInt32,
            Self::I64 => sys::ncclDataType_t::ncclInt64,
            Self::U32 => sys::ncclDataType_t::ncclUint32,
            Self::U64 => sys::ncclDataType_t::ncclUint64,
            Self::U8 => sys::ncclDataType_t::ncclUint8,
            Self::I8 => sys::ncclDataType_t::ncclInt8,
        }
    }
}

/// What an operation enqueues with; addresses are of the device, and valid until the operation has ended.
pub(crate) struct Queue<'a> {
    pub(super) raw: Raw,
    pub(super) stream: &'a Stream,
}

impl Queue<'_> {
    /// Sends and receives that make progress together.
    pub(super) fn exchange(&self, moves: &Moves) -> Result<(), NcclError> {
        // SAFETY: every start has its end, also where a call fails.
        let opened = unsafe { sys::ncclGroupStart() };
        accepted("opening a group of operations", opened, None)?;
        let sent = moves.gives.iter().try_for_each(|one| self.send(one));
        let done = sent.and_then(|()| moves.takes.iter().try_for_each(|one| self.receive(one)));
        // SAFETY: as above.
        let closed = unsafe { sys::ncclGroupEnd() };
        let ended = accepted("closing a group of operations", closed, Some(self.raw));
        done.and(ended)
    }

    fn send(&self, one: &Move) -> Result<(), NcclError> {
        one.block.runs().try_for_each(|(address, num_bytes)| {
            // SAFETY: the caller keeps the buffer until the operation has ended.
            let code = unsafe {
                sys::ncclSend(
                    address as _,
                    num_bytes,
                    sys::ncclDataType_t::ncclUint8,
                    one.peer as i32,
                    self.raw.0,
                    self.stream.raw() as _,
                )
            };
            accepted("sending", code, Some(self.raw))
        })
    }

    fn receive(&self, one: &Move) -> Result<(), NcclError> {
        one.block.runs().try_for_each(|(address, num_bytes)| {
            // SAFETY: as for `send`; nobody else has the buffer.
            let code = unsafe {
                sys::ncclRecv(
                    address as _,
                    num_bytes,
                    sys::ncclDataType_t::ncclUint8,
                    one.peer as i32,
                    self.raw.0,
                    self.stream.raw() as _,
                )
            };
            accepted("receiving", code, Some(self.raw))
        })
    }

    /// Equal parts of all ranks, one behind the other.
    pub(crate) fn all_gather(&self, from: u64, to: u64, num_bytes: usize) -> Result<(), NcclError> {
        // SAFETY: as for `send` and `receive`.
        let code = unsafe {
            sys::ncclAllGather(
                from as _,
                to as _,
                num_bytes,
                sys::ncclDataType_t::ncclUint8,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("gathering", code, Some(self.raw))
    }

    /// Sums on every rank.
    pub(crate) fn all_reduce(
        &self,
        from: u64,
        to: u64,
        len: usize,
        element: Element,
    ) -> Result<(), NcclError> {
        let sum = sys::ncclRedOp_t::ncclSum;
        // SAFETY: as for `send` and `receive`.
        let code = unsafe {
            sys::ncclAllReduce(
                from as _,
                to as _,
                len,
                element.raw(),
                sum,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("adding up", code, Some(self.raw))
    }

    /// Sums of all ranks' buffers, of which each rank gets its part of `len` elements.
    pub(crate) fn reduce_scatter(
        &self,
        from: u64,
        to: u64,
        len: usize,
        element: Element,
    ) -> Result<(), NcclError> {
        let sum = sys::ncclRedOp_t::ncclSum;
        // SAFETY: as for `send` and `receive`.
        let code = unsafe {
            sys::ncclReduceScatter(
                from as _,
                to as _,
                len,
                element.raw(),
                sum,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("adding up parts", code, Some(self.raw))
    }

    /// The root's buffer on every rank.
    pub(crate) fn broadcast(
        &self,
        from: u64,
        to: u64,
        num_bytes: usize,
        root: usize,
    ) -> Result<(), NcclError> {
        // SAFETY: as for `send` and `receive`.
        let code = unsafe {
            sys::ncclBroadcast(
                from as _,
                to as _,
                num_bytes,
                sys::ncclDataType_t::ncclUint8,
                root as i32,
                self.raw.0,
                self.stream.raw() as _,
            )
        };
        accepted("broadcasting", code, Some(self.raw))
    }
}

pub(super) fn accepted(
    what: &'static str,
    code: sys::ncclResult_t,
    comm: Option<Raw>,
) -> Result<(), NcclError> {
    match code {
        sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress => Ok(()),
        code => Err(call(what, code, comm)),
    }
}

pub(super) fn call(what: &'static str, code: sys::ncclResult_t, comm: Option<Raw>) -> NcclError {
    let comm = comm.map_or(std::ptr::null_mut(), |comm| comm.0);
    // SAFETY: the library returns a string of its own or null.
    let detail = unsafe {
        let text = sys::ncclGetLastError(comm);
        if text.is_null() {
            String::new()
        } else {
            std::ffi::CStr::from_ptr(text)
                .to_string_lossy()
                .into_owned()
        }
    };
    let detail = if detail.is_empty() {
        detail
    } else {
        format!(" ({})", detail.trim())
    };
    NcclError::Call { what, code, detail }
}
