//! Which keys a query sees under a mask, in closed form.

use std::ops::Range;

use super::{MaskKind, PlanError};
use crate::layout::Documents;

/// How the tokens of one document see each other.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sight<'a> {
    Full,
    Causal { window: Option<usize> },
    Spans(&'a [Range<usize>]),
    Prefix(usize),
}

/// A run of queries of one document that all see in one way.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Their document positions.
    pub(super) queries: Range<usize>,
    /// The shortest run of document positions that holds every key of them.
    pub(super) keys: Range<usize>,
    /// Whether keys behind a query are hidden; otherwise each query sees all of `keys`.
    pub(super) causal: bool,
    /// How many keys before its own a query sees.
    pub(super) window: Option<usize>,
}

/// Refuses masks that put together what is not defined together, or that need more than the documents say.
pub(super) fn check(mask: MaskKind, documents: &Documents) -> Result<(), PlanError> {
    const SPANS: &str = "bidirectional spans";
    let pair = |first, second| Err(PlanError::Pair { first, second });
    let needs = |given, mask, what| match given {
        true => Ok(()),
        false => Err(PlanError::Unmarked { mask, what }),
    };
    match mask {
        MaskKind::Causal { .. } | MaskKind::Full => Ok(()),
        MaskKind::CausalWithSpans { prefix: true, .. } => pair(SPANS, "a prefix"),
        MaskKind::CausalWithSpans {
            window: Some(_), ..
        } => pair(SPANS, "a window"),
        MaskKind::Prefix { window: Some(_) } => pair("a prefix", "a window"),
        MaskKind::PerDocument { window: Some(_) } => pair("masks of documents", "a window"),
        MaskKind::CausalWithSpans { .. } => {
            needs(documents.has_spans(), "causal-with-spans", "spans")
        }
        MaskKind::Prefix { .. } => needs(documents.has_prefixes(), "prefix", "prefixes"),
        MaskKind::PerDocument { .. } => {
            needs(documents.has_masks(), "per-document", "masks")?;
            for (row, table) in documents.rows().enumerate() {
                let masks = (0..table.len()).filter_map(|index| documents.mask(row, index));
                masks
                    .into_iter()
                    .try_for_each(|mask| check(mask, documents))?;
            }
            Ok(())
        }
    }
}

impl<'a> Sight<'a> {
    /// That of a document under a mask that [`check`] lets pass.
    pub(super) fn of(
        documents: &'a Documents,
        mask: MaskKind,
        row: usize,
        document: usize,
    ) -> Self {
        match mask {
            MaskKind::Full => Self::Full,
            MaskKind::Causal { window } => Self::Causal { window },
            MaskKind::CausalWithSpans { .. } => Self::Spans(documents.spans(row, document)),
            MaskKind::Prefix { .. } => Self::Prefix(documents.prefix(row, document)),
            MaskKind::PerDocument { .. } => match documents.mask(row, document) {
                Some(mask) => Self::of(documents, mask, row, document),
                None => Self::Causal { window: None },
            },
        }
    }

    /// Cuts a run of queries of a document of `len` real tokens where the way changes in which they see.
    pub(super) fn parts(self, queries: Range<usize>, len: usize, mut each: impl FnMut(Part)) {
        match self {
            Self::Full => each(Part {
                queries,
                keys: 0..len,
                causal: false,
                window: None,
            }),
            Self::Causal { window } => each(Part::causal(queries, window)),
            Self::Prefix(len) => cut(queries, std::slice::from_ref(&(0..len)), each),
            Self::Spans(spans) => cut(queries, spans, each),
        }
    }
}

/// Cuts a run of queries at the borders of spans that are in order.
fn cut(queries: Range<usize>, spans: &[Range<usize>], mut each: impl FnMut(Part)) {
    let Range { mut start, end } = queries;
    let first = spans.partition_point(|span| span.end <= start);
    for span in &spans[first..] {
        if span.start >= end {
            break;
        }
        if start < span.start {
            each(Part::causal(start..span.start, None));
            start = span.start;
        }
        let inside = start..span.end.min(end);
        start = inside.end;
        each(Part {
            queries: inside,
            keys: 0..span.end,
            causal: false,
            window: None,
        });
    }
    if start < end {
        each(Part::causal(start..end, None));
    }
}

impl Part {
    fn causal(queries: Range<usize>, window: Option<usize>) -> Self {
        let earlier = window.map_or(0, |window| queries.start.saturating_sub(window));
        Self {
            keys: earlier..queries.end,
            queries,
            causal: true,
            window,
        }
    }

    /// How many (query, key) pairs are visible. Nothing is counted.
    pub(super) fn area(&self) -> u128 {
        let wide = |value: usize| value as u128;
        let (start, num) = (wide(self.queries.start), wide(self.queries.len()));
        if !self.causal {
            return num * wide(self.keys.len());
        }
        // Queries at positions below the window see everything before them, later ones `window` keys; each
        // sees itself.
        let window = self.window.map_or(u128::MAX, wide);
        let growing = num.min(window.saturating_sub(start));
        let constant = num - growing;
        let earlier = if constant == 0 { 0 } else { constant * window };
        growing * start + growing * growing.saturating_sub(1) / 2 + earlier + num
    }
}
