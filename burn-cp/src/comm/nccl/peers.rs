//! Exchange between ranks that are threads of one process and whose GPUs reach each other's memory: copies from buffer to buffer by the
//! copy engines, which take no multiprocessors from the kernels that run meanwhile.
//!
//! A rank posts where its rows are and where those of others belong, with an event behind all work that was submitted to its device so
//! far. Whoever posts the second half of a pair enqueues the pair's copies, on a stream of the receiver's device and behind both events.
//! Neither waits for the other to post, until work of its own has to be ordered behind the copies.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use super::{
    cuda::{Event, Stream},
    error::NcclError,
};

/// How often a rank that waits for others to post looks for failures.
const LOOK: Duration = Duration::from_millis(5);

/// One run of bytes on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    /// The rank at the other end.
    pub(crate) peer: usize,
    /// Address on the device of who names it.
    pub(crate) address: u64,
    pub(crate) num_bytes: usize,
}

/// What a rank gives and what it takes; between two ranks, in the same order at both ends. Rows that stay with a rank are in both.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    pub(crate) gives: Vec<Move>,
    pub(crate) takes: Vec<Move>,
}

impl Moves {
    fn to(&self, peer: usize) -> impl Iterator<Item = &Move> {
        self.gives.iter().filter(move |one| one.peer == peer)
    }

    fn from(&self, peer: usize) -> impl Iterator<Item = &Move> {
        self.takes.iter().filter(move |one| one.peer == peer)
    }
}

/// A rank's half of an exchange.
struct Post {
    moves: Moves,
    /// Its rows are written, and its buffers are free to be written.
    ready: Event,
    /// Where copies from others run.
    stream: Arc<Stream>,
    /// Where those of its own rows run, beside.
    own: Arc<Stream>,
    since: Instant,
    /// Its own part is over: all copies have been handed out to be waited for.
    taken: bool,
}

/// An exchange that is not over for all who have posted.
struct Exchange {
    posts: Vec<Option<Post>>,
    /// Source, destination, and the end of the copies between.
    copied: Vec<(usize, usize, Arc<Event>)>,
}

impl Exchange {
    fn new(size: usize) -> Self {
        Self {
            posts: (0..size).map(|_| None).collect(),
            copied: Vec::new(),
        }
    }

    /// Starts the copies from `source` to `destination`, if both have posted.
    fn copy(&mut self, source: usize, destination: usize) -> Result<(), NcclError> {
        let (Some(from), Some(to)) = (&self.posts[source], &self.posts[destination]) else {
            return Ok(());
        };
        let gives: Vec<_> = from.moves.to(destination).collect();
        let takes: Vec<_> = to.moves.from(source).collect();
        let fit = gives.len() == takes.len()
            && gives
                .iter()
                .zip(&takes)
                .all(|(give, take)| give.num_bytes == take.num_bytes);
        // Who calls something else is found by the records of both, which fails the world.
        if !fit || gives.is_empty() {
            return Ok(());
        }
        let stream = if source == destination {
            &to.own
        } else {
            &to.stream
        };
        stream.enter()?;
        stream.wait(&from.ready)?;
        for (give, take) in gives.iter().zip(takes) {
            let from = (&*from.stream, give.address);
            stream.copy_from(take.address, from, take.num_bytes)?;
        }
        let end = Arc::new(stream.record()?);
        self.copied.push((source, destination, end));
        Ok(())
    }

    /// The ends of all copies that a rank's buffers take part in, when all have started.
    fn ends(&self, rank: usize) -> Option<Vec<Arc<Event>>> {
        let moves = &self.posts[rank].as_ref()?.moves;
        let end = |source, destination| {
            let mut all = self.copied.iter();
            all.find(|copied| (copied.0, copied.1) == (source, destination))
                .map(|copied| copied.2.clone())
        };
        let mut ends = Vec::new();
        for peer in 0..self.posts.len() {
            if moves.to(peer).next().is_some() {
                ends.push(end(rank, peer)?);
            }
            if peer != rank && moves.from(peer).next().is_some() {
                ends.push(end(peer, rank)?);
            }
        }
        Some(ends)
    }
}

/// What ranks of one process exchange by copies, by operation.
pub(super) struct Peers {
    size: usize,
    exchanges: Mutex<HashMap<u64, Exchange>>,
    changed: Condvar,
}

/// Those that ranks with the same id share, until all of them have gone.
static SHARED: Mutex<Vec<(Vec<u8>, Weak<Peers>)>> = Mutex::new(Vec::new());

impl Peers {
    /// Of the ranks of this process that joined with an id.
    pub(super) fn of(id: &[u8], size: usize) -> Arc<Self> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|(_, peers)| peers.strong_count() > 0);
        let mut all = shared.iter();
        let found = all.find(|(of, _)| of == id);
        if let Some(peers) = found.and_then(|(_, peers)| peers.upgrade()) {
            return peers;
        }
        let peers = Arc::new(Self {
            size,
            exchanges: Mutex::default(),
            changed: Condvar::new(),
        });
        shared.push((id.to_vec(), Arc::downgrade(&peers)));
        peers
    }

    fn exchanges(&self) -> MutexGuard<'_, HashMap<u64, Exchange>> {
        (self.exchanges.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a rank's half of operation `number`. Its streams, for copies from others and of its own rows, are of the thread's context.
    pub(super) fn post(
        &self,
        rank: usize,
        number: u64,
        moves: Moves,
        [stream, own]: [&Arc<Stream>; 2],
    ) -> Result<(), NcclError> {
        let post = Post {
            moves,
            ready: stream.wait_for_submitted_work()?,
            stream: stream.clone(),
            own: own.clone(),
            since: Instant::now(),
            taken: false,
        };
        let mut exchanges = self.exchanges();
        let exchange = exchanges
            .entry(number)
            .or_insert_with(|| Exchange::new(self.size));
        exchange.posts[rank] = Some(post);
        let started = (0..self.size)
            // Neighbours first, so that ranks do not all read from the same one.
            .map(|n| (rank + n) % self.size)
            .try_for_each(|peer| {
                exchange.copy(peer, rank)?;
                if peer == rank {
                    return Ok(());
                }
                exchange.copy(rank, peer)
            });
        self.changed.notify_all();
        drop(exchanges);
        // Copies to others were started in their devices' contexts.
        stream.enter().and(started)
    }

    /// The ends of all copies of operation `number` that a rank's buffers take part in. Waits until the others have posted, or until
    /// `failed`.
    pub(super) fn ends(
        &self,
        rank: usize,
        number: u64,
        failed: impl Fn() -> bool,
    ) -> Result<Vec<Arc<Event>>, NcclError> {
        let mut exchanges = self.exchanges();
        loop {
            let Some(exchange) = exchanges.get_mut(&number) else {
                return Err(NcclError::Aborted);
            };
            let ends = exchange.ends(rank);
            if ends.is_none() && !failed() {
                exchanges = (self.changed.wait_timeout(exchanges, LOOK))
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            match &ends {
                Some(_) => exchange.posts[rank]
                    .iter_mut()
                    .for_each(|post| post.taken = true),
                // Its buffers are about to go.
                None => exchange.posts[rank] = None,
            }
            if exchange.posts.iter().flatten().all(|post| post.taken) {
                exchanges.remove(&number);
            }
            return ends.ok_or(NcclError::Aborted);
        }
    }

    /// The oldest operation that a rank has posted, has not been handed the ends of, and that is not over.
    pub(super) fn oldest(&self, rank: usize) -> Option<(u64, Instant)> {
        let exchanges = self.exchanges();
        let mut oldest: Option<(u64, Instant)> = None;
        for (number, exchange) in exchanges.iter() {
            let post = exchange.posts[rank].as_ref();
            let Some(post) = post.filter(|post| !post.taken) else {
                continue;
            };
            // An event whose device has failed does not happen any more; that is its rank's to report.
            let over = exchange.ends(rank).is_some_and(|ends| {
                let mut ends = ends.iter();
                ends.all(|end| end.has_happened().unwrap_or(false))
            });
            if !over && oldest.is_none_or(|(_, since)| post.since < since) {
                oldest = Some((*number, post.since));
            }
        }
        oldest
    }
}
