//! Which device a rank of a test computes on.

use burn_cp::comm::RankContext;

#[cfg(all(feature = "cuda", not(feature = "wgpu")))]
mod of_thread {
    use std::{any::Any, cell::RefCell};

    use burn_cp::{comm::RankContext, launch::RankDevice};
    use cubecl::cuda::CudaDevice;

    thread_local! {
        static DEVICE: RefCell<CudaDevice> = RefCell::default();
    }

    pub(super) fn set(rank: &RankContext) {
        // Without a GPU the test fails where it needs it.
        DEVICE.replace(CudaDevice::of_rank(rank).unwrap_or_default());
    }

    pub(super) fn get<D: Clone + 'static>() -> Option<D> {
        DEVICE.with_borrow(|device| (device as &dyn Any).downcast_ref().cloned())
    }
}

/// Makes [`device`] the rank's own in this thread: where a host has several GPUs, ranks take them in turns.
pub fn enter_rank(rank: &RankContext) {
    #[cfg(all(feature = "cuda", not(feature = "wgpu")))]
    of_thread::set(rank);
    let _ = rank;
}

/// The device of this thread's rank, of whichever backend; the backend's default outside of ranks.
pub fn device<D: Clone + Default + 'static>() -> D {
    #[cfg(all(feature = "cuda", not(feature = "wgpu")))]
    if let Some(device) = of_thread::get() {
        return device;
    }
    D::default()
}
