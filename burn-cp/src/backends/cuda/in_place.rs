//! Exchanges whose rows are runs of memory: they go from the input straight to their place in the result.

use std::ops::Range;

use burn::tensor::TensorMetadata;
use burn_cubecl::kernel::into_contiguous;

use super::{Plain, Run, empty, tensor_of, with_tensor};
use crate::{
    collectives::{Collective, Combine, Decomposition, Payload},
    comm::CommError,
};

/// So many runs at most go from rank to rank as messages of their own; more are put together first.
const MOST_RUNS: usize = 8;

impl Collective {
    /// Whether rows need no copy before or behind the message. The same answer on every rank.
    pub(super) fn moves_runs(&self) -> bool {
        match self {
            Self::AllGather { dim, .. } => *dim == 0,
            Self::Exchange { dim, plan } => *dim == 0 && plan.most_runs() <= MOST_RUNS,
            _ => false,
        }
    }
}

impl Run<'_> {
    /// Moves rows of dim 0, which have elements, without copies between; `work` puts what it takes one behind the other.
    pub(super) fn in_place(
        &self,
        payload: Payload<Plain>,
        work: &Decomposition,
    ) -> Result<Payload<Plain>, CommError> {
        debug_assert!(work.dim == 0 && work.combine == Combine::Concat);
        let from = into_contiguous(tensor_of(&payload).clone());
        let mut shape = from.shape();
        let row = shape[1..].iter().product::<usize>() * from.dtype.size();
        shape[0] = work.takes.iter().map(|piece| piece.range.len()).sum();
        let to = match payload.zeros_like(0, 0) {
            nothing if shape[0] == 0 => tensor_of(&nothing).clone(),
            _ => empty(&from, shape),
        };
        let rank = self.group.rank();
        let at = |base: u64, num_rows: usize| base + (num_rows * row) as u64;
        let len = |range: &Range<usize>| range.len() * row;
        let tensors = [&from, &to];
        // Nothing to read from, or to write to: the device has no buffer for it.
        let named: Vec<_> = (tensors.into_iter())
            .filter(|tensor| tensor.shape().num_elements() > 0)
            .collect();
        if named.is_empty() {
            return Ok(with_tensor(&payload, to));
        }
        self.start(&named, |queue, addresses| {
            let input = addresses.first().copied().unwrap_or_default();
            let output = addresses.last().copied().unwrap_or_default();
            let places = work.takes.iter().scan(0, |end, piece| {
                let start = *end;
                *end += piece.range.len();
                Some((start, piece))
            });
            let places = places.filter(|(_, piece)| !piece.range.is_empty());
            queue.grouped(|| {
                for given in work.gives.iter().filter(|given| !given.range.is_empty()) {
                    let address = at(input, given.range.start);
                    queue.send(given.destination, address, len(&given.range))?;
                }
                for (start, piece) in places.clone().filter(|(_, piece)| piece.source != rank) {
                    queue.receive(piece.source, at(output, start), len(&piece.range))?;
                }
                Ok(())
            })?;
            for (start, piece) in places.filter(|(_, piece)| piece.source == rank) {
                let address = at(input, piece.range.start);
                queue.copy(address, at(output, start), len(&piece.range))?;
            }
            Ok(())
        })?;
        Ok(with_tensor(&payload, to))
    }
}
