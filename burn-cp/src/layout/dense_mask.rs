//! Documents from masks that say for every query which keys it may attend to.

use super::{Document, Documents, LayoutError};

/// From here down an additive mask means "masked": what is added leaves no weight in any float format.
const MASKED: f32 = -1e4;

/// What a token is that attends to itself only and that no other token attends to.
///
/// A mask alone cannot tell a document of one token from padding that was given itself as key, as is done
/// to keep the softmax of padding finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SelfOnly {
    /// Padding.
    Padding,
    /// A document of one token.
    Document,
}

/// What a mask of shape `[batch, 1, seq, seq]` (query, key) says, when it can be said in documents.
///
/// Tokens that attend to nothing and that nothing attends to are padding, also inside a document, which they
/// do not split. Reading a mask takes time and memory quadratic in its length; lengths or ids say the same
/// in linear. There is no reader for integer masks of this shape: they occur with 0 for "keep" as well as
/// with 1, so that any reading would be a guess.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DenseMask {
    /// The documents.
    pub documents: Documents,
    /// Whether queries see no later key of their document.
    pub is_causal: bool,
    /// Whether queries see all keys of their document. As well as `is_causal` only if no document has two
    /// tokens.
    pub is_full: bool,
}

impl DenseMask {
    /// Reads a mask where `true` means that the query may attend to the key, flat in row-major order.
    ///
    /// # Errors
    ///
    /// A shape other than `[batch, 1, seq, seq]` or another number of entries; a mask that is neither
    /// causal within every document nor full within every document ([`LayoutError::MaskPair`] with the
    /// first pair that differs), windows and prefixes included.
    pub fn from_bools(
        mask: &[bool],
        shape: [usize; 4],
        self_only: SelfOnly,
    ) -> Result<Self, LayoutError> {
        let [_, num_heads, num_queries, seq_len] = shape;
        if num_heads != 1 || num_queries != seq_len {
            return Err(LayoutError::MaskShape { got: shape });
        }
        let expected = shape.iter().try_fold(1_usize, |a, &b| a.checked_mul(b));
        if expected != Some(mask.len()) {
            return Err(LayoutError::MaskLen {
                expected: shape,
                got: mask.len(),
            });
        }
        if seq_len == 0 {
            return Err(LayoutError::EmptyStream { what: "dense mask" });
        }
        let mut rows = Vec::with_capacity(shape[0]);
        let mut sees_ahead = None;
        // A batch without rows is left to the table, which refuses it.
        let num_entries = seq_len.saturating_mul(seq_len);
        for (row, mask) in mask.chunks_exact(num_entries).enumerate() {
            let square = Square { mask, seq_len };
            let owners = square.owners(self_only);
            sees_ahead = sees_ahead.or_else(|| square.sees_ahead(&owners));
            square.check(row, &owners, sees_ahead.unwrap_or(false))?;
            rows.push(collect(&owners));
        }
        Ok(Self {
            documents: Documents::from_runs(rows, seq_len)?,
            is_causal: sees_ahead != Some(true),
            is_full: sees_ahead != Some(false),
        })
    }

    /// Reads a mask that is added to scores: 0 keeps a key, -10,000 and less (also minus infinity) masks it.
    ///
    /// # Errors
    ///
    /// Any other value, which would be a bias and not a mask, and what
    /// [`from_bools`](Self::from_bools) refuses.
    pub fn from_additive(
        mask: &[f32],
        shape: [usize; 4],
        self_only: SelfOnly,
    ) -> Result<Self, LayoutError> {
        let read = |(index, &value): (usize, &f32)| {
            if value == 0.0 {
                Ok(true)
            } else if value <= MASKED {
                Ok(false)
            } else {
                Err(LayoutError::MaskValue {
                    index,
                    got: value.to_string(),
                })
            }
        };
        let bools: Vec<bool> = (mask.iter().enumerate())
            .map(read)
            .collect::<Result<_, _>>()?;
        Self::from_bools(&bools, shape, self_only)
    }
}

/// The mask of one batch row.
struct Square<'a> {
    mask: &'a [bool],
    seq_len: usize,
}

impl Square<'_> {
    fn sees(&self, query: usize, key: usize) -> bool {
        self.mask[query * self.seq_len + key]
    }

    /// The document of each token, `None` for padding.
    ///
    /// Right if the mask is what it should be, which `check` finds out: a document begins where a token
    /// does not attend to the real token before it.
    fn owners(&self, self_only: SelfOnly) -> Vec<Option<usize>> {
        let mut num_keys = vec![0_usize; self.seq_len];
        let mut num_queries = vec![0_usize; self.seq_len];
        for (query, keys) in self.mask.chunks_exact(self.seq_len).enumerate() {
            for (key, &sees) in keys.iter().enumerate() {
                num_keys[query] += usize::from(sees);
                num_queries[key] += usize::from(sees);
            }
        }
        let mut previous = None;
        let mut num_documents = 0;
        (0..self.seq_len)
            .map(|token| {
                let alone = num_keys[token] == 1 && num_queries[token] == 1;
                let isolated = alone && self.sees(token, token);
                if num_keys[token] == 0 || isolated && self_only == SelfOnly::Padding {
                    return None;
                }
                if previous.is_none_or(|previous| !self.sees(token, previous)) {
                    num_documents += 1;
                }
                previous = Some(token);
                Some(num_documents - 1)
            })
            .collect()
    }

    /// Whether the first token of the first longer document sees the second; `None` without such a document.
    fn sees_ahead(&self, owners: &[Option<usize>]) -> Option<bool> {
        let mut previous: Option<(usize, usize)> = None;
        for (token, &owner) in owners.iter().enumerate() {
            let Some(owner) = owner else { continue };
            match previous {
                Some((before, same)) if same == owner => return Some(self.sees(before, token)),
                _ => previous = Some((token, owner)),
            }
        }
        None
    }

    fn check(
        &self,
        row: usize,
        owners: &[Option<usize>],
        sees_ahead: bool,
    ) -> Result<(), LayoutError> {
        for (query, keys) in self.mask.chunks_exact(self.seq_len).enumerate() {
            for (key, &got) in keys.iter().enumerate() {
                let expected = match owners[query] {
                    // Padding that has a key at all has itself alone.
                    None => got && key == query,
                    owner => owners[key] == owner && (sees_ahead || key <= query),
                };
                if got != expected {
                    return Err(LayoutError::MaskPair {
                        row,
                        query,
                        key,
                        got,
                    });
                }
            }
        }
        Ok(())
    }
}

/// Documents from the owner of each token. Owners are numbered in order of appearance and do not interleave.
fn collect(owners: &[Option<usize>]) -> Vec<Document> {
    let mut documents: Vec<Document> = Vec::new();
    let mut start = 0;
    for run in owners.chunk_by(|a, b| a == b) {
        let tokens = start..start + run.len();
        start = tokens.end;
        let Some(owner) = run[0] else { continue };
        match documents.get_mut(owner) {
            Some(document) => {
                document.extent.end = tokens.end;
                document.runs.push(tokens);
            }
            None => documents.push(Document::contiguous(tokens)),
        }
    }
    documents
}
