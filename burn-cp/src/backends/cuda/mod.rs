//! CUDA: ranks that have a GPU each exchange through NCCL, from device to device and without waiting for either. Ranks as threads that
//! share a GPU exchange through the host, since NCCL refuses them.

use burn::tensor::{DType, Shape, TensorMetadata};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::cuda::CudaRuntime;

use super::CollectiveRuntime;
use crate::{
    collectives::{Call, Collective, Later, Payload, Pending, Wire},
    comm::{
        Block, CommError, Communicator, Element, Move, Moves, NcclError, Observer, ProcessGroup,
        Queue,
    },
};

mod device;
mod in_place;
mod join;
mod on_its_way;
#[cfg(test)]
mod tests;

type Plain = CubeBackend<CudaRuntime, f32, i32, u8>;
type Tensor = CubeTensor<CudaRuntime>;

impl CollectiveRuntime for CudaRuntime {
    fn own_collective(
        payload: Payload<Plain>,
        op: &Collective,
        group: &ProcessGroup,
        call: &Call,
    ) -> Result<Pending<Plain>, Payload<Plain>> {
        let Some(observer) = group.observer() else {
            return Err(payload);
        };
        let ordinal = tensor_of(&payload).device.index;
        let joined = join::joined(group, &observer, ordinal);
        let Some(communicator) = &*joined else {
            return Err(payload);
        };
        let run = Run {
            group,
            observer: Some(observer),
            communicator,
            large: in_place::is_large(op, &payload.shape(), payload.dtype()),
            number: call.number,
            what: call.label,
        };
        (run.check_device(ordinal)
            .and_then(|()| run.check_communicator()))
        .unwrap_or_else(|error| error.raise());
        if let Some(observer) = &run.observer {
            observer.record(call.number, op.signature(&payload, call));
            // Perhaps that ranks call different things, whose sizes do not fit.
            if let Some(error) = observer.failure() {
                error.raise();
            }
        }
        let started = run.start_collective(payload, op);
        let later = started.unwrap_or_else(|error| error.raise());
        Ok(Pending::new(move || {
            later().unwrap_or_else(|error| error.raise())
        }))
    }

    fn moves_any_rows(
        (shape, dtype): (&[usize], DType),
        device: &Self::Device,
        op: &Collective,
        group: &ProcessGroup,
    ) -> bool {
        let Some(observer) = group.observer() else {
            return false;
        };
        let joined = join::joined(group, &observer, device.index);
        let copies = (joined.as_ref().as_ref()).is_some_and(Communicator::is_direct);
        copies && in_place::is_large(op, shape, dtype) && op.moves_blocks(true)
    }
}

fn tensor_of(payload: &Payload<Plain>) -> &Tensor {
    match payload {
        Payload::Float(tensor) | Payload::Int(tensor) | Payload::Bool(tensor) => tensor,
    }
}

/// The same kind of payload with another tensor.
fn with_tensor(like: &Payload<Plain>, tensor: Tensor) -> Payload<Plain> {
    match like {
        Payload::Float(_) => Payload::Float(tensor),
        Payload::Int(_) => Payload::Int(tensor),
        Payload::Bool(_) => Payload::Bool(tensor),
    }
}

/// One collective.
struct Run<'a> {
    group: &'a ProcessGroup,
    /// `None` in a group of one.
    observer: Option<Observer>,
    communicator: &'a Communicator,
    /// Whether much is moved.
    large: bool,
    number: u64,
    what: &'a str,
}

impl Run<'_> {
    fn check_device(&self, ordinal: usize) -> Result<(), CommError> {
        let expected = self.communicator.ordinal();
        if ordinal == expected {
            return Ok(());
        }
        Err(CommError::Transport {
            group: self.group.name().to_owned(),
            what: self.what.to_owned(),
            reason: format!(
                "expected a tensor on GPU {expected}, which the group was joined with, got GPU {ordinal}"
            ),
        })
    }

    /// Whether rows are copied from GPU to GPU.
    fn copies(&self) -> bool {
        self.large && self.communicator.is_direct()
    }

    /// What has gone wrong since, where no rank waited for it.
    fn check_communicator(&self) -> Result<(), CommError> {
        (self.communicator.check()).map_err(|error| error.of(self.observer.as_ref(), self.what))
    }

    #[cfg(test)]
    fn collective(
        &self,
        payload: Payload<Plain>,
        op: &Collective,
    ) -> Result<Payload<Plain>, CommError> {
        self.check_communicator()?;
        self.start_collective(payload, op)?()
    }

    fn start_collective(
        &self,
        payload: Payload<Plain>,
        op: &Collective,
    ) -> Result<Later<Payload<Plain>>, CommError> {
        let shape = payload.shape();
        let dtype = payload.dtype();
        match op {
            Collective::AllGather { dim: 0, sizes }
                if even(sizes) && shape.num_elements() > 0 && !self.copies() =>
            {
                let mut all = shape.clone();
                all[0] = sizes.iter().sum();
                let num_bytes = shape.num_elements() * dtype.size();
                self.whole(payload, all, move |queue, from, to| {
                    queue.all_gather(from, to, num_bytes)
                })
            }
            Collective::AllReduce if shape.num_elements() > 0 => {
                let wide = payload.widened();
                let Some(element) = element(wide.dtype()) else {
                    return self.by_messages(wide.narrowed(dtype), op);
                };
                let len = shape.num_elements();
                let sum = self.whole(wide, shape, move |queue, from, to| {
                    queue.all_reduce(from, to, len, element)
                })?;
                Ok(Box::new(move || Ok(sum()?.narrowed(dtype))))
            }
            // The sum of two is the same in any order, and rounded once in any dtype.
            Collective::ReduceScatter { dim: 0, sizes }
                if sizes.len() == 2 && even(sizes) && shape.num_elements() > 0 =>
            {
                let Some(element) = element(dtype) else {
                    return self.by_messages(payload, op);
                };
                let mut part = shape;
                part[0] = sizes[0];
                let len = part.num_elements();
                self.whole(payload, part, move |queue, from, to| {
                    queue.reduce_scatter(from, to, len, element)
                })
            }
            Collective::Broadcast { root } if shape.num_elements() > 0 => {
                let (num_bytes, root) = (shape.num_elements() * dtype.size(), *root);
                self.whole(payload, shape, move |queue, from, to| {
                    queue.broadcast(from, to, num_bytes, root)
                })
            }
            op if op.moves_blocks(self.copies()) => {
                let work = op.decompose(&shape, self.group.rank(), self.group.size());
                let others = shape[..work.dim].iter().chain(&shape[work.dim + 1..]);
                if others.product::<usize>() == 0 {
                    return self.by_messages(payload, op);
                }
                self.in_place(payload, &work)
            }
            // What is added up here is so in the order of ranks, which NCCL does not promise.
            _ => self.by_messages(payload, op),
        }
    }

    /// One of NCCL's own collectives on whole tensors.
    fn whole(
        &self,
        payload: Payload<Plain>,
        shape: Shape,
        enqueue: impl FnOnce(&Queue<'_>, u64, u64) -> Result<(), NcclError> + Send + 'static,
    ) -> Result<Later<Payload<Plain>>, CommError> {
        let from = contiguous(&payload);
        let to = empty(&from, shape);
        let on_its_way = self.start(vec![from, to.clone()], move |queue, addresses| {
            enqueue(queue, addresses[0], addresses[1])
        });
        Ok(Box::new(move || {
            on_its_way.arrive();
            Ok(with_tensor(&payload, to))
        }))
    }

    fn by_messages(
        &self,
        payload: Payload<Plain>,
        op: &Collective,
    ) -> Result<Later<Payload<Plain>>, CommError> {
        let work = op.decompose(&payload.shape(), self.group.rank(), self.group.size());
        let mut wire = self;
        work.start(payload, self.group.rank(), &mut wire)
    }
}

impl Wire<Plain> for &Run<'_> {
    fn swap(
        &mut self,
        sends: Vec<(Vec<usize>, Payload<Plain>)>,
        receives: Vec<(usize, Shape)>,
        like: &Payload<Plain>,
    ) -> Result<Later<Vec<Payload<Plain>>>, CommError> {
        let num_bytes = |tensor: &Tensor| tensor.shape().num_elements() * tensor.dtype.size();
        let outgoing: Vec<Tensor> = (sends.iter()).map(|(_, rows)| contiguous(rows)).collect();
        let incoming: Vec<Tensor> = (receives.iter())
            .map(|(_, shape)| empty(tensor_of(like), shape.clone()))
            .collect();
        let destinations: Vec<_> = (sends.into_iter())
            .map(|(destinations, _)| destinations)
            .zip(outgoing.iter().map(num_bytes))
            .collect();
        let sources: Vec<_> = (receives.into_iter())
            .map(|(source, _)| source)
            .zip(incoming.iter().map(num_bytes))
            .collect();
        let tensors: Vec<Tensor> = outgoing.into_iter().chain(incoming.clone()).collect();
        let on_its_way = (!tensors.is_empty()).then(|| {
            self.exchange(tensors, move |addresses| {
                let (from, to) = addresses.split_at(destinations.len());
                let mut moves = Moves::default();
                for ((destinations, num_bytes), &address) in destinations.into_iter().zip(from) {
                    moves
                        .gives
                        .extend(destinations.into_iter().map(|peer| Move {
                            peer,
                            block: Block::one(address, num_bytes),
                        }));
                }
                let takes = sources.into_iter().zip(to);
                moves.takes = takes
                    .map(|((peer, num_bytes), &address)| Move {
                        peer,
                        block: Block::one(address, num_bytes),
                    })
                    .collect();
                moves
            })
        });
        let like = like.clone();
        Ok(Box::new(move || {
            if let Some(on_its_way) = on_its_way {
                on_its_way.arrive();
            }
            let arrived = incoming.into_iter();
            Ok(arrived.map(|tensor| with_tensor(&like, tensor)).collect())
        }))
    }
}

/// Its rows one behind the other. One without elements stays as it is: the runtime may have given it a pitch, and would launch a copy of
/// nothing, which CUDA refuses.
fn contiguous(payload: &Payload<Plain>) -> Tensor {
    let tensor = tensor_of(payload).clone();
    if payload.is_empty() {
        return tensor;
    }
    into_contiguous(tensor)
}

/// A tensor that has not been written yet.
fn empty(like: &Tensor, shape: Shape) -> Tensor {
    let handle = like.client.empty(shape.num_elements() * like.dtype.size());
    Tensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        shape,
        handle,
        like.dtype,
    )
}

fn even(sizes: &[usize]) -> bool {
    sizes.windows(2).all(|pair| pair[0] == pair[1])
}

fn element(dtype: DType) -> Option<Element> {
    Some(match dtype {
        DType::F16 => Element::F16,
        DType::BF16 => Element::BF16,
        DType::F32 => Element::F32,
        DType::F64 => Element::F64,
        DType::I64 => Element::I64,
        DType::I32 => Element::I32,
        DType::I8 => Element::I8,
        DType::U64 => Element::U64,
        DType::U32 => Element::U32,
        DType::U8 => Element::U8,
        _ => return None,
    })
}
