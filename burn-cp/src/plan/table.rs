//! Documents and layout side by side: which tokens are real, whose they are, and where they stand.
//!
//! Made once per plan, in one walk over both, so that what follows searches within a document at most.

use std::ops::Range;

use crate::layout::{Document, Documents, OwnedRange, TokenLayout};

/// A run of real tokens of a row with its place in its document.
struct RealRun {
    tokens: Range<usize>,
    /// Document position of the first token.
    position: usize,
    /// The owner of the first token, among all owned ranges.
    first_owner: usize,
}

/// A run of real tokens that stand together in a shard and in their document.
#[derive(Debug, Clone)]
pub(super) struct LocalRun {
    pub(super) row: usize,
    pub(super) document: usize,
    /// Local token indices.
    pub(super) local: Range<usize>,
    /// Document position of the first token.
    pub(super) position: usize,
    /// Real tokens of the document.
    pub(super) document_len: usize,
}

/// The real runs of one row, ascending by token, which also is ascending by document and position.
struct RowTable {
    runs: Vec<RealRun>,
    /// First run of each document; the number of runs at the end.
    first_run: Vec<usize>,
}

/// All real tokens by row and document, and by rank.
pub(super) struct Table {
    rows: Vec<RowTable>,
    /// Ascending by token; the same for every row.
    owned: Vec<OwnedRange>,
    /// By rank, ascending by row and local token.
    shards: Vec<Vec<LocalRun>>,
}

impl Table {
    /// The table of documents in rows as long as those of the layout.
    pub(super) fn new(documents: &Documents, layout: &TokenLayout) -> Self {
        let owned: Vec<OwnedRange> = layout.owned_ranges(0..layout.seq_len()).collect();
        let mut shards = vec![Vec::new(); layout.world_size()];
        let rows = (documents.rows().enumerate())
            .map(|(row, documents)| RowTable::new((row, documents), &owned, &mut shards))
            .collect();
        for runs in &mut shards {
            // Local order is nearly always token order already, which the sort sees at once.
            runs.sort_by_key(|run: &LocalRun| (run.row, run.local.start));
            runs.dedup_by(|next, run| {
                let num = run.local.len();
                let continues = run.row == next.row
                    && run.document == next.document
                    && run.local.end == next.local.start
                    && run.position + num == next.position;
                if continues {
                    run.local.end = next.local.end;
                }
                continues
            });
        }
        Self {
            rows,
            owned,
            shards,
        }
    }

    /// The real tokens of a rank's shard in runs as long as can be, ascending by row and local token.
    pub(super) fn shard(&self, rank: usize) -> &[LocalRun] {
        &self.shards[rank]
    }

    /// Who owns the document positions, in order.
    pub(super) fn owners(
        &self,
        row: usize,
        document: usize,
        positions: &Range<usize>,
        mut each: impl FnMut(usize, Range<usize>),
    ) {
        let runs = self.rows[row].runs_of(document);
        let first = runs.partition_point(|run| run.position + run.tokens.len() <= positions.start);
        for (index, run) in runs.iter().enumerate().skip(first) {
            if run.position >= positions.end {
                break;
            }
            let start = run.tokens.start + positions.start.saturating_sub(run.position);
            let end = run.tokens.start + run.tokens.len().min(positions.end - run.position);
            let mut owners = &self.owned[run.first_owner..];
            if start > run.tokens.start {
                // The first one that reaches behind `start` is no later than the next run's.
                let next = runs
                    .get(index + 1)
                    .map_or(self.owned.len(), |run| run.first_owner + 1);
                let within = &owners[..next - run.first_owner];
                owners = &owners[within.partition_point(|owned| owned.tokens.end <= start)..];
            }
            for owned in owners.iter().take_while(|owned| owned.tokens.start < end) {
                let from = owned.tokens.start.max(start);
                let local = owned.local.start + (from - owned.tokens.start);
                let num = owned.tokens.end.min(end) - from;
                each(owned.rank, local..local + num);
            }
        }
    }
}

impl RowTable {
    fn new(
        (row, documents): (usize, &[Document]),
        owned: &[OwnedRange],
        shards: &mut [Vec<LocalRun>],
    ) -> Self {
        let mut runs = Vec::with_capacity(documents.len());
        let mut first_run = Vec::with_capacity(documents.len() + 1);
        let mut owner = 0;
        for (document, table) in documents.iter().enumerate() {
            first_run.push(runs.len());
            let (mut position, document_len) = (0, table.len());
            for tokens in &table.runs {
                while owned[owner].tokens.end <= tokens.start {
                    owner += 1;
                }
                runs.push(RealRun {
                    tokens: tokens.clone(),
                    position,
                    first_owner: owner,
                });
                let mut at = tokens.start;
                while at < tokens.end {
                    let OwnedRange {
                        rank,
                        local,
                        tokens: of_owner,
                    } = &owned[owner];
                    let end = of_owner.end.min(tokens.end);
                    let start = local.start + (at - of_owner.start);
                    shards[*rank].push(LocalRun {
                        row,
                        document,
                        local: start..start + (end - at),
                        position: position + (at - tokens.start),
                        document_len,
                    });
                    at = end;
                    if at < tokens.end {
                        owner += 1;
                    }
                }
                position += tokens.len();
            }
        }
        first_run.push(runs.len());
        Self { runs, first_run }
    }

    fn runs_of(&self, document: usize) -> &[RealRun] {
        &self.runs[self.first_run[document]..self.first_run[document + 1]]
    }
}
