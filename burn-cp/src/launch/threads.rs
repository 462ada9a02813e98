//! Ranks as threads of one process.

use std::{
    error::Error,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use super::{LaunchError, outcome, wait_for_helpers};
use crate::comm::{DEFAULT_DEADLINE, FailureCause, Hub, RankContext};

/// How [`threads_with`] and [`threads_detached`] run their ranks.
#[derive(Debug, Clone, Copy)]
pub struct ThreadsOptions {
    /// How long a rank waits for its peers in any operation.
    pub deadline: Duration,
    /// Stack of each rank's thread in bytes.
    pub stack_size: usize,
}

impl Default for ThreadsOptions {
    fn default() -> Self {
        Self {
            deadline: DEFAULT_DEADLINE,
            stack_size: 16 << 20,
        }
    }
}

/// Runs one closure per rank, each in a thread of its own, and returns their results in rank order.
///
/// # Errors
/// The first failure of the world: a closure's error, its panic, or a failed collective. Returns only when every closure has ended.
pub fn threads<T, E, F>(world_size: usize, f: F) -> Result<Vec<T>, LaunchError>
where
    F: Fn(RankContext) -> Result<T, E> + Sync,
    T: Send,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    threads_with(world_size, ThreadsOptions::default(), f)
}

/// [`threads`] with options.
///
/// # Errors
/// As [`threads`].
pub fn threads_with<T, E, F>(
    world_size: usize,
    options: ThreadsOptions,
    f: F,
) -> Result<Vec<T>, LaunchError>
where
    F: Fn(RankContext) -> Result<T, E> + Sync,
    T: Send,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    if world_size == 0 {
        return Err(LaunchError::EmptyWorld);
    }
    let hub = Hub::new(world_size, options.deadline);
    let results = thread::scope(|scope| {
        let mut handles = Vec::with_capacity(world_size);
        for rank in 0..world_size {
            let context = RankContext::new(rank, hub.clone());
            let (f, hub) = (&f, &hub);
            let handle =
                builder(rank, &options).spawn_scoped(scope, move || run_rank(context, hub, f));
            match handle {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    // The ranks already running must not wait for one that never starts.
                    hub.fail(
                        rank,
                        Some("start".to_owned()),
                        FailureCause::Reported(error.to_string()),
                    );
                    return Err(LaunchError::Spawn {
                        rank,
                        reason: error.to_string(),
                    });
                }
            }
        }
        Ok(handles
            .into_iter()
            .map(|handle| handle.join().ok().flatten())
            .collect::<Vec<_>>())
    })?;
    wait_for_helpers(Some(&hub));
    finish(&hub, results)
}

/// Starts one closure per rank and returns at once.
///
/// # Errors
/// No rank, or no thread for one.
pub fn threads_detached<T, E, F>(
    world_size: usize,
    options: ThreadsOptions,
    f: F,
) -> Result<DetachedWorld<T>, LaunchError>
where
    F: Fn(RankContext) -> Result<T, E> + Send + Sync + 'static,
    T: Send + 'static,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    if world_size == 0 {
        return Err(LaunchError::EmptyWorld);
    }
    let hub = Hub::new(world_size, options.deadline);
    let f = Arc::new(f);
    let (sender, receiver) = mpsc::channel();
    for rank in 0..world_size {
        let context = RankContext::new(rank, hub.clone());
        let (f, sender, table) = (f.clone(), sender.clone(), hub.clone());
        let spawned = builder(rank, &options).spawn(move || {
            let result = run_rank(context, &table, &*f);
            // The caller may have gone; then nobody wants the result.
            let _ = sender.send((rank, result));
        });
        if let Err(error) = spawned {
            hub.fail(
                rank,
                Some("start".to_owned()),
                FailureCause::Reported(error.to_string()),
            );
            return Err(LaunchError::Spawn {
                rank,
                reason: error.to_string(),
            });
        }
    }
    Ok(DetachedWorld { hub, receiver })
}

/// How often a waiting caller looks for failures.
const SLICE: Duration = Duration::from_millis(20);
/// How long the other ranks may take to end after a failure.
const GRACE: Duration = Duration::from_secs(1);

/// A world whose ranks run on while the caller does something else.
#[derive(Debug)]
pub struct DetachedWorld<T> {
    hub: Arc<Hub>,
    receiver: mpsc::Receiver<(usize, Option<T>)>,
}

impl<T> DetachedWorld<T> {
    /// Waits until every rank has ended, until `timeout` has passed, or until a second after a rank has failed: the others
    /// then had time to end, and one that has not may never do.
    ///
    /// # Errors
    /// The first failure of the world if there is one by then, also while some ranks still run; otherwise
    /// [`LaunchError::StillRunning`].
    pub fn wait(self, timeout: Duration) -> Result<Vec<T>, LaunchError> {
        let start = Instant::now();
        let world_size = self.hub.world_size();
        let mut results: Vec<Option<T>> = (0..world_size).map(|_| None).collect();
        let mut num_ended = 0;
        let mut failed_at: Option<Instant> = None;
        while num_ended < world_size {
            if let Ok((rank, result)) = self.receiver.recv_timeout(SLICE) {
                results[rank] = result;
                num_ended += 1;
                continue;
            }
            let failure = self.hub.failure();
            if failure.is_some() && failed_at.is_none() {
                failed_at = Some(Instant::now());
            }
            let late = failed_at.is_some_and(|at| at.elapsed() >= GRACE);
            if late || start.elapsed() >= timeout {
                if failure.is_some() {
                    wait_for_helpers(Some(&self.hub));
                }
                return Err(match failure {
                    Some(failure) => failure.into(),
                    None => LaunchError::StillRunning {
                        waited: start.elapsed(),
                        num_running: world_size - num_ended,
                    },
                });
            }
        }
        wait_for_helpers(Some(&self.hub));
        finish(&self.hub, results)
    }
}

fn builder(rank: usize, options: &ThreadsOptions) -> thread::Builder {
    thread::Builder::new()
        .name(format!("rank-{rank}"))
        .stack_size(options.stack_size)
}

fn run_rank<T, E, F>(context: RankContext, hub: &Hub, f: &F) -> Option<T>
where
    F: Fn(RankContext) -> Result<T, E>,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let rank = context.rank();
    let ended = catch_unwind(AssertUnwindSafe(|| outcome(context, f)));
    let (value, cause) = ended.unwrap_or_else(|panic| {
        // What is thrown may throw again when it is dropped.
        std::mem::forget(panic);
        let cause = FailureCause::Panic("after its program had ended".to_owned());
        (None, Some(cause))
    });
    if let Some(cause) = cause {
        hub.fail(rank, None, cause);
    }
    hub.end(rank);
    value
}

fn finish<T>(hub: &Hub, results: Vec<Option<T>>) -> Result<Vec<T>, LaunchError> {
    match hub.failure() {
        Some(failure) => Err(failure.into()),
        // Without a failure on record every rank has left a value.
        None => Ok(results.into_iter().flatten().collect()),
    }
}
