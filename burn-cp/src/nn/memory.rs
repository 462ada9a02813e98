//! What a decoder's cross-attention looks at.

use burn::tensor::{Tensor, backend::Backend};
use burn_cp_kernels::{DropoutPlace, Segment, Segments};

use crate::{
    attention::ContextParallelBackend,
    layout::{Documents, LocalRun},
    sharder::{Coordinates, CpStep, StepError},
};

/// The states `[batch, memory_len, d_model]` that cross-attention looks at, whole and equal on every rank of the group.
///
/// A token sees the memory's document with its own document's index in the row. Without documents of its own a memory is one
/// document a row, which fits steps with at most one document a row.
///
/// Keys and values are computed on every rank, and none travel. The gradient of the states on a rank is that of its own tokens'
/// loss; summed over ranks by [`sync_gradients`](crate::optim::sync_gradients), the parameters behind them get those of one device.
/// Cross-attention over a memory that stays sharded is not built: [`Memory::gather`] makes it whole first.
#[derive(Debug, Clone)]
pub struct Memory<B: Backend> {
    states: Tensor<B, 3>,
    documents: Option<Documents>,
}

/// A memory as one step's tokens see it.
pub(super) struct LocalMemory<B: Backend> {
    pub(super) states: Tensor<B, 3>,
    pub(super) segments: Segments,
}

impl<B: Backend> Memory<B> {
    /// States of one document a row. They must be the same on every rank, which nothing checks.
    pub fn new(states: Tensor<B, 3>) -> Self {
        Self {
            states,
            documents: None,
        }
    }

    /// The same states in documents: as many in each row as the step has, each one run of tokens. What is in none is padding.
    #[must_use]
    pub fn with_documents(self, documents: Documents) -> Self {
        Self {
            documents: Some(documents),
            ..self
        }
    }

    /// Which of the states the tokens of `step` see.
    pub(super) fn for_step(&self, step: &CpStep<B>) -> Result<LocalMemory<B>, StepError>
    where
        B: ContextParallelBackend,
    {
        let [batch, len, _] = self.states.dims();
        let documents = match &self.documents {
            Some(documents) => documents.clone(),
            None => Documents::full(batch, len)?,
        };
        check(&documents, [batch, len], step.documents())?;
        let (mut segments, mut places) = (Vec::new(), Vec::new());
        for run in LocalRun::of_rank(step.documents(), step.layout(), step.group().rank()) {
            let seen = &documents.row(run.row)[run.index];
            segments.push(Segment {
                q_row: run.row,
                q: run.local,
                k_row: run.row,
                k: seen.runs.first().cloned().unwrap_or_default(),
                k_position: 0,
                causal: false,
                window: None,
            });
            #[allow(clippy::cast_possible_truncation)]
            places.push(DropoutPlace {
                document: run.document as u32,
                q_position: run.position as u32,
            });
        }
        let shape = (step.batch_size(), step.local_len());
        let prepared = Segments::new(segments, shape, (batch, len))
            .and_then(|segments| segments.with_dropout_places(places));
        Ok(LocalMemory {
            states: self.states.clone(),
            segments: prepared.map_err(crate::attention::PrepareError::from)?,
        })
    }
}

impl<B: ContextParallelBackend> Memory<B> {
    /// The memory that an encoder has computed over `step`, its own: `local [batch, local_tokens, d_model]` of every rank, gathered,
    /// with the step's documents. Every rank of the group must call it; the adjoint gives each token the sum of all ranks'
    /// gradients.
    ///
    /// Encoder and decoder then run in one backward pass: give both steps one order
    /// ([`shard_in_order`](crate::sharder::ContextParallel::shard_in_order)).
    ///
    /// # Panics
    /// If `local` is not this rank's shard, or an exchange fails.
    pub fn gather(local: Tensor<B, 3>, step: &CpStep<B>) -> Self {
        Self {
            states: step.gather_tokens(local, 1, Coordinates::Padded, None),
            documents: Some(step.documents().clone()),
        }
    }
}

/// Has every document of the step a document of the memory, in one run?
fn check(memory: &Documents, size: [usize; 2], step: &Documents) -> Result<(), StepError> {
    let invalid = |what: &str, expected: String, got: String| {
        Err(StepError::Invalid {
            what: what.into(),
            expected,
            got,
        })
    };
    let got = [memory.batch_size(), memory.seq_len()];
    if got != size || size[0] != step.batch_size() {
        return invalid(
            "memory [batch, memory_len] and its documents",
            format!("[{}, memory_len], both", step.batch_size()),
            format!("{size:?} and {got:?}"),
        );
    }
    for (row, (own, seen)) in step.rows().zip(memory.rows()).enumerate() {
        let used = own.iter().enumerate().filter(|(_, own)| !own.is_empty());
        for (index, _) in used {
            let Some(seen) = seen.get(index) else {
                return invalid(
                    &format!("documents of the memory in row {row}"),
                    format!("one for each of the step's {}", own.len()),
                    format!("{}; give the memory its documents", seen.len()),
                );
            };
            if seen.runs.len() != 1 {
                return invalid(
                    &format!("document {index} of the memory in row {row}"),
                    "one run of tokens, at least 1".into(),
                    format!("{:?}", seen.runs),
                );
            }
        }
    }
    Ok(())
}
