//! What a rank has left for the others of its group, before it takes theirs.

use std::sync::Arc;

use super::{CommError, Signature, group::Shared, hub::MeetingKey};

/// A reference that this rank has left for the ranks of its group. Who drops it does not take theirs; nobody waits for that.
#[derive(Debug)]
pub(crate) struct Posted<T> {
    shared: Arc<Shared>,
    key: MeetingKey,
    signature: Signature,
    /// The reference itself in a group of one.
    own: Option<Arc<T>>,
    open: bool,
}

impl<T> Posted<T> {
    pub(super) fn new(
        shared: Arc<Shared>,
        key: MeetingKey,
        signature: Signature,
        own: Option<Arc<T>>,
    ) -> Self {
        Self {
            shared,
            key,
            signature,
            own,
            open: true,
        }
    }
}

impl<T: Send + Sync + 'static> Posted<T> {
    /// Waits until every rank has left its reference; they come back in group order.
    pub(crate) fn wait(mut self) -> Result<Vec<Arc<T>>, CommError> {
        self.open = false;
        let Some(hub) = self.shared.hub() else {
            return Ok(self.own.take().into_iter().collect());
        };
        let op = self.key.describe(&self.signature);
        let parcels = hub.wait(&self.key, &self.shared.attendance(), op)?;
        let wanted = std::any::type_name::<T>();
        parcels
            .into_iter()
            .zip(&*self.shared.ranks)
            .map(|(parcel, &rank)| {
                parcel.downcast::<T>().map_err(|_| {
                    let signature = &self.signature;
                    let got = format!("{signature} of another backend");
                    let wanted = format!("{signature} of {wanted}");
                    self.shared.mismatch(&self.key, rank, wanted, got)
                })
            })
            .collect()
    }
}

impl<T> Drop for Posted<T> {
    fn drop(&mut self) {
        if let Some(hub) = self.shared.hub().filter(|_| self.open) {
            hub.leave(&self.key);
        }
    }
}
