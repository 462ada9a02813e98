//! Which rank works through a transport of its own with which device of this process. Two ranks of one process must not do so with one device,
//! also where they are not in the same group: the operations of each are ordered behind all work of the device, and one thread starts
//! those of both, so that they could wait for each other's.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::World;

/// Devices, and whose each claim is.
static CLAIMS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

fn claims() -> MutexGuard<'static, Vec<(usize, usize)>> {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device of this process that other ranks leave alone until this is dropped.
pub(crate) struct Claim {
    device: usize,
    /// Every rank's is its own. Held, so that its address is nobody else's.
    rank: Arc<World>,
}

impl Claim {
    /// `None` where another rank has the device.
    pub(crate) fn of(device: usize, rank: &Arc<World>) -> Option<Self> {
        let mut claims = claims();
        let others = |&(of, who): &(usize, usize)| of == device && who != address(rank);
        if claims.iter().any(others) {
            return None;
        }
        claims.push((device, address(rank)));
        Some(Self {
            device,
            rank: rank.clone(),
        })
    }
}

fn address(rank: &Arc<World>) -> usize {
    Arc::as_ptr(rank).addr()
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Claim of device {}", self.device)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claims = claims();
        let mine = (self.device, address(&self.rank));
        if let Some(at) = claims.iter().position(|claim| *claim == mine) {
            claims.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::RankContext;

    #[test]
    fn a_device_is_one_ranks_until_all_its_claims_have_gone() {
        // Devices that no other test claims.
        let devices = [1 << 40, 1 << 41];
        let [mine, other] = [(); 2].map(|()| RankContext::solo());
        let claim = |device: usize, rank: &RankContext| Claim::of(device, rank.world());
        // For two groups of one rank.
        let first = claim(devices[0], &mine).unwrap();
        let second = claim(devices[0], &mine).unwrap();
        assert!(claim(devices[0], &other).is_none());
        assert!(claim(devices[1], &other).is_some());
        drop(first);
        assert!(claim(devices[0], &other).is_none());
        drop(second);
        let taken = claim(devices[0], &other).unwrap();
        assert!(claim(devices[0], &mine).is_none());
        drop((taken, other));
        assert!(claim(devices[0], &mine).is_some());
    }
}
