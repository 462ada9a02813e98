#![allow(
    clippy::single_range_in_vec_init,
    reason = "lists of one token range are what these tests are about"
)]

mod dense_masks;
mod documents;
mod dual_chunk;
mod layouts;
mod packed;
mod placements;
