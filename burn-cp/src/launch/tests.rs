//! What is left of a world that has ended.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use super::{Place, Process, ProcessOptions, Rendezvous, threads};
use crate::{
    comm::{self, CommError, ProcessGroup, RankContext},
    mesh::DeviceMesh,
};

/// Counts those that are let go.
struct OnDevice(Arc<AtomicUsize>);

impl Drop for OnDevice {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// A group that has something on a device, and is kept.
fn group(context: &RankContext, let_go: &Arc<AtomicUsize>) -> Result<ProcessGroup, CommError> {
    let mesh = DeviceMesh::new([("cp", context.world_size())]).unwrap();
    let group = comm::bind(&mesh, context)?.along(&["cp"])?;
    group.device_transport(|| Ok(OnDevice(let_go.clone())))?;
    assert_eq!(let_go.load(Ordering::Acquire), 0);
    group.barrier()?;
    Ok(group)
}

#[test]
fn what_ranks_have_on_devices_is_let_go_when_they_end_also_where_their_groups_are_kept() {
    let let_go = Arc::default();
    let kept = threads(3, |rank| group(&rank, &let_go)).unwrap();
    assert_eq!((kept.len(), let_go.load(Ordering::Acquire)), (3, 3));

    let let_go = Arc::default();
    let failed = threads(2, |rank| {
        let _kept = group(&rank, &let_go).map(Box::new).map(Box::leak);
        Err::<(), _>("ends")
    });
    assert!(failed.is_err());
    assert_eq!(let_go.load(Ordering::Acquire), 2);
}

#[test]
fn a_process_lets_go_of_its_devices_before_it_waits_for_what_works_for_them() {
    let place = Place {
        rank: 0,
        world_size: 1,
        local_rank: 0,
        rendezvous: Rendezvous::Alone,
        job: String::new(),
    };
    let process = Process::join(&place, ProcessOptions::default()).unwrap();
    let context = process.context().clone();
    let let_go = Arc::default();
    let kept = process.run(|rank| group(&rank, &let_go)).unwrap();
    assert_eq!(let_go.load(Ordering::Acquire), 1);
    drop((context, kept));
}

/// What throws when it is dropped.
struct Thrown;

impl Drop for Thrown {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("again");
        }
    }
}

#[test]
fn a_rank_whose_panic_panics_is_a_failure_like_any_other() {
    let failed = threads(2, |rank| {
        if rank.rank() == 1 {
            std::panic::panic_any(Thrown);
        }
        Ok::<_, CommError>(())
    });
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("rank 1"), "{error}");
}
