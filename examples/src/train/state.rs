//! What a run is to its checkpoints: where it stands, and whether another run may go on from there.

use std::path::Path;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{Architecture, CheckpointError, TrainConfig};

/// What checkpoints must know of a run to continue it, and no other.
pub trait RunConfig: Clone + Serialize + DeserializeOwned {
    /// The program.
    const PROGRAM: &'static str;

    /// Number of ranks.
    fn num_ranks(&self) -> usize;

    /// The same run with fixed values in all fields that may differ when it is continued: what is measured, and how often.
    #[must_use]
    fn deciding(&self) -> Self;
}

impl<A: Architecture> RunConfig for TrainConfig<A> {
    const PROGRAM: &'static str = A::PROGRAM;

    fn num_ranks(&self) -> usize {
        self.ranks
    }

    fn deciding(&self) -> Self {
        let fresh = Self::default();
        // The learning rate follows from the number of steps, so that one belongs to the run too.
        Self {
            heldout_packs: fresh.heldout_packs,
            eval_every: fresh.eval_every,
            checkpoint_every: fresh.checkpoint_every,
            deadline_seconds: fresh.deadline_seconds,
            ..self.clone()
        }
    }
}

/// Where a run stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainState<R = TrainConfig> {
    /// Steps done.
    pub step: u64,
    /// Their losses.
    pub losses: Vec<f64>,
    /// Frames that each rank's vision tower encoded.
    pub vision_frames_per_rank: Vec<u64>,
    /// K/V tokens that each rank received from others in the attention of one layer.
    pub kv_tokens_received: Vec<u64>,
    pub(super) config: R,
}

impl<R: RunConfig> TrainState<R> {
    /// The state of a run that has done nothing yet.
    pub fn new(config: &R) -> Self {
        Self {
            step: 0,
            losses: Vec::new(),
            vision_frames_per_rank: vec![0; config.num_ranks()],
            kv_tokens_received: vec![0; config.num_ranks()],
            config: config.clone(),
        }
    }

    /// Counts a step.
    pub fn advance(&mut self, loss: f64) {
        self.step += 1;
        self.losses.push(loss);
    }
}

/// Continuing changes nothing that decides what is trained or how; only what is measured, and how often, may differ.
pub(super) fn check_same_run<R: RunConfig>(
    path: &Path,
    old: &R,
    new: &R,
) -> Result<(), CheckpointError> {
    let json = |config: &R| serde_json::to_value(config.deciding()).unwrap_or_default();
    let (old, new) = (json(old), json(new));
    let fields = old.as_object().into_iter().flatten();
    for (field, expected) in fields {
        let got = &new[field];
        if got != expected {
            return Err(CheckpointError::OtherRun {
                path: path.display().to_string(),
                field: field.clone(),
                expected: expected.to_string(),
                got: got.to_string(),
            });
        }
    }
    Ok(())
}
