//! Lists of segments over a query and a key buffer, and their check.

use std::{ops::Range, sync::Arc};

use super::{AttentionError, DropoutPlace, Segment, cache::Cache};

/// A checked list of [`Segment`]s over a query and a key buffer. Cheap to clone.
///
/// # Example
///
/// ```
/// use burn_cp_kernels::{Segment, Segments};
///
/// // Two documents of 3 and 5 tokens, packed into one row.
/// let document = |tokens: std::ops::Range<usize>| Segment {
///     q_row: 0,
///     q: tokens.clone(),
///     k_row: 0,
///     k: tokens,
///     k_position: 0,
///     causal: true,
///     window: None,
/// };
/// let segments = Segments::new(vec![document(0..3), document(3..8)], (1, 8), (1, 8))?;
/// assert_eq!(segments.visible_pairs(), 6 + 15);
/// # Ok::<(), burn_cp_kernels::AttentionError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    inner: Arc<Inner>,
}

#[derive(Debug, PartialEq, Eq)]
struct Inner {
    list: Vec<Segment>,
    places: Vec<DropoutPlace>,
    q_shape: (usize, usize),
    k_shape: (usize, usize),
    cache: Cache,
}

impl Segments {
    /// Checks `segments` against a query buffer of `q_shape = (batch, tokens)` and a key buffer of
    /// `k_shape = (batch, tokens)`. The two batches may differ. Key ranges may overlap; sums over
    /// segments that share keys run in the order of the list.
    ///
    /// # Errors
    ///
    /// A range outside its buffer or running backwards, a query row in two segments, a position
    /// that overflows: see [`AttentionError`].
    pub fn new(
        segments: Vec<Segment>,
        q_shape: (usize, usize),
        k_shape: (usize, usize),
    ) -> Result<Self, AttentionError> {
        for (index, segment) in segments.iter().enumerate() {
            check_place(index, ["q_row", "q"], segment.q_row, &segment.q, q_shape)?;
            check_place(index, ["k_row", "k"], segment.k_row, &segment.k, k_shape)?;
            check_segment(index, segment)?;
        }
        check_queries(&segments)?;
        Ok(Self {
            inner: Arc::new(Inner {
                places: (0..).zip(&segments).map(default_place).collect(),
                list: segments,
                q_shape,
                k_shape,
                cache: Cache::default(),
            }),
        })
    }

    /// The same segments with a number for each one's document, which dropout draws from: pieces of
    /// one document must carry one number, wherever they are computed. Without it, segment `i`
    /// has the number `i`. Numbers count modulo 2^32.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Shape`] unless there is one number per segment.
    pub fn with_documents(self, documents: Vec<u32>) -> Result<Self, AttentionError> {
        let mut places = self.places().to_vec();
        places.resize(documents.len(), DropoutPlace::default());
        for (place, document) in places.iter_mut().zip(documents) {
            place.document = document;
        }
        self.with_places(places, "documents")
    }

    /// [`Self::with_documents`], and for each segment the document position of its first query, which dropout draws from
    /// too. Without it, a segment's last query is taken to stand at the position of its last key: right for causal
    /// segments, but not for a piece of a document whose queries see all of it. Positions count modulo 2^32.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Shape`] unless there is one place per segment.
    pub fn with_dropout_places(self, places: Vec<DropoutPlace>) -> Result<Self, AttentionError> {
        self.with_places(places, "places")
    }

    fn with_places(
        &self,
        places: Vec<DropoutPlace>,
        what: &'static str,
    ) -> Result<Self, AttentionError> {
        if places.len() != self.len() {
            return Err(AttentionError::Shape {
                what,
                expected: format!("[{}], one per segment", self.len()),
                got: format!("[{}]", places.len()),
            });
        }
        Ok(Self {
            inner: Arc::new(Inner {
                places,
                list: self.inner.list.clone(),
                q_shape: self.inner.q_shape,
                k_shape: self.inner.k_shape,
                cache: Cache::default(),
            }),
        })
    }

    /// What each segment's dropout is drawn from, see [`Self::with_dropout_places`].
    #[must_use]
    pub fn places(&self) -> &[DropoutPlace] {
        &self.inner.places
    }

    /// What routines have derived from these segments.
    #[cfg_attr(not(feature = "cubecl"), allow(dead_code))]
    pub(crate) fn cache(&self) -> &Cache {
        &self.inner.cache
    }

    /// The segments, in the order given.
    #[must_use]
    pub fn as_slice(&self) -> &[Segment] {
        &self.inner.list
    }

    /// Iterates over the segments in the order given.
    pub fn iter(&self) -> std::slice::Iter<'_, Segment> {
        self.inner.list.iter()
    }

    /// Number of segments.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.list.len()
    }

    /// Whether there is no segment.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.list.is_empty()
    }

    /// `(batch, tokens)` of the query buffer.
    #[must_use]
    pub fn q_shape(&self) -> (usize, usize) {
        self.inner.q_shape
    }

    /// `(batch, tokens)` of the key buffer.
    #[must_use]
    pub fn k_shape(&self) -> (usize, usize) {
        self.inner.k_shape
    }

    /// Number of (query, key) pairs that see each other, per head: the work of a call.
    #[must_use]
    pub fn visible_pairs(&self) -> u128 {
        self.iter()
            .map(|segment| {
                (segment.num_blind_queries()..segment.num_q())
                    .map(|t| segment.visible_keys(t).len() as u128)
                    .sum::<u128>()
            })
            .sum()
    }
}

impl<'a> IntoIterator for &'a Segments {
    type Item = &'a Segment;
    type IntoIter = std::slice::Iter<'a, Segment>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The last query of a segment and its last key have one position.
#[allow(clippy::cast_possible_truncation)]
fn default_place((document, segment): (u32, &Segment)) -> DropoutPlace {
    let end = (segment.k_position + segment.num_k()) as u32;
    DropoutPlace {
        document,
        q_position: end.wrapping_sub(segment.num_q() as u32),
    }
}

fn check_place(
    segment: usize,
    [row_name, range_name]: [&'static str; 2],
    row: usize,
    range: &Range<usize>,
    (batch, tokens): (usize, usize),
) -> Result<(), AttentionError> {
    if range.start > range.end {
        return Err(AttentionError::ReversedRange {
            segment,
            what: range_name,
            got: range.clone(),
        });
    }
    let places = [
        // An empty batch has no legal row at all.
        (row >= batch, row_name, batch.saturating_sub(1), row),
        (range.end > tokens, range_name, tokens, range.end),
    ];
    match places.into_iter().find(|(wrong, ..)| *wrong) {
        Some((_, what, expected, got)) => Err(AttentionError::OutOfBounds {
            segment,
            what,
            expected,
            got,
        }),
        None => Ok(()),
    }
}

fn check_segment(index: usize, segment: &Segment) -> Result<(), AttentionError> {
    // Half the integer range leaves room to round positions up to a tile.
    let limit = isize::MAX as usize;
    let parts = [segment.k_position, segment.num_k(), segment.num_q()];
    let sum = parts.iter().try_fold(0usize, |sum, x| sum.checked_add(*x));
    if sum.is_none_or(|sum| sum > limit) {
        return Err(AttentionError::Overflow {
            what: format!("segment {index}: k_position + number of keys + number of queries"),
            expected: limit,
            got: format!("{} + {} + {}", parts[0], parts[1], parts[2]),
        });
    }
    Ok(())
}

fn check_queries(segments: &[Segment]) -> Result<(), AttentionError> {
    let mut order: Vec<usize> = (0..segments.len())
        .filter(|&index| !segments[index].q.is_empty())
        .collect();
    order.sort_by_key(|&index| (segments[index].q_row, segments[index].q.start));
    for pair in order.windows(2) {
        let (first, second) = (&segments[pair[0]], &segments[pair[1]]);
        if first.q_row == second.q_row && second.q.start < first.q.end {
            return Err(AttentionError::OverlappingQueries {
                row: first.q_row,
                first_segment: pair[0],
                first: first.q.clone(),
                second_segment: pair[1],
                second: second.q.clone(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::Window;

    fn segment(q: Range<usize>, k: Range<usize>) -> Segment {
        Segment {
            q_row: 0,
            q,
            k_row: 0,
            k,
            k_position: 0,
            causal: true,
            window: None,
        }
    }

    fn error(segments: Vec<Segment>) -> AttentionError {
        Segments::new(segments, (1, 10), (1, 10)).unwrap_err()
    }

    #[test]
    fn causal_is_bottom_right() {
        let more_keys = segment(0..2, 0..5);
        assert_eq!(more_keys.visible_keys(0), 0..4);
        assert_eq!(more_keys.visible_keys(1), 0..5);
        let fewer_keys = segment(0..5, 0..2);
        assert_eq!(fewer_keys.num_blind_queries(), 3);
        assert!(fewer_keys.visible_keys(2).is_empty());
        assert_eq!(fewer_keys.visible_keys(3), 0..1);
    }

    #[test]
    fn window_counts_keys_before_the_own_one() {
        let mut windowed = segment(0..4, 0..4);
        windowed.window = Some(Window::left(1));
        assert_eq!(windowed.visible_keys(3), 2..4);
        windowed.window = Some(Window::left(0));
        assert_eq!(windowed.visible_keys(3), 3..4);
        windowed.window = Some(Window::left(usize::MAX));
        assert_eq!(windowed.visible_keys(3), 0..4);
    }

    #[test]
    fn window_without_causal_counts_keys_on_both_sides() {
        let full = |q: usize, k: usize, window| Segment {
            causal: false,
            window: Some(window),
            ..segment(0..q, 0..k)
        };
        assert_eq!(full(4, 4, Window::new(1, 2)).visible_keys(0), 0..3);
        assert_eq!(full(4, 4, Window::new(1, 2)).visible_keys(3), 2..4);
        assert_eq!(full(4, 4, Window::left(0)).visible_keys(1), 1..4);
        assert_eq!(full(2, 6, Window::new(1, 0)).visible_keys(0), 3..5);
        let right = Window::new(usize::MAX, usize::MAX);
        assert_eq!(full(3, 3, right).visible_keys(0), 0..3);
        let few_keys = full(6, 2, Window::new(9, 1));
        assert_eq!(few_keys.num_blind_queries(), 3);
        assert!(few_keys.visible_keys(2).is_empty());
        assert_eq!(few_keys.visible_keys(3), 0..1);
    }

    #[test]
    fn documents_are_numbered_one_per_segment() {
        let segments = Segments::new(vec![segment(0..4, 0..4)], (1, 10), (1, 10)).unwrap();
        let numbers = |segments: &Segments| -> Vec<u32> {
            segments
                .places()
                .iter()
                .map(|place| place.document)
                .collect()
        };
        assert_eq!(numbers(&segments), [0]);
        let numbered = segments.clone().with_documents(vec![7]).unwrap();
        assert_eq!(numbers(&numbered), [7]);
        assert!(segments.with_documents(vec![7, 8]).is_err());
    }

    #[test]
    fn bad_segments_are_refused_with_the_field_at_fault() {
        let message = |segments| error(segments).to_string();
        assert!(message(vec![segment(0..11, 0..4)]).contains("q is outside"));
        assert!(message(vec![segment(0..4, 0..11)]).contains("k is outside"));
        assert!(
            message(vec![Segment {
                q_row: 1,
                ..segment(0..1, 0..1)
            }])
            .contains("q_row")
        );
        assert!(
            message(vec![Segment {
                k_row: 7,
                ..segment(0..1, 0..1)
            }])
            .contains("k_row")
        );
        let reversed = Segment {
            q: Range { start: 3, end: 2 },
            ..segment(0..1, 0..1)
        };
        assert!(message(vec![reversed]).contains("backwards"));
        assert!(message(vec![segment(0..4, 0..4), segment(3..5, 0..4)]).contains("segment 1"));
        let far = Segment {
            k_position: usize::MAX - 2,
            ..segment(0..4, 0..4)
        };
        assert!(matches!(error(vec![far]), AttentionError::Overflow { .. }));
    }

    #[test]
    fn empty_ranges_and_shared_keys_are_legal() {
        let segments = vec![
            segment(0..0, 0..4),
            segment(0..3, 0..0),
            segment(3..5, 0..10),
            segment(5..10, 0..10),
            segment(5..5, 10..10),
        ];
        let segments = Segments::new(segments, (1, 10), (1, 10)).unwrap();
        assert_eq!(segments.visible_pairs(), (9 + 10) + (6 + 7 + 8 + 9 + 10));
    }
}
