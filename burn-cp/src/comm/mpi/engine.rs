//! MPI's thread.

use std::{
    sync::{
        PoisonError,
        atomic::Ordering,
        mpsc::{Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use mpi::{
    Threading, environment,
    request::{self, LocalScope, Request},
    topology::SimpleCommunicator,
    traits::{Communicator, Destination, Source},
};

use super::{Messages, Order, Started};

pub(super) const AVAILABLE: bool = true;

/// The largest message: MPI counts in 32 bits.
const PART: usize = 1 << 30;
/// How long a transfer is polled without a break, and the break after that.
const EAGER: Duration = Duration::from_micros(200);
const BREAK: Duration = Duration::from_micros(20);

/// Starts MPI and does as it is told until it is told to end, or nobody can tell it any more.
pub(super) fn run(ready: &Sender<Result<Started, String>>, orders: &Receiver<Order>) {
    // Who waits for the answer may have gone; the loop below finds out.
    let Some((universe, level)) = mpi::initialize_with_threading(Threading::Funneled) else {
        let _ = ready.send(Err("this process has started it before".to_owned()));
        return;
    };
    if level < Threading::Funneled {
        let reason = format!("expected threads to be allowed, got {level:?}");
        let _ = ready.send(Err(reason));
        stay();
    }
    let world = universe.world();
    let started = Started {
        rank: usize::try_from(world.rank()).unwrap_or_default(),
        size: usize::try_from(world.size()).unwrap_or_default(),
        host: environment::processor_name().unwrap_or_default(),
    };
    let _ = ready.send(Ok(started));
    loop {
        match orders.recv() {
            Ok(Order::Transfer(transfer)) => carry_out(&world, transfer),
            Ok(Order::Finish(done)) => {
                drop(universe);
                let _ = done.send(());
                return;
            }
            // The world has failed: to finalize could wait for ever.
            Err(_) => stay(),
        }
    }
}

/// Keeps everything that this thread holds until the process ends.
fn stay() -> ! {
    loop {
        thread::park();
    }
}

fn carry_out(world: &SimpleCommunicator, transfer: Messages) {
    let Messages {
        tag,
        sends,
        mut receives,
        progress,
        done,
    } = transfer;
    let tag = i32::from(tag);
    request::scope(|scope| {
        let mut requests = Vec::new();
        for (from, buffer) in &mut receives {
            for part in buffer.chunks_mut(PART) {
                let process = world.process_at_rank(of(*from));
                let request = process.immediate_receive_into_with_tag(scope, part, tag);
                requests.push((*from, Pending::Receive(request)));
            }
        }
        for (to, bytes) in &sends {
            for part in bytes.chunks(PART) {
                let process = world.process_at_rank(of(*to));
                let request = process.immediate_send_with_tag(scope, part, tag);
                requests.push((*to, Pending::Send(request)));
            }
        }
        let start = Instant::now();
        while !requests.is_empty() {
            let before = requests.len();
            requests = (requests.into_iter())
                .filter_map(|(rank, request)| Some((rank, request.test()?)))
                .collect();
            if requests.len() < before {
                continue;
            }
            if start.elapsed() < EAGER {
                thread::yield_now();
                continue;
            }
            let mut outstanding: Vec<usize> = requests.iter().map(|(rank, _)| *rank).collect();
            outstanding.sort_unstable();
            outstanding.dedup();
            *progress
                .outstanding
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = outstanding;
            if progress.abandoned.load(Ordering::Relaxed) {
                // MPI may still write to the buffers, so they must not be given back.
                stay();
            }
            thread::sleep(BREAK);
        }
    });
    let received = receives.into_iter().map(|(_, buffer)| buffer).collect();
    // Nobody may be waiting any more.
    let _ = done.send(received);
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
fn of(rank: usize) -> i32 {
    rank as i32
}

/// A message under way.
enum Pending<'a, 's> {
    Receive(Request<'a, [u8], &'s LocalScope<'a>>),
    Send(Request<'a, [u8], &'s LocalScope<'a>>),
}

impl Pending<'_, '_> {
    /// `None` when it has arrived.
    fn test(self) -> Option<Self> {
        match self {
            Self::Receive(request) => request.test().err().map(Self::Receive),
            Self::Send(request) => request.test().err().map(Self::Send),
        }
    }
}
