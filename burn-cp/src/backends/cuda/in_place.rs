//! Exchanges whose rows are runs of memory: they go from the input straight to their place in the result.

use burn::tensor::TensorMetadata;

use super::{Plain, Run, contiguous, empty, tensor_of, with_tensor};
use crate::{
    collectives::{Collective, Combine, Decomposition, Later, Payload},
    comm::{CommError, Move, Moves},
};

/// So many runs at most go from rank to rank as messages of their own; more are put together first.
const MOST_RUNS: usize = 8;

/// Bytes from one rank to another from which on an operation is large. NCCL moves fewer sooner, with one call. In tests all are: theirs are
/// small, and NCCL moves the rows of processes.
const SMALLEST_LARGE: usize = if cfg!(test) { 1 } else { 16 << 20 };

impl Collective {
    /// The most elements that one rank takes from another at once, of a payload of this shape. The same answer on every rank.
    pub(super) fn largest_message(&self, shape: &[usize]) -> usize {
        let (dim, rows) = match self {
            Self::AllGather { dim, sizes } | Self::ReduceScatter { dim, sizes } => {
                (*dim, sizes.iter().copied().max().unwrap_or(0))
            }
            Self::Exchange { dim, plan } | Self::ExchangeReverse { dim, plan } => {
                (*dim, plan.most_rows())
            }
            Self::AllReduce | Self::Broadcast { .. } | Self::Reduce { .. } => {
                (0, shape.first().copied().unwrap_or(1))
            }
        };
        let others = shape[..dim].iter().chain(shape.iter().skip(dim + 1));
        rows * others.product::<usize>()
    }

    /// Whether rows need no copy before or behind the message. The same answer on every rank.
    pub(super) fn moves_runs(&self) -> bool {
        match self {
            Self::AllGather { dim, .. } => *dim == 0,
            Self::Exchange { dim, plan } => *dim == 0 && plan.most_runs() <= MOST_RUNS,
            _ => false,
        }
    }
}

/// Whether an operation moves so much from rank to rank that copies are faster than NCCL, and that it is worth to let it begin before later
/// kernels do. The same answer on every rank.
pub(super) fn is_large(op: &Collective, payload: &Payload<Plain>) -> bool {
    op.largest_message(&payload.shape()) * payload.dtype().size() >= SMALLEST_LARGE
}

impl Run<'_> {
    /// Moves rows of dim 0, which have elements, without copies between; `work` puts what it takes one behind the other.
    pub(super) fn in_place(
        &self,
        payload: Payload<Plain>,
        work: &Decomposition,
    ) -> Result<Later<Payload<Plain>>, CommError> {
        debug_assert!(work.dim == 0 && work.combine == Combine::Concat);
        let from = contiguous(&payload);
        let mut shape = from.shape();
        let row = shape[1..].iter().product::<usize>() * from.dtype.size();
        shape[0] = work.takes.iter().map(|piece| piece.range.len()).sum();
        let to = match payload.zeros_like(0, 0) {
            nothing if shape[0] == 0 => tensor_of(&nothing).clone(),
            _ => empty(&from, shape),
        };
        let rank = self.group.rank();
        // In bytes.
        let run = move |start: usize, len: usize| ((start * row) as u64, len * row);
        let at = |peer, (address, num_bytes)| Move {
            peer,
            address,
            num_bytes,
        };
        // Addresses count from the start of the input, and of the output.
        let mut moves = Moves::default();
        for given in (work.gives.iter()).filter(|given| !given.range.is_empty()) {
            let bytes = run(given.range.start, given.range.len());
            moves.gives.push(at(given.destination, bytes));
        }
        let mut end = 0;
        for piece in &work.takes {
            let bytes = run(end, piece.range.len());
            end += piece.range.len();
            if bytes.1 == 0 {
                continue;
            }
            if piece.source == rank {
                // A rank's own rows are copied while those of others are on their way.
                moves
                    .gives
                    .push(at(rank, (run(piece.range.start, 0).0, bytes.1)));
            }
            moves.takes.push(at(piece.source, bytes));
        }
        // Nothing to read from, or to write to: the device has no buffer for it.
        let named: Vec<_> = [&from, &to]
            .into_iter()
            .filter(|tensor| tensor.shape().num_elements() > 0)
            .cloned()
            .collect();
        if named.is_empty() {
            return Ok(Box::new(move || Ok(with_tensor(&payload, to))));
        }
        let on_its_way = self.exchange(named, move |addresses| {
            let input = addresses.first().copied().unwrap_or_default();
            let output = addresses.last().copied().unwrap_or_default();
            moves.gives.iter_mut().for_each(|one| one.address += input);
            moves.takes.iter_mut().for_each(|one| one.address += output);
            moves
        });
        Ok(Box::new(move || {
            on_its_way.arrive();
            Ok(with_tensor(&payload, to))
        }))
    }
}
