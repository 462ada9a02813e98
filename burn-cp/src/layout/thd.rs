//! Packed streams as other libraries describe them: length tables with absent entries, and boundaries of
//! real and padded documents ("THD": tokens, heads, head dim).
//!
//! What is reported here is for others to read. Layouts and plans are made from [`Documents`], which keep
//! real lengths and padding apart.

use super::sources::check_row_len;
use super::{Documents, LayoutError};

/// Boundaries of the documents of a packed stream, as variable-length attention kernels take them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThdMetadata {
    /// Boundaries by real lengths: 0, then the number of real tokens up to the end of each document.
    ///
    /// When no padding lies between documents, all padding at the end of the stream is counted to the
    /// last one, since some kernels cannot skip it; then the last boundary is the length of the stream.
    pub cu_seqlens: Vec<usize>,
    /// Boundaries by extents: 0, then where each next document begins, and where the last extent ends.
    ///
    /// Absent when it would equal `cu_seqlens`.
    pub cu_seqlens_padded: Option<Vec<usize>>,
    /// Longest document by `cu_seqlens`.
    pub max_seqlen: usize,
    /// Padding tokens of the stream, ascending. Those counted to the last document are among them.
    pub padding: Vec<usize>,
}

/// Boundaries of several packed streams of equal length, in tables: what pipeline schedules hand to their stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThdTables {
    /// [`ThdMetadata::cu_seqlens`] of each stream; rows with fewer documents are filled up with
    /// [`Documents::ABSENT_LENGTH`].
    pub cu_seqlens: Vec<Vec<i64>>,
    /// [`ThdMetadata::cu_seqlens_padded`] of each stream, filled up likewise; a stream that has none repeats its
    /// `cu_seqlens`. Absent where no stream has any.
    pub cu_seqlens_padded: Option<Vec<Vec<i64>>>,
    /// Longest document of each stream by `cu_seqlens`.
    pub max_seqlen: Vec<usize>,
    /// Padding tokens of each stream, ascending.
    pub padding: Vec<Vec<usize>>,
}

impl ThdMetadata {
    /// The boundaries of several streams in tables.
    pub fn tables(streams: &[Self]) -> ThdTables {
        let padded = |stream: &Self| {
            let padded = stream.cu_seqlens_padded.as_ref();
            padded.unwrap_or(&stream.cu_seqlens).clone()
        };
        let some_padded = streams
            .iter()
            .any(|stream| stream.cu_seqlens_padded.is_some());
        ThdTables {
            cu_seqlens: table(streams.iter().map(|stream| stream.cu_seqlens.clone())),
            cu_seqlens_padded: some_padded.then(|| table(streams.iter().map(padded))),
            max_seqlen: streams.iter().map(|stream| stream.max_seqlen).collect(),
            padding: (streams.iter())
                .map(|stream| stream.padding.clone())
                .collect(),
        }
    }
}

/// Rows of one length, absent entries at their ends.
fn table(rows: impl Iterator<Item = Vec<usize>>) -> Vec<Vec<i64>> {
    #[allow(
        clippy::cast_possible_wrap,
        reason = "boundaries of a stream that is there fit into 63 bits"
    )]
    let mut rows: Vec<Vec<i64>> = rows
        .map(|row| row.into_iter().map(|boundary| boundary as i64).collect())
        .collect();
    let len = rows.iter().map(Vec::len).max().unwrap_or(0);
    for row in &mut rows {
        row.resize(len, Documents::ABSENT_LENGTH);
    }
    rows
}

impl Documents {
    /// Marks an absent entry in tables of [`from_seq_lens`](Self::from_seq_lens), where rows with fewer
    /// documents are filled up to the length of the others.
    pub const ABSENT_LENGTH: i64 = -1000;

    /// Documents that follow each other, by tables of real and (if given) padded lengths per row.
    ///
    /// Like [`from_padded_lengths`](Self::from_padded_lengths) and [`from_lengths`](Self::from_lengths),
    /// with entries left out that are [`ABSENT_LENGTH`](Self::ABSENT_LENGTH). Tokens that the lengths do
    /// not reach are padding.
    ///
    /// # Errors
    ///
    /// Other negative lengths, tables of different shape, an entry that is absent in one of them only, a
    /// padded length below the real one, documents that run past `seq_len`, no rows or no tokens.
    pub fn from_seq_lens(
        seq_lens: &[Vec<i64>],
        seq_lens_padded: Option<&[Vec<i64>]>,
        seq_len: usize,
    ) -> Result<Self, LayoutError> {
        let lengths = present("seq_lens", seq_lens)?;
        let Some(padded) = seq_lens_padded else {
            return Self::from_lengths(&lengths, seq_len);
        };
        if padded.len() != seq_lens.len() {
            return Err(LayoutError::NumRows {
                what: "seq_lens_padded",
                expected: seq_lens.len(),
                got: padded.len(),
            });
        }
        for (row, (real, padded)) in seq_lens.iter().zip(padded).enumerate() {
            check_row_len("seq_lens_padded", row, real.len(), padded.len())?;
            let differs = |(_, (a, b)): &(usize, (&i64, &i64))| {
                (**a == Self::ABSENT_LENGTH) != (**b == Self::ABSENT_LENGTH)
            };
            if let Some((index, (&expected, &got))) =
                real.iter().zip(padded).enumerate().find(differs)
            {
                return Err(LayoutError::AbsentLength {
                    row,
                    index,
                    expected,
                    got,
                });
            }
        }
        Self::from_padded_lengths(&lengths, &present("seq_lens_padded", padded)?, seq_len)
    }

    /// Boundaries of the flattened stream of all rows, for libraries that ask for them.
    ///
    /// Padding between two documents, of a row's end too, counts to the extent of the first of them;
    /// padding ahead of all documents is reported as the extent of an empty document.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Unpacked`] if a document has padding ahead of or between its real tokens, which
    /// boundaries cannot express.
    pub fn thd_metadata(&self) -> Result<ThdMetadata, LayoutError> {
        for (row, documents) in self.rows().enumerate() {
            for (document, table) in documents.iter().enumerate() {
                let expected = table.extent.start..table.extent.start + table.len();
                if !table.is_empty() && !table.runs.iter().eq([&expected]) {
                    return Err(LayoutError::Unpacked {
                        row,
                        document,
                        expected,
                        got: table.runs.clone(),
                    });
                }
            }
        }
        let stream = self.flattened();
        let (mut cu_seqlens, padded) = boundaries(&stream);
        // One document at least, and all of them stand where their real lengths alone put them.
        let unpadded = cu_seqlens.len() > 1
            && cu_seqlens[..cu_seqlens.len() - 1] == padded[..padded.len() - 1];
        if let (true, Some(last)) = (unpadded, cu_seqlens.last_mut()) {
            *last = stream.seq_len();
        }
        let max_seqlen = cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]).max();
        let padding = (stream.padding_mask(0).into_iter().enumerate())
            .filter_map(|(token, padding)| padding.then_some(token))
            .collect();
        Ok(ThdMetadata {
            cu_seqlens_padded: (!unpadded && padded != cu_seqlens).then_some(padded),
            max_seqlen: max_seqlen.unwrap_or(0),
            cu_seqlens,
            padding,
        })
    }
}

/// Real and padded boundaries of a stream of one row.
fn boundaries(stream: &Documents) -> (Vec<usize>, Vec<usize>) {
    let documents = stream.row(0);
    let (mut real, mut padded) = (vec![0], vec![0]);
    let ahead = documents.first().map_or(0, |first| first.extent.start);
    if ahead > 0 {
        real.push(0);
        padded.push(ahead);
    }
    let mut num_real = 0;
    for (index, document) in documents.iter().enumerate() {
        num_real += document.len();
        real.push(num_real);
        let next = documents.get(index + 1);
        padded.push(next.map_or(document.extent.end, |next| next.extent.start));
    }
    (real, padded)
}

/// The lengths that are not absent.
fn present(what: &'static str, rows: &[Vec<i64>]) -> Result<Vec<Vec<usize>>, LayoutError> {
    let entry = |row, (index, &length): (usize, &i64)| match usize::try_from(length) {
        Ok(length) => Some(Ok(length)),
        Err(_) if length == Documents::ABSENT_LENGTH => None,
        Err(_) => Some(Err(LayoutError::Negative {
            what,
            row,
            index,
            got: length,
        })),
    };
    (rows.iter().enumerate())
        .map(|(row, lengths)| {
            (lengths.iter().enumerate())
                .filter_map(|length| entry(row, length))
                .collect()
        })
        .collect()
}
