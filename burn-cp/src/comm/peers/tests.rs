//! Who starts which copies, and who waits for whom: with ranks whose devices are vectors, which need no GPU.

use std::{sync::mpsc, thread};

use proptest::prelude::*;

use super::*;

#[derive(Debug)]
struct InVain;

/// A device's memory; copies are over when they have started.
#[derive(Clone)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    fn new(num_bytes: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![0; num_bytes])))
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap()
    }
}

impl Device for Memory {
    type End = ();
    type Error = InVain;

    fn copy_from(&self, (_, from): (usize, &Self), copies: &[Rectangle]) -> Result<(), InVain> {
        for copy in copies {
            let len = copy.num_bytes;
            for line in 0..copy.count {
                let there = copy.from as usize + line * copy.from_pitch;
                let here = copy.to as usize + line * copy.to_pitch;
                let run = from.bytes()[there..there + len].to_vec();
                self.bytes()[here..here + len].copy_from_slice(&run);
            }
        }
        Ok(())
    }

    fn in_vain() -> InVain {
        InVain
    }

    fn are_over((): &()) -> bool {
        true
    }
}

/// Runs that each rank gives to each: `[source][destination]`.
type Runs = Vec<Vec<Vec<usize>>>;

fn runs(max_ranks: usize) -> impl Strategy<Value = Runs> {
    (2..=max_ranks).prop_flat_map(|size| {
        let pair = prop_oneof![
            2 => Just(Vec::new()),
            3 => prop::collection::vec(1usize..6, 1..4),
        ];
        prop::collection::vec(prop::collection::vec(pair, size), size)
    })
}

/// What one rank gives and takes, its memory before, and what it has to hold afterwards. Its own runs stay with the caller.
fn half(runs: &Runs, rank: usize, number: u64) -> (Moves, Memory, Vec<u8>) {
    let byte = |source: usize, destination: usize, at: usize| {
        (1 + source * 67 + destination * 29 + at * 3 + number as usize * 11) as u8
    };
    let (mut moves, mut bytes) = (Moves::default(), Vec::new());
    let mut add =
        |list: &mut Vec<Move>, peer: usize, lens: &[usize], values: &dyn Fn(usize) -> u8| {
            let mut at = 0;
            for &num_bytes in lens {
                list.push(Move {
                    peer,
                    block: Block::one(bytes.len() as u64, num_bytes),
                });
                bytes.extend((at..at + num_bytes).map(values));
                at += num_bytes;
            }
        };
    let others = (0..runs.len()).filter(|peer| *peer != rank);
    for peer in others.clone() {
        let value = |at| byte(rank, peer, at);
        add(&mut moves.gives, peer, &runs[rank][peer], &value);
    }
    for peer in others.clone() {
        add(&mut moves.takes, peer, &runs[peer][rank], &|_| 0);
    }
    let memory = Memory(Arc::new(Mutex::new(bytes.clone())));
    let mut want = bytes;
    for peer in others {
        let mut at = 0;
        for take in moves.from(peer) {
            let Block {
                address, num_bytes, ..
            } = take.block;
            for offset in 0..num_bytes {
                want[address as usize + offset] = byte(peer, rank, at + offset);
            }
            at += num_bytes;
        }
    }
    (moves, memory, want)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Ranks start operations in one order and end them in any, and some are late: all get what is theirs, and nothing is left.
    #[test]
    fn ranks_get_what_others_give_whoever_posts_first(
        runs in runs(5),
        late in prop::collection::vec(0u64..300, 5),
        last_first in prop::collection::vec(any::<bool>(), 5),
    ) {
        const NUM: u64 = 3;
        let size = runs.len();
        let peers = Peers::<Memory>::new(size);
        thread::scope(|scope| {
            for rank in 0..size {
                let (peers, runs, late) = (&peers, &runs, late[rank]);
                let backwards = last_first[rank];
                scope.spawn(move || {
                    let mut open = Vec::new();
                    for number in 0..NUM {
                        thread::sleep(Duration::from_micros(late));
                        let (moves, memory, want) = half(runs, rank, number);
                        peers.post((rank, number), moves, memory.clone()).unwrap();
                        open.push((number, memory, want));
                    }
                    if backwards {
                        open.reverse();
                    }
                    for (number, memory, want) in open {
                        let start = Instant::now();
                        let hangs = || start.elapsed() > Duration::from_secs(20);
                        peers.wait_until_started(rank, number, hangs).unwrap();
                        peers.ends(rank, number).unwrap();
                        assert_eq!(*memory.bytes(), want, "rank {rank}, operation {number}");
                    }
                });
            }
        });
        prop_assert!(peers.exchanges().is_empty());
    }
}

fn one_run(peer: usize) -> Vec<Move> {
    vec![Move {
        peer,
        block: Block::one(0, 1),
    }]
}

/// Rank 0 gives to rank 1, which has not come.
fn waiting() -> Arc<Peers<Memory>> {
    let peers = Arc::new(Peers::new(2));
    let moves = Moves {
        gives: one_run(1),
        takes: Vec::new(),
    };
    peers.post((0, 7), moves, Memory::new(1)).unwrap();
    peers
}

#[test]
fn a_rank_that_waits_is_the_oldest_until_the_other_comes() {
    let peers = waiting();
    assert_eq!(peers.oldest(0).map(|(number, _)| number), Some(7));
    assert_eq!(peers.oldest(1), None);
    let moves = Moves {
        gives: Vec::new(),
        takes: one_run(0),
    };
    peers.post((1, 7), moves, Memory::new(1)).unwrap();
    assert_eq!(peers.oldest(0), None, "over");
    for rank in [0, 1] {
        peers.wait_until_started(rank, 7, || false).unwrap();
        assert_eq!(peers.ends(rank, 7).unwrap().1.len(), 1);
    }
    assert!(peers.exchanges().is_empty());
}

#[test]
fn a_rank_stops_waiting_when_the_world_has_failed_and_nobody_reads_its_buffers_then() {
    let peers = waiting();
    let (failed, fails) = mpsc::channel::<()>();
    let waits = peers.clone();
    let rank = thread::spawn(move || {
        let failed = || fails.try_recv() != Err(mpsc::TryRecvError::Empty);
        waits.wait_until_started(0, 7, failed)
    });
    thread::sleep(Duration::from_millis(20));
    assert!(!rank.is_finished());
    drop(failed);
    assert!(rank.join().unwrap().is_err());
    assert!(peers.withdraw(0, 7).is_empty());
    // Too late: it finds nobody.
    let takes = Moves {
        gives: Vec::new(),
        takes: one_run(0),
    };
    peers.post((1, 7), takes, Memory::new(1)).unwrap();
    assert!(peers.ends(1, 7).is_err());
    assert!(peers.withdraw(1, 7).is_empty());
    assert!(peers.exchanges().is_empty());
}

#[test]
fn what_does_not_fit_is_not_copied() {
    let peers = waiting();
    let mut takes = one_run(0);
    takes[0].block = Block::one(0, 2);
    let moves = Moves {
        gives: Vec::new(),
        takes,
    };
    let memory = Memory::new(2);
    peers.post((1, 7), moves, memory.clone()).unwrap();
    for rank in [0, 1] {
        assert!(peers.wait_until_started(rank, 7, || true).is_err());
    }
    assert_eq!(*memory.bytes(), [0, 0]);
}
