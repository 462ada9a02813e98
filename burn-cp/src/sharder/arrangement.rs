//! From a batch as it came to the rows that are dealt out.

use burn::tensor::backend::Backend;

use crate::{
    batch::{HostInts, filled, shard_payload},
    collectives::Payload,
    layout::{LayoutError, Placement, TokenLayout},
};

/// How the tokens of a batch stand in the padded rows of a layout: each row with padding behind it, or as a placement says.
#[derive(Debug, Clone)]
pub(super) struct Arrangement {
    input_size: [usize; 2],
    padded_size: [usize; 2],
    placed: Option<Placed>,
}

#[derive(Debug, Clone)]
struct Placed {
    placement: Placement,
    /// For each padded token its token of the batch.
    sources: Vec<Option<usize>>,
    drops_tokens: bool,
}

impl Arrangement {
    /// `placement` is one of `input_size`; `padded_len` is at least the length of its rows.
    pub(super) fn new(
        input_size: [usize; 2],
        placement: Option<&Placement>,
        padded_len: usize,
    ) -> Result<Self, LayoutError> {
        let Some(placement) = placement else {
            return Ok(Self {
                input_size,
                padded_size: [input_size[0], padded_len],
                placed: None,
            });
        };
        let placement = placement.clone().padded_to(padded_len)?;
        Ok(Self {
            input_size,
            padded_size: placement.placed_size(),
            placed: Some(Placed {
                sources: placement.sources(),
                drops_tokens: placement.targets().contains(&None),
                placement,
            }),
        })
    }

    pub(super) fn input_size(&self) -> [usize; 2] {
        self.input_size
    }

    pub(super) fn padded_size(&self) -> [usize; 2] {
        self.padded_size
    }

    pub(super) fn has_placement(&self) -> bool {
        self.placed.is_some()
    }

    /// Whether some padded token is none of the batch's.
    pub(super) fn adds_tokens(&self) -> bool {
        match &self.placed {
            Some(placed) => placed.sources.contains(&None),
            None => self.padded_size[1] > self.input_size[1],
        }
    }

    /// Whether some token of the batch is in no padded row.
    pub(super) fn drops_tokens(&self) -> bool {
        self.placed
            .as_ref()
            .is_some_and(|placed| placed.drops_tokens)
    }

    /// Values `[batch, seq]` in padded rows; `fill` stands in added tokens.
    pub(super) fn place<T: Clone>(&self, values: &[T], fill: T) -> Vec<T> {
        if let Some(placed) = &self.placed {
            return placed
                .placement
                .place(values, fill)
                .expect("a checked stream has a value per token");
        }
        let (seq_len, padded_len) = (self.input_size[1], self.padded_size[1]);
        let mut placed = Vec::with_capacity(self.padded_size[0] * padded_len);
        for row in values.chunks_exact(seq_len) {
            placed.extend_from_slice(row);
            placed.resize(placed.len() + padded_len - seq_len, fill.clone());
        }
        placed
    }

    /// Integers `[.., batch, seq]` in padded rows; `fill` stands in added tokens.
    pub(super) fn place_ints(&self, ints: &HostInts, fill: i64) -> HostInts {
        self.place_each(ints, |plane| self.place(plane, fill))
    }

    /// Integers `[.., batch, seq]` in padded rows; an added token counts on from the token before it, or from 0.
    pub(super) fn place_counting(&self, ints: &HostInts) -> HostInts {
        self.place_each(ints, |plane| {
            let plane: Vec<Option<i64>> = plane.iter().copied().map(Some).collect();
            let mut placed = Vec::with_capacity(self.padded_size.iter().product());
            for row in self.place(&plane, None).chunks_exact(self.padded_size[1]) {
                let mut next = 0;
                for value in row {
                    let value = value.unwrap_or(next);
                    placed.push(value);
                    next = value.saturating_add(1);
                }
            }
            placed
        })
    }

    fn place_each(&self, ints: &HostInts, place: impl Fn(&[i64]) -> Vec<i64>) -> HostInts {
        let num_tokens = self.input_size[0] * self.input_size[1];
        let values = ints
            .values
            .chunks_exact(num_tokens)
            .flat_map(place)
            .collect();
        let mut shape = ints.shape.clone();
        let leading = shape.len() - 2;
        shape[leading..].copy_from_slice(&self.padded_size);
        HostInts { values, shape }
    }

    /// The tokens of `ranges` of every padded row, from a tensor of the batch's tokens along `dim`; `fill` stands in added
    /// tokens. With a placement the rows of the batch run along `dim - 1`. Differentiable on autodiff backends.
    pub(super) fn shard<B: Backend>(
        &self,
        payload: &Payload<B>,
        dim: usize,
        ranges: &[std::ops::Range<usize>],
        fill: f64,
    ) -> Payload<B> {
        let Some(Placed { sources, .. }) = &self.placed else {
            return shard_payload(payload, dim, ranges, fill);
        };
        let [num_rows, padded_len] = self.padded_size;
        let local: Vec<Option<usize>> = (0..num_rows)
            .flat_map(|row| {
                let tokens = ranges.iter().cloned().flatten();
                tokens.map(move |token| row * padded_len + token)
            })
            .map(|slot| sources[slot])
            .collect();
        let local_size = [num_rows, local.len() / num_rows];
        select_tokens(payload, dim, &local, local_size, fill)
    }

    /// What every rank has of the rows along `dim`, one rank behind the other, back in the batch's tokens; `fill` stands in
    /// dropped ones. With a placement the rows run along `dim - 1`. Differentiable on autodiff backends.
    pub(super) fn restore<B: Backend>(
        &self,
        gathered: Payload<B>,
        dim: usize,
        layout: &TokenLayout,
        fill: f64,
    ) -> Payload<B> {
        let mut order = layout.inverse();
        let Some(Placed { placement, .. }) = &self.placed else {
            order.truncate(self.input_size[1]);
            return in_order(gathered, dim, &order);
        };
        let padded_len = self.padded_size[1];
        let place = |slot: usize| slot / padded_len * padded_len + order[slot % padded_len];
        let targets = placement.targets().iter();
        let tokens: Vec<Option<usize>> = targets.map(|target| target.map(place)).collect();
        select_tokens(&gathered, dim, &tokens, self.input_size, fill)
    }
}

/// The rows `order` of `dim`, without a copy where they stand in order already.
pub(super) fn in_order<B: Backend>(payload: Payload<B>, dim: usize, order: &[usize]) -> Payload<B> {
    if order.iter().enumerate().all(|(i, &row)| i == row) {
        payload.rows(dim, &(0..order.len()))
    } else {
        payload.select(dim, order)
    }
}

/// Merges `dim - 1` and `dim`, selects `tokens` of them (`fill` where there is none), and splits them into `size`.
fn select_tokens<B: Backend>(
    payload: &Payload<B>,
    dim: usize,
    tokens: &[Option<usize>],
    size: [usize; 2],
    fill: f64,
) -> Payload<B> {
    let mut shape = payload.shape().to_vec();
    let num_tokens = shape[dim - 1] * shape[dim];
    shape.splice(dim - 1..=dim, [num_tokens]);
    let flat = payload.clone().reshape(&shape);
    let flat = if tokens.contains(&None) {
        let fill = filled(&flat, dim - 1, 1, fill);
        Payload::concat(vec![flat.clone(), fill], dim - 1, &flat)
    } else {
        flat
    };
    let indices: Vec<usize> = (tokens.iter())
        .map(|token| token.unwrap_or(num_tokens))
        .collect();
    shape.splice(dim - 1..dim, size);
    flat.select(dim - 1, &indices).reshape(&shape)
}
