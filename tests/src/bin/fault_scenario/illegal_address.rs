//! A kernel that writes where nothing is: the device then refuses everything in its context, for good.
//!
//! Copies would not do: the driver looks at their addresses first and refuses without harm.

use std::ffi::CStr;

use cudarc::driver::{DriverError, result};

/// One store to an address that is never mapped.
const KERNEL: &CStr = c"
.version 7.0
.target sm_80
.address_size 64
.visible .entry write_nowhere()
{
    .reg .b32 %value;
    .reg .b64 %address;
    mov.b32 %value, 1;
    mov.b64 %address, 16;
    st.global.b32 [%address], %value;
    ret;
}
";

/// Starts it on a GPU, in the context that everybody uses, and does not wait for it.
pub(crate) fn write(ordinal: usize) -> Result<(), DriverError> {
    let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
    let kind = result::stream::StreamKind::NonBlocking;
    // SAFETY: the context is retained and never released, nor is anything in it, so that all handles are valid. The kernel has no
    // parameters. What it does to the context is what it is for.
    unsafe {
        let context = result::primary_ctx::retain(device)?;
        result::ctx::set_current(context)?;
        let module = result::module::load_data(KERNEL.as_ptr().cast())?;
        let kernel = result::module::get_function(module, c"write_nowhere".to_owned())?;
        let stream = result::stream::create(kind)?;
        let one = (1, 1, 1);
        result::launch_kernel(kernel, one, one, 0, stream, &mut [])
    }
}
