//! Threads that work for a world besides its ranks. A process must not end in the middle of their work: the libraries that they call are
//! taken down with it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Hub, World};

/// What works for one world.
#[derive(Default)]
struct Work {
    num_helpers: usize,
    /// By device: waits until its thread has done what it was given.
    drains: BTreeMap<usize, fn(usize)>,
}

static WORK: Mutex<Option<HashMap<usize, Work>>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

type Table = Option<HashMap<usize, Work>>;

fn table() -> MutexGuard<'static, Table> {
    WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of a world in this process: threads of several may run at once, a process belongs to one.
fn of_hub(hub: &Hub) -> usize {
    std::ptr::from_ref(hub).addr()
}

fn of_world(world: &World) -> usize {
    match world {
        World::Threads(hub) => of_hub(hub),
        World::Processes(_) => 0,
    }
}

/// One thread that works for a world, until this is dropped.
#[derive(Debug)]
pub(crate) struct Helper(usize);

impl Helper {
    pub(crate) fn of(world: &World) -> Self {
        let world = of_world(world);
        let mut table = table();
        let of_world = table.get_or_insert_default().entry(world).or_default();
        of_world.num_helpers += 1;
        Self(world)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let Some(work) = table().get_or_insert_default().get_mut(&self.0) {
            work.num_helpers -= 1;
        }
        CHANGED.notify_all();
    }
}

/// Has a device's thread waited for when a world has ended and nobody works for it: ranks may have given it work that they did not wait for.
pub(super) fn drain_at_end(world: &World, device: usize, drain: fn(usize)) {
    let mut table = table();
    let of_world = table.get_or_insert_default().entry(of_world(world));
    of_world.or_default().drains.insert(device, drain);
}

/// Waits until nobody works for a world of threads, or for the world of this process, but not longer than `limit`. What is still at work then
/// is left alone.
pub(crate) fn wait_for_helpers(hub: Option<&Hub>, limit: Duration) {
    let start = Instant::now();
    let world = hub.map_or(0, of_hub);
    let busy = |table: &mut Table| {
        let work = table.as_ref().and_then(|all| all.get(&world));
        work.is_some_and(|work| work.num_helpers > 0)
    };
    let waited = CHANGED.wait_timeout_while(table(), limit, busy);
    let (mut table, waited) = waited.unwrap_or_else(PoisonError::into_inner);
    if waited.timed_out() {
        tracing::warn!(?limit, "threads that work for devices have not ended");
    }
    let of_world = table.as_mut().and_then(|all| all.get_mut(&world));
    let drains = of_world.map(|work| std::mem::take(&mut work.drains));
    if let Some(all) = table.as_mut() {
        all.retain(|_, work| work.num_helpers > 0 || !work.drains.is_empty());
    }
    drop(table);
    let (done, drained) = mpsc::channel();
    for (device, drain) in drains.into_iter().flatten() {
        let done = done.clone();
        let wait = move || {
            drain(device);
            drop(done);
        };
        if let Err(error) = thread::Builder::new().name("drain".into()).spawn(wait) {
            tracing::debug!(%error, device, "its thread is not waited for");
        }
    }
    drop(done);
    // Nobody says anything: the last that is done hangs up.
    let left = limit.saturating_sub(start.elapsed());
    if drained.recv_timeout(left) == Err::<(), _>(RecvTimeoutError::Timeout) {
        tracing::warn!(
            ?limit,
            "threads of devices have not done what they were given"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicUsize, atomic::Ordering};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_world_waits_for_its_own_helpers_and_not_for_ever() {
        let [hub, other] = [(); 2].map(|()| Hub::new(1, LONG));
        let helper = Helper::of(&World::Threads(Arc::clone(&hub)));
        let start = Instant::now();
        wait_for_helpers(Some(&other), LONG);
        wait_for_helpers(Some(&hub), Duration::from_millis(20));
        assert!(start.elapsed() >= Duration::from_millis(20));
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(helper);
        });
        wait_for_helpers(Some(&hub), LONG);
        assert!(start.elapsed() < LONG / 2);
        ends.join().unwrap();
    }

    #[test]
    fn a_world_waits_for_the_threads_of_its_devices_once_and_not_for_ever() {
        static NUM_DRAINED: AtomicUsize = AtomicUsize::new(0);
        let drain = |device: usize| {
            thread::sleep(Duration::from_millis(20));
            NUM_DRAINED.fetch_add(device, Ordering::AcqRel);
        };
        let stuck = |_| thread::sleep(LONG);
        let hub = Hub::new(1, LONG);
        let world = World::Threads(Arc::clone(&hub));
        // Two ranks that share a device, and one with another.
        for device in [1, 1, 10] {
            drain_at_end(&world, device, drain);
        }
        let start = Instant::now();
        wait_for_helpers(Some(&Hub::new(1, LONG)), LONG);
        assert_eq!(NUM_DRAINED.load(Ordering::Acquire), 0);
        wait_for_helpers(Some(&hub), LONG);
        assert_eq!(NUM_DRAINED.load(Ordering::Acquire), 11);
        wait_for_helpers(Some(&hub), LONG);
        assert_eq!(NUM_DRAINED.load(Ordering::Acquire), 11);
        drain_at_end(&world, 0, stuck);
        wait_for_helpers(Some(&hub), Duration::from_millis(20));
        assert!(start.elapsed() < LONG / 2);
    }
}
