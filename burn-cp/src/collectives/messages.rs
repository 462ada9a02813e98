//! Collectives among ranks that are processes: the rows that a rank takes travel to it as bytes, and it computes its own result
//! from them, with the arithmetic of threads.
//!
//! Only pairs of ranks with rows to exchange send anything, one message each, and nothing is padded.

use std::sync::Arc;

use burn::tensor::{Shape, TensorData, backend::Backend};

use super::{
    Call, Collective, Payload, Pending,
    host_read::read_to_host,
    wire::{Later, Wire},
};
use crate::comm::{CommError, ProcessGroup};

/// Sums of at most so many bytes are not cut up: each rank gets all parts at once.
const SMALL: usize = 8 << 10;

/// Starts a collective among processes, by messages from host memory to host memory.
///
/// Every rank of `group` must call it. What the ranks call is compared on the control plane before anything is sent, for which they
/// wait for each other; the messages then travel by themselves. A failure ends the rank with a typed panic.
pub fn start_by_messages<B: Backend>(
    payload: Payload<B>,
    op: &Collective,
    group: &ProcessGroup,
    call: Call,
) -> Pending<B> {
    let signature = op.signature(&payload, &call);
    let what = format!("{}[{}]", signature.kind, signature.label);
    let start = || {
        group.rendezvous(call.number, signature)?;
        let mut wire = HostWire {
            group,
            number: call.number,
            op: &what,
        };
        carry_out(payload, op, (group.rank(), group.size()), &mut wire)
    };
    let later = start().unwrap_or_else(|error: CommError| error.raise());
    Pending::new(move || later().unwrap_or_else(|error| error.raise()))
}

/// Bytes in host memory.
struct HostWire<'a> {
    group: &'a ProcessGroup,
    number: u64,
    op: &'a str,
}

impl<B: Backend> Wire<B> for HostWire<'_> {
    fn swap(
        &mut self,
        sends: Vec<(Vec<usize>, Payload<B>)>,
        receives: Vec<(usize, Shape)>,
        like: &Payload<B>,
    ) -> Result<Later<Vec<Payload<B>>>, CommError> {
        let mut messages = Vec::new();
        for (destinations, rows) in sends {
            // What goes to several ranks is read once.
            let bytes = Arc::new(bytes_of(rows));
            messages.extend(destinations.into_iter().map(|to| (to, bytes.clone())));
        }
        let size = like.dtype().size();
        let lens: Vec<(usize, usize)> = (receives.iter())
            .map(|(source, shape)| (*source, shape.num_elements() * size))
            .collect();
        let transfer = self.group.transfer(self.number, self.op, messages, &lens)?;
        let like = like.clone();
        Ok(Box::new(move || {
            let pairs = receives.into_iter().zip(transfer.finish()?);
            Ok(pairs
                .map(|((_, shape), bytes)| from_bytes(&like, shape, bytes))
                .collect())
        }))
    }
}

fn carry_out<B: Backend>(
    payload: Payload<B>,
    op: &Collective,
    (rank, size): (usize, usize),
    wire: &mut dyn Wire<B>,
) -> Result<Later<Payload<B>>, CommError> {
    let shape = payload.shape();
    let len = shape.num_elements();
    if *op != Collective::AllReduce || size == 2 || len * payload.dtype().size() <= SMALL {
        let work = op.decompose(&shape, rank, size);
        return work.start(payload, rank, wire);
    }
    // Every rank adds up a part of the elements: each travels twice instead of once per rank. The sums are the same.
    let sizes: Arc<[usize]> = (0..size)
        .map(|part| len / size + usize::from(part < len % size))
        .collect();
    let scatter = Collective::ReduceScatter {
        dim: 0,
        sizes: sizes.clone(),
    };
    let flat = payload.reshape(&[len]);
    let part = scatter
        .decompose(&[len], rank, size)
        .start(flat, rank, wire)?()?;
    let gather = Collective::AllGather { dim: 0, sizes };
    let work = gather.decompose(&part.shape(), rank, size);
    let all = work.start(part, rank, wire)?;
    Ok(Box::new(move || Ok(all()?.reshape(&shape))))
}

/// The elements of a tensor in row-major order.
fn bytes_of<B: Backend>(payload: Payload<B>) -> Vec<u8> {
    read_to_host(payload).as_bytes().to_vec()
}

/// A tensor like `like` of another shape, from its bytes.
fn from_bytes<B: Backend>(like: &Payload<B>, shape: Shape, bytes: Vec<u8>) -> Payload<B> {
    like.with_values(TensorData::from_bytes_vec(bytes, shape, like.dtype()))
}
