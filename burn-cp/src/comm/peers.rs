//! Exchange between ranks that are threads of one process and whose devices reach each other's memory, by copies from buffer to buffer.
//!
//! A rank posts where its rows are and where those of others belong. Whoever posts second starts the copies of a pair, those to the other
//! too, unless the other waits already, and so can start them itself. A rank waits for others to post only where work of its own has to be
//! ordered behind an operation: behind these copies, or behind a later operation of another kind, which copies that started afterwards would
//! have to wait for.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

mod block;

#[cfg_attr(
    not(feature = "cuda"),
    allow(unused_imports, reason = "for devices that address memory")
)]
pub(crate) use block::{Block, Rectangle, Steps};

/// How often a rank that waits for others to post looks for failures.
const LOOK: Duration = Duration::from_millis(5);

/// Rows on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    /// The rank at the other end.
    pub(crate) peer: usize,
    pub(crate) block: Block,
}

impl Move {
    /// The copies of what is given to where it is taken; `None` where it does not fit.
    pub(crate) fn copies(&self, take: &Self) -> Option<Vec<Rectangle>> {
        let fits = take.block.fits(&self.block);
        fits.then(|| block::copies(&self.block, &take.block))
    }
}

/// What a rank gives and what it takes; between two ranks, in the same order at both ends. What stays with a rank is in both.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    pub(crate) gives: Vec<Move>,
    pub(crate) takes: Vec<Move>,
}

impl Moves {
    pub(crate) fn to(&self, peer: usize) -> impl Iterator<Item = &Move> {
        self.gives.iter().filter(move |one| one.peer == peer)
    }

    pub(crate) fn from(&self, peer: usize) -> impl Iterator<Item = &Move> {
        self.takes.iter().filter(move |one| one.peer == peer)
    }
}

/// A rank's device at the moment of a post.
pub(crate) trait Device {
    /// Where copies end.
    type End;
    /// Why they do not start.
    type Error;

    /// Starts copies to this device from that of rank `source`.
    fn copy_from(
        &self,
        source: (usize, &Self),
        copies: &[Rectangle],
    ) -> Result<Self::End, Self::Error>;

    /// What a rank gets that waited in vain, in a world that has failed.
    fn in_vain() -> Self::Error;

    /// Whether copies are over. Where a device has failed they never are; that is its rank's to report.
    fn are_over(end: &Self::End) -> bool;
}

/// A rank's half of an exchange.
struct Post<D> {
    moves: Moves,
    device: D,
    since: Instant,
}

/// One direction of a pair of ranks, both of which have posted.
struct Pair<D> {
    source: usize,
    destination: usize,
    from: Arc<Post<D>>,
    to: Arc<Post<D>>,
}

impl<D: Device> Pair<D> {
    /// Starts the copies. `None` where what one gives is not what the other takes: they call something else, which the records of
    /// both show, and which fails the world.
    fn start(&self) -> Result<Option<D::End>, D::Error> {
        let gives: Vec<_> = self.from.moves.to(self.destination).collect();
        let takes: Vec<_> = self.to.moves.from(self.source).collect();
        if gives.len() != takes.len() {
            return Ok(None);
        }
        let copies = gives
            .iter()
            .zip(takes)
            .map(|(give, take)| give.copies(take));
        let Some(copies) = copies.collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let from = (self.source, &self.from.device);
        self.to.device.copy_from(from, &copies.concat()).map(Some)
    }
}

/// What is known of one rank in an exchange.
struct Rank<D> {
    post: Option<Arc<Post<D>>>,
    /// It waits for the others, and starts copies to itself meanwhile.
    waits: bool,
    /// It was told the ends of all copies that its buffers take part in.
    told: bool,
}

/// The copies of one direction of a pair, which somebody starts or has started.
struct Copies<E> {
    source: usize,
    destination: usize,
    started: Started<E>,
}

/// Where several copies end.
type Ends<D> = Vec<Arc<<D as Device>::End>>;

enum Started<E> {
    NotYet,
    /// And end there.
    Yes(Arc<E>),
    Failed,
}

/// An exchange that is not over for all who have posted.
struct Exchange<D: Device> {
    ranks: Vec<Rank<D>>,
    copies: Vec<Copies<D::End>>,
}

impl<D: Device> Exchange<D> {
    fn new(size: usize) -> Self {
        let rank = |_| Rank {
            post: None,
            waits: false,
            told: false,
        };
        Self {
            ranks: (0..size).map(rank).collect(),
            copies: Vec::new(),
        }
    }

    /// The pairs that a rank has to start copies for: to itself, and to those that do not wait. They count as begun.
    fn begin(&mut self, rank: usize) -> Vec<Pair<D>> {
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

    fn begin_pair(&mut self, source: usize, destination: usize, pairs: &mut Vec<Pair<D>>) {
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

    fn copies_between(&mut self, source: usize, destination: usize) -> Option<&mut Copies<D::End>> {
        let mut copies = self.copies.iter_mut();
        copies.find(|copies| (copies.source, copies.destination) == (source, destination))
    }

    /// The ends of all copies between a rank and others, when all have started.
    fn ends(&self, rank: usize) -> Option<Ends<D>> {
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
pub(crate) struct Peers<D: Device> {
    size: usize,
    exchanges: Mutex<HashMap<u64, Exchange<D>>>,
    changed: Condvar,
}

impl<D: Device> Peers<D> {
    pub(crate) fn new(size: usize) -> Self {
        Self {
            size,
            exchanges: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn exchanges(&self) -> MutexGuard<'_, HashMap<u64, Exchange<D>>> {
        (self.exchanges.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a rank's half of operation `number`. Another device's context may be left to the thread.
    pub(crate) fn post(
        &self,
        (rank, number): (usize, u64),
        moves: Moves,
        device: D,
    ) -> Result<(), D::Error> {
        let post = Post {
            moves,
            device,
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
        self.start(number, &pairs)
    }

    /// Starts copies of pairs that were begun, without holding up others. The first error.
    fn start(&self, number: u64, pairs: &[Pair<D>]) -> Result<(), D::Error> {
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
    pub(crate) fn wait_until_started(
        &self,
        rank: usize,
        number: u64,
        failed: impl Fn() -> bool,
    ) -> Result<(), D::Error> {
        let mut exchanges = self.exchanges();
        loop {
            let open = |(of, exchange): &(&u64, &mut Exchange<D>)| {
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
                return Err(D::in_vain());
            }
            exchanges = (self.changed.wait_timeout(exchanges, LOOK))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The ends of all copies of operation `number` between a rank and others, all of which have started, and when the rank posted it.
    pub(crate) fn ends(&self, rank: usize, number: u64) -> Result<(Instant, Ends<D>), D::Error> {
        let mut exchanges = self.exchanges();
        let exchange = exchanges.get_mut(&number).ok_or_else(D::in_vain)?;
        let ends = exchange.ends(rank).ok_or_else(D::in_vain)?;
        let post = exchange.ranks[rank].post.as_ref();
        let since = post.map_or_else(Instant::now, |post| post.since);
        exchange.ranks[rank].told = true;
        exchanges.retain(|_, exchange| !exchange.is_over());
        Ok((since, ends))
    }

    /// Nobody starts copies of a rank's buffers any more, which are about to go; the ends of those that have started.
    pub(crate) fn withdraw(&self, rank: usize, number: u64) -> Ends<D> {
        let mut exchanges = self.exchanges();
        let mut ends = Vec::new();
        while let Some(exchange) = exchanges.get_mut(&number) {
            exchange.ranks[rank].post = None;
            let of_rank =
                |copies: &&Copies<D::End>| [copies.source, copies.destination].contains(&rank);
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
    pub(crate) fn oldest(&self, rank: usize) -> Option<(u64, Instant)> {
        let exchanges = self.exchanges();
        let mut oldest: Option<(u64, Instant)> = None;
        for (number, exchange) in exchanges.iter() {
            let Rank { post, told, .. } = &exchange.ranks[rank];
            let Some(post) = post.as_ref().filter(|_| !told) else {
                continue;
            };
            let ends = exchange.ends(rank);
            let over = ends.is_some_and(|ends| ends.iter().all(|end| D::are_over(end)));
            if !over && oldest.is_none_or(|(_, since)| post.since < since) {
                oldest = Some((*number, post.since));
            }
        }
        oldest
    }
}

#[cfg(test)]
mod tests;
