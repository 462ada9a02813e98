//! Ranks as processes that something else has started.

use std::{
    error::Error,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{LaunchError, Place, Rendezvous, outcome, wait_for_helpers};
use crate::comm::{
    Client, ConnectError, Control, DEFAULT_DEADLINE, FailureCause, Hub, Listener, MPI_AVAILABLE,
    MpiError, MpiWire, Processes, RankContext, RankFailure, World,
};

/// How the tensors of processes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorTransport {
    /// Through MPI, from host to host. Needs the feature `mpi`, and processes that MPI's launcher has started.
    Mpi,
    /// Not through this process: the program exchanges host messages only, or tensors on GPUs, which go through NCCL.
    None,
}

/// How a process takes part in its world.
#[derive(Debug, Clone, Copy)]
pub struct ProcessOptions {
    /// How long a rank waits for its peers in any operation, and when the world comes together. Rank 0's counts for all ranks
    /// once they are connected.
    pub deadline: Duration,
    /// Stack of the rank's thread in bytes.
    pub stack_size: usize,
    /// How tensors travel.
    pub tensors: TensorTransport,
}

impl Default for ProcessOptions {
    fn default() -> Self {
        Self {
            deadline: DEFAULT_DEADLINE,
            stack_size: 16 << 20,
            tensors: TensorTransport::Mpi,
        }
    }
}

/// Runs this process's rank: connects to the other ranks as the environment says, runs the closure, and returns its result when
/// every rank has ended.
///
/// Every process of the world must call it, once. The closure runs in a thread of its own.
///
/// # Errors
/// An environment that does not describe a rank; ranks that cannot be connected; the first failure of the world: a closure's
/// error, its panic, a failed collective, or a process that was killed.
pub fn process<T, E, F>(f: F) -> Result<T, LaunchError>
where
    F: FnOnce(RankContext) -> Result<T, E> + Send,
    T: Send,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    process_with(ProcessOptions::default(), f)
}

/// [`process`] with options.
///
/// # Errors
/// As [`process`].
pub fn process_with<T, E, F>(options: ProcessOptions, f: F) -> Result<T, LaunchError>
where
    F: FnOnce(RankContext) -> Result<T, E> + Send,
    T: Send,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    from_env_with(options)?.run(f)
}

/// Connects this process with the other ranks of its world, as torchrun, mpirun or srun describe it in the environment: see
/// [`Place::from_env`].
///
/// Every process of the world must call it, once.
///
/// # Errors
/// An environment that does not describe a rank, and ranks that cannot be connected before the deadline.
pub fn from_env() -> Result<Process, LaunchError> {
    from_env_with(ProcessOptions::default())
}

/// [`from_env`] with options.
///
/// # Errors
/// As [`from_env`].
pub fn from_env_with(options: ProcessOptions) -> Result<Process, LaunchError> {
    Process::join(&Place::from_env()?, options)
}

/// This process as a rank of a world of processes, connected with the others.
///
/// [`run`](Self::run) it: one that is dropped without is a rank that was killed, to the others.
#[derive(Debug)]
pub struct Process {
    context: RankContext,
    options: ProcessOptions,
}

impl Process {
    /// Connects this process with the other ranks, at a place that the caller knows.
    ///
    /// # Errors
    /// Ranks that cannot be connected before the deadline, and tensors that could not travel.
    pub fn join(place: &Place, options: ProcessOptions) -> Result<Self, LaunchError> {
        let deadline = options.deadline;
        let &Place {
            rank,
            world_size,
            local_rank,
            ..
        } = place;
        if world_size == 0 {
            return Err(LaunchError::EmptyWorld);
        }
        let world = if world_size == 1 {
            World::Threads(Hub::new(1, deadline))
        } else {
            World::Processes(connect(place, options)?)
        };
        Ok(Self {
            context: RankContext::of_world(rank, local_rank, Arc::new(world)),
            options,
        })
    }

    /// This process's place in the world.
    pub fn context(&self) -> &RankContext {
        &self.context
    }

    /// Runs the rank's closure in a thread of its own, and returns its result when every rank of the world has ended.
    ///
    /// # Errors
    /// The first failure of the world, on every rank.
    pub fn run<T, E, F>(self, f: F) -> Result<T, LaunchError>
    where
        F: FnOnce(RankContext) -> Result<T, E> + Send,
        T: Send,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let (rank, context) = (self.context.rank(), self.context.clone());
        let ended = thread::scope(|scope| {
            let thread = thread::Builder::new()
                .name(format!("rank-{rank}"))
                .stack_size(self.options.stack_size)
                .spawn_scoped(scope, move || outcome(context, f));
            thread.map(|thread| {
                let panicked = |_| (None, Some(FailureCause::Panic("no outcome".to_owned())));
                thread.join().unwrap_or_else(panicked)
            })
        });
        let (value, cause) = ended.unwrap_or_else(|error| {
            let cause = FailureCause::Reported(format!("cannot start its thread: {error}"));
            (None, Some(cause))
        });
        let failure = end(self.context.world(), rank, cause.clone());
        wait_for_helpers(match &**self.context.world() {
            World::Threads(hub) => Some(hub),
            World::Processes(_) => None,
        });
        match (failure, value) {
            (None, Some(value)) => Ok(value),
            (Some(failure), _) => Err(own(failure, rank, cause).into()),
            // A rank without a value has a cause, which is a failure of the world.
            (None, None) => unreachable!("rank {rank} has neither a value nor a failure"),
        }
    }
}

/// Ends this rank's part of the world, and waits for the others: the first failure.
fn end(world: &World, rank: usize, cause: Option<FailureCause>) -> Option<RankFailure> {
    let failure = match world {
        World::Threads(hub) => {
            if let Some(cause) = cause {
                hub.fail(rank, None, cause);
            }
            hub.end(rank);
            hub.failure()
        }
        World::Processes(processes) => match &processes.control {
            Control::Host(server) => server.end(cause),
            Control::Remote(client) => client.end(cause.as_ref()),
        },
    };
    if let (None, World::Processes(processes)) = (&failure, world)
        && let Some(wire) = &processes.wire
    {
        wire.finish(world.deadline());
    }
    failure
}

/// A failure of this rank comes back as a message; its error is still here.
fn own(failure: RankFailure, rank: usize, cause: Option<FailureCause>) -> RankFailure {
    match cause {
        Some(cause) if failure.rank == rank && cause.to_string() == failure.cause.to_string() => {
            RankFailure { cause, ..failure }
        }
        _ => failure,
    }
}

fn connect(place: &Place, options: ProcessOptions) -> Result<Processes, LaunchError> {
    let wants_mpi = options.tensors == TensorTransport::Mpi;
    if (wants_mpi || place.rendezvous == Rendezvous::ThroughMpi) && !MPI_AVAILABLE {
        return Err(MpiError::NotBuilt.into());
    }
    let deadline = options.deadline;
    let mpi = |leave: &dyn Fn() -> Option<String>| {
        let start = Instant::now();
        let late = || {
            let waited = start.elapsed();
            (waited >= deadline).then(|| format!("after {waited:?}, not all ranks had come"))
        };
        let wire = MpiWire::start(|| leave().or_else(late))?;
        wire.check(place.rank, place.world_size)?;
        Ok::<_, MpiError>(wire)
    };
    let (wire, host, port, listener) = match &place.rendezvous {
        Rendezvous::Address { host, port } => (None, host.clone(), *port, None),
        Rendezvous::ThroughMpi => {
            let wire = mpi(&|| None)?;
            let mut listener = None;
            let (host, port) = wire.agree_on_address(deadline, |host| {
                let bound = Listener::bind(host, 0)?;
                let port = bound.port();
                listener = Some(bound);
                Ok::<_, LaunchError>(port)
            })?;
            (Some(wire), host, port, listener)
        }
        Rendezvous::Alone => {
            return Err(LaunchError::Connect(ConnectError::Unreachable {
                address: "nowhere".to_owned(),
                waited: Duration::ZERO,
                reason: format!("no address is known for {} ranks", place.world_size),
            }));
        }
    };
    let control = if place.rank == 0 {
        let listener = match listener {
            Some(listener) => listener,
            None => Listener::bind(&host, port)?,
        };
        Control::Host(listener.welcome(place.world_size, &place.job, deadline)?)
    } else {
        let who = (place.rank, place.world_size);
        Control::Remote(Client::connect((&host, port), who, &place.job, deadline)?)
    };
    if wire.is_some() || !wants_mpi {
        return Ok(Processes { control, wire });
    }
    // Ranks that have failed since are not waited for.
    let world = World::Processes(Processes {
        control,
        wire: None,
    });
    let wire =
        mpi(&|| world.failure().map(|failure| failure.to_string())).inspect_err(|error| {
            world.fail(
                place.rank,
                Some("the start of MPI".into()),
                FailureCause::Reported(error.to_string()),
            );
            // The others hear of it before the connections close.
            end(&world, place.rank, None);
        })?;
    match world {
        World::Processes(processes) => Ok(Processes {
            wire: Some(wire),
            ..processes
        }),
        World::Threads(_) => unreachable!("a world of processes was made above"),
    }
}
