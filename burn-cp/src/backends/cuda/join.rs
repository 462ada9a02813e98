//! Which of a group's ranks have a GPU each, and how these are connected.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{device::num_devices, on_its_way};
use crate::comm::{
    CommError, Communicator, FailureCause, NcclError, Observer, Place, ProcessGroup, Transport,
    UniqueId,
};

/// How a group's ranks with GPUs exchange, which is found out at the first call; `None`: through the host. Every rank must call it between
/// the same operations. A failure ends the rank.
pub(super) fn joined(
    group: &ProcessGroup,
    observer: &Observer,
    ordinal: usize,
) -> Arc<Option<Communicator>> {
    let joined = group.device_transport(|| join(group, observer, ordinal));
    joined.unwrap_or_else(|error| error.raise())
}

/// A GPU, wherever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Gpu([u8; 16]);

impl Gpu {
    fn of(ordinal: usize) -> Result<Self, String> {
        use cudarc::driver::result;
        let ordinal = i32::try_from(ordinal).map_err(|error| error.to_string())?;
        let device = result::device::get(ordinal).map_err(|error| error.to_string())?;
        let uuid = result::device::get_uuid(device).map_err(|error| error.to_string())?;
        Ok(Self(uuid.bytes.map(|byte| byte as u8)))
    }
}

/// Joins the group's ranks, each with its GPU. `None` where a GPU is shared by ranks that are threads, of this group or of another.
/// Every rank must call it.
fn join(
    group: &ProcessGroup,
    observer: &Observer,
    ordinal: usize,
) -> Result<Option<Communicator>, CommError> {
    observer.drain_at_end(ordinal, on_its_way::drain);
    if let Ok(num_gpus) = num_devices()
        && observer.num_ranks_here() > num_gpus
    {
        // Some share a GPU. What waits there for another rank in NCCL holds up all that comes behind it, also what that rank waits for.
        tracing::warn!(
            group = group.name(),
            num_gpus,
            "the process has more ranks than GPUs, so that tensors travel through the host"
        );
        return Ok(None);
    }
    let gpu = group.consensus("looking for the GPU", Gpu::of(ordinal))?;
    let claim = observer.claim(ordinal);
    let gpus = group.host_all_gather("GPUs", (gpu, claim.is_none()))?;
    if let Some(sharing) = who_shares(group, &gpus) {
        if group.transport() == Transport::Threads {
            tracing::warn!(
                group = group.name(),
                "{sharing}, so that tensors travel through the host"
            );
            return Ok(None);
        }
        return Err(CommError::Transport {
            group: group.name().to_owned(),
            what: "tensors on GPUs".to_owned(),
            reason: format!("{sharing}; NCCL wants one for each"),
        });
    }
    let id = (group.rank() == 0).then(UniqueId::new).transpose();
    let id = group.consensus("making a unique id", id)?;
    let ids = group.host_all_gather("unique id", id)?;
    let id = ids
        .into_iter()
        .flatten()
        .next()
        .ok_or_else(|| CommError::Transport {
            group: group.name().to_owned(),
            what: "tensors on GPUs".to_owned(),
            reason: "rank 0 made no unique id".to_owned(),
        })?;
    let direct = reach_each_other(group, ordinal)?;
    let place = Place {
        rank: group.rank(),
        size: group.size(),
        ordinal,
        claim,
    };
    let joined = Communicator::new(
        &id,
        place,
        direct,
        on_its_way::flush(ordinal),
        Some(observer.clone()),
        observer.deadline(),
    );
    // The others wait for this rank in NCCL, where they notice the failure of a world alone.
    if let Err(error) = &joined
        && !matches!(error, NcclError::Slow { .. })
    {
        let error = error.clone().of(Some(observer), "joining NCCL");
        observer.fail("joining NCCL", FailureCause::Comm(error));
    }
    group.consensus("joining NCCL", joined).map(Some)
}

/// Which ranks of a group share their GPU, with each other or with another rank of the process that has claimed it, if any do.
fn who_shares(group: &ProcessGroup, gpus: &[(Gpu, bool)]) -> Option<String> {
    let ranks = group.global_ranks();
    let first = |of: usize| gpus[..of].iter().position(|(gpu, _)| *gpu == gpus[of].0);
    let within = (1..gpus.len()).find_map(|second| Some((first(second)?, second)));
    if let Some((first, second)) = within {
        let (first, second) = (ranks[first], ranks[second]);
        return Some(match group.transport() {
            Transport::Processes => {
                format!("ranks {first} and {second} are processes with the same GPU")
            }
            _ => format!("ranks {first} and {second} share a GPU"),
        });
    }
    let taken = gpus.iter().position(|(_, taken)| *taken)?;
    Some(format!(
        "another rank of its process works with the GPU of rank {}",
        ranks[taken]
    ))
}

/// Whether the ranks are threads whose GPUs reach each other's memory, which is opened for them. Every rank must call it.
fn reach_each_other(group: &ProcessGroup, ordinal: usize) -> Result<bool, CommError> {
    if group.transport() != Transport::Threads {
        return Ok(false);
    }
    let ordinals = group.host_all_gather("GPUs", ordinal)?;
    let others: Vec<usize> = (ordinals.into_iter())
        .filter(|other| *other != ordinal)
        .collect();
    let opened = Communicator::open(ordinal, &others).unwrap_or_else(|error| {
        tracing::info!(gpu = ordinal, %error, "its memory is not opened to other GPUs");
        false
    });
    let all = group.host_all_gather("GPUs' memory", opened)?;
    let direct = all.iter().all(|opened| *opened);
    if !direct && group.rank() == 0 {
        tracing::info!(
            group = group.name(),
            "not all GPUs reach each other's memory, so that NCCL moves all rows"
        );
    }
    Ok(direct)
}
