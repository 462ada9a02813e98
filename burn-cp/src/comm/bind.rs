//! From a mesh to process groups.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{CommError, ProcessGroup, ProgramOrder, RankContext};
use crate::mesh::DeviceMesh;

/// The process groups of one rank on a mesh: one for each set of axes, made when first asked for. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Groups {
    context: RankContext,
    mesh: Arc<DeviceMesh>,
    order: ProgramOrder,
    made: Arc<Mutex<HashMap<Vec<String>, ProcessGroup>>>,
}

/// Makes the groups of a mesh for one rank. Moves nothing.
///
/// # Errors
/// The mesh's sizes do not multiply to the world's number of ranks.
pub fn bind(mesh: &DeviceMesh, rank: &RankContext) -> Result<Groups, CommError> {
    mesh.check_world(rank.world_size())?;
    Ok(Groups {
        context: rank.clone(),
        mesh: Arc::new(mesh.clone()),
        order: ProgramOrder::new(),
        made: Arc::default(),
    })
}

impl Groups {
    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// This rank in the world.
    pub fn global_rank(&self) -> usize {
        self.context.rank()
    }

    /// The group of ranks that differ from this one along `axes` only. Repeated calls give handles of one group.
    ///
    /// # Errors
    /// An axis that the mesh does not have.
    pub fn along(&self, axes: &[&str]) -> Result<ProcessGroup, CommError> {
        let ranks = self.mesh.group(self.context.rank(), axes)?;
        let mut key: Vec<String> = axes.iter().map(|axis| (*axis).to_owned()).collect();
        key.sort();
        key.dedup();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let group = made.entry(key.clone()).or_insert_with(|| {
            let name = format!("{}{ranks:?}", key.join("x"));
            self.context
                .group(&name, ranks)
                .with_order(self.order.clone())
        });
        Ok(group.clone())
    }

    /// The group of all ranks of the world.
    ///
    /// # Errors
    /// None on a bound mesh; the signature leaves room for transports that make groups by communication.
    pub fn world(&self) -> Result<ProcessGroup, CommError> {
        let axes: Vec<&str> = self
            .mesh
            .axes()
            .iter()
            .map(|axis| axis.name.as_str())
            .collect();
        self.along(&axes)
    }
}
