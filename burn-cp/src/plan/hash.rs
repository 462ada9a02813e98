//! A digest of what a plan is made from, by which ranks recognise that they made the same one.

use sha2::{Digest, Sha256};

use super::MaskKind;
use crate::layout::{Documents, TokenLayout};

/// Changes whenever the encoding, or what is derived from equal input, does.
const DOMAIN: &[u8] = b"burn-cp attention plan 1\0";

/// SHA-256 over documents, layout, mask, and what came with the documents for masks to ask.
///
/// The tables are canonical, and every list is preceded by its length, so that different input has
/// different encodings. Numbers are 64-bit little-endian whatever the platform.
pub(super) fn hash(documents: &Documents, layout: &TokenLayout, mask: MaskKind) -> [u8; 32] {
    let mut encoding = Encoding(Vec::from(DOMAIN));
    encoding.number(documents.seq_len());
    encoding.number(documents.batch_size());
    for row in documents.rows() {
        encoding.number(row.len());
        for document in row {
            encoding.number(document.extent.start);
            encoding.number(document.extent.end);
            encoding.ranges(&document.runs);
        }
    }
    encoding.number(layout.seq_len());
    encoding.number(layout.world_size());
    for rank in 0..layout.world_size() {
        encoding.ranges(layout.ranges(rank));
    }
    encoding.mask(mask);
    encoding.marks(documents);
    Sha256::digest(&encoding.0).into()
}

struct Encoding(Vec<u8>);

impl Encoding {
    fn mask(&mut self, mask: MaskKind) {
        match mask {
            MaskKind::Full => self.number(0),
            MaskKind::Causal { window: None } => self.number(1),
            MaskKind::Causal {
                window: Some(window),
            } => {
                self.number(2);
                self.number(window);
            }
            // Of these there is one each that can be planned.
            MaskKind::CausalWithSpans { .. } => self.number(3),
            MaskKind::Prefix { .. } => self.number(4),
            MaskKind::PerDocument { .. } => self.number(5),
        }
    }

    /// What came with the documents, also where the mask does not ask for it: ranks whose batches differ
    /// in it must notice. What was not given is not encoded; everything before says where it ends, so that
    /// this makes no two encodings equal.
    fn marks(&mut self, documents: &Documents) {
        let places = || {
            let rows = documents.rows().enumerate();
            rows.flat_map(|(row, table)| (0..table.len()).map(move |document| (row, document)))
        };
        if documents.has_spans() {
            self.number(1);
            places().for_each(|(row, document)| self.ranges(documents.spans(row, document)));
        }
        if documents.has_prefixes() {
            self.number(2);
            places().for_each(|(row, document)| self.number(documents.prefix(row, document)));
        }
        if documents.has_masks() {
            self.number(3);
            let masks = places().filter_map(|(row, document)| documents.mask(row, document));
            masks.for_each(|mask| self.mask(mask));
        }
    }

    fn number(&mut self, value: usize) {
        self.0.extend_from_slice(&(value as u64).to_le_bytes());
    }

    fn ranges(&mut self, ranges: &[std::ops::Range<usize>]) {
        self.number(ranges.len());
        for range in ranges {
            self.number(range.start);
            self.number(range.end);
        }
    }
}
