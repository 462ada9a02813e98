//! Random collectives, what they mean on host arrays, and how they are called on tensors.

use std::sync::Arc;

use burn::tensor::{Numeric, Tensor};
use burn_cp::{
    collectives::{
        self, Call, Collective, CollectiveBackend, CollectiveElement, ExchangePlan, Piece,
    },
    comm::ProcessGroup,
};
use burn_cp_tests::{Host, Random};

/// Kinds of collectives; the last two are reached through adjoints only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    AllGather,
    AllGatherSized,
    ReduceScatter,
    AllReduce,
    AllToAllV,
    Exchange,
    Broadcast,
    ExchangeReverse,
    Reduce,
}

pub(crate) const KINDS: [Kind; 9] = [
    Kind::AllGather,
    Kind::AllGatherSized,
    Kind::ReduceScatter,
    Kind::AllReduce,
    Kind::AllToAllV,
    Kind::Exchange,
    Kind::Broadcast,
    Kind::ExchangeReverse,
    Kind::Reduce,
];

/// Kinds that only move values, so that integers and booleans can take part.
pub(crate) const MOVING: [Kind; 5] = [
    Kind::AllGather,
    Kind::AllGatherSized,
    Kind::AllToAllV,
    Kind::Exchange,
    Kind::Broadcast,
];

/// A collective with all its arguments, of every rank.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    world_size: usize,
    dim: usize,
    root: usize,
    /// Sizes of the other dims; the one of `dim` is not used.
    base: [usize; 3],
    /// Rows of each rank.
    sizes: Vec<usize>,
    /// `matrix[s][d]`: rows that rank `s` sends to rank `d`.
    matrix: Vec<Vec<usize>>,
    pieces: Vec<Vec<Piece>>,
}

impl Operation {
    pub(crate) fn random(kind: Kind, world_size: usize, random: &mut Random) -> Self {
        let base = [random.int(1..=3), random.int(1..=3), random.int(1..=3)];
        let sizes: Vec<usize> = (0..world_size).map(|_| random.int(0..=4)).collect();
        let matrix = (0..world_size)
            .map(|_| (0..world_size).map(|_| random.int(0..=3)).collect())
            .collect();
        // A row goes to some ranks or to none, also twice to one rank.
        let pieces = (0..world_size)
            .map(|_| {
                let piece = |random: &mut Random| {
                    let source = random.int(0..=world_size - 1);
                    let start = random.int(0..=sizes[source]);
                    Piece {
                        source,
                        range: start..random.int(start..=sizes[source]),
                    }
                };
                (0..random.int(0..=4)).map(|_| piece(random)).collect()
            })
            .collect();
        let (dim, root) = (random.int(0..=2), random.int(0..=world_size - 1));
        Self {
            kind,
            world_size,
            dim,
            root,
            base,
            sizes,
            matrix,
            pieces,
        }
    }

    fn shape(&self, rows: usize) -> [usize; 3] {
        let mut shape = self.base;
        shape[self.dim] = rows;
        shape
    }

    fn plan(&self, rank: usize) -> Arc<ExchangePlan> {
        Arc::new(
            ExchangePlan::new(&self.sizes, &self.pieces, rank)
                .expect("pieces lie within their sources"),
        )
    }

    pub(crate) fn input_shape(&self, rank: usize) -> [usize; 3] {
        match self.kind {
            Kind::AllGather | Kind::AllGatherSized | Kind::Exchange => self.shape(self.sizes[rank]),
            Kind::ReduceScatter => self.shape(self.sizes.iter().sum()),
            Kind::AllReduce | Kind::Broadcast | Kind::Reduce => self.base,
            Kind::AllToAllV => self.shape(self.matrix[rank].iter().sum()),
            Kind::ExchangeReverse => self.shape(
                self.pieces[rank]
                    .iter()
                    .map(|piece| piece.range.len())
                    .sum(),
            ),
        }
    }

    pub(crate) fn inputs(&self, mut values: impl FnMut(usize) -> Vec<f64>) -> Vec<Host> {
        let input = |rank| {
            let shape = self.input_shape(rank);
            Host {
                shape,
                values: values(shape.iter().product()),
            }
        };
        (0..self.world_size).map(input).collect()
    }

    /// What every rank must get.
    pub(crate) fn on_host(&self, inputs: &[Host]) -> Vec<Host> {
        (0..self.world_size)
            .map(|rank| self.rank_on_host(inputs, rank))
            .collect()
    }

    fn rank_on_host(&self, inputs: &[Host], rank: usize) -> Host {
        let dim = self.dim;
        match self.kind {
            Kind::AllGather | Kind::AllGatherSized => Host::cat(inputs, dim),
            Kind::ReduceScatter => {
                let start = self.sizes[..rank].iter().sum();
                Host::sum(inputs).rows(dim, &(start..start + self.sizes[rank]))
            }
            Kind::AllReduce => Host::sum(inputs),
            Kind::AllToAllV => {
                let part = |source: usize| {
                    let start = self.matrix[source][..rank].iter().sum();
                    inputs[source].rows(dim, &(start..start + self.matrix[source][rank]))
                };
                Host::cat(&(0..self.world_size).map(part).collect::<Vec<_>>(), dim)
            }
            Kind::Exchange => {
                let mut parts: Vec<Host> = self.pieces[rank]
                    .iter()
                    .map(|piece| inputs[piece.source].rows(dim, &piece.range))
                    .collect();
                parts.push(Host::zeros(self.shape(0)));
                Host::cat(&parts, dim)
            }
            Kind::Broadcast => inputs[self.root].clone(),
            Kind::ExchangeReverse => self.reverse_on_host(inputs, rank),
            Kind::Reduce if rank == self.root => Host::sum(inputs),
            Kind::Reduce => Host::zeros(self.base),
        }
    }

    fn reverse_on_host(&self, inputs: &[Host], rank: usize) -> Host {
        let dim = self.dim;
        let mut total = Host::zeros(self.shape(self.sizes[rank]));
        for (taker, pieces) in self.pieces.iter().enumerate() {
            let mut at = 0;
            for piece in pieces {
                if piece.source == rank {
                    total = Host::from_fn(total.shape, |index| {
                        let mut from = index;
                        let inside = piece.range.contains(&index[dim]);
                        from[dim] = if inside {
                            at + index[dim] - piece.range.start
                        } else {
                            0
                        };
                        total.at(index) + if inside { inputs[taker].at(from) } else { 0.0 }
                    });
                }
                at += piece.range.len();
            }
        }
        total
    }

    /// Calls it by the public function, for kinds that move values only.
    pub(crate) fn moving<B, K>(
        &self,
        tensor: Tensor<B, 3, K>,
        group: &ProcessGroup,
    ) -> Tensor<B, 3, K>
    where
        B: CollectiveBackend,
        K: CollectiveElement<B>,
    {
        let rank = group.rank();
        match self.kind {
            Kind::AllGather => collectives::all_gather(tensor, self.dim, group),
            Kind::AllGatherSized => {
                collectives::all_gather_sized(tensor, self.dim, &self.sizes, group)
            }
            Kind::AllToAllV => {
                collectives::all_to_all_v(tensor, self.dim, &self.matrix[rank], group)
            }
            Kind::Exchange => collectives::exchange(tensor, self.dim, &self.plan(rank), group),
            Kind::Broadcast => collectives::broadcast(tensor, self.root, group),
            Kind::ExchangeReverse => {
                let plan = self.plan(rank);
                by_backend(
                    tensor,
                    &Collective::ExchangeReverse {
                        dim: self.dim,
                        plan,
                    },
                    group,
                )
            }
            Kind::Reduce => by_backend(tensor, &Collective::Reduce { root: self.root }, group),
            Kind::ReduceScatter | Kind::AllReduce => panic!("{:?} adds", self.kind),
        }
    }

    /// Calls it by the public function, where there is one.
    pub(crate) fn on_tensor<B, K>(
        &self,
        tensor: Tensor<B, 3, K>,
        group: &ProcessGroup,
    ) -> Tensor<B, 3, K>
    where
        B: CollectiveBackend,
        K: CollectiveElement<B> + Numeric<B>,
    {
        match self.kind {
            Kind::ReduceScatter => {
                collectives::reduce_scatter(tensor, self.dim, &self.sizes, group)
            }
            Kind::AllReduce => collectives::all_reduce(tensor, group),
            _ => self.moving(tensor, group),
        }
    }
}

fn by_backend<B: CollectiveBackend, K: CollectiveElement<B>>(
    tensor: Tensor<B, 3, K>,
    op: &Collective,
    group: &ProcessGroup,
) -> Tensor<B, 3, K> {
    K::from_payload(B::collective(
        K::into_payload(tensor),
        op,
        group,
        Call::forward(group, "test"),
    ))
}
