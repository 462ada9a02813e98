//! A collective from one rank's point of view: which rows it takes from whom, which it gives to whom, and what it makes of
//! those that it took. Host data; what moves the rows, and on which device, is the transport's.

use std::ops::Range;

use burn::tensor::backend::Backend;

use super::{Collective, Payload, Piece};

/// Rows that another rank takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Given {
    /// Rank of the group that takes them.
    pub(crate) destination: usize,
    /// Rows of this rank's input.
    pub(crate) range: Range<usize>,
}

/// What a rank makes of the rows that it took, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Combine {
    /// One behind the other.
    Concat,
    /// Added up.
    Sum,
    /// Each added to these rows of a result of so many rows, which starts from zeros.
    SumInto(Vec<Range<usize>>, usize),
    /// Nothing was taken: zeros like the input.
    Zeros,
}

/// One rank's part of a collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decomposition {
    /// Dim whose rows are counted.
    pub(crate) dim: usize,
    /// What this rank takes, from itself too, in the order of `combine`.
    pub(crate) takes: Vec<Piece>,
    /// What other ranks take from this one; the ranges for one destination are in the order in which it takes them. May hold
    /// empty ranges, which nobody sends.
    pub(crate) gives: Vec<Given>,
    /// What becomes of it.
    pub(crate) combine: Combine,
}

impl Collective {
    /// The part of `rank` among `size` ranks, whose input has this shape.
    pub(crate) fn decompose(&self, shape: &[usize], rank: usize, size: usize) -> Decomposition {
        let others = || (0..size).filter(|other| *other != rank);
        let give = |destination, range: &Range<usize>| Given {
            destination,
            range: range.clone(),
        };
        let take = |source, range: &Range<usize>| Piece {
            source,
            range: range.clone(),
        };
        match self {
            Self::AllGather { dim, sizes } => Decomposition {
                dim: *dim,
                takes: (0..size)
                    .map(|source| take(source, &(0..sizes[source])))
                    .collect(),
                gives: others().map(|to| give(to, &(0..shape[*dim]))).collect(),
                combine: Combine::Concat,
            },
            Self::ReduceScatter { dim, sizes } => {
                let part = |of: usize| {
                    let start: usize = sizes[..of].iter().sum();
                    start..start + sizes[of]
                };
                Decomposition {
                    dim: *dim,
                    takes: (0..size).map(|source| take(source, &part(rank))).collect(),
                    gives: others().map(|to| give(to, &part(to))).collect(),
                    combine: Combine::Sum,
                }
            }
            Self::AllReduce => {
                let all = 0..shape[0];
                Decomposition {
                    dim: 0,
                    takes: (0..size).map(|source| take(source, &all)).collect(),
                    gives: others().map(|to| give(to, &all)).collect(),
                    combine: Combine::Sum,
                }
            }
            Self::Exchange { dim, plan } => Decomposition {
                dim: *dim,
                takes: plan.pieces().to_vec(),
                gives: (plan.sends().iter())
                    .filter(|sent| sent.destination != rank)
                    .map(|sent| give(sent.destination, &sent.range))
                    .collect(),
                combine: Combine::Concat,
            },
            Self::ExchangeReverse { dim, plan } => {
                let mut at = 0;
                let mut gives = Vec::new();
                for piece in plan.pieces() {
                    let rows = at..at + piece.range.len();
                    at = rows.end;
                    if piece.source != rank {
                        gives.push(give(piece.source, &rows));
                    }
                }
                let sends = plan.sends().iter();
                let back = |sent: &super::SentRange| {
                    take(sent.destination, &(sent.at..sent.at + sent.range.len()))
                };
                Decomposition {
                    dim: *dim,
                    takes: sends.clone().map(back).collect(),
                    gives,
                    combine: Combine::SumInto(
                        sends.map(|sent| sent.range.clone()).collect(),
                        plan.input_len(),
                    ),
                }
            }
            Self::Broadcast { root } => Decomposition {
                dim: 0,
                takes: vec![take(*root, &(0..shape[0]))],
                gives: if *root == rank {
                    others().map(|to| give(to, &(0..shape[0]))).collect()
                } else {
                    Vec::new()
                },
                combine: Combine::Concat,
            },
            Self::Reduce { root } if *root == rank => Decomposition {
                gives: Vec::new(),
                ..Self::AllReduce.decompose(shape, rank, size)
            },
            Self::Reduce { root } => Decomposition {
                dim: 0,
                takes: Vec::new(),
                gives: vec![give(*root, &(0..shape[0]))],
                combine: Combine::Zeros,
            },
        }
    }
}

impl Combine {
    /// The result, from the rows that were taken; `like` is this rank's input. Sums run in the order of the rows, `f16` and `bf16`
    /// in `f32`.
    pub(crate) fn apply<B: Backend>(
        &self,
        taken: impl Iterator<Item = Payload<B>>,
        dim: usize,
        like: &Payload<B>,
    ) -> Payload<B> {
        match self {
            Self::Concat => Payload::concat(taken.collect(), dim, like),
            // A group has at least one rank, so there is always a sum.
            Self::Sum => Payload::sum(taken).unwrap_or_else(|| like.clone()),
            Self::SumInto(places, num_rows) => {
                let dtype = like.dtype();
                let mut total = like.zeros_like(dim, *num_rows).widened();
                for (range, rows) in places.iter().zip(taken) {
                    let sum = total.rows(dim, range).add(rows.widened());
                    total = if *range == (0..*num_rows) {
                        sum
                    } else {
                        total.with_rows(dim, range, sum)
                    };
                }
                total.narrowed(dtype)
            }
            Self::Zeros => like.zeros_like(0, like.shape()[0]),
        }
    }
}
