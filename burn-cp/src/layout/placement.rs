//! Where the tokens of a batch stand in the rows that are dealt out.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::LayoutError;

/// A map from the tokens of a batch as it came to the slots of the rows that are sharded.
///
/// No two tokens share a slot; a token may have none (it is dropped), and a slot may have no token (it is padding). Without a
/// placement, rows stay as they come.
///
/// ```
/// use burn_cp::layout::Placement;
///
/// let placement = Placement::from_rows(&[vec![Some(0), Some(1), None, Some(4)]], 6)?;
/// assert_eq!(placement.place(&[7, 8, 9, 10], 0)?, [7, 8, 0, 0, 10, 0]);
/// assert_eq!(placement.restore(&[7, 8, 0, 0, 10, 0], -9)?, [7, 8, -9, 10]);
/// # Ok::<(), burn_cp::layout::LayoutError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Placement {
    input_size: [usize; 2],
    placed_size: [usize; 2],
    /// For each token, rows one behind the other, its slot among all slots, rows one behind the other.
    targets: Vec<Option<usize>>,
}

/// A placement as it was read.
#[derive(Deserialize)]
struct Unchecked {
    input_size: [usize; 2],
    placed_size: [usize; 2],
    targets: Vec<Option<usize>>,
}

impl TryFrom<Unchecked> for Placement {
    type Error = String;

    fn try_from(read: Unchecked) -> Result<Self, String> {
        let count = |[rows, len]: [usize; 2]| rows.checked_mul(len).filter(|count| *count > 0);
        let (tokens, slots) = (count(read.input_size), count(read.placed_size));
        let mut taken = HashSet::new();
        let mut targets = read.targets.iter().flatten();
        if tokens != Some(read.targets.len())
            || !targets.all(|slot| slots > Some(*slot) && taken.insert(*slot))
        {
            return Err(format!(
                "placement: expected {:?} tokens with slots of their own below {:?}, got {:?}",
                read.input_size, read.placed_size, read.targets
            ));
        }
        Ok(Self {
            input_size: read.input_size,
            placed_size: read.placed_size,
            targets: read.targets,
        })
    }
}

impl Placement {
    /// Rows keep their place; within row `r`, token `t` goes to slot `targets[r][t]` of `placed_len`, or nowhere.
    ///
    /// # Errors
    ///
    /// No rows or no tokens, rows of different length, slots past `placed_len`, two tokens in one slot.
    pub fn from_rows(
        targets: &[Vec<Option<usize>>],
        placed_len: usize,
    ) -> Result<Self, LayoutError> {
        if targets.is_empty() {
            return Err(LayoutError::EmptyBatch { what: "placement" });
        }
        let seq_len = targets[0].len();
        if seq_len == 0 || placed_len == 0 {
            return Err(LayoutError::EmptyStream { what: "placement" });
        }
        num_tokens(targets.len(), placed_len)?;
        let mut flat = Vec::with_capacity(targets.len() * seq_len);
        for (row, targets) in targets.iter().enumerate() {
            super::sources::check_row_len("placement", row, seq_len, targets.len())?;
            let mut taken = HashSet::with_capacity(seq_len);
            for (token, &target) in targets.iter().enumerate() {
                if let Some(slot) = target
                    && (slot >= placed_len || !taken.insert(slot))
                {
                    return Err(LayoutError::Slot {
                        row,
                        token,
                        expected: placed_len,
                        got: slot,
                    });
                }
                flat.push(target.map(|slot| row * placed_len + slot));
            }
        }
        Ok(Self {
            input_size: [targets.len(), seq_len],
            placed_size: [targets.len(), placed_len],
            targets: flat,
        })
    }

    /// `batch_size` rows of `seq_len` tokens become one row, one behind the other.
    ///
    /// # Errors
    ///
    /// No rows or no tokens, or a number of tokens that overflows.
    pub fn flat(batch_size: usize, seq_len: usize) -> Result<Self, LayoutError> {
        if batch_size == 0 {
            return Err(LayoutError::EmptyBatch { what: "placement" });
        }
        if seq_len == 0 {
            return Err(LayoutError::EmptyStream { what: "placement" });
        }
        let num_tokens = num_tokens(batch_size, seq_len)?;
        Ok(Self {
            input_size: [batch_size, seq_len],
            placed_size: [1, num_tokens],
            targets: (0..num_tokens).map(Some).collect(),
        })
    }

    /// The same, with the placed rows one behind the other in one row.
    #[must_use]
    pub fn flattened(mut self) -> Self {
        self.placed_size = [1, self.num_slots()];
        self
    }

    /// The same, with slots added behind every placed row.
    ///
    /// # Errors
    ///
    /// Rows that are longer already.
    pub fn padded_to(mut self, placed_len: usize) -> Result<Self, LayoutError> {
        let [batch_size, expected] = self.placed_size;
        if placed_len < expected {
            return Err(LayoutError::Shorter {
                expected,
                got: placed_len,
            });
        }
        num_tokens(batch_size, placed_len)?;
        for slot in self.targets.iter_mut().flatten() {
            *slot = *slot / expected * placed_len + *slot % expected;
        }
        self.placed_size[1] = placed_len;
        Ok(self)
    }

    /// `[batch, seq]` of the batch as it came.
    pub fn input_size(&self) -> [usize; 2] {
        self.input_size
    }

    /// `[rows, slots]` after.
    pub fn placed_size(&self) -> [usize; 2] {
        self.placed_size
    }

    /// The row and slot where a token stands; `None` where it is dropped.
    ///
    /// # Panics
    ///
    /// If there is no such token.
    pub fn target(&self, row: usize, token: usize) -> Option<(usize, usize)> {
        let [batch_size, seq_len] = self.input_size;
        assert!(
            row < batch_size && token < seq_len,
            "token {token} of row {row}"
        );
        let len = self.placed_size[1];
        self.targets[row * seq_len + token].map(|slot| (slot / len, slot % len))
    }

    /// Values of all tokens, rows one behind the other, at their slots; `fill` elsewhere.
    ///
    /// # Errors
    ///
    /// Another number of values than tokens.
    pub fn place<T: Clone>(&self, values: &[T], fill: T) -> Result<Vec<T>, LayoutError> {
        check_len("values to be placed", self.targets.len(), values.len())?;
        let mut placed = vec![fill; self.num_slots()];
        for (value, target) in values.iter().zip(&self.targets) {
            if let Some(slot) = *target {
                placed[slot] = value.clone();
            }
        }
        Ok(placed)
    }

    /// Values of all slots, rows one behind the other, back at the tokens they belong to; `fill` for dropped ones.
    ///
    /// # Errors
    ///
    /// Another number of values than slots.
    pub fn restore<T: Clone>(&self, placed: &[T], fill: T) -> Result<Vec<T>, LayoutError> {
        check_len("values to be restored", self.num_slots(), placed.len())?;
        let value = |target: &Option<usize>| match *target {
            Some(slot) => placed[slot].clone(),
            None => fill.clone(),
        };
        Ok(self.targets.iter().map(value).collect())
    }

    /// For each token, rows one behind the other, its slot among all slots; `None` where it is dropped.
    pub fn targets(&self) -> &[Option<usize>] {
        &self.targets
    }

    /// For each slot, rows one behind the other, its token among all tokens; `None` where it is padding.
    pub fn sources(&self) -> Vec<Option<usize>> {
        let mut sources = vec![None; self.num_slots()];
        for (token, target) in self.targets.iter().enumerate() {
            if let Some(slot) = *target {
                sources[slot] = Some(token);
            }
        }
        sources
    }

    fn num_slots(&self) -> usize {
        self.placed_size[0] * self.placed_size[1]
    }
}

fn num_tokens(batch_size: usize, seq_len: usize) -> Result<usize, LayoutError> {
    batch_size
        .checked_mul(seq_len)
        .ok_or(LayoutError::Overflow {
            what: "placed",
            got: seq_len,
        })
}

fn check_len(what: &'static str, expected: usize, got: usize) -> Result<(), LayoutError> {
    if expected == got {
        return Ok(());
    }
    Err(LayoutError::NumValues {
        what,
        expected,
        got,
    })
}
