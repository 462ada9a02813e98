//! Do all ranks start with the same parameters, each with its own?

use std::{collections::HashMap, sync::Arc};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::Tensor,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::AuditError;
use crate::{
    collectives::{CollectiveBackend, Payload, read_to_host},
    comm::{CommError, FailureCause, ProcessGroup, Transport, odd_one_out},
    sharder::CapabilityError,
};

/// Ranks whose models do not fit together, or not the configuration. Every rank of the group returns the same error.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterError {
    /// A parameter has other values, another shape or another dtype on some rank, or exists on some ranks only.
    #[error(
        "ranks start with different parameters: rank {rank} has {got} as {path}, expected {expected}; Burn draws \
         parameters when they are first used: use the model once before cloning it, or broadcast them"
    )]
    Differ {
        /// Module path of the parameter.
        path: String,
        /// Global rank that differs from most ranks.
        rank: usize,
        /// What most ranks have.
        expected: String,
        /// What `rank` has.
        got: String,
    },
    /// Two ranks hold one autodiff leaf, so that each would wait for the other's backward pass for ever.
    #[error(
        "ranks {first} and {second} share the leaf of {path}; give each rank its own with `model.clone().fork(device)`"
    )]
    SharedLeaf {
        /// Module path of the parameter.
        path: String,
        /// Global rank.
        first: usize,
        /// Global rank.
        second: usize,
    },
    /// The configuration asks for what the model does not declare to support.
    #[error(transparent)]
    Unsupported(#[from] CapabilityError),
    /// The model holds attention that would see its own rank's tokens only.
    #[error(transparent)]
    Unconverted(#[from] AuditError),
    /// The ranks could not talk to each other.
    #[error(transparent)]
    Comm(#[from] CommError),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Fingerprint {
    path: String,
    shape: Vec<usize>,
    dtype: String,
    hash: [u8; 32],
    leaf: Option<u64>,
}

impl Fingerprint {
    fn shown(&self) -> String {
        let hash: String = self.hash[..4]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        format!("{} {:?} with hash {hash}", self.dtype, self.shape)
    }

    /// What must be equal on all ranks.
    fn values(&self) -> (&str, &[usize], &str, [u8; 32]) {
        (&self.path, &self.shape, &self.dtype, self.hash)
    }
}

#[derive(Default)]
struct Collect {
    path: Vec<String>,
    found: Vec<Fingerprint>,
}

impl<B: CollectiveBackend> ModuleVisitor<B> for Collect {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        let primitive = tensor.into_primitive().tensor();
        let leaf = B::leaf_id(&primitive);
        let data = read_to_host::<B>(Payload::Float(primitive));
        self.found.push(Fingerprint {
            path: self.path.join("."),
            shape: data.shape.to_vec(),
            dtype: format!("{:?}", data.dtype),
            hash: Sha256::digest(data.as_bytes()).into(),
            leaf,
        });
    }
}

/// Checks that the ranks of a group hold equal parameters, matched by module path, and that no two share an autodiff leaf.
///
/// Every rank of the group must call it. Reads every parameter to the host once.
///
/// # Errors
/// The first difference, the same on every rank.
pub fn check_parameters<B: CollectiveBackend, M: Module<B>>(
    module: &M,
    group: &ProcessGroup,
) -> Result<(), ParameterError> {
    let mut mine = Collect::default();
    module.visit(&mut mine);
    if group.transport() == Transport::Processes {
        // Every process counts its leaves anew, and holds them alone.
        mine.found.iter_mut().for_each(|found| found.leaf = None);
    }
    let all = group.host_all_gather("parameters", mine.found)?;
    let found =
        shared_leaf(&all, group.global_ranks()).or_else(|| difference(&all, group.global_ranks()));
    let Some((rank, error)) = found else {
        return Ok(());
    };
    group.fail(
        rank,
        "the start-up check of parameters",
        FailureCause::Error(Arc::new(error.clone())),
    );
    Err(error)
}

/// Two ranks that hold one autodiff leaf: the later one, and the error.
fn shared_leaf(all: &[Vec<Fingerprint>], ranks: &[usize]) -> Option<(usize, ParameterError)> {
    let mut leaves: HashMap<u64, usize> = HashMap::new();
    for (&rank, found) in ranks.iter().zip(all) {
        for parameter in found {
            let Some(leaf) = parameter.leaf else { continue };
            if let Some(first) = leaves.insert(leaf, rank).filter(|&first| first != rank) {
                return Some((
                    rank,
                    ParameterError::SharedLeaf {
                        path: parameter.path.clone(),
                        first,
                        second: rank,
                    },
                ));
            }
        }
    }
    None
}

/// The first rank whose parameters are not those of most ranks, and the first difference.
fn difference(all: &[Vec<Fingerprint>], ranks: &[usize]) -> Option<(usize, ParameterError)> {
    let values: Vec<Vec<_>> = all
        .iter()
        .map(|found| found.iter().map(Fingerprint::values).collect())
        .collect();
    let (odd, expected) = odd_one_out(&values)?;
    let (got, expected) = (&all[odd], &all[expected]);
    let same =
        |i: usize| got.get(i).map(Fingerprint::values) == expected.get(i).map(Fingerprint::values);
    let i = (0..got.len().max(expected.len())).find(|&i| !same(i))?;
    let shown = |found: &[Fingerprint]| {
        found
            .get(i)
            .map_or_else(|| "no parameter".to_owned(), Fingerprint::shown)
    };
    let path = expected
        .get(i)
        .or(got.get(i))
        .map_or_else(String::new, |parameter| parameter.path.clone());
    let error = ParameterError::Differ {
        path,
        rank: ranks[odd],
        expected: shown(expected),
        got: shown(got),
    };
    Some((ranks[odd], error))
}
