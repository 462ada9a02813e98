//! A step's tokens in the order of the sequence.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use burn::tensor::{Bool, Int, Tensor, TensorData};

use super::{RankContext, SequenceOrder, convolution::HaloPlan, scan::CarryPlan};
use crate::{
    attention::ContextParallelBackend,
    collectives::{CollectiveElement, ExchangePlan, exchange},
    layout::TokenLayout,
    sharder::CpStep,
};

/// A token's document, by index in its row, and its position there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) document: usize,
    pub(super) position: usize,
}

/// This rank's tokens of a row, in the order of the sequence.
#[derive(Debug, Clone)]
pub(super) struct LocalRow {
    /// `None` at padding.
    pub(super) places: Vec<Option<Place>>,
    /// Number of the segment: the documents that the rank holds, in order. Padding belongs to the segment before it, at the
    /// start to the first one.
    pub(super) segments: Vec<usize>,
}

impl LocalRow {
    fn new(places: Vec<Option<Place>>) -> Self {
        let mut segments = Vec::with_capacity(places.len());
        let (mut segment, mut current) = (0, None);
        for place in &places {
            if let Some(Place { document, .. }) = place {
                if current.is_some_and(|current| current != *document) {
                    segment += 1;
                }
                current = Some(*document);
            }
            segments.push(segment);
        }
        Self { places, segments }
    }

    /// For each token the first one of its segment.
    pub(super) fn starts(&self) -> Vec<usize> {
        let mut start = 0;
        (0..self.segments.len())
            .map(|token| {
                if token > 0 && self.segments[token] != self.segments[token - 1] {
                    start = token;
                }
                start
            })
            .collect()
    }
}

#[derive(Debug)]
struct Inner<B: ContextParallelBackend> {
    step: CpStep<B>,
    order: SequenceOrder,
    to: Option<Arc<ExchangePlan>>,
    from: Option<Arc<ExchangePlan>>,
    /// By row, then by rank.
    contexts: Vec<Vec<RankContext>>,
    rows: Vec<LocalRow>,
    carry: CarryPlan,
    halos: Mutex<HashMap<usize, Arc<HaloPlan>>>,
}

/// A step's tokens in the order of the sequence: what layers need whose tokens meet outside of attention. Cheap to clone; made once
/// per step with [`CpStep::recurrence`] and handed to all layers.
///
/// Its tensors hold this rank's tokens of the *contiguous* order, `[batch, local_tokens, ..]`, as many as in the step's own layout
/// ([`Self::to_contiguous`]).
#[derive(Debug)]
pub struct Recurrence<B: ContextParallelBackend> {
    inner: Arc<Inner<B>>,
}

impl<B: ContextParallelBackend> Clone for Recurrence<B> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
        }
    }
}

impl<B: ContextParallelBackend> CpStep<B> {
    /// The step's tokens in the order of the sequence, for recurrent layers and convolutions. Pure host: nothing travels, and
    /// every rank derives the same plans.
    pub fn recurrence(&self) -> Recurrence<B> {
        let rank = self.group().rank();
        let order = SequenceOrder::new(self.layout());
        let documents = self.documents();
        let contexts: Vec<Vec<RankContext>> = (0..documents.batch_size())
            .map(|row| {
                RankContext::of_row(documents, row, order.contiguous())
                    .expect("the order is contiguous and as long as the step's documents")
            })
            .collect();
        let start = order.contiguous().offset(rank);
        let tokens = start..start + order.contiguous().local_len(rank);
        let rows = documents.rows().map(|row| {
            let mut places = vec![None; tokens.len()];
            for (document, runs) in row.iter().map(|document| &document.runs).enumerate() {
                for (position, token) in runs.iter().cloned().flatten().enumerate() {
                    if tokens.contains(&token) {
                        places[token - tokens.start] = Some(Place { document, position });
                    }
                }
            }
            LocalRow::new(places)
        });
        let rows = rows.collect();
        let moves = !order.is_identity();
        Recurrence {
            inner: Arc::new(Inner {
                to: moves.then(|| order.to_contiguous(rank).into()),
                from: moves.then(|| order.from_contiguous(rank).into()),
                carry: CarryPlan::new(&contexts, rank),
                step: self.clone(),
                order,
                contexts,
                rows,
                halos: Mutex::default(),
            }),
        }
    }
}

impl<B: ContextParallelBackend> Recurrence<B> {
    /// The step.
    pub fn step(&self) -> &CpStep<B> {
        &self.inner.step
    }

    /// Which tokens each rank holds in the order of the sequence.
    pub fn layout(&self) -> &TokenLayout {
        self.inner.order.contiguous()
    }

    /// Which documents of a row cross this rank's borders.
    ///
    /// # Panics
    /// There is no such row.
    pub fn context(&self, row: usize) -> &RankContext {
        &self.inner.contexts[row][self.inner.step.group().rank()]
    }

    /// Whether a document of any row is on several ranks; otherwise no state and no token has to travel. The same on every rank.
    pub fn straddles(&self) -> bool {
        let mut contexts = self.inner.contexts.iter().flatten();
        contexts.any(|context| !context.is_first())
    }

    /// A shard of the step's layout in the order of the sequence: `[.., local_tokens, ..]` along `dim`, the same shape.
    ///
    /// Every rank of the group must call it; it moves nothing where the layout is in order. Differentiable: the adjoint is
    /// [`Self::from_contiguous`].
    ///
    /// # Panics
    /// Another number of tokens.
    pub fn to_contiguous<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
    ) -> Tensor<B, D, K> {
        self.moved(tensor, dim, self.inner.to.as_ref())
    }

    /// The inverse of [`Self::to_contiguous`], and its adjoint. Every rank of the group must call it.
    ///
    /// # Panics
    /// Another number of tokens.
    pub fn from_contiguous<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
    ) -> Tensor<B, D, K> {
        self.moved(tensor, dim, self.inner.from.as_ref())
    }

    fn moved<const D: usize, K: CollectiveElement<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: usize,
        plan: Option<&Arc<ExchangePlan>>,
    ) -> Tensor<B, D, K> {
        let len = self.local_len();
        assert!(
            tensor.shape().get(dim) == Some(&len),
            "contiguous order: expected {len} tokens in dim {dim}, got {:?}",
            tensor.shape()
        );
        match plan {
            Some(plan) => exchange(tensor, dim, plan, self.inner.step.group()),
            None => tensor,
        }
    }

    /// `[batch, local_tokens]`, true at padding.
    pub fn padding_mask(&self) -> Tensor<B, 2, Bool> {
        self.mask(|_, row| row.places.iter().map(Option::is_none).collect())
    }

    /// `[batch, local_tokens]`, true at the tokens of a document that began on an earlier rank: those that a state from there reaches.
    pub fn leading_mask(&self) -> Tensor<B, 2, Bool> {
        self.mask(|at, row| {
            let leading = self.context(at).leading.as_ref();
            let document = leading.map(|leading| leading.document);
            let is_leading =
                |place: &Option<Place>| place.is_some_and(|place| Some(place.document) == document);
            row.places.iter().map(is_leading).collect()
        })
    }

    /// `[batch, local_tokens]`: the number of each token's document among those that this rank holds of its row, from 0. Padding
    /// counts to the document before it, or to the first one.
    pub fn segments(&self) -> Tensor<B, 2, Int> {
        #[allow(clippy::cast_possible_wrap, reason = "tokens fit into 63 bits")]
        let values: Vec<i64> = (self.inner.rows.iter())
            .flat_map(|row| row.segments.iter().map(|segment| *segment as i64))
            .collect();
        let data = TensorData::new(values, [self.batch_size(), self.local_len()]);
        Tensor::from_data(data, self.inner.step.device())
    }

    pub(super) fn mask(
        &self,
        of_row: impl Fn(usize, &LocalRow) -> Vec<bool>,
    ) -> Tensor<B, 2, Bool> {
        let rows = self.inner.rows.iter().enumerate();
        let values: Vec<bool> = rows.flat_map(|(at, row)| of_row(at, row)).collect();
        let data = TensorData::new(values, [self.batch_size(), self.local_len()]);
        Tensor::from_data(data, self.inner.step.device())
    }

    pub(super) fn batch_size(&self) -> usize {
        self.inner.rows.len()
    }

    /// Tokens of each row on this rank.
    pub fn local_len(&self) -> usize {
        self.inner.step.local_len()
    }

    pub(super) fn contexts(&self) -> &[Vec<RankContext>] {
        &self.inner.contexts
    }

    pub(super) fn rows(&self) -> &[LocalRow] {
        &self.inner.rows
    }

    pub(super) fn carry_plan(&self) -> &CarryPlan {
        &self.inner.carry
    }

    pub(super) fn halos(&self) -> &Mutex<HashMap<usize, Arc<HaloPlan>>> {
        &self.inner.halos
    }
}

/// A mask over tokens `[batch, local_tokens]`, spread over the further dims of a shape.
pub(super) fn spread<B: ContextParallelBackend, const D: usize>(
    mask: Tensor<B, 2, Bool>,
    shape: [usize; D],
) -> Tensor<B, D, Bool> {
    let mut narrow = [1; D];
    narrow[..2].copy_from_slice(&shape[..2]);
    mask.reshape(narrow).expand(shape)
}
