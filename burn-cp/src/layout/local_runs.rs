//! Which document tokens a rank's shard holds, as runs.

use std::ops::Range;

use super::{Documents, TokenLayout};

/// A run of real tokens of a rank's shard: consecutive there and in their document.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LocalRun {
    /// Batch row.
    pub row: usize,
    /// Local token indices within that row.
    pub local: Range<usize>,
    /// Index of the document in its row.
    pub index: usize,
    /// Number of the document, counted through all rows, empty ones included: the same however the batch is dealt out.
    pub document: usize,
    /// Document position of the first token; padding inside the document is not counted.
    pub position: usize,
}

impl LocalRun {
    /// The runs of `rank`, by row and local token; padding is in none. Work grows with the number of runs, not of tokens.
    ///
    /// # Panics
    ///
    /// If there is no such rank, or the documents have rows of another length than the layout.
    pub fn of_rank(documents: &Documents, layout: &TokenLayout, rank: usize) -> Vec<Self> {
        assert_eq!(
            documents.seq_len(),
            layout.seq_len(),
            "documents and layout"
        );
        let mut runs = Vec::new();
        let mut first = 0;
        for (row, list) in documents.rows().enumerate() {
            // (tokens, index of the document, document position), ascending by token.
            let mut table: Vec<(Range<usize>, usize, usize)> = Vec::with_capacity(list.len());
            for (index, document) in list.iter().enumerate() {
                let mut position = 0;
                for tokens in &document.runs {
                    table.push((tokens.clone(), index, position));
                    position += tokens.len();
                }
            }
            let mut at = 0;
            for owned in layout.ranges(rank) {
                let start = table.partition_point(|(tokens, ..)| tokens.end <= owned.start);
                let within = table[start..].iter();
                for (tokens, index, position) in within.take_while(|run| run.0.start < owned.end) {
                    let cut = tokens.start.max(owned.start)..tokens.end.min(owned.end);
                    let local = at + (cut.start - owned.start);
                    runs.push(Self {
                        row,
                        local: local..local + cut.len(),
                        index: *index,
                        document: first + index,
                        position: position + (cut.start - tokens.start),
                    });
                }
                at += owned.len();
            }
            first += list.len();
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_say_where_a_shards_tokens_stand_in_their_documents() {
        // Row 0: a document of 3, padding, one of 4; row 1: one document with padding inside.
        let ids = [vec![1, 1, 1, 0, 2, 2, 2, 2], vec![3; 8]];
        let inside: Vec<Vec<bool>> = vec![
            vec![false, false, false, true, false, false, false, false],
            (0..8).map(|token| token == 2 || token == 3).collect(),
        ];
        let documents = Documents::from_ids(&ids).unwrap();
        let documents = documents.without_padding(&inside).unwrap();
        let layout = TokenLayout::head_tail(8, 2).unwrap();
        let run = |row, local, index, document, position| LocalRun {
            row,
            local,
            index,
            document,
            position,
        };
        // Rank 0 has the tokens 0, 1, 6, 7; rank 1 has 2..6.
        assert_eq!(
            LocalRun::of_rank(&documents, &layout, 0),
            [
                run(0, 0..2, 0, 0, 0),
                run(0, 2..4, 1, 1, 2),
                run(1, 0..2, 0, 2, 0),
                run(1, 2..4, 0, 2, 4),
            ]
        );
        assert_eq!(
            LocalRun::of_rank(&documents, &layout, 1),
            [
                run(0, 0..1, 0, 0, 2),
                run(0, 2..4, 1, 1, 0),
                run(1, 2..4, 0, 2, 2),
            ]
        );
    }
}
