//! Some rows of a batch, one behind the other, as a batch of its own.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData, TensorPrimitive, backend::Backend};

use super::{BatchError, Deepstack, Primary, SequenceBatch, Stream, StreamDeclaration, host_bools};
use crate::{
    collectives::Payload,
    layout::{Documents, Placement},
};

impl<B: Backend> SequenceBatch<B> {
    /// Rows `rows` of the batch, which is one of `size` with these documents and no placement: a batch of these rows that deals
    /// them out as one stream. Without the batch's media, which are not cut by rows.
    ///
    /// Streams that are not declared are kept whole, for the check of the batch to refuse.
    pub(crate) fn stream_of_rows(
        &self,
        rows: Range<usize>,
        documents: &Documents,
        declared: &[StreamDeclaration],
    ) -> Result<Self, BatchError> {
        let size = [documents.batch_size(), documents.seq_len()];
        let of = |what: &str, data: &Option<TensorData>, dim| {
            let data = data.as_ref();
            data.map(|data| rows_of(what, data, dim, (&rows, size[0])))
                .transpose()
        };
        let axes = self.positions.as_ref().map(|data| data.shape.len());
        Ok(Self {
            primary: match &self.primary {
                Primary::Ids(ids) => Primary::Ids(rows_of("ids", ids, 0, (&rows, size[0]))?),
                Primary::Embeddings(embeddings) => {
                    Primary::Embeddings(embeddings.clone().narrow(0, rows.start, rows.len()))
                }
            },
            labels: of("labels", &self.labels, 0)?,
            vocab_size: self.vocab_size,
            positions: of("positions", &self.positions, usize::from(axes == Some(3)))?,
            documents: Some(documents.of_rows(rows.clone()).flattened()),
            padding_mask: of("padding mask", &self.padding_mask, 0)?,
            marks: self.marks.stream_of_rows(&rows, documents)?,
            placement: Some(Placement::flat(rows.len(), size[1])?),
            media: Vec::new(),
            deepstack: self.deepstack_of_rows(rows.clone(), size)?,
            streams: (self.streams.iter())
                .map(|(name, stream)| {
                    let mut declared = declared.iter();
                    let dim = declared.find(|declared| declared.name == *name);
                    let dim = dim.and_then(|declared| declared.dim.checked_sub(1));
                    let stream = stream_of_rows(name, &stream.0, dim, (&rows, size[0]))?;
                    Ok((name.clone(), Stream(stream)))
                })
                .collect::<Result<_, BatchError>>()?,
            dropout_seed: self.dropout_seed,
        })
    }

    fn deepstack_of_rows(
        &self,
        rows: Range<usize>,
        size: [usize; 2],
    ) -> Result<Option<Deepstack<B>>, BatchError> {
        let Some((mask, layers)) = &self.deepstack else {
            return Ok(None);
        };
        let marked = host_bools("deepstack", mask, size)?;
        let count = |tokens: &[bool]| tokens.iter().filter(|marked| **marked).count();
        let (start, end) = (rows.start * size[1], rows.end * size[1]);
        let features = count(&marked[..start])..count(&marked[..end]);
        let layers = layers.iter().enumerate().map(|(i, layer)| {
            let (placeholders, embeddings) = (count(&marked), layer.dims()[0]);
            if placeholders != embeddings {
                return Err(BatchError::Placeholders {
                    what: format!("deepstack layer {i}"),
                    placeholders,
                    embeddings,
                });
            }
            let layer = Payload::<B>::Float(layer.clone().into_primitive().tensor());
            match layer.rows(0, &features) {
                Payload::Float(layer) => Ok(Tensor::from_primitive(TensorPrimitive::Float(layer))),
                other => unreachable!("rows of floats are floats, got {other:?}"),
            }
        });
        let layers = layers.collect::<Result<_, _>>()?;
        Ok(Some((
            rows_of("deepstack", mask, 0, (&rows, size[0]))?,
            layers,
        )))
    }
}

/// Rows along `dim` of data that must have `num_rows` of them.
fn rows_of(
    what: &str,
    data: &TensorData,
    dim: usize,
    (rows, num_rows): (&Range<usize>, usize),
) -> Result<TensorData, BatchError> {
    let mut shape = data.shape.to_vec();
    if shape.get(dim) != Some(&num_rows) {
        return Err(not_rows(what, dim, num_rows, shape));
    }
    let bytes = data.as_bytes();
    let outer: usize = shape[..dim].iter().product();
    let plane = bytes.len() / outer.max(1);
    let row = plane / num_rows;
    let mut some = Vec::with_capacity(outer * rows.len() * row);
    for plane in bytes.chunks_exact(plane.max(1)) {
        some.extend_from_slice(&plane[rows.start * row..rows.end * row]);
    }
    shape[dim] = rows.len();
    Ok(TensorData::from_bytes_vec(some, shape, data.dtype))
}

/// Rows of a further stream, which run along `dim`.
fn stream_of_rows<B: Backend>(
    name: &str,
    stream: &Payload<B>,
    dim: Option<usize>,
    (rows, num_rows): (&Range<usize>, usize),
) -> Result<Payload<B>, BatchError> {
    let Some(dim) = dim else {
        return Ok(stream.clone());
    };
    let shape = stream.shape().to_vec();
    if shape.get(dim) != Some(&num_rows) {
        return Err(not_rows(&format!("stream {name:?}"), dim, num_rows, shape));
    }
    Ok(stream.rows(dim, rows))
}

fn not_rows(what: &str, dim: usize, num_rows: usize, got: Vec<usize>) -> BatchError {
    BatchError::Shape {
        what: what.to_owned(),
        expected: format!("{num_rows} rows in dim {dim}"),
        got,
    }
}
