//! Parts of kernels, in CubeCL: tiles in shared memory and products of them, masks, scores, dropout; for matrix units in `matrix`.
//!
//! A cube has [`UNITS`] units, seen as a square of 16 × 16 for products of rows with rows
//! (`tile::products`), where a unit has some rows and four neighbouring columns, and as a rectangle
//! for products of weights with rows (`tile::weigh`). No plane operation is used, so that any runtime can
//! run them. Everything is computed in f32.

// The functions of this room are inlined into kernels, whose state is many registers and buffers.
#![allow(clippy::too_many_arguments)]

pub(crate) mod config;
pub(crate) mod dropout;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, unused_imports))]
pub(crate) mod matrix;
pub(crate) mod records;
pub(crate) mod scores;
pub(crate) mod tile;

pub(crate) use config::{Blueprint, COLUMNS, Columns, Features, LANES, UNITS};
pub(crate) use records::{KEY_TILE_FIELDS, ROW_TILE_FIELDS, VISIT_FIELDS};
