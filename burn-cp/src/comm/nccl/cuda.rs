//! The little of the driver that NCCL's order among CubeCL's streams needs.

use cudarc::driver::{result, sys};

use super::error::{NcclError, driver};
use crate::comm::peers::Rectangle;

/// A device's primary context, which CubeCL uses too, and a stream in it.
#[derive(Debug)]
pub(super) struct Stream {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; every use makes the context current first.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(ordinal: usize) -> Result<Self, NcclError> {
        driver("initialising the driver", result::init())?;
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let device = driver("looking for the device", result::device::get(ordinal))?;
        // SAFETY: the device exists; the context is released when `self` is dropped.
        let context = driver("opening the device", unsafe {
            result::primary_ctx::retain(device)
        })?;
        let made = (|| {
            // SAFETY: the context was just retained.
            driver("using the device", unsafe {
                result::ctx::set_current(context)
            })?;
            let kind = result::stream::StreamKind::NonBlocking;
            driver("making a stream", result::stream::create(kind))
        })();
        match made {
            Ok(stream) => Ok(Self {
                device,
                context,
                stream,
            }),
            Err(error) => {
                // SAFETY: retained above, and not used any more.
                let _ = unsafe { result::primary_ctx::release(device) };
                Err(error)
            }
        }
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Makes the device's context the calling thread's.
    pub(super) fn enter(&self) -> Result<(), NcclError> {
        // SAFETY: the context lives as long as `self`.
        driver("using the device", unsafe {
            result::ctx::set_current(self.context)
        })
    }

    /// An event that happens when all work that was submitted to the context's streams so far has ended. The context is the thread's.
    pub(super) fn submitted_work(&self) -> Result<Event, NcclError> {
        let event = Event::new()?;
        // SAFETY: context and event are alive.
        driver("recording the context's work", unsafe {
            sys::cuCtxRecordEvent(self.context, event.0).result()
        })?;
        Ok(event)
    }

    /// The stream's next operation waits, on the device, for an event of any device.
    pub(super) fn wait(&self, event: &Event) -> Result<(), NcclError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are alive.
        driver("ordering the stream", unsafe {
            result::stream::wait_event(self.stream, event.0, flags)
        })
    }

    /// Copies to this device from `source`'s, which may be this one, as the stream's next operation: as a copy between
    /// devices within one, too, which beside copies from others was faster than the call for one device.
    pub(super) fn copy_from(&self, source: &Self, copy: &Rectangle) -> Result<(), NcclError> {
        let rectangle = rectangle((source, self), copy);
        // SAFETY: the callers keep both buffers until the copy has ended; contexts, stream and record are alive.
        driver("copying between devices", unsafe {
            if copy.count == 1 {
                sys::cuMemcpyPeerAsync(
                    copy.to,
                    self.context,
                    copy.from,
                    source.context,
                    copy.num_bytes,
                    self.stream,
                )
            } else {
                sys::cuMemcpy3DPeerAsync(&raw const rectangle, self.stream)
            }
            .result()
        })
    }

    /// Lets this device's kernels and copies reach memory of other devices, and theirs reach its own; whether that is possible.
    pub(super) fn open_to(&self, others: &[usize]) -> Result<bool, NcclError> {
        self.enter()?;
        for &other in others {
            let ordinal = i32::try_from(other).unwrap_or(i32::MAX);
            let other = driver("looking for a device", result::device::get(ordinal))?;
            let mut reaches = 0;
            // SAFETY: both devices exist; the out pointer outlives the call.
            driver("asking what a device reaches", unsafe {
                sys::cuDeviceCanAccessPeer(&raw mut reaches, self.device, other).result()
            })?;
            if reaches == 0 {
                return Ok(false);
            }
            self.open_to_device(other, ordinal)?;
        }
        Ok(true)
    }

    fn open_to_device(&self, other: sys::CUdevice, ordinal: i32) -> Result<(), NcclError> {
        // Memory of its allocator's plain calls.
        // SAFETY: the device exists; the context is released below.
        let context = driver("opening a device", unsafe {
            result::primary_ctx::retain(other)
        })?;
        // SAFETY: the context is alive.
        let opened = unsafe { sys::cuCtxEnablePeerAccess(context, 0) };
        // SAFETY: retained above; its rank holds it, too.
        let released = unsafe { result::primary_ctx::release(other) };
        if opened != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            driver("opening a device's memory", opened.result())?;
        }
        driver("closing a device", released)?;
        // Memory of its pool.
        let mut pool = std::ptr::null_mut();
        // SAFETY: the device exists; the out pointer outlives the call.
        driver("looking for the memory pool", unsafe {
            sys::cuDeviceGetMemPool(&raw mut pool, self.device).result()
        })?;
        let access = PoolAccess {
            kind: 1,
            ordinal,
            flags: 3,
        };
        // SAFETY: the pool is the device's; the record has the layout that the driver reads.
        driver("opening the memory pool", unsafe {
            sys::cuMemPoolSetAccess(pool, (&raw const access).cast(), 1).result()
        })
    }

    /// Whether the device still works: a kernel's illegal address, whoever's kernel it was, fails all that comes behind it in the context.
    pub(super) fn check(&self) -> Result<(), NcclError> {
        self.enter()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            other => driver("the device's work so far", other.result()),
        }
    }

    /// Uninitialised memory that is freed, as the stream's next operation, when it is dropped.
    pub(super) fn scratch(&self, num_bytes: usize) -> Result<Scratch<'_>, NcclError> {
        // SAFETY: the stream is alive.
        let address = driver("allocating", unsafe {
            result::malloc_async(self.stream, num_bytes)
        })?;
        Ok(Scratch(self, address))
    }

    /// An event that happens when the stream's work so far has ended.
    pub(super) fn record(&self) -> Result<Event, NcclError> {
        let event = Event::new()?;
        // SAFETY: event and stream are alive and of one context.
        driver("recording the stream's work", unsafe {
            result::event::record(event.0, self.stream)
        })?;
        Ok(event)
    }

    /// All work that is submitted to the context's streams from now on waits, on the device, for an event.
    pub(super) fn hold_later_work(&self, event: &Event) -> Result<(), NcclError> {
        // SAFETY: context and event are alive.
        driver("ordering the context", unsafe {
            sys::cuCtxWaitEvent(self.context, event.0).result()
        })
    }
}

/// A copy, as the driver takes it: of so many lines.
fn rectangle(
    (source, destination): (&Stream, &Stream),
    copy: &Rectangle,
) -> sys::CUDA_MEMCPY3D_PEER {
    sys::CUDA_MEMCPY3D_PEER {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: copy.from,
        srcArray: std::ptr::null_mut(),
        srcContext: source.context,
        srcPitch: copy.from_pitch,
        srcHeight: copy.count,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: copy.to,
        dstArray: std::ptr::null_mut(),
        dstContext: destination.context,
        dstPitch: copy.to_pitch,
        dstHeight: copy.count,
        WidthInBytes: copy.num_bytes,
        Height: copy.count,
        Depth: 1,
    }
}

/// `CUmemAccessDesc`, whose fields are named differently from version to version: a device (kind 1) that may read and write (flags 3).
#[repr(C)]
struct PoolAccess {
    kind: u32,
    ordinal: i32,
    flags: u32,
}

const _: () = assert!(size_of::<PoolAccess>() == size_of::<sys::CUmemAccessDesc>());

impl Drop for Stream {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        // SAFETY: nothing uses the stream any more. Errors have nobody to go to.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Memory for one stream's operations.
#[derive(Debug)]
pub(super) struct Scratch<'a>(&'a Stream, sys::CUdeviceptr);

impl Scratch<'_> {
    pub(super) fn address(&self) -> u64 {
        self.1
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        // SAFETY: of this stream, whose operations have it until the freeing runs. An error has nobody to go to.
        let _ = unsafe { result::free_async(self.1, self.0.stream) };
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub(super) struct Event(sys::CUevent);

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as for streams.
unsafe impl Sync for Event {}

impl Event {
    /// Of the thread's current context.
    fn new() -> Result<Self, NcclError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        driver("making an event", result::event::create(flags)).map(Self)
    }

    pub(super) fn has_happened(&self) -> Result<bool, NcclError> {
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::CUresult::CUDA_SUCCESS => Ok(true),
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => driver("looking at an event", other.result()).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: destroyed once; waits that were enqueued keep what they need.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
