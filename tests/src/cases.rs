//! Random documents, layouts and masks.

use std::ops::Range;

use burn_cp::{
    layout::{AlignedDocuments, Document, Documents, LayoutPolicy, Placement, Visibility},
    plan::MaskKind,
};

use crate::Random;

/// Documents of `batch` rows, with what is rare in practice and easy to get wrong: empty documents and documents of one token,
/// primes, a huge one, padding ahead of, inside of, between and behind documents, rows that are all padding.
pub fn random_documents(random: &mut Random, batch: usize) -> Documents {
    let huge = random.once_in(12).then(|| random.int(200..=400));
    let seq_len = match huge {
        Some(huge) => huge + random.int(0..=40),
        None => random.int(1..=48),
    };
    if huge.is_none() && random.once_in(6) {
        let holes = random.int(2..=6);
        let mask: Vec<Vec<bool>> = (0..batch)
            .map(|_| (0..seq_len).map(|_| !random.once_in(holes)).collect())
            .collect();
        return Documents::from_mask(&mask).expect("rows of one length");
    }
    let rows = (0..batch)
        .map(|row| random_row(random, seq_len, huge.filter(|_| row == 0)))
        .collect();
    Documents::from_runs(rows, seq_len).expect("documents in order within the row")
}

fn random_row(random: &mut Random, seq_len: usize, huge: Option<usize>) -> Vec<Document> {
    let mut row = Vec::new();
    if random.once_in(12) && huge.is_none() {
        return row;
    }
    // Padding on the left.
    let mut at = if huge.is_none() && random.once_in(4) {
        random.int(0..=seq_len)
    } else {
        0
    };
    if let Some(huge) = huge {
        row.push(Document::contiguous(at..at + huge));
        at += huge;
    }
    while at < seq_len && !random.once_in(12) {
        let len = random
            .one_of(&[0, 1, 1, 2, 3, 5, 7, 11, 13, 17, 23])
            .min(seq_len - at);
        let runs = if random.once_in(4) {
            holes(random, at..at + len)
        } else {
            std::iter::once(at..at + len).collect()
        };
        // Padding that belongs to the document, or to none.
        let own = if random.once_in(4) {
            random.int(0..=3).min(seq_len - at - len)
        } else {
            0
        };
        row.push(Document {
            runs,
            extent: at..at + len + own,
        });
        at += len + own;
        if random.once_in(6) {
            at = (at + random.int(1..=3)).min(seq_len);
        }
    }
    row
}

/// Runs of real tokens with padding between them.
fn holes(random: &mut Random, tokens: Range<usize>) -> Vec<Range<usize>> {
    tokens
        .filter(|_| !random.once_in(3))
        .map(|token| token..token + 1)
        .collect()
}

/// A way to deal out rows of `seq_len` tokens to `world_size` ranks: any policy; custom ones are uneven, in any order, and leave
/// some ranks without a token.
pub fn random_layout(random: &mut Random, world_size: usize, seq_len: usize) -> LayoutPolicy {
    match random.int(if world_size == 1 { 0 } else { 1 }..=5) {
        0 => LayoutPolicy::Identity,
        1 | 2 => LayoutPolicy::Contiguous {
            multiple: random.one_of(&[1, 2, 4, 8]),
        },
        3 => LayoutPolicy::HeadTail,
        _ => LayoutPolicy::Custom(random_ranges(random, world_size, seq_len)),
    }
}

/// A way to move documents to other places, and how to deal them out then: as dual-chunk-swap wants them, in one row where every
/// document is padded to a multiple of two chunks per rank; rows one behind the other, perhaps balanced; rows in which documents got room.
pub fn random_placement(
    random: &mut Random,
    documents: &Documents,
    world_size: usize,
) -> (AlignedDocuments, LayoutPolicy) {
    let size = [documents.batch_size(), documents.seq_len()];
    let aligned = |multiple| documents.aligned(multiple).expect("lengths that fit");
    let placed = match random.int(0..=4) {
        0 => AlignedDocuments {
            documents: documents.flattened(),
            placement: Placement::flat(size[0], size[1]).expect("some tokens"),
        },
        1 => aligned(random.int(1..=5)),
        2 => {
            let placed = AlignedDocuments {
                documents: documents.flattened(),
                placement: Placement::flat(size[0], size[1]).expect("some tokens"),
            };
            return (placed, random_balanced(random));
        }
        _ => {
            return (
                aligned(2 * world_size).flattened(),
                LayoutPolicy::DualChunkSwap,
            );
        }
    };
    let layout = random_layout(random, world_size, placed.documents.seq_len());
    (placed, layout)
}

/// Balanced for the mask of a call or for another one, which changes who owns what and nothing else.
fn random_balanced(random: &mut Random) -> LayoutPolicy {
    LayoutPolicy::Balanced {
        visibility: match random.int(0..=2) {
            0 => Visibility::Full,
            1 => Visibility::Causal {
                window: Some(random.one_of(&[0, 3, 40])),
            },
            _ => Visibility::default(),
        },
    }
}

fn random_ranges(random: &mut Random, world_size: usize, seq_len: usize) -> Vec<Vec<Range<usize>>> {
    let end = seq_len
        + if random.once_in(3) {
            random.int(1..=9)
        } else {
            0
        };
    let longest = random.one_of(&[3, 17, end]);
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < end {
        let next = (at + random.int(1..=longest)).min(end);
        ranges.push(at..next);
        at = next;
    }
    random.shuffle(&mut ranges);
    let owners = random.int(1..=world_size);
    let mut ranks = vec![Vec::new(); world_size];
    for range in ranges {
        ranks[random.int(0..=owners - 1)].push(range);
    }
    random.shuffle(&mut ranks);
    ranks
}

/// The documents with spans, a prefix each and a mask each, so that every mask can be asked for.
///
/// # Panics
/// Never: what is drawn fits.
pub fn random_marks(random: &mut Random, documents: &Documents) -> Documents {
    let (mut spans, mut prefixes, mut masks) = (Vec::new(), Vec::new(), Vec::new());
    for row in documents.rows() {
        let (mut of_row, mut prefix, mut own) = (Vec::new(), Vec::new(), Vec::new());
        for document in row {
            let tokens: Vec<usize> = document.runs.iter().cloned().flatten().collect();
            let mut at = 0;
            while at < tokens.len() && !random.once_in(4) {
                let first = at + random.one_of(&[0, 0, 1, 4]);
                at = (first + random.one_of(&[1, 2, 5, 40])).min(tokens.len());
                if first < at {
                    of_row.push(tokens[first]..tokens[at - 1] + 1);
                }
            }
            let most = if random.once_in(3) { 0 } else { tokens.len() };
            prefix.push(random.int(0..=most));
            own.push(random.one_of(&[
                MaskKind::CAUSAL,
                MaskKind::Full,
                MaskKind::Causal { window: Some(3) },
                MaskKind::CAUSAL_WITH_SPANS,
                MaskKind::PREFIX,
            ]));
        }
        spans.push(of_row);
        prefixes.push(prefix);
        masks.push(own);
    }
    (documents.clone().with_spans(&spans))
        .and_then(|documents| documents.with_prefixes(prefixes))
        .and_then(|documents| documents.with_masks(masks))
        .expect("marks within their documents")
}

/// By row the tokens of each span: from its first to behind its last one.
pub fn span_tokens(documents: &Documents) -> Vec<Vec<Range<usize>>> {
    let of_row = |row: usize| {
        let mut spans = Vec::new();
        for (index, document) in documents.row(row).iter().enumerate() {
            let tokens: Vec<usize> = document.runs.iter().cloned().flatten().collect();
            let of_document = documents.spans(row, index).iter();
            spans.extend(of_document.map(|span| tokens[span.start]..tokens[span.end - 1] + 1));
        }
        spans
    };
    (0..documents.batch_size()).map(of_row).collect()
}

/// The same documents without spans, prefixes and masks.
///
/// # Panics
/// Never: the documents are a legal table.
pub fn unmarked(documents: &Documents) -> Documents {
    let rows = documents.rows().map(<[Document]>::to_vec).collect();
    Documents::from_runs(rows, documents.seq_len()).expect("documents of a table")
}

/// Any mask; documents with [`random_marks`] serve all of them.
pub fn random_mask(random: &mut Random) -> MaskKind {
    match random.int(0..=9) {
        0 => MaskKind::Full,
        1 | 2 => MaskKind::CAUSAL,
        3 | 4 => MaskKind::CAUSAL_WITH_SPANS,
        5 => MaskKind::PREFIX,
        6 => MaskKind::PER_DOCUMENT,
        _ => MaskKind::Causal {
            window: Some(random.one_of(&[0, 1, 2, 5, 16, 100, usize::MAX])),
        },
    }
}
