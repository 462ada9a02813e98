//! Collectives among ranks that are processes: the rows that a rank takes travel to it as bytes, and it computes its own result
//! from them, with the arithmetic of threads.
//!
//! Only pairs of ranks with rows to exchange send anything, one message each, and nothing is padded.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use burn::tensor::{DType, Shape, TensorData, backend::Backend, read_sync};

use super::{Call, Collective, Payload, decomposition::Decomposition};
use crate::comm::{CommError, ProcessGroup};

/// Sums of at most so many bytes are not cut up: each rank gets all parts at once.
const SMALL: usize = 8 << 10;

/// Runs a collective among processes, by messages from host memory to host memory.
///
/// Every rank of `group` must call it. What the ranks call is compared on the control plane before anything is sent. A failure
/// ends the rank with a typed panic.
pub fn run_by_messages<B: Backend>(
    payload: Payload<B>,
    op: &Collective,
    group: &ProcessGroup,
    call: Call,
) -> Payload<B> {
    let signature = op.signature(&payload, &call);
    let what = format!("{}[{}]", signature.kind, signature.label);
    let run = || {
        group.rendezvous(call.number, signature)?;
        let mut wire = |sends, receives: &[(usize, usize)]| {
            group.transfer(call.number, &what, sends, receives)
        };
        carry_out(payload, op, (group.rank(), group.size()), &mut wire)
    };
    run().unwrap_or_else(|error: CommError| error.raise())
}

/// Moves bytes: messages to send, and how many bytes to receive from whom; what was received, in order.
type Wire<'a> = dyn FnMut(Vec<(usize, Arc<Vec<u8>>)>, &[(usize, usize)]) -> Result<Vec<Vec<u8>>, CommError>
    + 'a;

fn carry_out<B: Backend>(
    payload: Payload<B>,
    op: &Collective,
    (rank, size): (usize, usize),
    wire: &mut Wire<'_>,
) -> Result<Payload<B>, CommError> {
    let shape = payload.shape();
    let len = shape.num_elements();
    if *op != Collective::AllReduce || size == 2 || len * payload.dtype().size() <= SMALL {
        let work = op.decompose(&shape, rank, size);
        return exchange(payload, &work, rank, wire);
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
    let part = exchange(flat, &scatter.decompose(&[len], rank, size), rank, wire)?;
    let gather = Collective::AllGather { dim: 0, sizes };
    let work = gather.decompose(&part.shape(), rank, size);
    Ok(exchange(part, &work, rank, wire)?.reshape(&shape))
}

/// Rows of one dim, range by range.
type Ranges = Vec<Range<usize>>;

/// Sends what this rank gives, receives what it takes, and combines it.
fn exchange<B: Backend>(
    payload: Payload<B>,
    work: &Decomposition,
    rank: usize,
    wire: &mut Wire<'_>,
) -> Result<Payload<B>, CommError> {
    let (shape, dtype) = (payload.shape(), payload.dtype());
    let row_len = row_bytes(&shape, work.dim, dtype);
    let mut gives: BTreeMap<usize, Ranges> = BTreeMap::new();
    for given in work.gives.iter().filter(|given| !given.range.is_empty()) {
        gives
            .entry(given.destination)
            .or_default()
            .push(given.range.clone());
    }
    let mut takes: BTreeMap<usize, usize> = BTreeMap::new();
    for piece in work.takes.iter().filter(|piece| piece.source != rank) {
        *takes.entry(piece.source).or_default() += piece.range.len() * row_len;
    }
    takes.retain(|_, len| *len > 0);
    let mut sends: Vec<(usize, Arc<Vec<u8>>)> = Vec::new();
    let mut last: Option<(Ranges, Arc<Vec<u8>>)> = None;
    for (destination, ranges) in gives.into_iter().filter(|_| row_len > 0) {
        // What goes to several ranks is read once.
        let bytes = match &last {
            Some((before, bytes)) if *before == ranges => bytes.clone(),
            _ => Arc::new(bytes_of(&payload, work.dim, &ranges)),
        };
        last = Some((ranges, bytes.clone()));
        sends.push((destination, bytes));
    }
    let receives: Vec<(usize, usize)> = takes.into_iter().collect();
    let received = wire(sends, &receives)?;
    // The rows of each source, and how many of them have been taken so far.
    let mut sources: BTreeMap<usize, (Payload<B>, usize)> = (receives.iter().zip(received))
        .map(|(&(source, len), bytes)| {
            let rows = with_rows(&payload, work.dim, len / row_len, bytes);
            (source, (rows, 0))
        })
        .collect();
    let taken = work.takes.iter().map(|piece| {
        if piece.source == rank {
            return payload.rows(work.dim, &piece.range);
        }
        match sources.get_mut(&piece.source) {
            Some((rows, start)) => {
                let range = *start..*start + piece.range.len();
                *start = range.end;
                rows.rows(work.dim, &range)
            }
            // Nothing was to be sent.
            None => payload.zeros_like(work.dim, piece.range.len()),
        }
    });
    Ok(work.combine.apply(taken, work.dim, &payload))
}

fn row_bytes(shape: &Shape, dim: usize, dtype: DType) -> usize {
    let others = shape.iter().enumerate().filter(|(d, _)| *d != dim);
    others.map(|(_, size)| *size).product::<usize>() * dtype.size()
}

/// Rows of a tensor in row-major order, range by range.
fn bytes_of<B: Backend>(payload: &Payload<B>, dim: usize, ranges: &[Range<usize>]) -> Vec<u8> {
    let rows = ranges.iter().map(|range| payload.rows(dim, range));
    let data = match Payload::concat(rows.collect(), dim, payload) {
        Payload::Float(tensor) => read_sync(B::float_into_data(tensor)),
        Payload::Int(tensor) => read_sync(B::int_into_data(tensor)),
        Payload::Bool(tensor) => read_sync(B::bool_into_data(tensor)),
    };
    // As Burn's own `into_data`.
    let data =
        data.unwrap_or_else(|error| panic!("cannot read a tensor that is to be sent: {error}"));
    data.as_bytes().to_vec()
}

/// A tensor like `like` with other rows, from their bytes.
fn with_rows<B: Backend>(
    like: &Payload<B>,
    dim: usize,
    num_rows: usize,
    bytes: Vec<u8>,
) -> Payload<B> {
    let mut shape = like.shape();
    shape[dim] = num_rows;
    let data = TensorData::from_bytes_vec(bytes, shape, like.dtype());
    match like {
        Payload::Float(tensor) => {
            Payload::Float(B::float_from_data(data, &B::float_device(tensor)))
        }
        Payload::Int(tensor) => Payload::Int(B::int_from_data(data, &B::int_device(tensor))),
        Payload::Bool(tensor) => Payload::Bool(B::bool_from_data(data, &B::bool_device(tensor))),
    }
}
