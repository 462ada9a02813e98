//! Collectives, attention and steps across ranks in threads.

mod attention;
mod bad_input;
mod bitwise;
mod collectives;
mod gradients;
mod operations;
mod order;
mod steps;
mod token_loss;
mod training;
mod unpacked_reference;
