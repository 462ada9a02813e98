//! A plan made ready for one rank: kernel segments and exchange ranges, made once per mask and step.

use std::{ops::Range, sync::Arc};

use burn_cp_kernels::{AttentionError, DropoutPlace, Segment, Segments, Window};

use crate::{
    collectives::{ExchangeError, ExchangePlan, Piece},
    layout::LocalRun,
    plan::{self, AttentionPlan},
};

/// A plan that could not be turned into kernel segments and exchange ranges: a fault of this library.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PrepareError {
    /// The kernels refuse the segments.
    #[error(transparent)]
    Segments(#[from] AttentionError),
    /// The exchange refuses the ranges.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
}

/// What one rank needs to run a plan: its segments, and where its keys and values come from. Host data.
#[derive(Debug)]
pub struct PreparedAttention {
    plan: Arc<AttentionPlan>,
    rank: usize,
    /// Whether the segments address the rank's own keys and values; otherwise an assembled buffer.
    local: bool,
    segments: Segments,
    exchange: Arc<ExchangePlan>,
    /// The buffer's rows in the rank-major concatenation of all shards, in buffer order.
    gathered: Vec<Range<usize>>,
    sizes: Arc<[usize]>,
}

impl PreparedAttention {
    /// Prepares a plan for one rank of the group.
    ///
    /// # Errors
    /// Only where plan and kernels or exchange contradict each other.
    pub fn new(plan: Arc<AttentionPlan>, rank: usize) -> Result<Self, PrepareError> {
        let layout = plan.layout();
        let batch = plan.documents().batch_size();
        let mine = plan.rank(rank);
        let q_shape = (batch, layout.local_len(rank));
        let local_segments = mine
            .local_segments
            .as_ref()
            .filter(|_| !plan.moves_tokens());
        let segments = match local_segments {
            Some(segments) => kernel_segments(segments, q_shape, q_shape)?,
            // A buffer without any row is stood in for by one row that no segment names.
            None => kernel_segments(&mine.segments, q_shape, (1, mine.buffer_len.max(1)))?,
        };
        let places = dropout_places(&segments, &plan, rank);
        let segments = segments.with_dropout_places(places)?;
        let sizes: Vec<usize> = (0..plan.world_size())
            .map(|r| batch * layout.local_len(r))
            .collect();
        let flat = |source: usize, row: usize, local: &Range<usize>| {
            let start = row * layout.local_len(source);
            start + local.start..start + local.end
        };
        let pieces: Vec<Vec<Piece>> = plan
            .ranks()
            .iter()
            .map(|rank| {
                let piece = |p: &plan::KvPiece| Piece {
                    source: p.source,
                    range: flat(p.source, p.row, &p.local),
                };
                rank.pieces.iter().map(piece).collect()
            })
            .collect();
        let gathered = pieces[rank]
            .iter()
            .map(|piece| {
                let offset: usize = sizes[..piece.source].iter().sum();
                offset + piece.range.start..offset + piece.range.end
            })
            .collect();
        let exchange = Arc::new(ExchangePlan::new(&sizes, &pieces, rank)?);
        let local = local_segments.is_some();
        Ok(Self {
            plan,
            rank,
            local,
            segments,
            exchange,
            gathered,
            sizes: sizes.into(),
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<AttentionPlan> {
        &self.plan
    }

    /// Index in the group of the rank that this was prepared for.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The rank's segments, as the kernels take them.
    pub fn segments(&self) -> &Segments {
        &self.segments
    }

    pub(super) fn is_local(&self) -> bool {
        self.local
    }

    pub(super) fn exchange(&self) -> &Arc<ExchangePlan> {
        &self.exchange
    }

    pub(super) fn gathered(&self) -> &[Range<usize>] {
        &self.gathered
    }

    /// The buffer's rows among the rank's own, where no rank needs another's.
    pub(super) fn gathered_locally(&self) -> Vec<Range<usize>> {
        self.exchange
            .pieces()
            .iter()
            .map(|piece| piece.range.clone())
            .collect()
    }

    /// `batch · local_tokens` of each rank.
    pub(super) fn sizes(&self) -> &Arc<[usize]> {
        &self.sizes
    }

    /// The first bytes of the plan's hash.
    pub(super) fn short_hash(&self) -> u64 {
        let hash = self.plan.hash();
        hash[..8]
            .iter()
            .fold(0, |value, &byte| value << 8 | u64::from(byte))
    }
}

/// Where each segment's queries stand in their document. Numbers and positions count modulo 2^32.
#[allow(clippy::cast_possible_truncation)]
fn dropout_places(segments: &Segments, plan: &AttentionPlan, rank: usize) -> Vec<DropoutPlace> {
    let runs = LocalRun::of_rank(plan.documents(), plan.layout(), rank);
    let place = |segment: &Segment| {
        let (row, token) = (segment.q_row, segment.q.start);
        let at = runs.partition_point(|run| (run.row, run.local.end) <= (row, token));
        runs.get(at)
            .map_or_else(DropoutPlace::default, |run| DropoutPlace {
                document: run.document as u32,
                q_position: (run.position + token.saturating_sub(run.local.start)) as u32,
            })
    };
    segments.iter().map(place).collect()
}

fn kernel_segments(
    segments: &[plan::Segment],
    q_shape: (usize, usize),
    k_shape: (usize, usize),
) -> Result<Segments, AttentionError> {
    let list = segments
        .iter()
        .map(|segment| Segment {
            q_row: segment.q_row,
            q: segment.q.clone(),
            k_row: segment.k_row,
            k: segment.k.clone(),
            k_position: segment.k_position,
            causal: segment.causal,
            window: segment.window.map(Window::left),
        })
        .collect();
    Segments::new(list, q_shape, k_shape)
}
