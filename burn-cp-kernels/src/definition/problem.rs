//! The sizes of one attention call.

use super::{AttentionError, Segments};

/// The sizes of one attention call, checked against each other and against the segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttentionProblem {
    /// Batch rows of the query buffer.
    pub q_batch: usize,
    /// Tokens per row of the query buffer.
    pub q_tokens: usize,
    /// Batch rows of the key and value buffers.
    pub k_batch: usize,
    /// Tokens per row of the key and value buffers.
    pub k_tokens: usize,
    /// Heads of the queries.
    pub num_heads: usize,
    /// Heads of keys and values; divides `num_heads`. Query head `h` reads key head
    /// `h / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    /// Size of a query or key vector.
    pub head_dim: usize,
    /// Size of a value vector.
    pub v_head_dim: usize,
}

impl AttentionProblem {
    /// From the shapes of `q [q_batch, num_heads, q_tokens, head_dim]`,
    /// `k [k_batch, num_kv_heads, k_tokens, head_dim]` and
    /// `v [k_batch, num_kv_heads, k_tokens, v_head_dim]`.
    ///
    /// # Errors
    ///
    /// Shapes that contradict each other or the segments' buffers, heads that do not divide, zero
    /// heads or dims, and element counts that overflow: see [`AttentionError`].
    pub fn new(
        q: [usize; 4],
        k: [usize; 4],
        v: [usize; 4],
        segments: &Segments,
    ) -> Result<Self, AttentionError> {
        let [q_batch, num_heads, q_tokens, head_dim] = q;
        let [k_batch, num_kv_heads, k_tokens, _] = k;
        let v_head_dim = v[3];
        let (sq_batch, sq_tokens) = segments.q_shape();
        let (sk_batch, sk_tokens) = segments.k_shape();
        if q_batch != sq_batch || q_tokens != sq_tokens || num_heads == 0 || head_dim == 0 {
            return Err(shape(
                "q",
                format!("[{sq_batch}, num_heads >= 1, {sq_tokens}, head_dim >= 1]"),
                q,
            ));
        }
        if k_batch != sk_batch || k_tokens != sk_tokens || num_kv_heads == 0 || k[3] != head_dim {
            return Err(shape(
                "k",
                format!("[{sk_batch}, num_kv_heads >= 1, {sk_tokens}, {head_dim}]"),
                k,
            ));
        }
        if v[..3] != k[..3] || v_head_dim == 0 {
            return Err(shape(
                "v",
                format!("[{k_batch}, {num_kv_heads}, {k_tokens}, v_head_dim >= 1]"),
                v,
            ));
        }
        if num_heads % num_kv_heads != 0 {
            return Err(AttentionError::HeadGroups {
                num_heads,
                num_kv_heads,
            });
        }
        let out = [q_batch, num_heads, q_tokens, v_head_dim];
        for (what, dims) in [("q", q), ("k", k), ("v", v), ("out", out)] {
            check_elements(what, dims)?;
        }
        Ok(Self {
            q_batch,
            q_tokens,
            k_batch,
            k_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            v_head_dim,
        })
    }

    /// Query heads per key head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Shape of the queries and their gradient.
    #[must_use]
    pub fn q_shape(&self) -> [usize; 4] {
        [self.q_batch, self.num_heads, self.q_tokens, self.head_dim]
    }

    /// Shape of the keys and their gradient.
    #[must_use]
    pub fn k_shape(&self) -> [usize; 4] {
        [
            self.k_batch,
            self.num_kv_heads,
            self.k_tokens,
            self.head_dim,
        ]
    }

    /// Shape of the values and their gradient.
    #[must_use]
    pub fn v_shape(&self) -> [usize; 4] {
        [
            self.k_batch,
            self.num_kv_heads,
            self.k_tokens,
            self.v_head_dim,
        ]
    }

    /// Shape of the output and its gradient.
    #[must_use]
    pub fn out_shape(&self) -> [usize; 4] {
        [self.q_batch, self.num_heads, self.q_tokens, self.v_head_dim]
    }

    /// Shape of the log-sum-exp.
    #[must_use]
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.q_batch, self.num_heads, self.q_tokens]
    }
}

fn shape(what: &'static str, expected: String, got: [usize; 4]) -> AttentionError {
    AttentionError::Shape {
        what,
        expected,
        got: format!("{got:?}"),
    }
}

fn check_elements(what: &'static str, dims: [usize; 4]) -> Result<(), AttentionError> {
    // Eight bytes is the widest element that attention accumulates in.
    let limit = isize::MAX as usize / 8;
    let elements = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    if elements.is_none_or(|n| n > limit) {
        return Err(AttentionError::Overflow {
            what: format!("number of elements of {what}"),
            expected: limit,
            got: format!("{dims:?}"),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradicting_shapes_are_refused() {
        let segments = Segments::new(vec![], (2, 5), (1, 7)).unwrap();
        let new = |q, k, v| AttentionProblem::new(q, k, v, &segments).map_err(|e| e.to_string());
        let (q, k, v) = ([2, 6, 5, 8], [1, 3, 7, 8], [1, 3, 7, 4]);
        assert_eq!(new(q, k, v).unwrap().group(), 2);
        assert!(new([1, 6, 5, 8], k, v).unwrap_err().contains("shape of q"));
        assert!(new([2, 6, 4, 8], k, v).unwrap_err().contains("shape of q"));
        assert!(new(q, [1, 3, 7, 9], v).unwrap_err().contains("shape of k"));
        assert!(new(q, k, [1, 2, 7, 4]).unwrap_err().contains("shape of v"));
        let heads = new([2, 5, 5, 8], k, v).unwrap_err();
        assert!(heads.contains("num_kv_heads = 3") && heads.contains("got 5"));
        assert!(new([2, usize::MAX / 3, 5, 8], k, v).is_err());
    }
}
