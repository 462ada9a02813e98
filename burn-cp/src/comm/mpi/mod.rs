//! The wire of ranks that are processes on CPUs: bytes from process to process through MPI.
//!
//! Ranks have compared what they do on the control plane before anything is sent, so that here every message is expected, and
//! of a known length. MPI lives in a thread of its own, which starts it, polls it and never waits inside it: a wait can be left
//! when the world has failed or a deadline has passed. The thread then stays where it is, and keeps the buffers that MPI may
//! still write to; MPI is not asked to finalize, which would wait for ranks that may be gone, and ends with the process.
//!
//! Built with the feature `mpi`; without it a wire cannot be had, and says how to get one.

#[cfg_attr(not(feature = "mpi"), path = "absent.rs")]
mod engine;

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use super::{CommError, FailureCause, World};

/// Whether tensors of processes can travel through MPI.
pub(crate) const MPI_AVAILABLE: bool = engine::AVAILABLE;

/// How often who waits for the wire looks for failures of the world.
const LOOK: Duration = Duration::from_millis(5);

/// Why tensors cannot travel through MPI.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// The program was built without it.
    #[error(
        "tensors of processes on CPU backends travel through MPI, and this program was built without it: build burn-cp (or \
         burn-cp-examples) with feature `mpi`, which needs Open MPI and libclang (Debian: libopenmpi-dev, libclang-dev)"
    )]
    NotBuilt,
    /// It does not start.
    #[error("MPI has not started: {reason}")]
    Start {
        /// Why, as far as is known.
        reason: String,
    },
    /// Its world is not the one that the environment describes.
    #[error(
        "MPI's world does not fit: expected {what} {expected}, got {got}; start every rank with mpirun or srun"
    )]
    World {
        /// What differs.
        what: &'static str,
        /// According to the environment.
        expected: usize,
        /// According to MPI.
        got: usize,
    },
    /// Ranks could not tell each other where rank 0 listens.
    #[error("after {waited:?}, ranks {missing:?} had not answered through MPI")]
    Silent {
        /// Ranks whose message has not come.
        missing: Vec<usize>,
        /// How long they were waited for.
        waited: Duration,
    },
}

/// What MPI says of this process.
#[derive(Debug, Clone)]
struct Started {
    rank: usize,
    size: usize,
    host: String,
}

/// An order to MPI's thread.
enum Order {
    Transfer(Messages),
    /// Ends MPI, together with all other ranks.
    Finish(mpsc::Sender<()>),
}

/// Messages to send, and buffers to receive into.
struct Messages {
    tag: u16,
    sends: Vec<(usize, Arc<Vec<u8>>)>,
    receives: Vec<(usize, Vec<u8>)>,
    progress: Arc<Progress>,
    done: mpsc::Sender<Vec<Vec<u8>>>,
}

/// What who waits and who works know of a transfer.
#[derive(Debug, Default)]
struct Progress {
    /// Nobody waits for it any more.
    abandoned: AtomicBool,
    /// Ranks whose messages, or whose reception, are outstanding.
    outstanding: Mutex<Vec<usize>>,
}

/// A connection to all ranks of MPI's world.
#[derive(Debug)]
pub(crate) struct MpiWire {
    orders: mpsc::Sender<Order>,
    started: Started,
}

/// How a wait for the wire ended badly.
enum Left<T> {
    /// Because who waits had a reason to leave.
    Reason(T),
    /// MPI's thread has ended.
    Broken,
}

/// Messages that MPI's thread has been given. Who drops it does not take what is received; the messages travel all the same.
#[derive(Debug)]
struct InFlight {
    progress: Arc<Progress>,
    is_done: mpsc::Receiver<Vec<Vec<u8>>>,
}

impl InFlight {
    /// What was received; `leave` is told who is outstanding, again and again, and may end the wait.
    fn wait<T>(self, leave: impl Fn(Vec<usize>) -> Option<T>) -> Result<Vec<Vec<u8>>, Left<T>> {
        loop {
            match self.is_done.recv_timeout(LOOK) {
                Ok(received) => return Ok(received),
                Err(RecvTimeoutError::Disconnected) => return Err(Left::Broken),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(reason) = leave(self.progress.outstanding()) {
                        self.progress.abandoned.store(true, Ordering::Relaxed);
                        return Err(Left::Reason(reason));
                    }
                }
            }
        }
    }
}

/// How much later than the deadline a rank names one of several that it waits for.
const LATER: Duration = Duration::from_secs(1);

/// A transfer that was started, among ranks that have compared what they do.
#[derive(Debug)]
pub(crate) struct Transfer(Option<Waited>);

#[derive(Debug)]
struct Waited {
    in_flight: InFlight,
    world: Arc<World>,
    rank: usize,
    op: String,
}

impl Transfer {
    /// Nothing was to be sent or received.
    pub(crate) fn nothing() -> Self {
        Self(None)
    }

    /// What was received, in order. Ends when the world fails or its deadline passes, which is then the world's failure.
    pub(crate) fn finish(self) -> Result<Vec<Vec<u8>>, CommError> {
        let Some(Waited {
            in_flight,
            world,
            rank,
            op,
        }) = self.0
        else {
            return Ok(Vec::new());
        };
        let start = Instant::now();
        let leave = |outstanding: Vec<usize>| {
            if let Some(failure) = world.failure() {
                return Some(failure.as_peer_failure());
            }
            let waited = start.elapsed();
            // One who waits for a single rank knows who is late; of several most wait themselves, so that others are let speak first.
            let deadline = match outstanding[..] {
                [_] => world.deadline(),
                _ => world.deadline().saturating_add(LATER),
            };
            if waited < deadline {
                return None;
            }
            let culprit = outstanding.first().copied().unwrap_or(rank);
            let error = CommError::Timeout {
                op: op.clone(),
                missing: outstanding,
                waited,
                last_seen: Some(op.clone()),
            };
            let cause = FailureCause::Comm(error.clone());
            world.fail(culprit, Some(op.clone()), cause);
            Some(error)
        };
        in_flight.wait(leave).map_err(|left| match left {
            Left::Reason(error) => error,
            Left::Broken => broken(op.clone()),
        })
    }
}

fn broken(op: String) -> CommError {
    CommError::Transport {
        group: "of MPI's world".to_owned(),
        what: op,
        reason: "MPI has failed on this rank".to_owned(),
    }
}

impl MpiWire {
    /// Starts MPI; `leave` is asked again and again whether the wait has become useless.
    pub(crate) fn start(leave: impl Fn() -> Option<String>) -> Result<Self, MpiError> {
        if !MPI_AVAILABLE {
            return Err(MpiError::NotBuilt);
        }
        let (orders, queue) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let failed = |reason: String| MpiError::Start { reason };
        let thread = std::thread::Builder::new().name("mpi".to_owned());
        thread
            .spawn(move || engine::run(&ready, &queue))
            .map_err(|error| failed(error.to_string()))?;
        loop {
            match is_ready.recv_timeout(LOOK) {
                Ok(Ok(started)) => return Ok(Self { orders, started }),
                Ok(Err(reason)) => return Err(failed(reason)),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(failed("its thread panicked".to_owned()));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(reason) = leave() {
                        return Err(failed(reason));
                    }
                }
            }
        }
    }

    /// Whether MPI's world is the one that the environment describes.
    pub(crate) fn check(&self, rank: usize, world_size: usize) -> Result<(), MpiError> {
        let compare = |what, expected, got| match expected == got {
            true => Ok(()),
            false => Err(MpiError::World {
                what,
                expected,
                got,
            }),
        };
        compare("world_size", world_size, self.started.size)?;
        compare("rank", rank, self.started.rank)
    }

    /// Rank 0 tells all where it listens. `listen` is called on rank 0 only, with a name of this host that all ranks know, and
    /// returns the port.
    pub(crate) fn agree_on_address<E: From<MpiError>>(
        &self,
        deadline: Duration,
        listen: impl FnOnce(&str) -> Result<u16, E>,
    ) -> Result<(String, u16), E> {
        /// Bytes of a host's name, and of a port in front of it.
        const NAME: usize = 1024;
        let padded = |port: u16, host: &str| {
            let mut bytes = vec![0; 2 + NAME];
            bytes[..2].copy_from_slice(&port.to_le_bytes());
            let len = host.len().min(NAME);
            bytes[2..2 + len].copy_from_slice(&host.as_bytes()[..len]);
            bytes
        };
        let read = |bytes: &[u8]| {
            let port = u16::from_le_bytes([bytes[0], bytes[1]]);
            let name: Vec<u8> = bytes[2..].iter().copied().take_while(|b| *b != 0).collect();
            (String::from_utf8_lossy(&name).into_owned(), port)
        };
        let Started { rank, size, host } = &self.started;
        let mine = padded(0, host);
        if *rank == 0 {
            let from: Vec<_> = (1..*size).map(|rank| (rank, 2 + NAME)).collect();
            let names = self.exchange(Vec::new(), from, deadline)?;
            let local = names.iter().all(|name| read(name).0 == *host);
            let shared = if local { "127.0.0.1" } else { host };
            let port = listen(shared)?;
            let answer = Arc::new(padded(port, shared));
            let to = (1..*size).map(|rank| (rank, answer.clone())).collect();
            self.exchange(to, Vec::new(), deadline)?;
            return Ok((shared.to_owned(), port));
        }
        self.exchange(vec![(0, mine.into())], Vec::new(), deadline)?;
        let answers = self.exchange(Vec::new(), vec![(0, 2 + NAME)], deadline)?;
        Ok(read(&answers[0]))
    }

    /// A transfer without a control plane beside it.
    fn exchange(
        &self,
        sends: Vec<(usize, Arc<Vec<u8>>)>,
        receives: Vec<(usize, usize)>,
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, MpiError> {
        let start = Instant::now();
        let leave = |outstanding: Vec<usize>| {
            let waited = start.elapsed();
            (waited >= deadline).then_some(MpiError::Silent {
                missing: outstanding,
                waited,
            })
        };
        self.run(0, sends, receives, leave)
            .map_err(|left| match left {
                Left::Reason(error) => error,
                Left::Broken => MpiError::Start {
                    reason: "its thread has ended".to_owned(),
                },
            })
    }

    /// Starts to send to and to receive from ranks of the world, as `(rank, ..)`.
    pub(crate) fn transfer(
        &self,
        world: &Arc<World>,
        (rank, number): (usize, u64),
        op: String,
        sends: Vec<(usize, Arc<Vec<u8>>)>,
        receives: Vec<(usize, usize)>,
    ) -> Result<Transfer, CommError> {
        // Messages of one pair do not overtake each other; the number keeps them apart all the same.
        let tag = (number % 0x4000 + 1) as u16;
        match self.start_messages(tag, sends, receives) {
            Some(in_flight) => Ok(Transfer(Some(Waited {
                in_flight,
                world: world.clone(),
                rank,
                op,
            }))),
            None => Err(broken(op)),
        }
    }

    fn run<T>(
        &self,
        tag: u16,
        sends: Vec<(usize, Arc<Vec<u8>>)>,
        receives: Vec<(usize, usize)>,
        leave: impl Fn(Vec<usize>) -> Option<T>,
    ) -> Result<Vec<Vec<u8>>, Left<T>> {
        let started = self.start_messages(tag, sends, receives);
        started.ok_or(Left::Broken)?.wait(leave)
    }

    /// `None` where MPI's thread has ended.
    fn start_messages(
        &self,
        tag: u16,
        sends: Vec<(usize, Arc<Vec<u8>>)>,
        receives: Vec<(usize, usize)>,
    ) -> Option<InFlight> {
        let progress = Arc::new(Progress::default());
        let (done, is_done) = mpsc::channel();
        let buffer = |(from, len)| (from, vec![0; len]);
        let messages = Messages {
            tag,
            sends,
            receives: receives.into_iter().map(buffer).collect(),
            progress: progress.clone(),
            done,
        };
        let sent = self.orders.send(Order::Transfer(messages));
        sent.is_ok().then_some(InFlight { progress, is_done })
    }

    /// Ends MPI in a world that has ended well. All ranks must do it; one that does not come is waited for up to a deadline.
    pub(crate) fn finish(&self, deadline: Duration) {
        let (done, is_done) = mpsc::channel();
        if self.orders.send(Order::Finish(done)).is_ok() && is_done.recv_timeout(deadline).is_err()
        {
            tracing::warn!("MPI has not ended in time");
        }
    }
}

impl Progress {
    fn outstanding(&self) -> Vec<usize> {
        self.outstanding
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
