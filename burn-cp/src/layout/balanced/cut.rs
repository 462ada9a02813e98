//! The piece of a document that one rank takes.

use std::ops::Range;

use super::{Limits, deal::Problem};

/// What one rank may take of a document.
pub(super) struct Cut<'a> {
    pub(super) problem: &'a Problem<'a>,
    /// Length of the document.
    pub(super) len: usize,
    /// Work, about.
    pub(super) area: u64,
    pub(super) tokens: usize,
    /// K/V tokens that it may receive.
    pub(super) received: usize,
    /// Tokens that the ranks which come next have room for.
    pub(super) others: usize,
}

impl Cut<'_> {
    /// The pieces from the beginning and the end of `rest`: all the work that is allowed, with as little of the beginning as
    /// will do. `None` if nothing will.
    pub(super) fn runs(&self, rest: &Range<usize>) -> Option<[Range<usize>; 2]> {
        let fitting = |low: usize| {
            let steps = &self.problem.steps;
            steps.set(steps.get().saturating_add(1));
            let runs = self.with_low(rest, low);
            let fits = self
                .problem
                .visibility
                .received(&runs[0], &runs[1], self.len)
                <= self.received
                && runs[1].start - runs[0].end <= self.others;
            fits.then_some(runs)
        };
        let none = fitting(0);
        if none.is_some() {
            return none;
        }
        let granule = self.problem.granule;
        let (mut low, mut high) = (0, rest.len().min(self.tokens) / granule + 1);
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            if fitting(middle * granule).is_some() {
                high = middle;
            } else {
                low = middle;
            }
        }
        fitting((high * granule).min(rest.len()))
    }

    /// `low` tokens from the beginning and as many from the end as the work allows.
    fn with_low(&self, rest: &Range<usize>, low: usize) -> [Range<usize>; 2] {
        let visibility = self.problem.visibility;
        let low = rest.start..(rest.start + low).min(rest.end);
        let area = self.area.saturating_sub(visibility.area(&low, self.len));
        let start = visibility.start_of(area, rest.end, self.len);
        let granule = self.problem.granule;
        let start = ((start + granule / 2) / granule * granule).clamp(low.end, rest.end);
        let fewest = rest
            .end
            .saturating_sub(self.tokens.saturating_sub(low.len()));
        [low, start.max(fewest)..rest.end]
    }

    /// Whether the rank may have these pieces beside the work it has.
    pub(super) fn allows(
        &self,
        [low, high]: &[Range<usize>; 2],
        area: u64,
        limits: &Limits,
    ) -> bool {
        let visibility = self.problem.visibility;
        let area = area + visibility.area(low, self.len) + visibility.area(high, self.len);
        low.len() + high.len() <= self.tokens
            && area <= limits.area_with_cuts
            && visibility.received(low, high, self.len) <= self.received
    }
}
