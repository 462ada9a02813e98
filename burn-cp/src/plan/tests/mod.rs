#![allow(
    clippy::single_range_in_vec_init,
    reason = "lists of one token range are what these tests are about"
)]

mod balanced;
mod cases;
mod contracts;
mod masks;
mod predict;
mod properties;
mod tables;

use super::{AttentionPlan, MaskKind};
use crate::layout::{Documents, TokenLayout};

/// A plan of one row with these document ids, in a contiguous layout.
fn plan(ids: &[i64], world_size: usize, mask: MaskKind) -> AttentionPlan {
    let documents = Documents::from_ids(&[ids.to_vec()]).unwrap();
    let layout = TokenLayout::contiguous(ids.len(), world_size).unwrap();
    AttentionPlan::new(documents.into(), layout.into(), mask).unwrap()
}

/// Ids of documents of these lengths, then padding.
fn ids(lengths: &[usize], padding: usize) -> Vec<i64> {
    let mut ids = Vec::new();
    for (index, &length) in lengths.iter().enumerate() {
        ids.extend(std::iter::repeat_n(index as i64 + 1, length));
    }
    ids.extend(std::iter::repeat_n(0, padding));
    ids
}
