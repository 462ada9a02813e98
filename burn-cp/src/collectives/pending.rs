//! Collectives that were started and whose results have not been taken yet.

use std::fmt;

use burn::tensor::backend::Backend;

use super::Payload;

/// A collective that was started. What it moves travels while the rank does something else.
///
/// Who drops it without finishing it does not take the result; the other ranks get theirs all the same. A failure between ranks
/// ends the rank with a typed panic, when the collective is started or when it is finished.
#[must_use = "the result of a collective is taken by finishing it"]
pub struct Pending<B: Backend>(Box<dyn FnOnce() -> Payload<B>>);

impl<B: Backend> fmt::Debug for Pending<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}

impl<B: Backend> Pending<B> {
    /// A collective that `finish` brings to its end.
    pub fn new(finish: impl FnOnce() -> Payload<B> + 'static) -> Self {
        Self(Box::new(finish))
    }

    /// A collective that has ended already.
    pub fn ready(result: Payload<B>) -> Self {
        Self::new(move || result)
    }

    /// Waits for the other ranks, on the host or, for devices with a transport of their own, on the device; this rank's result.
    pub fn finish(self) -> Payload<B> {
        (self.0)()
    }
}
