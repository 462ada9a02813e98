//! Which ranges of rows travel between which pairs of ranks.

use std::{
    hash::{Hash, Hasher},
    ops::Range,
};

/// A run of rows of the result: where it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Rank of the group that holds the rows.
    pub source: usize,
    /// Rows of that rank's input.
    pub range: Range<usize>,
}

/// A run of this rank's rows that another rank (or itself) takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentRange {
    /// Rank of the group that takes the rows.
    pub destination: usize,
    /// Rows of this rank's input.
    pub range: Range<usize>,
    /// First row in the destination's result.
    pub at: usize,
}

/// Pieces that no rank could supply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// Not one input length, or not one list of pieces, per rank.
    #[error("exchange plan: expected {expected} lists of pieces, one per rank, got {got}")]
    Ranks {
        /// Number of input lengths.
        expected: usize,
        /// Number of lists.
        got: usize,
    },
    /// A piece reaches past its source's input, or its source is not a rank.
    #[error(
        "exchange plan: rank {rank} takes rows {start}..{end} of rank {source_rank}, which has {len:?}"
    )]
    Piece {
        /// Rank that takes the rows.
        rank: usize,
        /// Rank that should supply them.
        source_rank: usize,
        /// First row.
        start: usize,
        /// End of the rows.
        end: usize,
        /// Rows that the source has; `None` where it is no rank of the group.
        len: Option<usize>,
    },
}

/// One rank's view of a planned exchange: what it takes from whom, and who takes what from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangePlan {
    world_size: usize,
    input_len: usize,
    output_len: usize,
    pieces: Vec<Piece>,
    sends: Vec<SentRange>,
    /// Largest number of pieces that one rank takes from one other.
    most_runs: usize,
    /// Largest number of rows that one rank takes from another.
    most_rows: usize,
    /// Of the whole exchange, equal on every rank.
    fingerprint: u64,
}

impl ExchangePlan {
    /// The view of `rank` in an exchange where rank `r` has `input_lens[r]` rows and takes `pieces[r]`, in order.
    ///
    /// Pure host: every rank derives its view from the same arguments.
    ///
    /// # Errors
    /// Not one list per rank, or a piece that its source does not have.
    pub fn new(
        input_lens: &[usize],
        pieces: &[Vec<Piece>],
        rank: usize,
    ) -> Result<Self, ExchangeError> {
        if input_lens.len() != pieces.len() || rank >= pieces.len() {
            return Err(ExchangeError::Ranks {
                expected: input_lens.len(),
                got: pieces.len(),
            });
        }
        let (mut sends, mut most_runs, mut most_rows) = (Vec::new(), 0, 0);
        let (mut num_runs, mut num_rows) = (vec![0; pieces.len()], vec![0; pieces.len()]);
        for (destination, list) in pieces.iter().enumerate() {
            let mut at = 0;
            num_runs.fill(0);
            num_rows.fill(0);
            for piece in list {
                let len = input_lens.get(piece.source).copied();
                if piece.range.start > piece.range.end
                    || len.is_none_or(|len| piece.range.end > len)
                {
                    return Err(ExchangeError::Piece {
                        rank: destination,
                        source_rank: piece.source,
                        start: piece.range.start,
                        end: piece.range.end,
                        len,
                    });
                }
                if !piece.range.is_empty() {
                    num_runs[piece.source] += 1;
                    most_runs = most_runs.max(num_runs[piece.source]);
                    num_rows[piece.source] += piece.range.len();
                    if piece.source != destination {
                        most_rows = most_rows.max(num_rows[piece.source]);
                    }
                }
                if piece.source == rank && !piece.range.is_empty() {
                    sends.push(SentRange {
                        destination,
                        range: piece.range.clone(),
                        at,
                    });
                }
                at += piece.range.len();
            }
        }
        let mine: Vec<Piece> = pieces[rank]
            .iter()
            .filter(|piece| !piece.range.is_empty())
            .cloned()
            .collect();
        let output_len = mine.iter().map(|piece| piece.range.len()).sum();
        // Compared within one run of one program, where this hash is stable.
        let mut hasher = std::hash::DefaultHasher::new();
        (input_lens, pieces).hash(&mut hasher);
        Ok(Self {
            world_size: pieces.len(),
            input_len: input_lens[rank],
            output_len,
            pieces: mine,
            sends,
            most_runs,
            most_rows,
            fingerprint: hasher.finish(),
        })
    }

    /// The plan of an all-to-all in which rank `s` sends `matrix[s][d]` consecutive rows to each rank `d`, in rank order.
    pub(crate) fn all_to_all_v(matrix: &[Vec<usize>], rank: usize) -> Self {
        let start =
            |source: usize, destination: usize| matrix[source][..destination].iter().sum::<usize>();
        let piece = |source: usize, destination: usize| {
            let start = start(source, destination);
            Piece {
                source,
                range: start..start + matrix[source][destination],
            }
        };
        let world_size = matrix.len();
        let pieces: Vec<Vec<Piece>> = (0..world_size)
            .map(|d| (0..world_size).map(|s| piece(s, d)).collect())
            .collect();
        let lens: Vec<usize> = matrix.iter().map(|row| row.iter().sum()).collect();
        // Built from the matrix itself, so every piece lies within its source.
        Self::new(&lens, &pieces, rank).expect("an all-to-all's pieces lie within their sources")
    }

    /// Equal on two ranks if and, up to chance, only if they hold views of one exchange.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Largest number of pieces that one rank takes from one rank; the same on every rank.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "for devices that address memory")
    )]
    pub(crate) fn most_runs(&self) -> usize {
        self.most_runs
    }

    /// The largest number of rows that one rank takes from another. The same on every rank.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "for devices that address memory")
    )]
    pub(crate) fn most_rows(&self) -> usize {
        self.most_rows
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Rows of this rank's input.
    pub fn input_len(&self) -> usize {
        self.input_len
    }

    /// Rows of this rank's result.
    pub fn output_len(&self) -> usize {
        self.output_len
    }

    /// Rows that come to `rank`, whose view this is, from other ranks.
    pub(crate) fn num_received(&self, rank: usize) -> usize {
        let others = self.pieces.iter().filter(|piece| piece.source != rank);
        others.map(|piece| piece.range.len()).sum()
    }

    /// Whether rows leave or reach this rank, which is `rank`.
    pub(crate) fn moves_rows(&self, rank: usize) -> bool {
        let mut taken = self.pieces.iter();
        let mut sent = self.sends.iter();
        taken.any(|piece| piece.source != rank) || sent.any(|sent| sent.destination != rank)
    }

    /// What this rank takes, in the order of its result; no piece is empty.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Who takes what from this rank, ordered by destination; no range is empty.
    pub fn sends(&self) -> &[SentRange] {
        &self.sends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_sees_its_side_of_the_exchange() {
        let pieces = vec![
            vec![Piece {
                source: 0,
                range: 0..2,
            }],
            vec![
                Piece {
                    source: 0,
                    range: 1..2,
                },
                Piece {
                    source: 1,
                    range: 0..3,
                },
            ],
        ];
        let rank0 = ExchangePlan::new(&[2, 3], &pieces, 0).unwrap();
        assert_eq!(rank0.sends().len(), 2);
        assert_eq!(
            rank0.sends()[1],
            SentRange {
                destination: 1,
                range: 1..2,
                at: 0
            }
        );
        let rank1 = ExchangePlan::new(&[2, 3], &pieces, 1).unwrap();
        assert_eq!((rank1.input_len(), rank1.output_len()), (3, 4));
        assert_eq!(
            rank1.sends(),
            [SentRange {
                destination: 1,
                range: 0..3,
                at: 1
            }]
        );
    }

    #[test]
    fn a_piece_past_its_source_is_refused() {
        let pieces = vec![
            vec![Piece {
                source: 1,
                range: 2..4,
            }],
            vec![],
        ];
        let error = ExchangePlan::new(&[2, 3], &pieces, 0).unwrap_err();
        assert_eq!(
            error,
            ExchangeError::Piece {
                rank: 0,
                source_rank: 1,
                start: 2,
                end: 4,
                len: Some(3)
            }
        );
        assert!(
            ExchangePlan::new(
                &[2, 3],
                &[
                    vec![],
                    vec![Piece {
                        source: 5,
                        range: 0..1
                    }]
                ],
                0
            )
            .is_err()
        );
    }

    #[test]
    fn ranks_of_one_exchange_have_one_fingerprint() {
        let pieces = vec![
            vec![Piece {
                source: 1,
                range: 0..2,
            }],
            vec![Piece {
                source: 0,
                range: 0..2,
            }],
        ];
        let of = |pieces: &[Vec<Piece>], rank| {
            ExchangePlan::new(&[2, 3], pieces, rank)
                .unwrap()
                .fingerprint()
        };
        assert_eq!(of(&pieces, 0), of(&pieces, 1));
        let mut others = pieces.clone();
        others[1][0].range = 0..1;
        assert_ne!(
            of(&pieces, 0),
            of(&others, 0),
            "also for a rank whose own view is the same"
        );
    }
}
