//! Collectives, attention and steps across ranks in threads.

// Clippy takes the helpers of tests for library code.
#![allow(clippy::unwrap_used)]

mod attention;
mod bad_input;
mod bad_media;
mod bitwise;
mod broadcast;
mod burn_modules;
mod capabilities;
mod collectives;
mod documents;
mod exactness;
mod gradients;
mod marks;
mod masks;
mod operations;
mod order;
mod padding;
mod placement;
mod recurrent;
mod steps;
mod strategies;
mod thd;
mod token_loss;
mod training;
mod unpacked_reference;
mod verbs;
mod vision;
mod vision_delivery;
