//! Carries out one rank's part of a collective where ranks hold no references to each other's tensors.

use std::{collections::BTreeMap, ops::Range};

use burn::tensor::{Shape, backend::Backend};

use super::{Payload, decomposition::Decomposition};
use crate::comm::CommError;

/// Moves rows between ranks that hold no references to each other's tensors.
pub(crate) trait Wire<B: Backend> {
    /// Starts to send rows to some ranks each, and to receive tensors of these shapes like `like` from others, which come back in
    /// order. Every message is expected, and none is empty.
    fn swap(
        &mut self,
        sends: Vec<(Vec<usize>, Payload<B>)>,
        receives: Vec<(usize, Shape)>,
        like: &Payload<B>,
    ) -> Result<Later<Vec<Payload<B>>>, CommError>;
}

/// What is there once it has been waited for.
pub(crate) type Later<T> = Box<dyn FnOnce() -> Result<T, CommError>>;

impl Decomposition {
    /// Starts to send what `rank` gives and to receive what it takes, which is combined in the end. One message goes from rank to
    /// rank, and none where there is nothing to say.
    pub(crate) fn start<B: Backend>(
        self,
        payload: Payload<B>,
        rank: usize,
        wire: &mut dyn Wire<B>,
    ) -> Result<Later<Payload<B>>, CommError> {
        let shape = payload.shape();
        let others = shape.iter().enumerate().filter(|(dim, _)| *dim != self.dim);
        let anything = others.map(|(_, size)| *size).product::<usize>() > 0;
        let mut gives: BTreeMap<usize, Vec<Range<usize>>> = BTreeMap::new();
        let mut takes: BTreeMap<usize, usize> = BTreeMap::new();
        if anything {
            for given in self.gives.iter().filter(|given| !given.range.is_empty()) {
                let ranges = gives.entry(given.destination).or_default();
                ranges.push(given.range.clone());
            }
            for piece in self.takes.iter().filter(|piece| piece.source != rank) {
                *takes.entry(piece.source).or_default() += piece.range.len();
            }
            takes.retain(|_, num_rows| *num_rows > 0);
        }
        // What goes to several ranks is put together once.
        let mut messages: Vec<(Vec<usize>, Vec<Range<usize>>)> = Vec::new();
        for (destination, ranges) in gives {
            match messages.iter_mut().find(|(_, other)| *other == ranges) {
                Some((destinations, _)) => destinations.push(destination),
                None => messages.push((vec![destination], ranges)),
            }
        }
        let sends = messages.into_iter().map(|(destinations, ranges)| {
            let rows = ranges.iter().map(|range| payload.rows(self.dim, range));
            (
                destinations,
                Payload::concat(rows.collect(), self.dim, &payload),
            )
        });
        let receives = takes.iter().map(|(source, num_rows)| {
            let mut shape = shape.clone();
            shape[self.dim] = *num_rows;
            (*source, shape)
        });
        let arrivals = wire.swap(sends.collect(), receives.collect(), &payload)?;
        let sources: Vec<usize> = takes.into_keys().collect();
        Ok(Box::new(move || {
            let received = sources.into_iter().zip(arrivals()?);
            Ok(self.combined(&payload, rank, received))
        }))
    }

    /// The result, from the rows of each source.
    fn combined<B: Backend>(
        &self,
        payload: &Payload<B>,
        rank: usize,
        received: impl Iterator<Item = (usize, Payload<B>)>,
    ) -> Payload<B> {
        // The rows of each source, and how many of them have been taken so far.
        let mut sources: BTreeMap<usize, (Payload<B>, usize)> =
            received.map(|(source, rows)| (source, (rows, 0))).collect();
        let taken = self.takes.iter().map(|piece| {
            if piece.source == rank {
                return payload.rows(self.dim, &piece.range);
            }
            match sources.get_mut(&piece.source) {
                Some((rows, start)) => {
                    let range = *start..*start + piece.range.len();
                    *start = range.end;
                    rows.rows(self.dim, &range)
                }
                // Nothing was to be sent.
                None => payload.zeros_like(self.dim, piece.range.len()),
            }
        });
        self.combine.apply(taken, self.dim, payload)
    }
}
