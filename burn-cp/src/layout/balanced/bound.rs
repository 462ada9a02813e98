//! How few keys and values a balanced layout can get by with.

use super::{Limits, visibility::Visibility};

/// Positions at which the longest document is looked at.
const NUM_SECTIONS: usize = 64;

/// A number of K/V tokens that the busiest receiver cannot go below in any layout within `limits`, for documents the longest
/// of which has `len` tokens.
///
/// Take the tokens of the longest document from position `p` on, and say that `m` ranks own them. The owner of one of them
/// needs at least `p + 1` keys (fewer under a window, all `len` under a full mask). If no rank receives more than `r`, each of
/// the `m` ranks therefore owns `q = p + 1 - r` tokens of the document or more, so that together they own at least
/// `l = m q - (len - p)` tokens below `p`. These are different tokens, so their work is at least that of the first `l` positions.
/// Hence some `m` must satisfy
///
/// - `q <= limits.tokens`, `len - p <= m limits.tokens` and `l <= p`,
/// - `area(p..len) + area(0..l) <= m limits.area`,
///
/// for every `p`. The bound is the smallest `r` for which none of the positions looked at says no. A longer document asks for no
/// less than a shorter one, so the longest alone is looked at.
pub(super) fn min_received(
    len: usize,
    world_size: usize,
    limits: &Limits,
    visibility: Visibility,
) -> usize {
    let sections = sections(len, visibility);
    let possible = |received: usize| {
        sections.iter().all(|&(first, area, keys)| {
            let owned = keys.saturating_sub(received);
            let section = Section {
                first,
                len: len - first,
                area,
                owned,
            };
            (1..=world_size.min(section.len))
                .any(|num_owners| section.fits(num_owners, limits, visibility))
        })
    };
    let (mut low, mut high) = (0, len);
    while low < high {
        let middle = low + (high - low) / 2;
        if possible(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// The tokens of a document from a position on.
struct Section {
    first: usize,
    len: usize,
    area: u64,
    /// How many tokens of the document each owner of a token of the section has, at least.
    owned: usize,
}

impl Section {
    fn fits(&self, num_owners: usize, limits: &Limits, visibility: Visibility) -> bool {
        let below = (num_owners as u128 * self.owned as u128).saturating_sub(self.len as u128);
        if self.owned > limits.tokens || below > self.first as u128 {
            return false;
        }
        let num = num_owners as u128;
        let below = visibility.area(&(0..below as usize), self.first + self.len);
        self.len as u128 <= num * limits.tokens as u128
            && u128::from(self.area) + u128::from(below) <= num * u128::from(limits.area)
    }
}

/// First position, work, and keys of the first query of each section.
fn sections(len: usize, visibility: Visibility) -> Vec<(usize, u64, usize)> {
    let keys = |first: usize| match visibility {
        Visibility::Full => len,
        Visibility::Causal { window } => first.min(window.unwrap_or(usize::MAX)) + 1,
    };
    let num = match visibility {
        // All queries need the same keys, so that the whole document says most.
        Visibility::Full => 1,
        Visibility::Causal { .. } => NUM_SECTIONS.min(len),
    };
    let section = |index: usize| {
        let first = (len as u128 * index as u128 / num as u128) as usize;
        (first, visibility.area(&(first..len), len), keys(first))
    };
    // The last token alone, too.
    let last = (!matches!(visibility, Visibility::Full) && len > 0).then(|| len - 1);
    let last = last.map(|first| (first, visibility.area(&(first..len), len), keys(first)));
    (0..num).map(section).chain(last).collect()
}
