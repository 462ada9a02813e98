//! A digest of what a plan is made from, by which ranks recognise that they made the same one.

use sha2::{Digest, Sha256};

use super::MaskKind;
use crate::layout::{Documents, TokenLayout};

/// Changes whenever the encoding, or what is derived from equal input, does.
const DOMAIN: &[u8] = b"burn-cp attention plan 1\0";

/// SHA-256 over documents, layout and mask.
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
    match mask {
        MaskKind::Full => encoding.number(0),
        MaskKind::Causal { window: None } => encoding.number(1),
        MaskKind::Causal {
            window: Some(window),
        } => {
            encoding.number(2);
            encoding.number(window);
        }
    }
    Sha256::digest(&encoding.0).into()
}

struct Encoding(Vec<u8>);

impl Encoding {
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
