//! Deals documents and pieces of documents to ranks.

use std::{cell::Cell, cmp::Reverse, ops::Range};

use super::{Limits, bound, cut::Cut, visibility::Visibility};

/// A run of positions of a document and its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) document: usize,
    pub(super) rank: usize,
    pub(super) positions: Range<usize>,
}

/// Documents to be dealt out.
pub(super) struct Problem<'a> {
    /// Length and index of each, the longest first, none empty.
    pub(super) documents: &'a [(usize, usize)],
    pub(super) world_size: usize,
    pub(super) visibility: Visibility,
    /// Cuts are made at multiples of it.
    pub(super) granule: usize,
    /// Visible pairs of all documents.
    pub(super) total: u64,
    /// Pieces that were considered so far: what the search costs.
    pub(super) steps: Cell<u32>,
}

/// How a deal is gone about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attempt {
    /// K/V tokens that a rank may receive.
    pub(super) received: usize,
    /// Where whole documents go.
    pub(super) choice: Choice,
    /// How others are cut.
    pub(super) way: Way,
}

/// How documents are cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    /// Part of a rank's work, in 64ths, that pieces leave to whole documents.
    pub(super) reserve: u64,
    /// How the longest document is divided, and how all others are.
    pub(super) shares: [Shares; 2],
}

/// How the work of a document is divided among the ranks that it takes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shares {
    /// In proportion to the room that they have.
    Even,
    /// All the room that they have, but for the last one.
    Full,
}

/// Which of the ranks with room a whole document goes to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Choice {
    /// The one that has the largest part of what it is allowed left, of work or tokens, whichever is scarcer.
    Emptiest,
    /// The one whose free work and free tokens are most like the document's (by scalar product, as in vector bin packing).
    Suiting,
    /// The one with the most work free for each free token, so that what is left suits all ranks alike in the end.
    RichestInWork,
}

/// What a rank has been given so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Load {
    pub(super) area: u64,
    pub(super) tokens: usize,
    pub(super) received: usize,
}

/// Documents dealt out within limits.
pub(super) struct Deal {
    pub(super) pieces: Vec<Piece>,
    loads: Vec<Load>,
    /// By rank, what is left of the work and of the tokens that are allowed, as parts of them.
    free: Vec<[f64; 2]>,
}

/// A rank's piece from the beginning and from the end of what was left of a document.
type Share = (usize, [Range<usize>; 2]);

impl Problem<'_> {
    /// Length of the longest document, 0 if there is none.
    pub(super) fn longest(&self) -> usize {
        self.documents.first().map_or(0, |&(len, _)| len)
    }

    /// What a rank may have: `slack` hundredths more work than the mean, `with_cuts` if it was given pieces, and half more
    /// tokens.
    pub(super) fn limits(&self, seq_len: usize, slack: u64, with_cuts: u64) -> Limits {
        let world_size = self.world_size as u128;
        let area = |slack: u64| {
            let area = u128::from(self.total) * u128::from(100 + slack) / 100 / world_size;
            u64::try_from(area).unwrap_or(u64::MAX)
        };
        let half_more = (seq_len as u128 * 3 / 2 / world_size) as usize;
        Limits {
            area: area(slack),
            area_with_cuts: area(with_cuts),
            tokens: half_more.max(seq_len.div_ceil(self.world_size)),
        }
    }

    /// What the busiest receiver receives in any balanced layout.
    pub(super) fn least_received(&self, seq_len: usize) -> usize {
        let mut limits = self.limits(seq_len, 0, 0);
        // A balance of 0.95 is asked for; rounded up, so that the bound stays one.
        let most = (u128::from(self.total) * 20).div_ceil(19 * self.world_size as u128);
        limits.area = u64::try_from(most).unwrap_or(u64::MAX);
        bound::min_received(self.longest(), self.world_size, &limits, self.visibility)
    }

    /// Deals out the first `num` documents: each whole to a rank that has room; one that fits nowhere in pieces.
    ///
    /// `None` if one does not fit in pieces either.
    pub(super) fn deal(&self, num: usize, attempt: Attempt, limits: &Limits) -> Option<Deal> {
        let mut deal = Deal {
            pieces: Vec::with_capacity(num + 2 * self.world_size),
            loads: vec![Load::default(); self.world_size],
            free: vec![[1.0; 2]; self.world_size],
        };
        for &(len, document) in &self.documents[..num] {
            let area = self.visibility.whole_area(len);
            // A document that alone leaves no reserve is cut, although it would fit.
            let whole = area <= limits.usable(attempt.way.reserve);
            match deal
                .with_room(area, len, attempt.choice, limits)
                .filter(|_| whole)
            {
                Some(rank) => deal.give(document, (rank, [0..len, len..len]), (area, 0), limits),
                None => self.split(&mut deal, (len, document), attempt, limits)?,
            }
        }
        Some(deal)
    }

    /// Work and tokens of all documents but the first `num`.
    pub(super) fn rest(&self, num: usize) -> (u64, usize) {
        let rest = &self.documents[num..];
        let area = rest.iter().map(|&(len, _)| self.visibility.whole_area(len));
        (area.sum(), rest.iter().map(|&(len, _)| len).sum())
    }

    /// Deals out one document in pieces, to as few ranks as can be.
    fn split(
        &self,
        deal: &mut Deal,
        document: (usize, usize),
        attempt: Attempt,
        limits: &Limits,
    ) -> Option<()> {
        let area = self.visibility.whole_area(document.0);
        let mut reserve = attempt.way.reserve;
        loop {
            let ranks = deal.with_any_room(reserve, limits);
            let all: u64 = ranks.iter().map(|&(room, _)| room).sum();
            if all < area && reserve > 0 {
                reserve = reserve * 3 / 4;
                continue;
            }
            if let Some(shares) = self.shares_of_fewest(deal, ranks, document.0, attempt, limits) {
                for share in shares {
                    let [low, high] = &share.1;
                    let area = self.visibility.area(low, document.0)
                        + self.visibility.area(high, document.0);
                    let received = self.visibility.received(low, high, document.0);
                    deal.give(document.1, share, (area, received), limits);
                }
                return Some(());
            }
            if reserve == 0 {
                return None;
            }
            reserve = 0;
        }
    }

    /// Pieces for as few of the ranks as can be: those with the most room, or else those that may receive the most.
    fn shares_of_fewest(
        &self,
        deal: &Deal,
        mut ranks: Vec<(u64, usize)>,
        len: usize,
        attempt: Attempt,
        limits: &Limits,
    ) -> Option<Vec<Share>> {
        let area = self.visibility.whole_area(len);
        ranks.sort_unstable_by_key(|&(room, rank)| (Reverse(room), rank));
        let mut by_received = ranks.clone();
        by_received.sort_unstable_by_key(|&(room, rank)| {
            (
                Reverse((deal.may_receive(rank, attempt).min(len), room)),
                rank,
            )
        });
        if by_received == ranks {
            by_received.clear();
        }
        [ranks, by_received].iter().find_map(|ranks| {
            let mut room = 0;
            let (mut fewest, mut next) = (usize::MAX, 0);
            (1..=ranks.len()).find_map(|num| {
                room += ranks[num - 1].0;
                if room < area || num < next {
                    return None;
                }
                // One more, two more, four more, ..
                fewest = fewest.min(num);
                next = (fewest + 2 * (num - fewest)).min(ranks.len()).max(num + 1);
                self.shares(deal, &ranks[..num], len, attempt, limits)
            })
        })
    }

    /// Pieces for just these ranks, each listed with the room it has: of what is left each takes the end, and of the beginning as
    /// much as it needs in order to receive no more than it may.
    fn shares(
        &self,
        deal: &Deal,
        ranks: &[(u64, usize)],
        len: usize,
        attempt: Attempt,
        limits: &Limits,
    ) -> Option<Vec<Share>> {
        let mut order = ranks.to_vec();
        order.sort_unstable_by_key(|&(room, rank)| {
            (Reverse((deal.may_receive(rank, attempt), room)), rank)
        });
        let free = |rank: usize| limits.tokens - deal.loads[rank].tokens;
        let mut open: u64 = order.iter().map(|&(room, _)| room).sum();
        let mut others: usize = order.iter().map(|&(_, rank)| free(rank)).sum();
        let mut shares = Vec::with_capacity(order.len());
        let mut rest = 0..len;
        for (index, &(room, rank)) in order.iter().enumerate() {
            let area = self.visibility.area(&rest, len);
            others -= free(rank);
            let cut = Cut {
                problem: self,
                len,
                area: match attempt.way.shares[usize::from(!deal.pieces.is_empty())] {
                    Shares::Even => part_of(area, room, open),
                    Shares::Full => area.min(room),
                },
                tokens: free(rank),
                received: deal.may_receive(rank, attempt),
                others,
            };
            open -= room;
            let runs = if index + 1 == order.len() {
                [rest.clone(), rest.end..rest.end]
            } else {
                cut.runs(&rest)?
            };
            if !cut.allows(&runs, deal.loads[rank].area, limits) {
                return None;
            }
            rest = runs[0].end..runs[1].start;
            shares.push((rank, runs));
        }
        Some(shares)
    }
}

/// `value * numerator / denominator` of a part of a whole.
fn part_of(value: u64, numerator: u64, denominator: u64) -> u64 {
    let part = u128::from(value) * u128::from(numerator) / u128::from(denominator).max(1);
    u64::try_from(part).unwrap_or(value)
}

impl Deal {
    fn may_receive(&self, rank: usize, attempt: Attempt) -> usize {
        attempt.received.saturating_sub(self.loads[rank].received)
    }

    /// Whether what is left has room for further documents, taken as a liquid of their mean work per token.
    pub(super) fn has_room(&self, (area, tokens): (u64, usize), limits: &Limits) -> bool {
        let room = |load: &Load| {
            let free = limits.area.saturating_sub(load.area) as f64;
            let by_area = if area == 0 {
                f64::INFINITY
            } else {
                free * (tokens as f64 / area as f64)
            };
            by_area.min(limits.tokens.saturating_sub(load.tokens) as f64)
        };
        self.loads.iter().map(room).sum::<f64>() >= tokens as f64
    }

    /// The chosen one of the ranks that have room for a whole document.
    fn with_room(
        &self,
        area: u64,
        tokens: usize,
        choice: Choice,
        limits: &Limits,
    ) -> Option<usize> {
        let mut best = None;
        let mut most = -1.0;
        let wanted_area = area as f64 / (limits.area as f64).max(1.0);
        let wanted_tokens = tokens as f64 / limits.tokens as f64;
        for (rank, (load, [free_area, free_tokens])) in
            self.loads.iter().zip(&self.free).enumerate()
        {
            let suits = match choice {
                Choice::Emptiest => free_area.min(*free_tokens),
                Choice::Suiting => wanted_area * free_area + wanted_tokens * free_tokens,
                Choice::RichestInWork => free_area / free_tokens.max(1e-9),
            };
            if suits > most
                && load.tokens + tokens <= limits.tokens
                && load.area + area <= limits.area
            {
                most = suits;
                best = Some(rank);
            }
        }
        best
    }

    /// The ranks with room for some piece, and the work they have room for beside the reserve.
    fn with_any_room(&self, reserve: u64, limits: &Limits) -> Vec<(u64, usize)> {
        let usable = limits.usable(reserve);
        (self.loads.iter().enumerate())
            .filter(|(_, load)| load.tokens < limits.tokens)
            .map(|(rank, load)| (usable.saturating_sub(load.area), rank))
            .filter(|&(room, _)| room > 0)
            .collect()
    }

    fn give(
        &mut self,
        document: usize,
        (rank, runs): Share,
        (area, received): (u64, usize),
        limits: &Limits,
    ) {
        let load = &mut self.loads[rank];
        load.area += area;
        load.received += received;
        for positions in runs {
            if !positions.is_empty() {
                load.tokens += positions.len();
                self.pieces.push(Piece {
                    document,
                    rank,
                    positions,
                });
            }
        }
        let free = |used: f64, all: f64| (1.0 - used / all.max(1.0)).max(0.0);
        self.free[rank] = [
            free(load.area as f64, limits.area as f64),
            free(load.tokens as f64, limits.tokens as f64),
        ];
    }
}
