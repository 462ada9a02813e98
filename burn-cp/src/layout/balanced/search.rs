//! Looks for a deal in which the busiest receiver receives little.

use super::{
    Limits,
    deal::{Attempt, Choice, Piece, Problem, Shares, Way},
};

/// Work that a rank may have over the mean, in hundredths, from what is good to what is better than nothing. A hundredth
/// more is allowed for cuts, so that the first keeps the mean above 0.95 of the most.
const SLACK: [u64; 7] = [4, 10, 25, 50, 100, 400, 1600];

/// Pieces considered until a search makes do with what it has found.
const MAX_STEPS: u32 = 40_000;

/// Up to as many documents are dealt out throughout the search, of more only the longest.
const MANY: usize = 128;

/// Parts of a rank's work, in 64ths, that pieces of cut documents leave to whole ones; those that are best most often first.
const RESERVES: [u64; 10] = [0, 5, 2, 12, 1, 8, 3, 24, 48, 18];

/// How the longest document is divided, and how all others are.
const SHARES: [[Shares; 2]; 4] = [
    [Shares::Full, Shares::Even],
    [Shares::Full, Shares::Full],
    [Shares::Even, Shares::Even],
    [Shares::Even, Shares::Full],
];

const CHOICES: [Choice; 3] = [Choice::Emptiest, Choice::Suiting, Choice::RichestInWork];

/// How much more than was found for the longest documents is tried for all, in 32nds.
const MORE: [usize; 12] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128];

/// Pieces for all documents, or nothing if there is no way to deal them out.
pub(super) fn search(problem: &Problem<'_>, seq_len: usize) -> Option<Vec<Piece>> {
    let least = problem.least_received(seq_len);
    SLACK.iter().find_map(|&slack| {
        let limits = problem.limits(seq_len, slack, slack + 1);
        Search {
            problem,
            seq_len,
            limits,
        }
        .run(least)
    })
}

struct Search<'a> {
    problem: &'a Problem<'a>,
    seq_len: usize,
    limits: Limits,
}

impl Search<'_> {
    fn run(&self, least: usize) -> Option<Vec<Piece>> {
        let (found, received) = self.promising(least);
        let all = ways();
        for more in MORE {
            let received = received + received.max(self.seq_len / 32) * more / 32;
            // The ways that were good for the longest documents; later any.
            let ways = if more < 4 && !found.is_empty() {
                &found
            } else {
                &all
            };
            for choice in CHOICES {
                for &way in ways {
                    let attempt = Attempt {
                        received,
                        choice,
                        way,
                    };
                    if let Some(deal) =
                        self.problem
                            .deal(self.problem.documents.len(), attempt, &self.limits)
                    {
                        return Some(deal.pieces);
                    }
                }
            }
        }
        None
    }

    /// What the busiest receiver must receive for the longest documents, and the ways that led there, the best first.
    ///
    /// The longest decide: the shorter a document, the less is received for a piece of it. The others are
    /// checked for having room at all.
    fn promising(&self, least: usize) -> (Vec<Way>, usize) {
        let problem = self.problem;
        let num = (problem.documents)
            .partition_point(|&(len, _)| problem.visibility.whole_area(len) > self.limits.area / 8)
            .max(problem.documents.len().min(MANY));
        let rest = problem.rest(num);
        let works = |received: usize, way: Way| {
            let choice = Choice::Emptiest;
            let deal = problem.deal(
                num,
                Attempt {
                    received,
                    choice,
                    way,
                },
                &self.limits,
            );
            deal.is_some_and(|deal| deal.has_room(rest, &self.limits))
        };
        let step = |received: usize| (received / 64).max(self.seq_len / 1024).max(1);
        let mut found = Vec::new();
        // Twice the longest document is as good as no limit.
        let mut best = 2 * problem.longest() + 1;
        problem.steps.set(0);
        for way in ways() {
            let (mut low, mut high) = (least, best.saturating_sub(step(best)));
            if problem.steps.get() > MAX_STEPS || high < low {
                break;
            }
            if !works(high, way) {
                continue;
            }
            if works(low, way) {
                high = low;
            }
            while low + step(high) < high {
                let middle = low + (high - low) / 2;
                if works(middle, way) {
                    high = middle;
                } else {
                    low = middle;
                }
            }
            best = high;
            found.insert(0, way);
        }
        (found, best)
    }
}

fn ways() -> Vec<Way> {
    let ways = |reserve: u64| SHARES.map(|shares| Way { reserve, shares });
    RESERVES.into_iter().flat_map(ways).collect()
}
