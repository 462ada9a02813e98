//! Threads that work for a world besides its ranks. A process must not end in the middle of their work: the libraries that they call are
//! taken down with it.

use std::{
    collections::HashMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::{Hub, World};

static NUM: Mutex<Option<HashMap<usize, usize>>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

fn table() -> MutexGuard<'static, Option<HashMap<usize, usize>>> {
    NUM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of a world in this process: threads of several may run at once, a process belongs to one.
fn of_hub(hub: &Hub) -> usize {
    std::ptr::from_ref(hub).addr()
}

/// One thread that works for a world, until this is dropped.
#[derive(Debug)]
pub(crate) struct Helper(usize);

impl Helper {
    pub(crate) fn of(world: &World) -> Self {
        let world = match world {
            World::Threads(hub) => of_hub(hub),
            World::Processes(_) => 0,
        };
        *table().get_or_insert_default().entry(world).or_default() += 1;
        Self(world)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let mut table = table();
        let all = table.get_or_insert_default();
        if let Some(num) = all.get_mut(&self.0) {
            *num -= 1;
            if *num == 0 {
                all.remove(&self.0);
            }
        }
        CHANGED.notify_all();
    }
}

/// Waits until nobody works for a world of threads, or for the world of this process, but not longer than `limit`.
pub(crate) fn wait_for_helpers(hub: Option<&Hub>, limit: Duration) {
    let world = hub.map_or(0, of_hub);
    let busy = |all: &mut Option<HashMap<usize, usize>>| {
        all.as_ref().is_some_and(|all| all.contains_key(&world))
    };
    // A thread that is stuck in a library is left there.
    drop(CHANGED.wait_timeout_while(table(), limit, busy));
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread, time::Instant};

    use super::*;

    #[test]
    fn a_world_waits_for_its_own_helpers_and_not_for_ever() {
        let long = Duration::from_secs(60);
        let [hub, other] = [(); 2].map(|()| Hub::new(1, long));
        let helper = Helper::of(&World::Threads(Arc::clone(&hub)));
        let start = Instant::now();
        wait_for_helpers(Some(&other), long);
        wait_for_helpers(Some(&hub), Duration::from_millis(20));
        assert!(start.elapsed() >= Duration::from_millis(20));
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(helper);
        });
        wait_for_helpers(Some(&hub), long);
        assert!(start.elapsed() < long / 2);
        ends.join().unwrap();
    }
}
