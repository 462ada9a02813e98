//! Exchange between ranks that are threads of one process and whose GPUs reach each other's memory: copies from buffer to buffer by the
//! copy engines, which take no multiprocessors from the kernels that run meanwhile.
//!
//! A rank posts where its rows are and where those of others belong, with an event behind all work that was submitted to its device so
//! far. Copies run on streams of the receiver's device, one for each source, behind the events of both ends. Whoever posts second starts them,
//! those to the other too, unless the other waits already, and so can start them itself. A rank waits for others to post only where work of
//! its own has to be ordered behind an operation: behind these copies, or behind a later operation of NCCL, which copies that started
//! afterwards would have to wait for.

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

/// What a rank gives and what it takes; between two ranks, in the same order at both ends. Runs that stay with a rank are in both.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    pub(crate) gives: Vec<Move>,
    pub(crate) takes: Vec<Move>,
}

impl Moves {
    pub(super) fn to(&self, peer: usize) -> impl Iterator<Item = &Move> {
        self.gives.iter().filter(move |one| one.peer == peer)
    }

    pub(super) fn from(&self, peer: usize) -> impl Iterator<Item = &Move> {
        self.takes.iter().filter(move |one| one.peer == peer)
    }
}

/// A rank's streams for copies from each rank: one that waits for a rank's kernels holds up no copies from others.
pub(super) type Streams = Arc<[Stream]>;

/// A rank's half of an exchange.
struct Post {
    moves: Moves,
    /// Its rows are written, and its buffers are free to be written.
    ready: Event,
    /// Where copies from each rank run.
    streams: Streams,
    since: Instant,
}

/// One direction of a pair of ranks, both of which have posted.
struct Pair {
    source: usize,
    destination: usize,
    from: Arc<Post>,
    to: Arc<Post>,
}

impl Pair {
    /// Starts the copies. `None` where what one gives is not what the other takes: they call something else, which the records of
    /// both show, and which fails the world.
    fn start(&self) -> Result<Option<Event>, NcclError> {
        let gives: Vec<_> = self.from.moves.to(self.destination).collect();
        let takes: Vec<_> = self.to.moves.from(self.source).collect();
        let sizes = |moves: &[&Move]| moves.iter().map(|one| one.num_bytes).collect::<Vec<_>>();
        if sizes(&gives) != sizes(&takes) {
            return Ok(None);
        }
        let stream = &self.to.streams[self.source];
        stream.enter()?;
        stream.wait(&self.to.ready)?;
        stream.wait(&self.from.ready)?;
        for (give, take) in gives.iter().zip(takes) {
            let from = (&self.from.streams[self.source], give.address);
            stream.copy_from(take.address, from, take.num_bytes)?;
        }
        stream.record().map(Some)
    }
}

/// What is known of one rank in an exchange.
#[derive(Default)]
struct Rank {
    post: Option<Arc<Post>>,
    /// It waits for the others, and starts copies to itself meanwhile.
    waits: bool,
    /// It was told the ends of all copies that its buffers take part in.
    told: bool,
}

/// The copies of one direction of a pair, which somebody starts or has started.
struct Copies {
    source: usize,
    destination: usize,
    started: Started,
}

enum Started {
    NotYet,
    /// And end there.
    Yes(Arc<Event>),
    Failed,
}

/// An exchange that is not over for all who have posted.
struct Exchange {
    ranks: Vec<Rank>,
    copies: Vec<Copies>,
}

impl Exchange {
    fn new(size: usize) -> Self {
        Self {
            ranks: (0..size).map(|_| Rank::default()).collect(),
            copies: Vec::new(),
        }
    }

    /// The pairs that a rank has to start copies for: to itself, and to those that do not wait. They count as begun.
    fn begin(&mut self, rank: usize) -> Vec<Pair> {
        let mut pairs = Vec::new();
        // Neighbours first, so that ranks do not all read from the same one.
        let size = self.ranks.len();
        for peer in (1..size).map(|n| (rank + n) % size) {
            self.begin_pair(peer, rank, &mut pairs);
            if !self.ranks[peer].waits {
                self.begin_pair(rank, peer, &mut pairs);
            }
        }
        pairs
    }

    fn begin_pair(&mut self, source: usize, destination: usize, pairs: &mut Vec<Pair>) {
        let [from, to] = [source, destination].map(|rank| self.ranks[rank].post.clone());
        let (Some(from), Some(to)) = (from, to) else {
            return;
        };
        let begun = self.copies_between(source, destination).is_some();
        if begun || from.moves.to(destination).next().is_none() {
            return;
        }
        self.copies.push(Copies {
            source,
            destination,
            started: Started::NotYet,
        });
        pairs.push(Pair {
            source,
            destination,
            from,
            to,
        });
    }

    /// Whether all who have posted were told all; those who have not have nothing to do with these.
    fn is_over(&self) -> bool {
        let mut ranks = self.ranks.iter();
        ranks.all(|rank| rank.told || rank.post.is_none())
    }

    fn copies_between(&mut self, source: usize, destination: usize) -> Option<&mut Copies> {
        let mut copies = self.copies.iter_mut();
        copies.find(|copies| (copies.source, copies.destination) == (source, destination))
    }

    /// The ends of all copies between a rank and others, when all have started.
    fn ends(&self, rank: usize) -> Option<Vec<Arc<Event>>> {
        let moves = &self.ranks[rank].post.as_ref()?.moves;
        let others = (0..self.ranks.len()).filter(|peer| *peer != rank);
        let gives = others
            .clone()
            .filter(|peer| moves.to(*peer).next().is_some());
        let takes = others.filter(|peer| moves.from(*peer).next().is_some());
        gives
            .map(|peer| (rank, peer))
            .chain(takes.map(|peer| (peer, rank)))
            .map(|pair| {
                let mut copies = self.copies.iter();
                let copies = copies.find(|copies| (copies.source, copies.destination) == pair);
                match &copies?.started {
                    Started::Yes(end) => Some(end.clone()),
                    _ => None,
                }
            })
            .collect()
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

    /// Posts a rank's half of operation `number`, whose buffers are `ready`. The streams are of the thread's context.
    pub(super) fn post(
        &self,
        (rank, number): (usize, u64),
        moves: Moves,
        ready: Event,
        streams: &Streams,
    ) -> Result<(), NcclError> {
        let post = Post {
            moves,
            ready,
            streams: streams.clone(),
            since: Instant::now(),
        };
        let mut exchanges = self.exchanges();
        let exchange = exchanges
            .entry(number)
            .or_insert_with(|| Exchange::new(self.size));
        exchange.ranks[rank].post = Some(Arc::new(post));
        let pairs = exchange.begin(rank);
        drop(exchanges);
        self.changed.notify_all();
        let started = self.start(number, &pairs);
        // Copies to others were started in their devices' contexts.
        streams[rank].enter().and(started)
    }

    /// Starts copies of pairs that were begun, without holding up others. The first error.
    fn start(&self, number: u64, pairs: &[Pair]) -> Result<(), NcclError> {
        let mut result = Ok(());
        for pair in pairs {
            let started = match pair.start() {
                Ok(Some(end)) => Started::Yes(Arc::new(end)),
                Ok(None) => Started::Failed,
                Err(error) => {
                    result = result.and(Err(error));
                    Started::Failed
                }
            };
            let mut exchanges = self.exchanges();
            let exchange = exchanges.get_mut(&number);
            let copies = exchange.and_then(|it| it.copies_between(pair.source, pair.destination));
            if let Some(copies) = copies {
                copies.started = started;
            }
            drop(exchanges);
            self.changed.notify_all();
        }
        result
    }

    /// Waits until all copies between a rank and others have started that belong to operations up to `number` and have not been waited for,
    /// which takes their posts, or until `failed`. Work that waits for a later operation must not come before them on the device.
    pub(super) fn wait_until_started(
        &self,
        rank: usize,
        number: u64,
        failed: impl Fn() -> bool,
    ) -> Result<(), NcclError> {
        let mut exchanges = self.exchanges();
        loop {
            let open = |(of, exchange): &(&u64, &mut Exchange)| {
                let Rank { post, told, .. } = &exchange.ranks[rank];
                **of <= number && post.is_some() && !told && exchange.ends(rank).is_none()
            };
            let Some((&of, exchange)) = exchanges.iter_mut().find(open) else {
                return Ok(());
            };
            exchange.ranks[rank].waits = true;
            let pairs = exchange.begin(rank);
            if !pairs.is_empty() {
                drop(exchanges);
                self.start(of, &pairs)?;
                exchanges = self.exchanges();
                continue;
            }
            if failed() {
                return Err(NcclError::Aborted);
            }
            exchanges = (self.changed.wait_timeout(exchanges, LOOK))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The ends of all copies of operation `number` between a rank and others, all of which have started, and when the rank posted it.
    pub(super) fn ends(
        &self,
        rank: usize,
        number: u64,
    ) -> Result<(Instant, Vec<Arc<Event>>), NcclError> {
        let mut exchanges = self.exchanges();
        let exchange = exchanges.get_mut(&number).ok_or(NcclError::Aborted)?;
        let ends = exchange.ends(rank).ok_or(NcclError::Aborted)?;
        let post = exchange.ranks[rank].post.as_ref();
        let since = post.map_or_else(Instant::now, |post| post.since);
        exchange.ranks[rank].told = true;
        exchanges.retain(|_, exchange| !exchange.is_over());
        Ok((since, ends))
    }

    /// Nobody starts copies of a rank's buffers any more, which are about to go; the ends of those that have started.
    pub(super) fn withdraw(&self, rank: usize, number: u64) -> Vec<Arc<Event>> {
        let mut exchanges = self.exchanges();
        let mut ends = Vec::new();
        while let Some(exchange) = exchanges.get_mut(&number) {
            exchange.ranks[rank].post = None;
            let of_rank = |copies: &&Copies| [copies.source, copies.destination].contains(&rank);
            let copies: Vec<_> = exchange.copies.iter().filter(of_rank).collect();
            if !(copies.iter()).any(|copies| matches!(copies.started, Started::NotYet)) {
                ends.extend(copies.iter().filter_map(|copies| match &copies.started {
                    Started::Yes(end) => Some(end.clone()),
                    _ => None,
                }));
                break;
            }
            // Who begins copies starts them at once.
            exchanges = (self.changed.wait_timeout(exchanges, LOOK))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        exchanges.retain(|_, exchange| !exchange.is_over());
        ends
    }

    /// The oldest operation that a rank has posted, has not been handed the ends of, and that is not over.
    pub(super) fn oldest(&self, rank: usize) -> Option<(u64, Instant)> {
        let exchanges = self.exchanges();
        let mut oldest: Option<(u64, Instant)> = None;
        for (number, exchange) in exchanges.iter() {
            let Rank { post, told, .. } = &exchange.ranks[rank];
            let Some(post) = post.as_ref().filter(|_| !told) else {
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
