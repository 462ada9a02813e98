//! Random documents with everything that masks ask for, and layouts of them.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::layout::{Document, Documents, LayoutPolicy};
use crate::plan::*;

/// What is known of a real token without any plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Label {
    pub(super) document: usize,
    pub(super) position: usize,
    /// Number of the span that it belongs to.
    pub(super) span: Option<usize>,
    pub(super) in_prefix: bool,
    /// Which of the masks of documents is its document's.
    pub(super) own: usize,
}

/// By row and token; `None` for padding.
pub(super) type Labels = Vec<Vec<Option<Label>>>;

/// Masks that a document may have.
pub(super) const OWN: [MaskKind; 5] = [
    MaskKind::CAUSAL,
    MaskKind::Full,
    MaskKind::Causal { window: Some(2) },
    MaskKind::CAUSAL_WITH_SPANS,
    MaskKind::PREFIX,
];

#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) documents: Documents,
    pub(super) labels: Labels,
    pub(super) policy: LayoutPolicy,
    pub(super) world_size: usize,
    pub(super) mask: MaskKind,
}

/// Padding ahead of the document, its runs with the hole behind each, padding behind it.
type DocumentShape = (usize, Vec<(usize, usize)>, usize);

/// Gap ahead and length of each span, length of the prefix, index of the document's own mask.
type MarkShape = (Vec<(usize, usize)>, usize, usize);

fn document_shape() -> impl Strategy<Value = DocumentShape> {
    let length = prop_oneof![
        6 => prop::sample::select(vec![0_usize, 1, 2, 3, 5, 7, 13]),
        1 => Just(61_usize),
    ];
    let runs = prop_oneof![
        4 => vec((length.clone(), Just(0)), 1),
        1 => vec((length, 0..3_usize), 1..4),
    ];
    let padding = || prop_oneof![3 => Just(0_usize), 1 => 1..12_usize];
    (padding(), runs, padding())
}

fn mark_shape() -> impl Strategy<Value = MarkShape> {
    (
        vec((0..6_usize, 1..9_usize), 0..5),
        0..20_usize,
        0..OWN.len(),
    )
}

/// A row as it is built: its documents, and what is said of its tokens and documents.
#[derive(Default)]
struct Row {
    documents: Vec<Document>,
    labels: Vec<Option<Label>>,
    spans: Vec<Range<usize>>,
    prefixes: Vec<usize>,
    masks: Vec<MaskKind>,
}

impl Row {
    fn new(shapes: &[(DocumentShape, MarkShape)]) -> Self {
        let mut row = Self::default();
        for ((ahead, runs, behind), marks) in shapes {
            row.labels.extend(std::iter::repeat_n(None, *ahead));
            row.add(runs, marks);
            row.labels.extend(std::iter::repeat_n(None, *behind));
            let end = row.labels.len();
            row.documents.last_mut().unwrap().extent.end = end;
        }
        row
    }

    fn add(&mut self, shape: &[(usize, usize)], (spans, prefix, own): &MarkShape) {
        let start = self.labels.len();
        let mut tokens = Vec::new();
        let mut runs = Vec::new();
        for &(length, hole) in shape {
            let first = self.labels.len();
            runs.push(first..first + length);
            for token in first..first + length {
                self.labels.push(Some(Label {
                    document: self.documents.len(),
                    position: tokens.len(),
                    span: None,
                    in_prefix: tokens.len() < *prefix,
                    own: *own,
                }));
                tokens.push(token);
            }
            self.labels.extend(std::iter::repeat_n(None, hole));
        }
        let mut at = 0;
        for (gap, length) in spans {
            let first = at + gap;
            at = (first + length).min(tokens.len());
            if first >= at {
                break;
            }
            for &token in &tokens[first..at] {
                self.labels[token].as_mut().unwrap().span = Some(self.spans.len());
            }
            self.spans.push(tokens[first]..tokens[at - 1] + 1);
        }
        self.prefixes.push((*prefix).min(tokens.len()));
        self.masks.push(OWN[*own]);
        let extent = start..start;
        self.documents.push(Document { runs, extent });
    }
}

/// Deals pieces of the given lengths to ranks in turn until `covered` tokens are out, each rank's pieces
/// in the order of their keys.
fn custom(pieces: &[(usize, usize, u8)], covered: usize, world_size: usize) -> LayoutPolicy {
    let mut ranks: Vec<Vec<(u8, Range<usize>)>> = vec![Vec::new(); world_size];
    let mut start = 0;
    for &(rank, length, key) in pieces.iter().cycle() {
        let end = (start + length).min(covered);
        ranks[rank % world_size].push((key, start..end));
        start = end;
        if start == covered {
            break;
        }
    }
    let in_order = |mut ranges: Vec<(u8, Range<usize>)>| {
        ranges.sort_by_key(|(key, _)| *key);
        ranges.into_iter().map(|(_, range)| range).collect()
    };
    LayoutPolicy::Custom(ranks.into_iter().map(in_order).collect())
}

pub(super) fn case() -> impl Strategy<Value = Case> {
    let rows = vec(vec((document_shape(), mark_shape()), 0..6), 1..4);
    let mask = prop_oneof![
        Just(MaskKind::CAUSAL),
        Just(MaskKind::Full),
        Just(MaskKind::CAUSAL_WITH_SPANS),
        Just(MaskKind::PREFIX),
        Just(MaskKind::PER_DOCUMENT),
        prop::sample::select(vec![0, 1, 2, 6, 30, usize::MAX]).prop_map(|window| {
            MaskKind::Causal {
                window: Some(window),
            }
        }),
    ];
    let pieces = vec((0..8_usize, 1..20_usize, any::<u8>()), 1..30);
    (rows, 1..9_usize, mask, 0..5_usize, pieces, 0..10_usize).prop_map(
        |(rows, world_size, mask, policy, pieces, extra)| {
            let mut rows: Vec<Row> = rows.iter().map(|shapes| Row::new(shapes)).collect();
            let seq_len = rows
                .iter()
                .map(|row| row.labels.len())
                .max()
                .unwrap()
                .max(1)
                + extra / 3;
            rows.iter_mut()
                .for_each(|row| row.labels.resize(seq_len, None));
            let documents = documents(&rows, seq_len);
            let labels: Labels = rows.into_iter().map(|row| row.labels).collect();
            if policy == 4 {
                return swapped(&documents, &labels, world_size, mask);
            }
            let policy = match policy {
                0 if world_size == 1 => LayoutPolicy::Identity,
                0 => LayoutPolicy::Contiguous { multiple: extra },
                1 => LayoutPolicy::HeadTail,
                _ => custom(&pieces, seq_len + extra, world_size),
            };
            Case {
                documents,
                labels,
                policy,
                world_size,
                mask,
            }
        },
    )
}

fn documents(rows: &[Row], seq_len: usize) -> Documents {
    fn of_each<T>(rows: &[Row], what: impl Fn(&Row) -> T) -> Vec<T> {
        rows.iter().map(what).collect()
    }
    Documents::from_runs(of_each(rows, |row| row.documents.clone()), seq_len)
        .and_then(|documents| documents.with_spans(&of_each(rows, |row| row.spans.clone())))
        .and_then(|documents| documents.with_prefixes(of_each(rows, |row| row.prefixes.clone())))
        .and_then(|documents| documents.with_masks(of_each(rows, |row| row.masks.clone())))
        .unwrap()
}

/// The documents in one row, each with as much room as dual-chunk-swap asks for.
fn swapped(documents: &Documents, labels: &Labels, world_size: usize, mask: MaskKind) -> Case {
    let aligned = documents.aligned(2 * world_size).unwrap().flattened();
    // Documents of other rows are other documents.
    let labels = labels.iter().enumerate().flat_map(|(row, labels)| {
        let apart = move |label: Label| Label {
            document: 1000 * row + label.document,
            span: label.span.map(|span| 1000 * row + span),
            ..label
        };
        labels.iter().map(move |label| label.map(apart))
    });
    let labels: Vec<_> = labels.collect();
    Case {
        labels: vec![aligned.placement.place(&labels, None).unwrap()],
        documents: aligned.documents,
        policy: LayoutPolicy::DualChunkSwap,
        world_size,
        mask,
    }
}
