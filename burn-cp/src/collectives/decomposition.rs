//! A collective from one rank's point of view: which rows it takes from whom, which it gives to whom, and what it makes of
//! those that it took. Host data; what moves the rows, and on which device, is the transport's.

use std::ops::Range;

use burn::tensor::backend::Backend;

use super::{Collective, ExchangePlan, Payload, Piece};

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
        match self {
            Self::AllGather { dim, sizes } => Decomposition {
                dim: *dim,
                takes: (0..size).map(|from| take(from, 0..sizes[from])).collect(),
                gives: to_others(rank, size, |_| 0..shape[*dim]),
                combine: Combine::Concat,
            },
            Self::ReduceScatter { dim, sizes } => {
                let part = |of: usize| {
                    let start: usize = sizes[..of].iter().sum();
                    start..start + sizes[of]
                };
                Decomposition {
                    dim: *dim,
                    takes: (0..size).map(|from| take(from, part(rank))).collect(),
                    gives: to_others(rank, size, part),
                    combine: Combine::Sum,
                }
            }
            Self::AllReduce => Decomposition {
                dim: 0,
                takes: (0..size).map(|from| take(from, 0..shape[0])).collect(),
                gives: to_others(rank, size, |_| 0..shape[0]),
                combine: Combine::Sum,
            },
            Self::Exchange { dim, plan } => forth(*dim, plan, rank),
            Self::ExchangeReverse { dim, plan } => back(*dim, plan, rank),
            Self::Broadcast { root } => Decomposition {
                dim: 0,
                takes: vec![take(*root, 0..shape[0])],
                gives: if *root == rank {
                    to_others(rank, size, |_| 0..shape[0])
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
                gives: vec![give(*root, 0..shape[0])],
                combine: Combine::Zeros,
            },
        }
    }
}

fn take(source: usize, range: Range<usize>) -> Piece {
    Piece { source, range }
}

fn give(destination: usize, range: Range<usize>) -> Given {
    Given { destination, range }
}

fn to_others(rank: usize, size: usize, rows: impl Fn(usize) -> Range<usize>) -> Vec<Given> {
    let others = (0..size).filter(|other| *other != rank);
    others.map(|other| give(other, rows(other))).collect()
}

/// A planned exchange.
fn forth(dim: usize, plan: &ExchangePlan, rank: usize) -> Decomposition {
    let sends = plan.sends().iter().filter(|sent| sent.destination != rank);
    Decomposition {
        dim,
        takes: plan.pieces().to_vec(),
        gives: sends
            .map(|sent| give(sent.destination, sent.range.clone()))
            .collect(),
        combine: Combine::Concat,
    }
}

/// Its adjoint: what was taken goes back to where it came from.
fn back(dim: usize, plan: &ExchangePlan, rank: usize) -> Decomposition {
    let mut at = 0;
    let mut gives = Vec::new();
    for piece in plan.pieces() {
        let rows = at..at + piece.range.len();
        at = rows.end;
        if piece.source != rank {
            gives.push(give(piece.source, rows));
        }
    }
    let sends = plan.sends().iter();
    let takes = sends
        .clone()
        .map(|sent| take(sent.destination, sent.at..sent.at + sent.range.len()));
    Decomposition {
        dim,
        takes: takes.collect(),
        gives,
        combine: Combine::SumInto(
            sends.map(|sent| sent.range.clone()).collect(),
            plan.input_len(),
        ),
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
                let parts: Vec<_> = places.iter().cloned().zip(taken).collect();
                Payload::sum_rows(&parts, dim, *num_rows, like)
            }
            Self::Zeros => like.zeros_like(0, like.shape()[0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Rows that travel, by sender and receiver, and in the receiver's order.
    fn check(of: impl Fn(usize) -> Collective, shapes: &[[usize; 2]]) {
        let size = shapes.len();
        let parts: Vec<Decomposition> = (0..size)
            .map(|rank| of(rank).decompose(&shapes[rank], rank, size))
            .collect();
        for from in 0..size {
            for to in (0..size).filter(|to| *to != from) {
                let gives = parts[from]
                    .gives
                    .iter()
                    .filter(|give| give.destination == to);
                let takes = parts[to].takes.iter().filter(|take| take.source == from);
                let given: Vec<_> = gives.map(|give| give.range.clone()).collect();
                let taken: Vec<_> = takes.map(|take| take.range.clone()).collect();
                assert_eq!(given, taken, "{:?}: from {from} to {to}", of(from));
            }
        }
    }

    #[test]
    fn what_one_rank_gives_is_what_the_other_takes() {
        let sizes: Arc<[usize]> = [2, 0, 3].into();
        let gather = Collective::AllGather {
            dim: 0,
            sizes: sizes.clone(),
        };
        check(|_| gather.clone(), &[[2, 4], [0, 4], [3, 4]]);
        check(|_| gather.adjoint(), &[[5, 4]; 3]);
        check(|_| Collective::AllReduce, &[[5, 4]; 3]);
        for root in 0..3 {
            check(|_| Collective::Broadcast { root }, &[[5, 4]; 3]);
            check(|_| Collective::Reduce { root }, &[[5, 4]; 3]);
        }
        // Rows in another order than their source's, twice to one rank, and to itself.
        let pieces = [
            vec![take(1, 1..2), take(0, 0..2), take(1, 0..2)],
            vec![take(2, 0..1), take(0, 1..2), take(2, 0..1)],
            vec![],
        ];
        let exchange = |rank| Collective::Exchange {
            dim: 0,
            plan: ExchangePlan::new(&[2, 2, 1], &pieces, rank)
                .expect("pieces lie within their sources")
                .into(),
        };
        check(exchange, &[[2, 4], [2, 4], [1, 4]]);
        check(|rank| exchange(rank).adjoint(), &[[5, 4], [3, 4], [0, 4]]);
    }
}
