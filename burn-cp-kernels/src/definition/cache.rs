//! A place for what routines derive from a list of segments: made once, kept as long as the segments.

use std::{
    any::Any,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// Values of any type. Two caches are always equal: they say nothing about the segments.
#[derive(Default)]
pub(crate) struct Cache {
    entries: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl Cache {
    /// The value of type `T` that fits, made by `make` if there is none yet. `make` must not use
    /// the cache.
    #[cfg_attr(not(feature = "cubecl"), allow(dead_code))]
    pub(crate) fn get_or_make<T: Any + Send + Sync>(
        &self,
        fits: impl Fn(&T) -> bool,
        make: impl FnOnce() -> T,
    ) -> Arc<T> {
        // A panic in `make` leaves the list as it was.
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let found = entries
            .iter()
            .filter_map(|entry| Arc::clone(entry).downcast::<T>().ok())
            .find(|entry| fits(entry));
        found.unwrap_or_else(|| {
            let made = Arc::new(make());
            entries.push(made.clone());
            made
        })
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cache")
    }
}

impl PartialEq for Cache {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Cache {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once_per_type_and_fit() {
        let cache = Cache::default();
        let number = |value: u32| *cache.get_or_make(|x| *x == value, || value);
        assert_eq!([number(3), number(4), number(3)], [3, 4, 3]);
        assert_eq!(*cache.get_or_make(|_: &i64| true, || 5), 5);
        assert_eq!(cache.entries.lock().unwrap().len(), 3);
    }
}
